"""The stages of `tokentrue.turn`: pinning, prompts, generation (with parsing), commits. Only `turn` writes."""
