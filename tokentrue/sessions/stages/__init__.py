"""The stages that `tokentrue.turn` calls in order: requests (before a turn is admitted), prompts, generation (with
parsing), commits. Only `turn` writes to the journal."""
