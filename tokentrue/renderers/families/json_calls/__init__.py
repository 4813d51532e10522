"""Families whose calls are JSON in the text."""
