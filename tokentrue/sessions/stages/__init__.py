"""The stages of `tokentrue.turn`: pinning, prompts, generation (with parsing), commits.
`commits` reserves sequence numbers in the tree; only `turn` adds nodes to it and to the journal."""
