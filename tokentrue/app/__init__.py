"""What cli and cluster share: configuration, wiring (the one place that picks implementations), the
embedded gateway, rollouts and the set-up of a training run."""
