"""Commands that run something: a gateway, rollouts, training, the demo, the lab, benchmarks."""
