"""`policy_loss`: every surrogate goes through the same steps: ratio, loss per token, correction, penalty, aggregate.

Gradient flows through the current policy's log-probabilities only; weights, masks and bands are constants. All
arithmetic is float64; the gradient comes back in the dtype of the inputs. A batch of which nothing is left has loss 0
and zero gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.correct import Corrected, correct
from tokentrue.mismatch.correction.signals import detach
from tokentrue.mismatch.estimators import ESTIMATORS, k1, k3
from tokentrue.mismatch.layout import Layout, Rows, Values
from tokentrue.mismatch.loss.config import LossConfig
from tokentrue.mismatch.loss.surrogates import SURROGATES, Tokens
from tokentrue.mismatch.metrics import Extremes, Mean, Metrics, Statistic


class LossOptions(TypedDict, total=False):
    """The keywords of `policy_loss`."""

    cu_seqlens: Tensor | Sequence[int] | None  # row boundaries of packed 1-D tensors, from 0 to N
    corrected: Corrected | None  # a correction made once for the step, used instead of one made from these inputs
    reference_logprobs: Values | None  # for a penalty against the reference policy
    entropy: Values | None  # per token
    num_tokens: (
        float | None
    )  # the step's global counts: with them, micro-batch losses add up to the loss of the whole step
    num_rows: float | None
    row_tokens: (
        Sequence[float] | None
    )  # of each row's whole sequence, where a sequence is several rows; num_rows counts sequences
    versions: Values | None  # the policy version that sampled each token, or each row
    version: int | None  # the current policy version
    support_log_mass: Values | None  # log of the current policy's mass on the tokens that the sampler could choose


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The batch of one call, checked to have one layout; `rows` holds all of it."""

    layout: Layout
    rows: Rows
    current: Values
    old: Values | None
    rollout: Values | None
    advantages: Values
    mask: Values | None
    options: LossOptions

    def read(self, name: str, values: Values) -> Tensor:
        self.layout.check(name, values)
        return self.rows.read(values)


def policy_loss(
    logprobs: Values,
    old_logprobs: Values | None,
    rollout_logprobs: Values | None,
    advantages: Values,
    mask: Values | None = None,
    config: LossConfig | Correction | None = None,
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Metrics]:
    """The loss to call `.backward()` on, and its metrics.

    `old_logprobs` is the trainer's recomputed policy; None means the current one (one update per batch, its ratio
    is 1 in value).
    """
    unknown = sorted(set(options) - LossOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"policy_loss: unexpected keyword argument {unknown[0]!r}")
    config = LossConfig(correction=config) if isinstance(config, Correction) else config or LossConfig()
    layout = Layout.of(logprobs, mask, options.get("cu_seqlens"))
    inputs = LossInputs(
        layout=layout, rows=layout.rows(), current=logprobs, old=old_logprobs, rollout=rollout_logprobs,
        advantages=advantages, mask=mask, options=options,
    )  # fmt: skip
    corrected = _correct(inputs, config)
    tokens = _read_tokens(inputs, config)
    rows = inputs.rows
    keep = everything = rows.flags(True)
    per_token, metrics = SURROGATES[config.correction.surrogate](tokens, config)
    if corrected is not None:
        keep = rows.read(corrected.mask, torch.bool)
        per_token = per_token * rows.read(corrected.weights)
    counted = everything if config.correction.loss_counts == "original" else keep
    num_tokens, num_rows = options.get("num_tokens"), options.get("num_rows")
    row_tokens = _read_row_tokens(inputs)
    reduce = Reduction(
        rows=rows, counted=counted, config=config, num_tokens=num_tokens, num_rows=num_rows, row_tokens=row_tokens
    )
    loss = reduce(per_token, keep)
    metrics["loss/policy"] = Mean.of(loss.detach().reshape(1), 1)
    for extra in (
        _add_penalty(inputs, tokens, config, reduce, keep, metrics),
        _add_entropy(inputs, config, reduce, keep, metrics),
    ):
        loss = loss if extra is None else loss + extra
    metrics |= _common(tokens, keep)
    merged = Metrics(metrics) if corrected is None else Metrics(metrics).merge(corrected.metrics)
    return loss.to(torch.promote_types(_dtype(logprobs), torch.float32)), merged


