"""Wire dialects: parse foreign JSON to `RequestHead` and messages; build replies and events in that dialect."""
