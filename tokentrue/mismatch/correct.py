"""`correct`: importance weights and rejection for a batch, from the log-probabilities alone. Nothing here is differentiated through.

`weights` never encode rejection, and `mask` carries it, except where a mode says otherwise (IcePop's "mask", a rule's action "mask").
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.bag import Count, Mean, Metrics, Statistic, as_float, exact_totals
from tokentrue.mismatch.config import Correction
from tokentrue.mismatch.layout import Layout
from tokentrue.mismatch.metrics import ESTIMATORS, k3_to_compare
from tokentrue.mismatch.parts import Reject, Weights
from tokentrue.mismatch.rows import Rows, Values
from tokentrue.mismatch.signals import Policies, Signals, read_per_token, read_signals


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corrected:
    """`weights` (0 at masked positions) and `mask` lie as the inputs did. `metrics` merge over micro-batches and ranks.

    `totals` is the sum of weights and their count when the correction normalises over a step: add them up over micro-batches and
    ranks, then call `normalised`.
    """

    weights: Values
    mask: Values
    metrics: Metrics
    correction: Correction
    totals: tuple[float, int] | None = None
    pending: bool = False

    def normalised(self, total: float, count: int) -> Corrected:
        """These weights over the step's mean."""
        mean = total / count if count else 0.0
        return replace(self, weights=_scaled(self.weights, mean), pending=False)


