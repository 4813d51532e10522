"""Mergeable metrics: what data-parallel ranks and micro-batches combine exactly. Nothing here calls a collective.

A `Metrics` is a read-only mapping of finished numbers over a set of statistics that keep what merging needs: sums
(exact, as integers), counts, extremes and histograms. `a.merge(b)` equals the metrics of the whole batch, bit for bit,
in any order. Every key is present on every rank, also where nothing was counted: then means and extremes read 0 and the
counts say so.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tokentrue.mismatch.exact_sums import UNIT_BITS, as_float, exact_total, exact_totals

_SHIFT = 17  # a histogram bin is a float32 without its low 17 bits: 64 bins an octave
_OFFSET = 1 << 14  # makes bins of negative values count from 0
_MAGNITUDE = _OFFSET - 1  # a bin without its sign
BINS = 2 * _OFFSET
QUANTILES = (0.01, 0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    count: int = 0

    def merge(self, other: Count) -> Count:
        return Count(count=self.count + other.count)

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        yield name, float(self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A sum over a count; also a fraction, when the sum counts too."""

    total: int = 0
    count: int = 0

    @staticmethod
    def of(row_sums: Tensor, count: int) -> Mean:
        few = row_sums.numel() < 64  # Python is quicker up to there
        total = exact_total(row_sums.tolist()) if few else exact_totals(row_sums.view(1, -1))[0]
        return Mean(total=total, count=count)

    @staticmethod
    def fraction(hits: int, count: int) -> Mean:
        return Mean(total=hits << UNIT_BITS, count=count)

    @property
    def value(self) -> float:
        return as_float(self.total) / self.count if self.count else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(total=self.total + other.total, count=self.count + other.count)

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        yield name, self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Extremes:
    low: float = math.inf
    high: float = -math.inf

    @staticmethod
    def of(low: Tensor, high: Tensor) -> Extremes:
        """From the minima and maxima of rows; infinities mark empty rows."""
        return Extremes(low=float(low.min()), high=float(high.max())) if low.numel() else Extremes()

    def merge(self, other: Extremes) -> Extremes:
        return Extremes(low=min(self.low, other.low), high=max(self.high, other.high))

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        empty = self.low > self.high
        yield f"{name}/min", 0.0 if empty else self.low
        yield f"{name}/max", 0.0 if empty else self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count and exact sums of x, x² and maybe x³: mean, standard deviation, skew, and the effective sample share
    (Σx)²/(nΣx²)."""

    count: int = 0
    first: int = 0
    second: int = 0
    third: int | None = None

    def merge(self, other: Moments) -> Moments:
        return Moments(
            count=self.count + other.count,
            first=self.first + other.first,
            second=self.second + other.second,
            third=None if self.third is None or other.third is None else self.third + other.third,
        )

    @property
    def mean(self) -> float:
        return as_float(self.first) / self.count if self.count else 0.0

    @property
    def effective(self) -> float:
        first, second = as_float(self.first), as_float(self.second)
        return first * first / (self.count * second) if second else 0.0

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        if not self.count:
            yield from (
                (f"{name}/{key}", 0.0)
                for key in ("count", "mean", "std", "ess", *(("skew",) if self.third is not None else ()))
            )
            return
        mean = self.mean
        # Central sums from exact raw sums: the differences are taken between exact integers, so that they do not cancel
        # in floats.
        square = as_float(self.second * self.count - (self.first * self.first >> UNIT_BITS)) / self.count / self.count
        std = math.sqrt(max(square, 0.0))
        yield f"{name}/count", float(self.count)
        yield f"{name}/mean", mean
        yield f"{name}/std", std
        yield f"{name}/ess", self.effective
        if self.third is not None:
            yield f"{name}/skew", self._skew(mean, std)

    def _skew(self, mean: float, std: float) -> float:
        """E(x - mean)³ / std³."""
        third = as_float(self.third or 0) / self.count - 3 * mean * as_float(self.second) / self.count + 2 * mean**3
        return third / std**3 if std > 1e-12 * abs(mean) and std**3 > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts by float32 bit pattern (64 bins an octave, zero by itself): exact to merge, quantiles within 0.8% of the
    value."""

    counts: Mapping[int, int]

    @staticmethod
    def bins_of(values: Tensor) -> Tensor:
        """The bin of each value, from 0 to `BINS` - 1; rising with the value among positives and falling among
        negatives."""
        bits = values.to(torch.float32, copy=True).view(torch.int32)
        return bits.bitwise_right_shift_(_SHIFT).add_(_OFFSET)

    @staticmethod
    def of(dense: Tensor) -> Histogram:
        """From counts per bin."""
        found = dense.nonzero().squeeze(1)
        counts = dense[found].tolist()
        return Histogram(counts={key - _OFFSET: count for key, count in zip(found.tolist(), counts, strict=True)})

    def merge(self, other: Histogram) -> Histogram:
        counts = dict(self.counts)
        for key, count in other.counts.items():
            counts[key] = counts.get(key, 0) + count
        return Histogram(counts=counts)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def bins(self, *, magnitude: bool = False) -> list[tuple[float, float, int]]:
        """(low, high, count) in rising order; with `magnitude`, of the absolute values."""
        rows: dict[tuple[float, float], int] = {}
        for key, count in self.counts.items():
            near, far = _edge(key & _MAGNITUDE), _edge((key & _MAGNITUDE) + 1)
            edges = (near, far) if key >= 0 or magnitude else (-far, -near)
            rows[edges] = rows.get(edges, 0) + count
        return [(low, high, count) for (low, high), count in sorted(rows.items())]

    def quantile(self, share: float, *, magnitude: bool = False) -> float:
        seen, wanted = 0, share * (self.total - 1)
        for low, high, count in self.bins(magnitude=magnitude):
            seen += count
            if seen > wanted:
                return 0.0 if low == 0.0 or high == 0.0 else (low + high) / 2
        return 0.0

    def entries(self, name: str) -> Iterator[tuple[str, float]]:
        for share in QUANTILES:
            yield f"{name}/p{share * 100:g}", self.quantile(share)
        for share in QUANTILES:
            yield f"{name}/abs_p{share * 100:g}", self.quantile(share, magnitude=True)


