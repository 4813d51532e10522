"""From samples to rows: batches, packing, minibatches per rank, and the source of each round."""
