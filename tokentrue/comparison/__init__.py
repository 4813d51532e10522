"""Graded, aligned differences of two id sequences: `tokentrue.compare(expected, actual, renderer=r)`."""

from tokentrue.comparison.compare import ComparedSpan, Mismatch, compare

__all__ = ["ComparedSpan", "Mismatch", "compare"]
