"""Reads the policies' log-probabilities of some rows and forms their log-ratios: zero outside valid tokens, finite or
refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.batch.chunks import ChunkedRows, Values
from tokentrue.mismatch.batch.layout import Layout
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.rules import Signal


class BatchOptions(TypedDict, total=False):
    """The keywords that `correct`, `diagnose` and `policy_loss` share; each is needed by some rules only."""

    cu_seqlens: Tensor | Sequence[int] | None  # row boundaries of packed 1-D tensors, from 0 to N
    logprobs: Values | None  # the current policy's log-probabilities
    advantages: Values | None  # per token, or one per row
    versions: Values | None  # the policy version that sampled each token, or each row
    version: int | None  # the current policy version
    support_log_mass: Values | None  # log of the trainer's mass on the tokens that the sampler could choose


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One batch, checked to have one layout. `trainer` is the recomputed policy, `current` the one being trained."""

    layout: Layout
    trainer: Values
    rollout: Values
    current: Values | None = None
    support: Values | None = None
    advantages: Values | None = None
    versions: Values | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        names = ("trainer_logprobs", "rollout_logprobs", "logprobs", "support_log_mass")
        for name, values in zip(names, (self.trainer, self.rollout, self.current, self.support), strict=True):
            if values is not None:
                self.layout.check(name, values)

    @staticmethod
    def of(trainer: Values, rollout: Values, mask: Values | None, options: BatchOptions) -> Batch:
        unknown = sorted(set(options) - BatchOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
        return Batch(
            layout=Layout.of(trainer, mask, options.get("cu_seqlens")),
            trainer=trainer,
            rollout=rollout,
            current=options.get("logprobs"),
            support=options.get("support_log_mass"),
            advantages=options.get("advantages"),
            versions=options.get("versions"),
            version=options.get("version"),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signals:
    """Some rows' log-ratios. `bad` marks valid tokens whose numbers were not finite; their ratios are set to
    agreement."""

    rows: ChunkedRows
    trainer: Tensor
    rollout: Tensor
    current: Tensor | None
    corr: Tensor
    bad: Tensor | None
    span: tuple[float, float]  # smallest and largest δ
    cache: dict[float, Tensor] = field(default_factory=dict[float, Tensor])

    def clamped(self, limit: float) -> Tensor:
        """The mismatch's log-ratio inside ±limit."""
        least, most = self.span
        return self.corr if max(most, -least) <= limit else self.corr.clamp(-limit, limit)

    def ratio(self, limit: float) -> Tensor:
        """r of the mismatch; 1 outside valid tokens. Kept until the weights are made of it."""
        if limit not in self.cache:
            self.cache[limit] = self.clamped(limit).exp()
        return self.cache[limit]

    def log_ratio(self, signal: Signal) -> Tensor:
        if signal == "corr":
            return self.corr
        if self.current is None:
            raise InputError(f"logprobs: the current policy's log-probabilities are needed for the {signal} ratio")
        return self.current - (self.trainer if signal == "ppo_train" else self.rollout)


def read_signals(batch: Batch, rows: ChunkedRows, config: Correction) -> Signals:
    trainer, rollout = rows.read(batch.trainer), rows.read(batch.rollout)
    current = None if batch.current is None else rows.read(_detach(batch.current))
    if config.align_support:
        if batch.support is None:
            raise InputError(
                "support_log_mass: align_support needs the log of the trainer's mass on the sampler's support, per token"
            )
        mass = rows.read(batch.support)
        trainer = trainer - mass
        current = None if current is None else current - mass
    corr = trainer - rollout
    span = rows.extremes(corr)
    fine = not rows.tokens or (
        all(map(math.isfinite, span)) and (current is None or math.isfinite(float(current.sum())))
    )
    if fine:
        return Signals(rows=rows, trainer=trainer, rollout=rollout, current=current, corr=corr, bad=None, span=span)
    bad = ~torch.isfinite(corr if current is None else corr + current)
    if config.non_finite == "raise":
        raise InputError(_where(rows, bad))
    calm, corr = torch.where(bad, 0.0, rollout), torch.where(bad, 0.0, corr)
    rows = (
        rows.without(bad) if config.non_finite == "token" else rows
    )  # then bad tokens are padding: they count nowhere
    return Signals(
        rows=rows,
        trainer=torch.where(bad, calm, trainer),
        rollout=calm,
        current=None if current is None else torch.where(bad, calm, current),
        corr=corr,
        bad=bad,
        span=rows.extremes(corr),
    )


def _where(rows: ChunkedRows, bad: Tensor) -> str:
    row = int(rows.sum(bad.double()).nonzero()[0]) + rows.place.start
    return (
        f"log-probabilities: {int(bad.sum())} valid tokens are not finite, the first in row {row}; the engine or the trainer could not "
        "score them. Correct the mask, or choose Correction(non_finite='unit' | 'token' | 'sequence')"
    )


def _detach(values: Values) -> Values:
    return values.detach() if isinstance(values, Tensor) else [row.detach() for row in values]


def read_per_token(layout: Layout, rows: ChunkedRows, name: str, values: Values) -> Tensor:
    """Values per token, or one per row spread over it."""
    if (
        isinstance(values, Tensor)
        and values.dim() <= 1
        and values.numel() == layout.num_rows
        and not _lies_like(layout, values)
    ):
        return rows.read_rows(values.reshape(-1))
    layout.check(name, values)
    return rows.read(values)


def _lies_like(layout: Layout, values: Tensor) -> bool:
    return layout.kind == "packed" and values.shape[0] == layout.offsets[-1]
