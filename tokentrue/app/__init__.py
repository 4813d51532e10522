"""Shared by cli and cluster: configuration, wiring, the embedded gateway, rollouts, the set-up of a training run."""
