"""Families whose calls are tags with one tag per argument."""
