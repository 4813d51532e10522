"""Commands that run something: a gateway, rollouts, training and the demo."""
