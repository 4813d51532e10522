"""The accumulators behind `diagnose`: sums of chunks block by block, turned into row sums and exact totals once, at the
end.

Every sum that becomes a metric is first a row's own, so that it does not depend on the batch; rows are then added as
exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.batch.chunks import CHUNK, ChunkedRows, Values
from tokentrue.mismatch.batch.layout import Layout
from tokentrue.mismatch.batch.reduce import chunk_sums, row_maxima, row_sums
from tokentrue.mismatch.correction.signals import Signals
from tokentrue.mismatch.estimators import LOG_CLAMP, contribution, k1, k2, k3
from tokentrue.mismatch.exact_sums import exact_total, exact_totals
from tokentrue.mismatch.metrics import BINS, Count, Extremes, Histogram, Mean, Metrics, Moments, Statistic

PROBABILITIES = (1e-4, 1e-2, 0.1, 0.5, 0.9, 0.99)
POSITIONS = (128, 512, 2048, 8192, 32768)  # whole chunks
TAILS = (1.1, 1.5, 2.0, 5.0, 10.0)
SIGNS = ("positive", "negative")
COUNTED_TOKENS = 1 << 20
NEAR = 1e-3
SMALL = -1.0  # log-ratios below this are summed as r, the others as r - 1
LARGEST = 700.0  # of a logarithm whose exp is finite


@dataclass(slots=True, kw_only=True, eq=False)
class Sums:
    """Mutable, and lives for one call of `diagnose`."""

    kind_names: tuple[str, ...]
    parts: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])  # sums of chunks
    tables: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])  # |δ| per row and bucket
    numbers: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])  # how many slots those were
    counts: dict[str, int] = field(default_factory=dict[str, int])
    ranges: dict[str, Extremes] = field(default_factory=dict[str, Extremes])
    bins: list[Tensor] = field(default_factory=list[Tensor])  # of δ, of blocks not yet counted
    dense: Tensor | None = None  # counts of δ per bin
    padding: int = 0  # slots that hold none
    shape: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor, Tensor]])
    rows: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # row sums, after `finish`
    totals: dict[str, int] = field(default_factory=dict[str, int])  # exact, after `finish`
    peaks: Tensor = field(default_factory=lambda: torch.zeros(0))  # largest |δ| of each row, after `finish`

    def push(self, name: str, slots: Tensor) -> None:
        self.parts.setdefault(name, []).append(chunk_sums(slots))

    def push_powers(self, name: str, values: Tensor, *, third: bool = False) -> None:
        """Sums of x, x² and maybe x³."""
        power = values * values
        self.push(f"{name}1", values)
        self.push(f"{name}2", power)
        if third:
            self.push(f"{name}3", power.mul_(values))

    def count(self, name: str, hits: Tensor | int) -> None:
        self.counts[name] = self.counts.get(name, 0) + (
            hits if isinstance(hits, int) else int(torch.count_nonzero(hits))
        )

    def span(self, name: str, low: float, high: float) -> None:
        self.ranges[name] = self.ranges.get(name, Extremes()).merge(Extremes(low=low, high=high))

    def add_bins(self, rows: ChunkedRows, values: Tensor) -> None:
        """Counted some blocks at a time: clearing and adding the table costs as much as filling it."""
        self.bins.append(Histogram.bins_of(values).view(-1).to(torch.int16))
        self.padding += rows.valid.numel() - rows.tokens
        if sum(bins.numel() for bins in self.bins) >= COUNTED_TOKENS:
            self._count_bins()

    def _count_bins(self) -> None:
        dense = torch.bincount(torch.cat(self.bins), minlength=BINS)
        self.dense = dense if self.dense is None else self.dense.add_(dense)
        self.bins.clear()

    def bucket(self, name: str, rows: ChunkedRows, buckets: Tensor, values: Tensor, *, size: int, padding: int) -> None:
        """Sums per row and bucket, each in token order; padding holds 0 and falls into bucket `padding`."""
        keys = (buckets + (rows.row * size).to(buckets.dtype).unsqueeze(1)).view(-1).cpu()
        sums = torch.bincount(keys, weights=values.view(-1).cpu(), minlength=rows.num_rows * size)
        self.tables.setdefault(name, []).append(sums.view(-1, size))
        numbers = torch.bincount(keys, minlength=rows.num_rows * size).view(-1, size)
        self.numbers.setdefault(name, []).append(numbers)
        self.count(f"{name}_{padding}", rows.tokens - rows.valid.numel())

    def add_mismatch(self, signals: Signals) -> None:
        rows, delta = signals.rows, signals.corr
        self.shape.append((rows.lengths, rows.chunks, rows.filled))
        magnitude = delta.abs()
        peak = magnitude.amax(dim=1)
        self.parts.setdefault("peak", []).append(peak)
        self.push("delta", delta)
        self.push("abs", magnitude)
        self.push("rollout", signals.rollout)
        self.add_divergence(signals.clamped(LOG_CLAMP), peak)
        self.add_bins(rows, delta)
        least, most = signals.span
        self.span("delta", least, most)
        self.count("clamped", magnitude > LOG_CLAMP if max(most, -least) > LOG_CLAMP else 0)
        for bound in TAILS:
            edge = math.log(bound)
            self.count(f"raw/above_{bound:g}", delta > edge if most > edge else 0)
            self.count(f"raw/below_1/{bound:g}", delta < -edge if least < -edge else 0)
        buckets = (
            _probability_table(delta.device).index_select(0, Histogram.bins_of(signals.rollout).view(-1)).view_as(delta)
        )
        self.bucket("probability", rows, buckets, magnitude, size=len(PROBABILITIES) + 1, padding=len(PROBABILITIES))

    def add_divergence(self, x: Tensor, peak: Tensor) -> None:
        """Chunks' sums of x², K3, and of r - 1 and (r - 1)², or of r and r² themselves for tokens where r is small.

        Σ(e^x - 1) - Σx is K3's sum but for 1e-14, which is nothing to a chunk with one |x| above `NEAR`. In the others
        rounding would
        be all that is left: there K3 is summed by its series, and gives the sum of r - 1 too. A small r would be
        rounded away in r - 1.
        """
        square = x * x
        excess = x.exp().sub_(1)
        total, second = chunk_sums(x), chunk_sums(square)
        first = chunk_sums(excess)
        gap = first - total
        near = (peak <= NEAR).nonzero().squeeze(1)
        if near.numel():
            value, power = x.index_select(0, near), square.index_select(0, near)
            third, fourth = chunk_sums(value.mul_(power)), chunk_sums(power.mul_(power))
            series = second.index_select(0, near) / 2 + third / 6 + fourth / 24
            gap = gap.index_copy(0, near, series)
            first = first.index_copy(0, near, total.index_select(0, near) + series)
        small1, small2 = torch.zeros_like(first), torch.zeros_like(first)
        small = x < SMALL
        if bool(small.any()):
            ratio = x.exp().masked_fill_(~small, 0)
            small1, small2 = chunk_sums(ratio), chunk_sums(ratio.mul_(ratio))
            excess.masked_fill_(small, 0)
            first = torch.where(small.any(dim=1), chunk_sums(excess), first)
            self.count("small", small)
        sums = {
            "square": second,
            "k3": gap,
            "excess1": first,
            "excess2": chunk_sums(excess.mul_(excess)),
            "small1": small1,
            "small2": small2,
        }
        for name, part in sums.items():
            self.parts.setdefault(name, []).append(part)

    def add_ppo(self, signals: Signals) -> None:
        if signals.current is None:
            return
        self.count("current", signals.rows.tokens)
        for name in ("ppo_train", "ppo_rollout"):
            x = signals.log_ratio(name).clamp(-LOG_CLAMP, LOG_CLAMP)
            self.push(f"{name}_k1", k1(x))
            self.push(f"{name}_k2", k2(x))
            self.push(f"{name}_k3", k3(x))

    def add_contribution(self, signals: Signals, advantages: Tensor) -> None:
        """Without a current policy the trainer's own stands in: its contribution is then 0 and the rollout's that of
        the mismatch."""
        rows = signals.rows
        own = torch.zeros_like(signals.corr) if signals.current is None else signals.log_ratio("ppo_train")
        theirs = signals.corr if signals.current is None else signals.log_ratio("ppo_rollout")
        for sign, chosen in zip(SIGNS, (advantages > 0, advantages < 0), strict=True):
            chosen = chosen & rows.valid
            self.count(f"contribution_{sign}", chosen)
            self.count(f"quadrant_{sign}_up", chosen & (signals.corr > 0))
            self.count(f"quadrant_{sign}_down", chosen & (signals.corr < 0))
            for name, x in (("trainer", own), ("rollout", theirs)):
                value = contribution(x.clamp(-LOG_CLAMP, LOG_CLAMP), advantages)
                self.push_powers(f"contribution_{name}_{sign}", torch.where(chosen, value, 0.0), third=True)

    def add_applied(self, rows: ChunkedRows, weights: Tensor) -> None:
        """Weights as the loss uses them: 0 where rejected."""
        self.count("applied", rows.tokens)
        self.push_powers("applied", weights)
        high = float(weights.amax()) if rows.tokens else -math.inf
        low = rows.least(weights) if rows.tokens else math.inf
        self.span("applied", low, high)
        for bound in TAILS:
            self.count(f"applied/above_{bound:g}", weights > bound if high > bound else 0)
            self.count(f"applied/below_1/{bound:g}", rows.valid & (weights < 1 / bound) if low < 1 / bound else 0)

    def add_kinds(self, layout: Layout, signals: Signals, kinds: Values) -> None:
        layout.check("kinds", kinds)
        codes = signals.rows.read(kinds, torch.long)
        if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= len(self.kind_names)):
            raise InputError(
                f"kinds: {int(codes.min())} to {int(codes.max())} do not index the {len(self.kind_names)} kind_names"
            )
        self.bucket("kind", signals.rows, codes, signals.corr.abs(), size=len(self.kind_names), padding=0)

    def add_flips(self, layout: Layout, rows: ChunkedRows, trainer: Values, rollout: Values) -> None:
        layout.check("trainer_top_ids", trainer)
        layout.check("rollout_top_ids", rollout)
        self.count("flips", rows.read(trainer, torch.long) != rows.read(rollout, torch.long))
        self.count("flips_of", rows.tokens)

    def add_flips_by_logprob(self, layout: Layout, signals: Signals, trainer: Values, rollout: Values) -> None:
        layout.check("trainer_top_logprobs", trainer)
        layout.check("rollout_top_logprobs", rollout)
        rows, dtype = signals.rows, signals.corr.dtype
        best_there = signals.trainer >= rows.read(trainer, dtype)
        best_here = signals.rollout >= rows.read(rollout, dtype)
        self.count("flips", rows.valid & (best_there != best_here))
        self.count("flips_of", rows.valid & (best_there | best_here))

    def finish(self) -> Metrics:
        self._reduce()
        tokens, rows = self.counts.get("tokens", 0), self.counts.get("rows", 0)
        stats: dict[str, Statistic] = {"tokens": Count(count=tokens), "rows": Count(count=rows)}
        stats |= self._delta(tokens, rows) | self._estimators(tokens, rows) | self._ratios(tokens, rows)
        for sign in SIGNS:
            number = self.counts.get(f"contribution_{sign}", 0)
            for name in ("trainer", "rollout"):
                stats[f"contribution/{name}/{sign}"] = self._moments(f"contribution_{name}_{sign}", number)
            for way in ("up", "down"):
                stats[f"quadrant/{sign}_{way}"] = Mean.fraction(self.counts.get(f"quadrant_{sign}_{way}", 0), number)
        for name, labels in (
            ("probability", _labels(PROBABILITIES, 0.0, 1.0)),
            ("position", _labels(POSITIONS, 0, None)),
            ("kind", self.kind_names),
        ):
            for index, label in enumerate(labels):
                stats[f"by_{name}/{label}"] = self._mean(f"{name}_{index}", self.counts.get(f"{name}_{index}", 0))
        stats["flips"] = Mean.fraction(self.counts.get("flips", 0), self.counts.get("flips_of", 0))
        return Metrics(stats)

    def by_row(self) -> list[tuple[int, float, float, float]]:
        """Tokens, ΣK3, Σδ and largest |δ| of each row."""
        if not self.shape:
            return []
        lengths = torch.cat([lengths for lengths, _, _ in self.shape])
        return list(
            zip(
                lengths.tolist(),
                self.rows["k3"].tolist(),
                self.rows["delta"].tolist(),
                self.peaks.tolist(),
                strict=True,
            )
        )

    def _reduce(self) -> None:
        """Chunks to rows to exact totals, and what is a function of whole rows."""
        if not self.shape:
            return
        lengths, chunks, filled = (torch.cat(part) for part in zip(*self.shape, strict=True))
        self.peaks = row_maxima(torch.cat(self.parts.pop("peak")), chunks, 0)
        for name, part in self.parts.items():
            self.rows[name] = row_sums(torch.cat(part), chunks)
        full = lengths > 0
        self.rows["trainer"] = self.rows["rollout"] + self.rows["delta"]
        self.count("tokens", int(lengths.sum()))
        self.count("rows", full)
        per_row = {
            name: self.rows[name] / lengths.clamp(min=1)
            for name in ("delta", "abs", "square", "k3", "trainer", "rollout")
        }
        whole = {f"{name}_rows": values for name, values in per_row.items()}
        gap = per_row["rollout"] - per_row["trainer"]
        product = self.rows["delta"].clamp(-LOG_CLAMP, LOG_CLAMP)
        weight = product.exp() * full
        whole |= {f"ppl_{name}": (-per_row[name]).clamp(max=LARGEST).exp() * full for name in ("trainer", "rollout")}
        whole |= {"ppl_ratio": gap.clamp(max=LARGEST).exp() * full, "ppl_gap": gap, "ppl_abs_gap": gap.abs()}
        whole |= {"chi2_rows": torch.expm1(2 * product), "product1": weight, "product2": weight * weight}
        if gap[full].numel():
            self.span("gap", float(gap[full].min()), float(gap[full].max()))
        self._positions(chunks, filled)
        for name, numbers in self.numbers.items():
            for index, number in enumerate(torch.cat(numbers).sum(dim=0).tolist()):
                self.count(f"{name}_{index}", number)
        every = self.rows | whole
        for name, tables in self.tables.items():
            every |= {f"{name}_{index}": column for index, column in enumerate(torch.cat(tables).T)}
        self.totals = dict(
            zip(every, exact_totals(torch.stack([column.cpu() for column in every.values()])), strict=True)
        )

    def _positions(self, chunks: Tensor, filled: Tensor) -> None:
        """The edges are whole chunks, so that the chunks' own sums can be sorted into them."""
        number = chunks.shape[0]
        before = (chunks.cumsum(0) - chunks).repeat_interleave(chunks)
        start = (torch.arange(before.shape[0], device=chunks.device) - before) * CHUNK
        size = len(POSITIONS) + 1
        bucket = torch.bucketize(start, torch.tensor(POSITIONS, device=start.device), right=True)
        keys = (torch.arange(number, device=chunks.device).repeat_interleave(chunks) * size + bucket).cpu()
        sums = torch.bincount(keys, weights=torch.cat(self.parts["abs"]).cpu(), minlength=number * size)
        self.tables["position"] = [sums.view(-1, size)]
        numbers = torch.bincount(bucket.cpu(), weights=filled.double().cpu(), minlength=size)
        for index, count in enumerate(numbers.tolist()):
            self.count(f"position_{index}", int(count))

    def _delta(self, tokens: int, rows: int) -> dict[str, Statistic]:
        return {
            "delta/mean": self._mean("delta", tokens),
            "delta/abs_mean": self._mean("abs", tokens),
            "delta/abs_mean_rows": self._mean("abs_rows", rows),
            "delta": self.ranges.get("delta", Extremes()),
            "delta/quantile": self._histogram(),
            "delta/clamped": Mean.fraction(self.counts.get("clamped", 0), tokens),
        }

    def _estimators(self, tokens: int, rows: int) -> dict[str, Statistic]:
        stats: dict[str, Statistic] = {
            "corr/k1": Mean(total=-self.totals.get("delta", 0), count=tokens),
            "corr/k2": Mean(total=self.totals.get("square", 0), count=2 * tokens),
            "corr/k3": self._mean("k3", tokens),
            "corr/k1_rows": Mean(total=-self.totals.get("delta_rows", 0), count=rows),
            "corr/k2_rows": Mean(total=self.totals.get("square_rows", 0), count=2 * rows),
            "corr/k3_rows": self._mean("k3_rows", rows),
        }
        for name in ("ppo_train", "ppo_rollout"):
            for key in ("k1", "k2", "k3"):
                stats[f"{name}/{key}"] = self._mean(f"{name}_{key}", self.counts.get("current", 0))
        for name in ("trainer", "rollout"):
            stats[f"ppl/{name}"] = self._mean(f"ppl_{name}", rows)
            stats[f"log_ppl/{name}"] = Mean(total=-self.totals.get(f"{name}_rows", 0), count=rows)
        stats["ppl/ratio"] = self._mean("ppl_ratio", rows)
        stats["log_ppl/gap_mean"] = self._mean("ppl_gap", rows)
        stats["log_ppl/abs_gap_mean"] = self._mean("ppl_abs_gap", rows)
        stats["log_ppl/gap"] = self.ranges.get("gap", Extremes())
        return stats

    def _ratios(self, tokens: int, rows: int) -> dict[str, Statistic]:
        one, two = self.totals.get("excess1", 0), self.totals.get("excess2", 0)
        # The sums of r and r² from those of r - 1 and (r - 1)², and of small ratios, in exact integers.
        unit = exact_total([float(tokens - self.counts.get("small", 0))])
        first, second = unit + one + self.totals.get("small1", 0), unit + 2 * one + two + self.totals.get("small2", 0)
        raw = Moments(count=tokens, first=first, second=second)
        stats: dict[str, Statistic] = {
            "chi2/token": Mean(total=second - exact_total([float(tokens)]), count=tokens),
            "chi2/sequence": self._mean("chi2_rows", rows),
            "ratio/raw": raw,
            "ratio/sequence": self._moments("product", rows),
            "ratio/applied": self._moments("applied", self.counts.get("applied", 0)),
            "ratio/applied_range": self.ranges.get("applied", Extremes()),
        }
        for side, of in (("raw", tokens), ("applied", self.counts.get("applied", 0))):
            for bound in TAILS:
                for way in (f"above_{bound:g}", f"below_1/{bound:g}"):
                    stats[f"tail/{side}/{way}"] = Mean.fraction(self.counts.get(f"{side}/{way}", 0), of)
        return stats

    def _mean(self, name: str, count: int) -> Mean:
        return Mean(total=self.totals.get(name, 0), count=count)

    def _moments(self, name: str, count: int) -> Moments:
        first, second = self.totals.get(f"{name}1", 0), self.totals.get(f"{name}2", 0)
        third = self.totals.get(f"{name}3", 0) if name.startswith("contribution") else None
        return Moments(count=count, first=first, second=second, third=third)

    def _histogram(self) -> Histogram:
        if self.bins:
            self._count_bins()
        if self.dense is None:
            return Histogram(counts={})
        self.dense[BINS // 2] -= self.padding  # the padding of the slots is zero too
        return Histogram.of(self.dense.cpu())


@cache
def _probability_table(device: torch.device) -> Tensor:
    """Bin of a log-probability -> bucket of probability; an edge that cuts a bin is moved to the bin's end (0.8% of the
    logarithm)."""
    magnitude = torch.arange(BINS, dtype=torch.int32).bitwise_and(BINS // 2 - 1) << 17
    values = -magnitude.view(torch.float32).double()  # log-probabilities are not positive
    edges = torch.tensor(PROBABILITIES, dtype=torch.float64).log()
    return torch.bucketize(values, edges, right=True, out_int32=True).to(device)


def _labels(edges: Sequence[float], low: float, high: float | None) -> list[str]:
    tops: list[float | None] = [*edges, high]
    return [f"{a:g}-{'' if b is None else f'{b:g}'}" for a, b in zip([low, *edges], tops, strict=True)]
