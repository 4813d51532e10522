"""What the gateway measures, and the Prometheus page that shows it."""
