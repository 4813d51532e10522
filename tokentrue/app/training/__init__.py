"""A training run: its settings, its source of samples, and how it is set up."""
