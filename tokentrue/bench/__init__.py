"""Benchmarks: each module measures ratios inside one run and returns a `Report`; no test asserts a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A table of one run: `rows` are tuples in the order of `columns`; `notes` say what the ratios mean and on what
    machine."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = field(default_factory=tuple)