def _edge(key: int) -> float:
    """The smallest magnitude of a bin: its bit pattern with the low bits at zero."""
    return struct.unpack("<f", struct.pack("<I", key << _SHIFT))[0]


Statistic: TypeAlias = Count | Mean | Extremes | Moments | Histogram
_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (Count, Mean, Extremes, Moments, Histogram)}


class Metrics(Mapping[str, float]):
    """Finished numbers by name, over statistics that merge. `metrics["corr/k3"]`, `dict(metrics)`, `a.merge(b)`."""

    def __init__(self, statistics: Mapping[str, Statistic]) -> None:
        self.statistics = dict(statistics)
        self._values: dict[str, float] | None = None

    def _finished(self) -> dict[str, float]:
        if self._values is None:
            self._values = {key: value for name, stat in self.statistics.items() for key, value in stat.entries(name)}
        return self._values

    def __getitem__(self, key: str) -> float:
        return self._finished()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._finished())

    def __len__(self) -> int:
        return len(self._finished())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and self.statistics == other.statistics

    __hash__ = None  # type: ignore[assignment]  # holds dictionaries

    def __repr__(self) -> str:
        return "Metrics(" + ", ".join(f"{key}={value:.6g}" for key, value in self.items()) + ")"

    def merge(self, *others: Metrics) -> Metrics:
        """The metrics of all batches together. Statistics that only some have are kept as they are."""
        merged = dict(self.statistics)
        for other in others:
            for name, stat in other.statistics.items():
                mine = merged.get(name)
                merged[name] = stat if mine is None else mine.merge(stat)  # type: ignore[arg-type]
        return Metrics(merged)

    def to_json(self) -> str:
        """Everything that merging needs, as text: for a file or a gather of objects between ranks."""
        shaped: dict[str, dict[str, Any]] = {}
        for name, stat in self.statistics.items():
            fields = {field: _plain(getattr(stat, field)) for field in stat.__slots__}
            shaped[name] = {"kind": type(stat).__name__.lower(), **fields}
        return json.dumps(shaped)

    @staticmethod
    def from_json(text: str) -> Metrics:
        statistics: dict[str, Statistic] = {}
        for name, fields in json.loads(text).items():
            kind = fields.pop("kind")
            statistics[name] = _KINDS[kind](**{field: _restore(field, value) for field, value in fields.items()})
        return Metrics(statistics)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [[key, count] for key, count in sorted(value.items())]
    return value if not isinstance(value, int) or abs(value) < 1 << 53 else hex(value)


def _restore(field: str, value: Any) -> Any:
    if field == "counts":
        return {int(key): int(count) for key, count in value}
    return int(value, 16) if isinstance(value, str) else value
