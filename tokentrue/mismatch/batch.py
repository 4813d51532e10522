"""A batch as the rules of a correction see it: the policies' log-probabilities, and what was decided so far.

r is always trainer ÷ rollout probability. `corr` is r_corr = e^(old - rollout), the mismatch itself; `ppo_train` is
e^(current - old) and `ppo_rollout` is e^(current - rollout), which contain the policy's own drift. Where the sampler
renormalised over the tokens that top-p, top-k or min-p kept, `Correction(align_support=True)` subtracts the log of the
trainer's mass on them (`support_log_mass`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.layout import Bounds, Rows, Values
from tokentrue.mismatch.metrics import LOG_CLAMP
from tokentrue.types import Sample

Signal: TypeAlias = Literal["corr", "ppo_train", "ppo_rollout"]
Need: TypeAlias = Literal["old", "current", "advantages", "versions"]
"""Policies (the trainer's recomputed one, the one being trained) and values per token that a rule may need."""
NonFinite: TypeAlias = Literal["raise", "unit", "token", "sequence"]


class BatchOptions(TypedDict, total=False):
    """Keywords of `correct` and `diagnose`; each is needed by some rules only."""

    cu_seqlens: Bounds
    logprobs: Values | None  # the current policy's log-probabilities
    advantages: Values | None  # per token, or one per row
    versions: Values | None  # the policy version that sampled each token, or each row
    version: int | None  # the current policy version
    support_log_mass: Values | None  # log of the trainer's mass on the tokens that the sampler could choose


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Log-probabilities of the valid tokens, of the trainer's recomputed policy, the rollout and the current policy;
    and the decisions of the rules about them."""

    rows: Rows
    options: BatchOptions
    trainer: Tensor
    rollout: Tensor
    current: Tensor | None
    bad: Tensor | None  # not finite, and set to agreement
    hits: dict[str, int]  # how many tokens or rows each decision concerns, by its name
    log_clamp: float = LOG_CLAMP
    clamp_tokens: bool = False  # each log-ratio before it is summed, instead of the sum
    weights: Tensor = field(init=False)
    unmasked: Tensor = field(init=False)  # weights before mode "mask" zeroed any
    dropped: Tensor = field(init=False)
    zeroed: Tensor = field(init=False)  # weight 0, still counted
    active: Tensor = field(init=False)  # tokens that statistics of whole rows are taken over

    def __post_init__(self) -> None:
        self.weights = self.unmasked = torch.ones_like(self.rollout)
        self.dropped, self.zeroed, self.active = (self.rows.flags(value) for value in (False, False, True))

    @property
    def corr(self) -> Tensor:
        return self.trainer - self.rollout

    @property
    def applied(self) -> Tensor:
        """Weights as the loss uses them: 0 where rejected."""
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

    def has(self, need: Need) -> bool:
        if need == "versions":
            return self.options.get("versions") is not None and self.options.get("version") is not None
        return need == "old" or self.options.get("logprobs" if need == "current" else need) is not None

    def row_totals(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Row sums over the active tokens, and their number (at least 1)."""
        return self.rows.sum(torch.where(self.active, values, 0.0)), self.rows.count(self.active).clamp(min=1)

    def count(self, name: str, tokens: Tensor) -> None:
        """Counts hit tokens, and the rows that hold one."""
        self.hits[f"{name}_tokens"] = int(tokens.sum())
        self.hits[f"{name}_rows"] = int(self.rows.any(tokens).sum())

    def drop(self, name: str, tokens: Tensor, *, whole_rows: bool = False) -> None:
        """Drops the tokens, or every row that holds one of them."""
        self.count(name, tokens)
        self.dropped |= self.rows.spread(self.rows.any(tokens)) if whole_rows else tokens


def read_batch(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None,
    options: BatchOptions,
    *,
    non_finite: NonFinite = "raise",
    align_support: bool = False,
) -> Batch:
    """The batch, checked to have one layout and to be finite."""
    if unknown := sorted(set(options) - BatchOptions.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    rows = Rows.of(trainer_logprobs, mask, options.get("cu_seqlens"))
    logprobs, support = options.get("logprobs"), options.get("support_log_mass")
    trainer = rows.read("trainer_logprobs", trainer_logprobs)
    rollout = rows.read("rollout_logprobs", rollout_logprobs)
    current = None if logprobs is None else rows.read("logprobs", logprobs)
    mass = None if support is None else rows.read("support_log_mass", support)
    if align_support:
        if mass is None:
            raise InputError(
                "support_log_mass: align_support needs each token's log of the trainer's mass on the sampler's support"
            )
        trainer = trainer - mass
        current = None if current is None else current - mass
    bad: Tensor | None = ~torch.isfinite(trainer - rollout if current is None else trainer - rollout + current)
    num_bad = int(bad.sum())
    if num_bad and non_finite == "raise":
        raise InputError(
            f"log-probabilities: {num_bad} valid tokens are not finite, the first in row {int(rows.row[bad][0])}; the "
            "engine or the trainer could not score them. Correct the mask, or choose "
            "Correction(non_finite='unit' | 'token' | 'sequence')"
        )
    if num_bad and non_finite == "token":
        rows, trainer, rollout = rows.without(bad), trainer[~bad], rollout[~bad]
        current = None if current is None else current[~bad]
    elif num_bad:
        rollout = torch.where(bad, 0.0, rollout)
        trainer = torch.where(bad, rollout, trainer)
        current = None if current is None else torch.where(bad, rollout, current)
    return Batch(
        rows=rows, options=options, trainer=trainer, rollout=rollout, current=current,
        bad=bad if num_bad and non_finite != "token" else None, hits={"bad": num_bad},
    )  # fmt: skip


def support_log_mass(logits: Tensor, kept: Tensor) -> Tensor:
    """log Σ over the kept tokens of the trainer's probabilities, differentiable.

    `logits` `[..., V]` after temperature; `kept` is a boolean `[..., V]`, or token ids `[..., K]` padded with -1.
    """
    whole = logits.double()
    if kept.dtype == torch.bool:
        if kept.shape != logits.shape:
            raise InputError(f"kept: shape {list(kept.shape)} does not match the logits' {list(logits.shape)}")
        inside, is_kept = whole, kept
    else:
        if kept.shape[:-1] != logits.shape[:-1] or int(kept.max()) >= logits.shape[-1]:
            raise InputError(f"kept: ids of shape {list(kept.shape)} do not index logits of shape {list(logits.shape)}")
        inside, is_kept = whole.gather(-1, kept.clamp(min=0)), kept >= 0
    if not bool(is_kept.any(dim=-1).all()):
        raise InputError("kept: a position keeps no token; the sampled one at least must be among them")
    return inside.masked_fill(~is_kept, -torch.inf).logsumexp(dim=-1) - whole.logsumexp(dim=-1)


def support_log_mass_of(sample: Sample, logits: Tensor) -> Tensor:
    """`support_log_mass` of a sample's recorded sampling mask, `[T]`: 0 where no filter removed an id.

    Row i of `logits` `[T, V]` is the distribution that token i was drawn from.
    """
    mask = sample.sampling_mask
    if mask is None:
        raise InputError(f"sample {sample.sample_id} has no sampling mask; have the engine return it when rolling out")
    if logits.shape[0] != len(sample.token_ids):
        raise InputError(
            f"sample {sample.sample_id}: {logits.shape[0]} rows of logits for {len(sample.token_ids)} tokens"
        )
    rows = {index: torch.tensor(row) for index in range(len(mask)) if (row := mask.row(index).tolist())}
    found = torch.zeros(len(mask), dtype=torch.float64, device=logits.device)
    if not rows:
        return found
    kept = torch.nn.utils.rnn.pad_sequence(list(rows.values()), batch_first=True, padding_value=-1).to(logits.device)
    at = torch.tensor(list(rows), device=logits.device)
    return found.index_put((at,), support_log_mass(logits[at], kept))
