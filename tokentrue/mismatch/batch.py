"""A batch as the rules of a correction see it: the policies' log-probabilities, and what was decided so far.

r is always trainer ÷ rollout probability: `corr` is e^(old - rollout), the mismatch itself; `ppo_train` is
e^(current - old) and `ppo_rollout` e^(current - rollout), which contain the policy's own drift."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.layout import Bounds, Rows, Values
from tokentrue.mismatch.metrics import LOG_CLAMP

Signal: TypeAlias = Literal["corr", "ppo_train", "ppo_rollout"]
Need: TypeAlias = Literal["old", "current", "advantages", "versions", "head"]
"""Policies and values per token that a rule may need; "head", both policies at the sampler's most likely ids, concerns
the loss alone."""
NonFinite: TypeAlias = Literal["raise", "unit"]


class BatchOptions(TypedDict, total=False):
    cu_seqlens: Bounds
    logprobs: Values | None  # the current policy's log-probabilities
    advantages: Values | None  # per token, or one per row
    versions: Values | None  # the policy version that sampled each token, or each row
    version: int | None  # the current policy version


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Log-probabilities of the valid tokens, and the decisions of the rules about them."""

    rows: Rows
    options: BatchOptions
    trainer: Tensor
    rollout: Tensor
    current: Tensor | None
    hits: dict[str, int]  # how many tokens or rows each decision concerns, by its name
    log_clamp: float = LOG_CLAMP
    clamp_tokens: bool = False  # each log-ratio before it is summed, instead of the sum
    weights: Tensor = field(init=False)
    unmasked: Tensor = field(init=False)  # weights before mode "mask" zeroed any
    dropped: Tensor = field(init=False)
    active: Tensor = field(init=False)  # tokens that statistics of whole rows are taken over

    def __post_init__(self) -> None:
        self.weights = self.unmasked = torch.ones_like(self.rollout)
        self.dropped, self.active = self.rows.flags(False), self.rows.flags(True)

    @property
    def corr(self) -> Tensor:
        return self.trainer - self.rollout

    @property
    def applied(self) -> Tensor:
        return self.weights.masked_fill(self.dropped, 0)

    def log_ratio(self, signal: Signal) -> Tensor:
        if signal == "corr":
            return self.corr
        assert self.current is not None, "`correct_batch` refuses a batch without it"
        return self.current - (self.trainer if signal == "ppo_train" else self.rollout)

    def per_token(self, name: Literal["advantages", "versions"]) -> Tensor:
        values = self.options.get(name)
        assert values is not None, "`correct_batch` refuses a batch without it"
        return self.rows.read_per_token(name, values)

    @property
    def age(self) -> Tensor:
        version = self.options.get("version")
        assert version is not None, "`correct_batch` refuses a batch without it"
        return version - self.per_token("versions")

    def has(self, need: Need) -> bool:
        if need == "versions":
            return self.options.get("versions") is not None and self.options.get("version") is not None
        return need in ("old", "head") or self.options.get("logprobs" if need == "current" else need) is not None

    def row_totals(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows.sum(torch.where(self.active, values, 0.0)), self.rows.count(self.active).clamp(min=1)

    def count(self, name: str, tokens: Tensor) -> None:
        self.hits[f"{name}_tokens"] = int(tokens.sum())
        self.hits[f"{name}_rows"] = int(self.rows.any(tokens).sum())

    def drop(self, name: str, tokens: Tensor, *, whole_rows: bool = False) -> None:
        self.count(name, tokens)
        self.dropped |= self.rows.spread(self.rows.any(tokens)) if whole_rows else tokens


def read_batch(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None,
    options: BatchOptions,
    *,
    non_finite: NonFinite = "raise",
) -> Batch:
    if unknown := sorted(set(options) - BatchOptions.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    rows = Rows.of(trainer_logprobs, mask, options.get("cu_seqlens"))
    logprobs = options.get("logprobs")
    trainer = rows.read("trainer_logprobs", trainer_logprobs)
    rollout = rows.read("rollout_logprobs", rollout_logprobs)
    current = None if logprobs is None else rows.read("logprobs", logprobs)
    bad = ~torch.isfinite(trainer - rollout if current is None else trainer - rollout + current)
    num_bad = int(bad.sum())
    if num_bad and non_finite == "raise":
        raise InputError(
            f"log-probabilities: {num_bad} valid tokens are not finite, the first in row {int(rows.row[bad][0])}; the "
            "engine or the trainer could not score them. Correct the mask, or choose Correction(non_finite='unit')"
        )
    if num_bad:
        rollout = torch.where(bad, 0.0, rollout)
        trainer = torch.where(bad, rollout, trainer)
        current = None if current is None else torch.where(bad, rollout, current)
    return Batch(rows=rows, options=options, trainer=trainer, rollout=rollout, current=current, hits={"bad": num_bad})


def interpolate_policy(current: Tensor, rollout: Tensor, age: Tensor) -> Tensor:
    """A-3PO's proximal log-probabilities (arXiv 2512.06547): the policy one version before the current one."""
    return rollout + (1 - 1 / age.clamp(min=1)) * (current - rollout)
