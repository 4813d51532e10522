"""The stages of `tokentrue.turn`. `commits` reserves sequence numbers in the tree; only `turn` adds nodes to it and to
the journal."""