def correct(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None = None,
    correction: Correction | None = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    logprobs: Values | None = None,
    advantages: Values | None = None,
    versions: Values | None = None,
    version: int | None = None,
    support_log_mass: Values | None = None,
) -> Corrected:
    """Weights and mask of `correction` for this batch; see `Correction` for what each part needs."""
    config = Correction() if correction is None else correction
    layout = Layout.of(trainer_logprobs, mask, cu_seqlens)
    policies = Policies(layout=layout, trainer=trainer_logprobs, rollout=rollout_logprobs, current=logprobs, support=support_log_mass)
    collector = Collector.of(policies, config, Extras(advantages=advantages, versions=versions, version=version))
    with torch.no_grad():
        for rows in layout.blocks():
            collector.add(read_signals(policies, rows, config))
    return collector.finish()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """What only some rules need."""

    advantages: Values | None = None
    versions: Values | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The correction of some rows, in slots, with the counts that become metrics."""

    rows: Rows
    weights: Tensor
    unmasked: Tensor  # weights before mode "mask" zeroed any
    keep: Tensor
    row_weights: Tensor  # sums over the kept tokens
    hits: dict[str, int]

    def applied(self) -> Tensor:
        """Weights of kept tokens, 0 elsewhere."""
        return self.weights if self.keep is self.rows.valid else self.weights * self.keep


def correct_rows(signals: Signals, layout: Layout, config: Correction, extras: Extras) -> Block:
    rows = signals.rows
    judge = Judge(signals=signals, config=config)
    judge.count("bad", signals.bad)
    if signals.bad is not None and config.non_finite == "sequence":
        judge.drop_rows("bad", signals.bad)
    _whole_row_rules(judge, layout, extras)
    for rule in config.reject:
        if rule.aggregate == "token":
            judge.apply(rule)
    active = judge.keep() if config.staged else rows.valid
    weights, unmasked = judge.weigh(active)
    for rule in config.reject:
        if rule.aggregate != "token":
            judge.apply(rule, active)
    judge.count_rejected()
    if judge.zeroed is not None:
        weights = weights.masked_fill(judge.zeroed, 0)
    weights = rows.clear_padding(weights)
    signals.cache.clear()  # the weights may have been its ratios, whose padding was 1
    return Block(rows=rows, weights=weights, unmasked=unmasked, keep=judge.keep(), row_weights=judge.row_weights(weights), hits=judge.hits)


def _whole_row_rules(judge: Judge, layout: Layout, extras: Extras) -> None:
    """Veto, outlier, staleness and the off-policy mask, each on the valid tokens."""
    signals, config, rows = judge.signals, judge.config, judge.signals.rows
    if config.veto is not None:
        chosen = {"trainer": signals.trainer, "rollout": signals.rollout, "current": signals.current}[config.veto.of]
        if chosen is None:
            raise InputError("logprobs: Veto(of='current') needs the current policy's log-probabilities")
        judge.drop_rows("vetoed", rows.valid & (chosen < math.log(config.veto.below)))
    if config.outlier is not None:
        log_ratio = signals.log_ratio(config.outlier.signal)
        judge.drop_rows("outlier", rows.valid & ~inside(log_ratio, _log(config.outlier.lower), _log(config.outlier.upper)))
    if config.staleness is not None:
        judge.drop_stale(layout, extras)
    if config.off_policy_mask is not None:
        if extras.advantages is None:
            raise InputError("advantages: the off-policy mask drops negative advantages and needs them")
        judge.drop_off_policy(read_per_token(layout, rows, "advantages", extras.advantages))


@dataclass(slots=True, kw_only=True, eq=False)
class Judge:
    """Collects what is kept. Mutable, and lives for one block only."""

    signals: Signals
    config: Correction
    tokens_dropped: Tensor | None = None  # slots
    rows_dropped: Tensor | None = None  # one flag per row: most rules need no more
    zeroed: Tensor | None = None
    hits: dict[str, int] = field(default_factory=dict[str, int])

    def keep(self) -> Tensor:
        """The slots that are left."""
        rows, left = self.signals.rows, self.signals.rows.valid
        if self.rows_dropped is not None:
            left = rows.spread_flags(~self.rows_dropped)
        return left if self.tokens_dropped is None else left & ~self.tokens_dropped

    def row_weights(self, weights: Tensor) -> Tensor:
        """Row sums of the weights of what is left."""
        rows = self.signals.rows
        sums = rows.sum(weights if self.tokens_dropped is None else weights * ~self.tokens_dropped)
        return sums if self.rows_dropped is None else sums * ~self.rows_dropped

    def count_rejected(self) -> None:
        rows = self.signals.rows
        left = rows.lengths.double() if self.tokens_dropped is None else rows.count(rows.valid & ~self.tokens_dropped)
        left = left if self.rows_dropped is None else left * ~self.rows_dropped
        self.hits["rejected"] = rows.tokens - int(left.sum())
        self.hits["rows_rejected"] = int(((left == 0) & (rows.lengths > 0)).sum())

    def drop_tokens(self, slots: Tensor) -> None:
        self.tokens_dropped = slots if self.tokens_dropped is None else self.tokens_dropped | slots

    def count(self, name: str, hit: Tensor | None) -> None:
        self.hits[name] = 0 if hit is None else int(torch.count_nonzero(hit))

    def drop_rows(self, name: str, tokens: Tensor) -> None:
        """Drops every row that holds one of `tokens`; counts the rows."""
        rows = self.signals.rows
        hit = rows.any(tokens)
        self.count(f"{name}_tokens", tokens)
        self.count(f"{name}_rows", hit)
        if self.hits[f"{name}_rows"]:
            self._drop_whole(hit)

    def _drop_whole(self, hit: Tensor) -> None:
        self.rows_dropped = hit if self.rows_dropped is None else self.rows_dropped | hit

    def drop_stale(self, layout: Layout, extras: Extras) -> None:
        limit = self.config.staleness
        if limit is None or extras.versions is None or extras.version is None:
            raise InputError("versions, version: a staleness limit needs the policy version of each token (or row) and the current one")
        rows = self.signals.rows
        age = extras.version - read_per_token(layout, rows, "versions", extras.versions)
        stale = rows.valid & (age > limit.limit)
        if limit.level == "sequence":
            self.drop_rows("stale", stale)
            return
        self.count("stale_tokens", stale)
        self.count("stale_rows", rows.any(stale))
        self.drop_tokens(stale)

    def drop_off_policy(self, advantages: Tensor) -> None:
        rule = self.config.off_policy_mask
        assert rule is not None
        rows = self.signals.rows
        drift = rows.mean(-self.signals.log_ratio(rule.signal))
        dropped = (advantages < 0) & rows.spread_flags(drift > rule.threshold)
        if rule.whole_row:
            self.drop_rows("off_policy", dropped)
            return
        self.count("off_policy_tokens", dropped)
        self.count("off_policy_rows", rows.any(dropped))
        self.drop_tokens(dropped)

    def weigh(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """Applied weights, and weights before masking; outside valid tokens they mean nothing."""
        rows, how, limit = self.signals.rows, self.config.weights, self.config.log_clamp
        if how is None:
            ones = rows.valid.double()
            return ones, ones
        log_weight = self.signals.log_ratio(how.signal)
        if how.level != "token":
            total, count = self.row_totals(log_weight, active)
            log_weight = rows.spread(total / count if how.level == "geometric" else total)
        low, high = _log(how.lower), _log(how.upper)
        least, most = self.signals.span if log_weight is self.signals.corr else rows.extremes(log_weight)
        # The padding's zeros are inside any bounds, which all hold 0.
        self.count("weights_below", log_weight < low if low is not None and least < low else None)
        self.count("weights_above", log_weight > high if high is not None and most > high else None)
        clamps = max(most, -least) > limit
        self.count("clamped", log_weight.abs() > limit if clamps else None)
        raw = self.signals.ratio(limit) if log_weight is self.signals.corr else log_weight.clamp(-limit, limit).exp()
        outside = self.hits["weights_below"] + self.hits["weights_above"] > 0
        if how.mode == "raw" or not outside:
            return raw, raw
        if how.mode == "mask":
            return raw.masked_fill(~inside(log_weight, low, high), 0), raw
        bounded = raw.clamp(min=how.lower, max=how.upper)
        return bounded, bounded

    def row_totals(self, values: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Row sums over the active tokens, and their number (at least 1)."""
        rows = self.signals.rows
        if active is rows.valid:
            return rows.sum(values), rows.lengths.clamp(min=1)
        return rows.sum(torch.where(active, values, 0.0)), rows.sum(active.double()).clamp(min=1)

    def apply(self, rule: Reject, active: Tensor | None = None) -> None:
        rows = self.signals.rows
        statistic = self.statistic(rule, rows.valid if active is None else active)
        failing = ~inside(statistic, *_bounds(rule))
        by_token = rule.aggregate == "token"
        failing = failing & (rows.valid if by_token else rows.lengths > 0)
        hits = rows.count(failing) if by_token else failing * rows.lengths
        self.hits[f"{rule_name(rule)}_tokens"] = int(hits.sum())
        self.hits[f"{rule_name(rule)}_rows"] = int((hits > 0).sum())
        if not bool(hits.any()):
            return
        if rule.action == "mask":
            bad = failing if by_token else rows.spread_flags(failing)
            self.zeroed = bad if self.zeroed is None else self.zeroed | bad
        elif by_token:
            self.drop_tokens(failing)
        else:
            self._drop_whole(failing)

    def statistic(self, rule: Reject, active: Tensor) -> Tensor:
        """Per slot for a token rule, per row otherwise; log-ratios stand in for ratios."""
        rows, values = self.signals.rows, self.estimate(rule)
        if rule.aggregate == "token":
            return values
        if rule.aggregate == "seq_max":
            return rows.max(torch.where(active, values, -torch.inf), empty=0.0)
        total, count = self.row_totals(values, active)
        return total if rule.aggregate == "seq_sum" else total / count

    def estimate(self, rule: Reject) -> Tensor:
        """The rule's estimator at each slot."""
        limit = self.config.log_clamp
        if rule.estimator == "k3" and rule.signal == "corr" and not rule.inverse:
            return k3_to_compare(self.signals.clamped(limit), self.signals.ratio(limit))
        log_ratio = self.signals.log_ratio(rule.signal)
        if rule.inverse:
            log_ratio = -log_ratio
        if rule.estimator in ("k2", "k3") or self.config.clamp_tokens:
            log_ratio = log_ratio.clamp(-limit, limit)
        return log_ratio if rule.estimator == "ratio" else ESTIMATORS[rule.estimator](log_ratio)


