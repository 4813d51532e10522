"""`diagnose` and its report."""
