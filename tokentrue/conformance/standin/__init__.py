"""The engine stand-in: what it samples, how it is asked, what it logs."""
