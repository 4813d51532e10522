"""What runs next: requests, cache blocks, the schedule, prefills and decode bursts. Only `prefills` holds tensors."""
