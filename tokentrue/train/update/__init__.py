"""What one optimiser update computes: scores, the correction of a minibatch, master weights."""
