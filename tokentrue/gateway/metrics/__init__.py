"""The gateway's measurements and the Prometheus page."""
