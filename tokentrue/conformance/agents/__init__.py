"""Agents over HTTP: dialects, habits, answers and streams read back."""
