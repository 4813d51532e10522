"""Reads the policies' log-probabilities of some rows and forms their log-ratios: zero outside valid tokens, finite or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.config import Correction, Signal
from tokentrue.mismatch.layout import Layout, Rows, Values
from tokentrue.mismatch.metrics import k3_from


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policies:
    """The log-probabilities of one batch, checked to lie alike. `trainer` is the recomputed policy, `current` the one being trained."""

    layout: Layout
    trainer: Values
    rollout: Values
    current: Values | None = None
    support: Values | None = None  # log of the trainer's mass on the tokens that the sampler could choose

    def __post_init__(self) -> None:
        names = ("trainer_logprobs", "rollout_logprobs", "logprobs", "support_log_mass")
        for name, values in zip(names, (self.trainer, self.rollout, self.current, self.support), strict=True):
            if values is not None:
                self.layout.check(name, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signals:
    """Some rows' log-ratios. `bad` marks valid tokens whose numbers were not finite; their ratios are set to agreement."""

    rows: Rows
    trainer: Tensor
    rollout: Tensor
    current: Tensor | None
    corr: Tensor
    bad: Tensor | None
    cache: dict[object, Tensor] = field(default_factory=dict[object, Tensor])

    def clamped(self, limit: float) -> Tensor:
        """The mismatch's log-ratio inside ±limit."""
        least, most = self.extremes()
        return self.corr if max(most, -least) <= limit else self.corr.clamp(-limit, limit)

    def extremes(self) -> tuple[float, float]:
        """Smallest and largest δ."""
        if "extremes" not in self.cache:
            self.cache["extremes"] = torch.tensor(self.rows.extremes(self.corr), dtype=torch.float64)
        least, most = self.cache["extremes"].tolist()
        return least, most

    def square(self, limit: float) -> Tensor:
        return self._once(("square", limit), lambda: self.clamped(limit).square())

    def excess(self, limit: float) -> Tensor:
        """r - 1 of the mismatch; 0 outside valid tokens."""
        return self._once(("excess", limit), lambda: torch.expm1(self.clamped(limit)))

    def k3(self, limit: float) -> Tensor:
        return self._once(("k3", limit), lambda: k3_from(self.clamped(limit), self.excess(limit), self.square(limit)))

    def _once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def log_ratio(self, signal: Signal) -> Tensor:
        if signal == "corr":
            return self.corr
        if self.current is None:
            raise InputError(f"logprobs: the current policy's log-probabilities are needed for the {signal} ratio")
        return self.current - (self.trainer if signal == "ppo_train" else self.rollout)


def read_signals(policies: Policies, rows: Rows, config: Correction) -> Signals:
    dtype = torch.promote_types(policies.layout.dtype(policies.trainer), policies.layout.dtype(policies.rollout))
    trainer, rollout = rows.read(policies.trainer, dtype), rows.read(policies.rollout, dtype)
    current = None if policies.current is None else rows.read(_detached(policies.current), dtype)
    if config.align_support:
        if policies.support is None:
            raise InputError("support_log_mass: align_support needs the log of the trainer's mass on the sampler's support, per token")
        mass = rows.read(policies.support, dtype)
        trainer = trainer - mass
        current = None if current is None else current - mass
    corr = trainer - rollout
    probe = corr if current is None else corr + current
    if math.isfinite(float(probe.sum())):
        return Signals(rows=rows, trainer=trainer, rollout=rollout, current=current, corr=corr, bad=None)
    bad = ~torch.isfinite(probe)
    if config.non_finite == "raise":
        raise InputError(_where(rows, bad))
    calm = torch.where(bad, 0.0, rollout)
    signals = Signals(
        rows=rows,
        trainer=torch.where(bad, calm, trainer),
        rollout=calm,
        current=None if current is None else torch.where(bad, calm, current),
        corr=torch.where(bad, 0.0, corr),
        bad=bad,
    )
    return _without_bad(signals, bad) if config.non_finite == "token" else signals


def _without_bad(signals: Signals, bad: Tensor) -> Signals:
    """Bad tokens become padding: they count nowhere."""
    return replace(signals, rows=signals.rows.without(bad))


def _where(rows: Rows, bad: Tensor) -> str:
    row = int(rows.sum(bad.double()).nonzero()[0]) + rows.start
    return (
        f"log-probabilities: {int(bad.sum())} valid tokens are not finite, the first in row {row}; the engine or the trainer could not "
        "score them. Mend the mask, or choose Correction(non_finite='unit' | 'token' | 'sequence')"
    )


def _detached(values: Values) -> Values:
    return values.detach() if isinstance(values, Tensor) else [row.detach() for row in values]


def read_per_token(layout: Layout, rows: Rows, name: str, values: Values) -> Tensor:
    """Values per token, or one per row spread over it."""
    if isinstance(values, Tensor) and values.dim() <= 1 and values.numel() == layout.num_rows and not _lies_like(layout, values):
        return rows.read_rows(values.reshape(-1))
    layout.check(name, values)
    return rows.read(values)


def _lies_like(layout: Layout, values: Tensor) -> bool:
    return layout.kind == "packed" and values.shape[0] == layout.offsets[-1]
