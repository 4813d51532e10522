"""Reads the policies' log-probabilities of a batch, forms their log-ratios, and collects what the rules of a correction
decide about them.

r is always trainer ÷ rollout probability. `corr` is r_corr = e^(old - rollout), the mismatch itself; `ppo_train` is
e^(current - old) and `ppo_rollout` is e^(current - rollout), which contain the policy's own drift. Where the sampler
renormalised over the tokens that top-p, top-k or min-p kept, `Correction(align_support=True)` subtracts the log of the
trainer's mass on them (`support_log_mass`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.layout import Layout, Rows, Values, detach
from tokentrue.types import Sample

Signal: TypeAlias = Literal["corr", "ppo_train", "ppo_rollout"]
Need: TypeAlias = Literal["old", "current", "advantages", "versions"]
"""Policies (the trainer's recomputed one, the one being trained) and values per token that a rule may need."""
NonFinite: TypeAlias = Literal["raise", "unit", "token", "sequence"]


class BatchOptions(TypedDict, total=False):
    """Keywords of `correct` and `diagnose`; each is needed by some rules only."""

    cu_seqlens: Tensor | Sequence[int] | None  # row boundaries of packed 1-D tensors, from 0 to N
    logprobs: Values | None  # the current policy's log-probabilities
    advantages: Values | None  # per token, or one per row
    versions: Values | None  # the policy version that sampled each token, or each row
    version: int | None  # the current policy version
    support_log_mass: Values | None  # log of the trainer's mass on the tokens that the sampler could choose


@dataclass(slots=True, kw_only=True, eq=False)
class Signals:
    """Log-probabilities of a batch's valid tokens: of the trainer's recomputed policy, the rollout, and the current
    policy. `bad` marks those that were not finite and are set to agreement."""

    layout: Layout
    rows: Rows
    options: BatchOptions
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
        values = self.options.get(name)
        assert values is not None, "`Correction.require` refuses a batch without it"
        return self.layout.read_per_token(self.rows, name, values)

    def has(self, need: Need) -> bool:
        if need == "versions":
            return self.options.get("versions") is not None and self.options.get("version") is not None
        return need == "old" or self.options.get("logprobs" if need == "current" else need) is not None


def read_signals(
    trainer_logprobs: Values,
    rollout_logprobs: Values,
    mask: Values | None,
    options: BatchOptions,
    *,
    non_finite: NonFinite = "raise",
    align_support: bool = False,
) -> Signals:
    """The batch, checked to have one layout and to be finite."""
    unknown = sorted(set(options) - BatchOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    layout = Layout.of(trainer_logprobs, mask, options.get("cu_seqlens"))
    rows, logprobs, support = layout.rows(), options.get("logprobs"), options.get("support_log_mass")

    def read(name: str, values: Values) -> Tensor:
        layout.check(name, values)
        return rows.read(detach(values))

    trainer = rows.read(trainer_logprobs)
    rollout = read("rollout_logprobs", rollout_logprobs)
    current = None if logprobs is None else read("logprobs", logprobs)
    mass = None if support is None else read("support_log_mass", support)
    if align_support:
        if mass is None:
            raise InputError(
                "support_log_mass: align_support needs the log of the trainer's mass on the sampler's support, per "
                "token"
            )
        trainer = trainer - mass
        current = None if current is None else current - mass
    found = Signals(layout=layout, rows=rows, options=options, trainer=trainer, rollout=rollout, current=current)
    bad = ~torch.isfinite(found.corr if current is None else found.corr + current)
    found.num_bad = int(bad.sum())
    if found.num_bad:
        _settle_bad(found, bad, non_finite)
    return found


def _settle_bad(found: Signals, bad: Tensor, non_finite: NonFinite) -> None:
    current = found.current
    if non_finite == "raise":
        raise InputError(
            f"log-probabilities: {found.num_bad} valid tokens are not finite, the first in row "
            f"{int(found.rows.row[bad][0])}; the engine or the trainer could not score them. Correct the mask, or "
            "choose "
            "Correction(non_finite='unit' | 'token' | 'sequence')"
        )
    if non_finite == "token":
        found.rows = found.rows.without(bad)
        found.trainer, found.rollout = found.trainer[~bad], found.rollout[~bad]
        found.current = None if current is None else current[~bad]
        return
    found.bad = bad
    found.rollout = torch.where(bad, 0.0, found.rollout)
    found.trainer = torch.where(bad, found.rollout, found.trainer)
    found.current = None if current is None else torch.where(bad, found.rollout, current)


@dataclass(slots=True, kw_only=True, eq=False)
class Judge:
    """What the rules have decided so far about a batch's valid tokens."""

    signals: Signals
    log_clamp: float
    clamp_tokens: bool  # each log-ratio before it is summed, instead of the sum
    weights: Tensor
    unmasked: Tensor  # weights before mode "mask" zeroed any
    dropped: Tensor
    zeroed: Tensor  # weight 0, still counted
    active: Tensor  # tokens that statistics of whole rows are taken over
    hits: dict[str, int] = field(default_factory=dict[str, int])

    @staticmethod
    def of(signals: Signals, *, log_clamp: float, clamp_tokens: bool) -> Judge:
        rows, ones = signals.rows, torch.ones_like(signals.rollout)
        return Judge(
            signals=signals, log_clamp=log_clamp, clamp_tokens=clamp_tokens, weights=ones, unmasked=ones,
            dropped=rows.flags(False), zeroed=rows.flags(False), active=rows.flags(True), hits={"bad": signals.num_bad},
        )  # fmt: skip

    @property
    def rows(self) -> Rows:
        return self.signals.rows

    @property
    def applied(self) -> Tensor:
        """Weights as the loss uses them: 0 where rejected."""
        return self.weights.masked_fill(self.dropped, 0)

    def count(self, name: str, tokens: Tensor) -> None:
        """Counts hit tokens, and the rows that hold one."""
        self.hits[f"{name}_tokens"] = int(tokens.sum())
        self.hits[f"{name}_rows"] = int(self.rows.any(tokens).sum())

    def drop(self, name: str, tokens: Tensor, *, whole_rows: bool = False) -> None:
        """Drops the tokens, or every row that holds one of them."""
        self.count(name, tokens)
        self.dropped |= self.rows.spread(self.rows.any(tokens)) if whole_rows else tokens

    def row_totals(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Row sums over the active tokens, and their number (at least 1)."""
        return self.rows.sum(torch.where(self.active, values, 0.0)), self.rows.count(self.active).clamp(min=1)


def support_log_mass(logits: Tensor, kept: Tensor) -> Tensor:
    """log Σ over the kept tokens of the trainer's probabilities, differentiable.

    `logits` `[..., V]` after temperature; `kept` is a boolean `[..., V]`, or token ids `[..., K]` padded with -1.
    """
    whole = logits.double().logsumexp(dim=-1)
    if kept.dtype == torch.bool:
        if kept.shape != logits.shape:
            raise InputError(f"kept: shape {list(kept.shape)} does not match the logits' {list(logits.shape)}")
        inside, some = logits.double().masked_fill(~kept, -torch.inf), kept.any(dim=-1)
    else:
        if kept.shape[:-1] != logits.shape[:-1] or int(kept.max()) >= logits.shape[-1]:
            raise InputError(f"kept: ids of shape {list(kept.shape)} do not index logits of shape {list(logits.shape)}")
        inside = logits.double().gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)
        some = (kept >= 0).any(dim=-1)
    if not bool(some.all()):
        raise InputError("kept: a position keeps no token; the sampled one at least must be among them")
    return inside.logsumexp(dim=-1) - whole


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
    rows = [mask.row(index).tolist() for index in range(len(mask))]
    filtered = [index for index, row in enumerate(rows) if row]
    found = torch.zeros(len(rows), dtype=torch.float64, device=logits.device)
    if not filtered:
        return found
    ids = [torch.tensor(rows[index]) for index in filtered]
    kept = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1).to(logits.device)
    at = torch.tensor(filtered, device=logits.device)
    return found.index_put((at,), support_log_mass(logits[at], kept))
