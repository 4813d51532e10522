"""Where the viewer reads sessions from: a samples file, a store, a gateway; and the trainer's log-probabilities."""
