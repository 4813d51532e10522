"""Weights and rejection for some rows of a batch, rule by rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.batch.chunks import ChunkedRows
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.rules import Reject
from tokentrue.mismatch.correction.signals import Batch, Signals, read_per_token
from tokentrue.mismatch.correction.whole_batch import BatchLimits, harmful_tokens, second_moments
from tokentrue.mismatch.estimators import ESTIMATORS, k3_to_compare


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """The correction of some rows, in slots, with the counts that become metrics."""

    rows: ChunkedRows
    weights: Tensor
    unmasked: Tensor  # weights before mode "mask" zeroed any
    keep: Tensor
    row_weights: Tensor  # sums over the kept tokens
    hits: dict[str, int]

    def applied(self) -> Tensor:
        """Weights of kept tokens, 0 elsewhere."""
        return self.weights if self.keep is self.rows.valid else self.weights * self.keep


def correct_rows(signals: Signals, batch: Batch, config: Correction, limits: BatchLimits) -> Block:
    rows = signals.rows
    judge = Judge(signals=signals, config=config, mix=limits.mix)
    judge.count("bad", signals.bad)
    if signals.bad is not None and config.non_finite == "sequence":
        judge.drop_rows("bad", signals.bad)
    _whole_row_rules(judge, batch, limits)
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
    return Block(
        rows=rows,
        weights=weights,
        unmasked=unmasked,
        keep=judge.keep(),
        row_weights=judge.row_weights(weights),
        hits=judge.hits,
    )


def _whole_row_rules(judge: Judge, batch: Batch, limits: BatchLimits) -> None:
    """Veto, outlier, staleness, the off-policy mask and the second moment, each on the valid tokens."""
    signals, config, rows = judge.signals, judge.config, judge.signals.rows
    if config.veto is not None:
        chosen = {"trainer": signals.trainer, "rollout": signals.rollout, "current": signals.current}[config.veto.of]
        if chosen is None:
            raise InputError("logprobs: Veto(of='current') needs the current policy's log-probabilities")
        judge.drop_rows("vetoed", rows.valid & (chosen < math.log(config.veto.below)))
    if config.outlier is not None:
        log_ratio = signals.log_ratio(config.outlier.signal)
        judge.drop_rows(
            "outlier", rows.valid & ~inside(log_ratio, _log(config.outlier.lower), _log(config.outlier.upper))
        )
    if config.staleness is not None:
        judge.drop_stale(batch)
    if config.off_policy_mask is not None:
        if batch.advantages is None:
            raise InputError("advantages: the off-policy mask drops negative advantages and needs them")
        judge.drop_off_policy(read_per_token(batch.layout, rows, "advantages", batch.advantages))
    if config.second_moment is not None:
        too_far = second_moments(signals, config.second_moment) >= limits.drop_from
        judge.drop_far(too_far & harmful_tokens(signals, batch, config.second_moment))


@dataclass(slots=True, kw_only=True, eq=False)
class Judge:
    """Collects what is kept. Mutable, and lives for one block only."""

    signals: Signals
    config: Correction
    mix: float = 1.0
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

    def drop_stale(self, batch: Batch) -> None:
        limit = self.config.staleness
        if limit is None or batch.versions is None or batch.version is None:
            raise InputError(
                "versions, version: a staleness limit needs the policy version of each token (or row) and the current one"
            )
        rows = self.signals.rows
        age = batch.version - read_per_token(batch.layout, rows, "versions", batch.versions)
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

    def drop_far(self, slots: Tensor) -> None:
        self.count("second_moment_tokens", slots)
        self.count("second_moment_rows", self.signals.rows.any(slots))
        self.drop_tokens(slots)

    def weigh(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """Applied weights, and weights before masking; outside valid tokens they mean nothing."""
        bounded, unmasked = self._bounded_weights(active)
        if self.config.weights is None or self.mix == 1.0:
            return bounded, unmasked
        return bounded * self.mix + (1 - self.mix), unmasked * self.mix + (1 - self.mix)

    def _bounded_weights(self, active: Tensor) -> tuple[Tensor, Tensor]:
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
