"""The files of a checkpoint: weights that any tool loads, the optimiser's state, digests."""
