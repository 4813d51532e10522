"""Commands that read and check: templates, samples, sessions, engines."""
