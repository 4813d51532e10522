"""Families whose calls stand between special tokens."""
