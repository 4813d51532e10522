"""Puts the exact operators into a transformers model, and takes them out again."""
