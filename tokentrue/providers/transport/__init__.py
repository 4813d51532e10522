"""What the adapters to engines share: HTTP, typed answers, building a checked completion, abort of running requests."""
