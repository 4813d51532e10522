"""What cli, cluster, bench and lab share: configuration, wiring (the one place that picks implementations), the
embedded gateway, rollouts and the set-up of a training run."""
