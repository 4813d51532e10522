"""What `tokentrue.turn` calls in order: requests (before a turn is admitted), prompts, generation (and parsing),
commits. `turn` writes."""
