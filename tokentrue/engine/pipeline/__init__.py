"""One model over several processes, each with some of its layers."""
