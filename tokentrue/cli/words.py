"""Counted nouns for what commands print."""

from __future__ import annotations


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """`1 sample`, `2 samples`, `1,024 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"
