"""Reads the policies' log-probabilities of a batch and forms their log-ratios: finite, or refused.

r is always trainer ÷ rollout probability. `corr` is r_corr = e^(old - rollout), the mismatch itself; `ppo_train` is
e^(current - old) and `ppo_rollout` is e^(current - rollout), which contain the policy's own drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.layout import Layout, Rows, Values

Signal: TypeAlias = Literal["corr", "ppo_train", "ppo_rollout"]
Need: TypeAlias = Literal["old", "current", "advantages", "versions"]
"""Policies (the trainer's recomputed one, the one being trained) and values per token that a rule may need."""


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

    def has(self, need: Need) -> bool:
        if need == "versions":
            return self.versions is not None and self.version is not None
        return need == "old" or getattr(self, need) is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signals:
    """The log-ratios of a batch's valid tokens. `bad` marks those whose numbers were not finite; their ratios are set
    to agreement."""

    batch: Batch
    rows: Rows
    trainer: Tensor
    rollout: Tensor
    current: Tensor | None
    num_bad: int = 0
    bad: Tensor | None = None

    @property
    def corr(self) -> Tensor:
        return self.trainer - self.rollout

    def log_ratio(self, signal: Signal) -> Tensor:
        if signal == "corr":
            return self.corr
        assert self.current is not None, "`Correction.require` refuses a batch without it"
        return self.current - (self.trainer if signal == "ppo_train" else self.rollout)

    def per_token(self, name: Literal["advantages", "versions"]) -> Tensor:
        values = getattr(self.batch, name)
        return self.batch.layout.read_per_token(self.rows, name, values)


def read_signals(
    batch: Batch,
    *,
    non_finite: Literal["raise", "unit", "token", "sequence"] = "raise",
    align_support: bool = False,
) -> Signals:
    """`non_finite` and `align_support` as in `Correction`."""
    rows = batch.layout.rows()
    trainer, rollout = rows.read(batch.trainer), rows.read(batch.rollout)
    current = None if batch.current is None else rows.read(detach(batch.current))
    if align_support:
        if batch.support is None:
            raise InputError(
                "support_log_mass: align_support needs the log of the trainer's mass on the sampler's support, per token"
            )
        mass = rows.read(batch.support)
        trainer = trainer - mass
        current = None if current is None else current - mass
    found = Signals(batch=batch, rows=rows, trainer=trainer, rollout=rollout, current=current)
    bad = ~torch.isfinite(found.corr if current is None else found.corr + current)
    num_bad = int(bad.sum())
    if not num_bad:
        return found
    if non_finite == "raise":
        raise InputError(
            f"log-probabilities: {num_bad} valid tokens are not finite, the first in row {int(rows.row[bad][0])}; the engine or the "
            "trainer could not score them. Correct the mask, or choose Correction(non_finite='unit' | 'token' | 'sequence')"
        )
    if non_finite == "token":
        left = [None if values is None else values[~bad] for values in (trainer, rollout, current)]
        assert left[0] is not None and left[1] is not None
        return replace(
            found, rows=rows.without(bad), trainer=left[0], rollout=left[1], current=left[2], num_bad=num_bad
        )
    calm = torch.where(bad, 0.0, rollout)
    return replace(
        found,
        trainer=torch.where(bad, calm, trainer),
        rollout=calm,
        current=None if current is None else torch.where(bad, calm, current),
        num_bad=num_bad,
        bad=bad,
    )


def detach(values: Values) -> Values:
    return values.detach() if isinstance(values, Tensor) else [row.detach() for row in values]