def _correct(inputs: LossInputs, config: LossConfig) -> Corrected | None:
    """The caller's correction, or the one that the configuration asks for; None where it asks for none."""
    given, wanted, options = inputs.options.get("corrected"), config.correction, inputs.options
    if given is not None:
        if given.pending:
            raise InputError(
                "corrected: its weights still need the step's mean; call corrected.normalised(total, count) first"
            )
        return given
    if not wanted.is_active and wanted.non_finite == "raise":
        return None
    if inputs.rollout is None:
        raise InputError("rollout_logprobs: needed, the correction compares the trainer with the rollout")
    detached = detach(inputs.current)
    out = correct(
        detached if inputs.old is None else inputs.old, inputs.rollout, inputs.mask, wanted,
        cu_seqlens=options.get("cu_seqlens"), logprobs=detached, advantages=inputs.advantages, versions=options.get("versions"),
        version=options.get("version"), support_log_mass=options.get("support_log_mass"),
    )  # fmt: skip
    if out.pending:
        raise InputError(
            "corrected: scope='step' needs the step's totals; call correct, add up .totals, pass corrected=out.normalised(…)"
        )
    return out


def _read_row_tokens(inputs: LossInputs) -> Tensor | None:
    given = inputs.options.get("row_tokens")
    if given is None:
        return None
    if len(given) != inputs.layout.num_rows or inputs.options.get("num_rows") is None:
        raise InputError(
            f"row_tokens: {len(given)} numbers for {inputs.layout.num_rows} rows; one for each, and num_rows with them"
        )
    return torch.tensor(list(given), dtype=torch.float64, device=inputs.rows.row.device)


def _read_tokens(inputs: LossInputs, config: LossConfig) -> Tokens:
    rows, limit = inputs.rows, config.correction.log_clamp
    current, support = rows.read(inputs.current), inputs.options.get("support_log_mass")
    mass = None
    if config.correction.align_support and support is not None:
        mass = rows.read(support)
        current = current - mass
    base = _read_denominator(inputs, config, current.detach(), mass)
    bad = None
    if not bool(torch.isfinite(current.detach() + base).all()):
        if config.correction.non_finite == "raise":
            raise InputError(
                "log-probabilities: a valid token of the current policy or of the denominator is not finite; correct the mask"
            )
        bad = ~(torch.isfinite(current.detach()) & torch.isfinite(base))
        base = torch.where(~bad, base, torch.where(torch.isfinite(current.detach()), current.detach(), 0.0))
        current = torch.where(torch.isfinite(current.detach()), current, 0.0)
    advantages = inputs.layout.read_per_token(rows, "advantages", inputs.advantages).detach()
    log_ratio = (current - base).clamp(-limit, limit)
    return Tokens(rows=rows, current=current, base=base, log_ratio=log_ratio, advantages=advantages, bad=bad)


