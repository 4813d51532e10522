"""Shared by cli and cluster: configuration, wiring (which chooses implementations), the embedded gateway, rollouts
and the set-up of a training run."""