def inside(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Within bounds, the bounds included."""
    good = torch.ones_like(values, dtype=torch.bool) if lower is None else values >= lower
    return good if upper is None else good & (values <= upper)


def rule_name(rule: Reject) -> str:
    return f"{rule.signal}_{rule.aggregate}_{rule.estimator}" + ("_inverse" if rule.inverse else "")


def _bounds(rule: Reject) -> tuple[float | None, float | None]:
    return (_log(rule.lower), _log(rule.upper)) if rule.estimator == "ratio" else (rule.lower, rule.upper)


def _log(bound: float | None) -> float | None:
    return None if bound is None else math.log(bound)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collector:
    """Corrects block after block into one result."""

    layout: Layout
    config: Correction
    extras: Extras
    weights: Tensor
    keep: Tensor
    tally: Tally

    @staticmethod
    def of(policies: Policies, config: Correction, extras: Extras) -> Collector:
        given = policies.trainer
        first = given if isinstance(given, Tensor) else next(iter(given), torch.zeros(0))
        size = policies.layout.offsets[-1]
        weights = torch.zeros(size, dtype=policies.layout.dtype(given), device=first.device)
        keep = torch.zeros(size, dtype=torch.bool, device=first.device)
        return Collector(layout=policies.layout, config=config, extras=extras, weights=weights, keep=keep, tally=Tally())

    def add(self, signals: Signals) -> Block:
        block = correct_rows(signals, self.layout, self.config, self.extras)
        block.rows.write(block.weights, self.weights)
        block.rows.write(block.keep, self.keep)
        self.tally.add(block, self.config)
        return block

    def finish(self) -> Corrected:
        weights, totals, pending = _normalise(self.weights, self.config.weights, self.tally)
        return Corrected(
            weights=self.layout.shaped(weights),
            mask=self.layout.shaped(self.keep),
            metrics=self.tally.metrics(),
            correction=self.config,
            totals=totals,
            pending=pending,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Tally:
    """Adds up blocks into metrics and into the totals that normalisation needs."""

    hits: dict[str, int] = field(default_factory=dict[str, int])
    tokens: int = 0
    rows: int = 0
    weight_sums: list[Tensor] = field(default_factory=list[Tensor])  # per row, of what normalisation averages
    weight_count: int = 0
    applied: list[Tensor] = field(default_factory=list[Tensor])  # weights of kept tokens, per row

    def add(self, block: Block, config: Correction) -> None:
        rows = block.rows
        for name, hit in block.hits.items():
            self.hits[name] = self.hits.get(name, 0) + hit
        self.tokens += rows.tokens
        self.rows += int((rows.lengths > 0).sum())
        self.applied.append(block.row_weights)
        how = config.weights.normalise if config.weights is not None else None
        if how is None:
            return
        counted = rows.valid if how.over != "kept" else block.keep & (block.weights > 0)
        source = block.unmasked if how.over == "raw" else block.weights
        sums, counts = rows.sum(torch.where(counted, source, 0.0)), rows.sum(counted.double())
        if how.level == "token":
            self.weight_sums.append(sums)
            self.weight_count += int(counts.sum())
            return
        self.weight_sums.append(sums / counts.clamp(min=1))
        self.weight_count += rows.num_rows if how.empty_rows else int((counts > 0).sum())

    def metrics(self) -> Metrics:
        statistics: dict[str, Statistic] = {"tokens": Count(count=self.tokens), "rows": Count(count=self.rows)}
        for name, hit in sorted(self.hits.items()):
            of = self.rows if name.endswith("_rows") or name == "rows_rejected" else self.tokens
            statistics[f"fraction/{name}"] = Mean.fraction(hit, of)
        statistics["weight/applied_mean"] = Mean(total=_total(self.applied), count=self.tokens)
        return Metrics(statistics)


def _normalise(weights: Tensor, how: Weights | None, tally: Tally) -> tuple[Tensor, tuple[float, int] | None, bool]:
    if how is None or how.normalise is None:
        return weights, None, False
    totals = (as_float(_total(tally.weight_sums)), tally.weight_count)
    if how.normalise.scope == "step":
        return weights, totals, True
    if tally.rows == 1 and how.level != "token":
        warnings.warn("weights normalised over a single row become 1: the correction is cancelled; use scope='step'", stacklevel=3)
    mean = totals[0] / totals[1] if totals[1] else 0.0
    return (weights / mean if mean > 1e-8 else weights), totals, False


def _total(parts: Sequence[Tensor]) -> int:
    return exact_totals(torch.cat(list(parts)).unsqueeze(0))[0] if parts else 0


def _scaled(weights: Values, mean: float) -> Values:
    if mean <= 1e-8:
        return weights
    return weights / mean if isinstance(weights, Tensor) else [row / mean for row in weights]