def _read_denominator(inputs: LossInputs, config: LossConfig, current: Tensor, mass: Tensor | None) -> Tensor:
    if config.correction.denominator == "rollout":
        if inputs.rollout is None:
            raise InputError("rollout_logprobs: needed, the rollout policy is the denominator")
        return inputs.read("rollout_logprobs", inputs.rollout).detach()
    if inputs.old is None:
        return current
    base = inputs.read("old_logprobs", inputs.old).detach()
    return base if mass is None else base - mass.detach()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """Per-token values to one number. The denominators come from `counted` tokens unless the step's global counts are
    given.

    `row_tokens` are the denominators of rows that are parts of longer sequences: their means then add up to the
    sequence's mean.
    """

    rows: Rows
    counted: Tensor
    config: LossConfig
    num_tokens: float | None
    num_rows: float | None
    row_tokens: Tensor | None

    def __call__(self, values: Tensor, kept: Tensor) -> Tensor:
        sums = self.rows.sum(values.masked_fill(~kept, 0))
        mode = self.config.aggregate
        if mode == "token_sum":
            return sums.sum()
        counts = self.rows.count(self.counted)
        if mode == "token_mean":
            return sums.sum() / max(float(counts.sum()) if self.num_tokens is None else self.num_tokens, 1.0)
        if mode == "seq_mean_token_mean":
            sums = sums / (counts if self.row_tokens is None else self.row_tokens).clamp(min=1)
        elif mode == "fixed_length":
            sums = sums / float(self.config.fixed_length or 1)
        return sums.sum() / max(float((counts > 0).sum()) if self.num_rows is None else self.num_rows, 1.0)


def _add_penalty(
    inputs: LossInputs, t: Tokens, config: LossConfig, reduce: Reduction, keep: Tensor, metrics: dict[str, Statistic]
) -> Tensor | None:
    if config.penalty is None:
        return None
    value = _penalty(inputs, t, config)
    paid = keep if config.penalty.tokens == "kept" else inputs.rows.flags(True)
    metrics["loss/kl"] = Mean.of(value.detach()[paid])
    return config.penalty.coefficient * reduce(value, paid)


def _add_entropy(
    inputs: LossInputs, config: LossConfig, reduce: Reduction, keep: Tensor, metrics: dict[str, Statistic]
) -> Tensor | None:
    entropy = inputs.options.get("entropy")
    if entropy is None:
        if config.entropy_coefficient:
            raise InputError("entropy: the entropy coefficient is not 0, so pass each token's entropy")
        return None
    values = inputs.read("entropy", entropy)
    metrics["entropy"] = Mean.of(values.detach()[keep])
    return -config.entropy_coefficient * reduce(values, keep)


def _penalty(inputs: LossInputs, t: Tokens, config: LossConfig) -> Tensor:
    penalty = config.penalty
    assert penalty is not None
    policies = {"reference": inputs.options.get("reference_logprobs"), "rollout": inputs.rollout, "trainer": inputs.old}
    other = policies[penalty.against]
    if other is None:
        raise InputError(f"{penalty.against}_logprobs: needed for the penalty against the {penalty.against} policy")
    base = inputs.read(f"{penalty.against}_logprobs", other).detach()
    bad = ~torch.isfinite(base) if t.bad is None else t.bad | ~torch.isfinite(base)
    if config.correction.non_finite == "raise" and bool(bad.any()):
        raise InputError(
            f"{penalty.against}_logprobs: a valid token's is not finite, and the penalty is against it; correct the mask"
        )
    x = _bound(torch.where(bad, 0.0, base - t.current), penalty.clamp)  # what could not be scored costs nothing
    if penalty.estimator == "unbiased":
        return t.log_ratio.exp() * _bound(k3(x), penalty.ceiling)
    return _bound(ESTIMATORS[penalty.estimator](x), penalty.ceiling)


def _bound(values: Tensor, limit: float | None) -> Tensor:
    return values if limit is None else values.clamp(-limit, limit)


def _common(t: Tokens, keep: Tensor) -> dict[str, Statistic]:
    x = t.log_ratio.detach()
    return {
        "kept": Mean.of(keep),
        "ppo_ratio": Extremes.of(x.exp()),
        "ppo_kl": Mean.of(k1(x)),
        "ppo_k3": Mean.of(k3(x)),
        "advantage": Mean.of(t.advantages),
        "all_rejected": Mean(total=float(t.rows.tokens > 0 and not bool(keep.any())), count=1),
    }


def _dtype(values: Values) -> torch.dtype:
    return values.dtype if isinstance(values, Tensor) else values[0].dtype if len(values) else torch.float32
