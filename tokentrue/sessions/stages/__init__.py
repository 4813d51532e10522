"""The stages of a turn, which `tokentrue.turn` calls in order: request, prompt, generation, reply, commit. None of them writes."""
