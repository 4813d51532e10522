"""`policy_loss`: every surrogate goes through the same steps: ratio, loss per token, correction, penalty, aggregate.

Gradient flows through the current policy's log-probabilities only; weights, masks and bands are constants. All
arithmetic is float64; the gradient comes back in the dtype of the inputs. A batch of which nothing is left has loss 0
and zero gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict, Unpack

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.correction import Corrected, Correction, correct
from tokentrue.mismatch.layout import Layout, Rows, Values, detach, dtype_of
from tokentrue.mismatch.loss_config import LossConfig
from tokentrue.mismatch.metrics import ESTIMATORS, LOG_CLAMP, Extremes, Mean, Metrics, Statistic, k1, k3
from tokentrue.mismatch.rules import Surrogate

TokenLoss: TypeAlias = tuple[Tensor, dict[str, Statistic]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """What a surrogate sees: a value per valid token."""

    rows: Rows
    current: Tensor
    base: Tensor  # log-probabilities of the denominator
    log_ratio: Tensor  # current - base, clamped; carries gradient
    advantages: Tensor
    bad: Tensor | None = None  # not finite, and set to agreement


def _ppo(t: Tokens, config: LossConfig) -> TokenLoss:
    return _clip(t, t.log_ratio.exp(), config)


def _gspo(t: Tokens, config: LossConfig) -> TokenLoss:
    limit = config.correction.log_clamp
    mean = t.rows.mean(t.current - t.base).clamp(-limit, limit)
    if config.gspo_gradient == "sequence":
        return _clip(t, t.rows.spread(mean).exp(), config)
    carrier = t.current - t.current.detach()  # zero in value, each token's own gradient
    return _clip(t, (carrier + t.rows.spread(mean.detach())).exp(), config)


def _clip(t: Tokens, ratio: Tensor, config: LossConfig) -> TokenLoss:
    assert config.clip_low is not None and config.clip_high is not None
    plain = -t.advantages * ratio
    bounded = -t.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(plain, bounded)
    hits = bounded > plain
    metrics: dict[str, Statistic] = {
        "clip/high": Mean.of(hits & (t.advantages > 0)),
        "clip/low": Mean.of(hits & (t.advantages < 0)),
    }
    if config.dual_clip is not None:
        cap = -t.advantages * config.dual_clip
        metrics["clip/dual"] = Mean.of((t.advantages < 0) & (loss > cap))
        loss = torch.where(t.advantages < 0, torch.minimum(loss, cap), loss)
    return loss, metrics


def _reinforce(t: Tokens, config: LossConfig) -> TokenLoss:
    return -t.advantages * t.current, {}


def _cispo(t: Tokens, config: LossConfig) -> TokenLoss:
    ratio = t.log_ratio.detach().exp()
    low = None if config.clip_low is None else 1 - config.clip_low
    high = None if config.clip_high is None else 1 + config.clip_high
    clipped = ratio if low is None and high is None else ratio.clamp(low, high)
    metrics: dict[str, Statistic] = {"clip/high": Mean.of(clipped < ratio), "clip/low": Mean.of(clipped > ratio)}
    return -clipped * t.advantages * t.current, metrics


def _dppo_tv(t: Tokens, config: LossConfig) -> TokenLoss:
    assert config.clip_low is not None and config.clip_high is not None
    change = t.current.detach().exp() - t.base.exp()
    drop = torch.where(t.advantages > 0, change > config.clip_high, change < -config.clip_low)
    if config.ratio_cap is None:
        loss = -t.advantages * t.log_ratio.exp()
    else:
        loss = -t.advantages * t.log_ratio.detach().exp().clamp(max=config.ratio_cap) * t.current
    metrics: dict[str, Statistic] = {
        "clip/high": Mean.of(drop & (t.advantages > 0)),
        "clip/low": Mean.of(drop & (t.advantages <= 0)),
    }
    return loss.masked_fill(drop, 0), metrics


def _ratio(t: Tokens, config: LossConfig) -> TokenLoss:
    return -t.advantages * t.log_ratio.exp(), {}


def _sapo(t: Tokens, config: LossConfig) -> TokenLoss:
    temperature = torch.where(t.advantages > 0, config.sapo.positive, config.sapo.negative)
    gate = torch.sigmoid(temperature * torch.expm1(t.log_ratio)) * 4 / temperature
    return -t.advantages * gate, {}


def _vespo(t: Tokens, config: LossConfig) -> TokenLoss:
    kernel, positive = config.vespo, t.advantages >= 0
    log_w = t.rows.spread(t.rows.sum(t.log_ratio.detach()).clamp(math.log(1e-8), LOG_CLAMP))
    k = torch.where(positive, kernel.k_positive, kernel.k_negative)
    steepness = torch.where(positive, kernel.lambda_positive, kernel.lambda_negative)
    weight = (k * log_w - steepness * torch.expm1(log_w)).exp()
    metrics: dict[str, Statistic] = {"vespo/weight": Mean.of(weight)}
    return -weight * t.advantages * t.current, metrics


SURROGATES: Mapping[Surrogate, Callable[[Tokens, LossConfig], TokenLoss]] = {
    "ppo": _ppo,
    "reinforce": _reinforce,
    "gspo": _gspo,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
    "ratio": _ratio,
    "sapo": _sapo,
    "vespo": _vespo,
}


class LossOptions(TypedDict, total=False):
    cu_seqlens: Tensor | Sequence[int] | None  # row boundaries of packed 1-D tensors, from 0 to N
    corrected: Corrected | None  # a correction made once for the step, used instead of one made from these inputs
    reference_logprobs: Values | None  # for a penalty against the reference policy
    entropy: Values | None  # per token
    num_tokens: float | None  # the step's global counts: with them, micro-batch losses add up to the step's
    num_rows: float | None
    row_tokens: Sequence[float] | None  # of each row's whole sequence, where several rows are one; with num_rows
    versions: Values | None  # the policy version that sampled each token, or each row
    version: int | None  # the current policy version
    support_log_mass: Values | None  # log of the current policy's mass on the tokens that the sampler could choose


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The batch of one call."""

    layout: Layout
    rows: Rows
    current: Values
    old: Values | None
    rollout: Values | None
    advantages: Values
    mask: Values | None
    options: LossOptions

    def read(self, name: str, values: Values | None, why: str) -> Tensor:
        """The valid tokens' values."""
        if values is None:
            raise InputError(f"{name}: needed, {why}")
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
    """The loss to call `.backward()` on, and its metrics; without `old_logprobs` the current policy is the old one."""
    unknown = sorted(set(options) - LossOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"policy_loss: unexpected keyword argument {unknown[0]!r}")
    config = LossConfig(correction=config) if isinstance(config, Correction) else config or LossConfig()
    layout = Layout.of(logprobs, mask, options.get("cu_seqlens"))
    inputs = LossInputs(
        layout=layout, rows=layout.rows(), current=logprobs, old=old_logprobs, rollout=rollout_logprobs,
        advantages=advantages, mask=mask, options=options,
    )  # fmt: skip
    corrected, tokens, rows = _correct(inputs, config), _read_tokens(inputs, config), inputs.rows
    per_token, metrics = SURROGATES[config.correction.surrogate](tokens, config)
    keep = everything = rows.flags(True)
    if corrected is not None:
        keep = rows.read(corrected.mask, torch.bool)
        per_token = per_token * rows.read(corrected.weights)
    counted = everything if config.correction.loss_counts == "original" else keep
    reduce = Reduction(rows=rows, counted=counted, config=config, options=options)
    loss = reduce(per_token, keep)
    metrics["loss/policy"] = Mean.of(loss.detach().reshape(1), 1)
    if config.penalty is not None:
        loss = loss + _add_penalty(inputs, tokens, config, reduce, keep, metrics)
    if options.get("entropy") is not None or config.entropy_coefficient:
        values = inputs.read("entropy", options.get("entropy"), "the entropy coefficient is not 0: pass each token's")
        metrics["entropy"] = Mean.of(values.detach()[keep])
        loss = loss - config.entropy_coefficient * reduce(values, keep)
    x = tokens.log_ratio.detach()
    metrics |= {
        "kept": Mean.of(keep),
        "ppo_ratio": Extremes.of(x.exp()),
        "ppo_kl": Mean.of(k1(x)),
        "ppo_k3": Mean.of(k3(x)),
        "advantage": Mean.of(tokens.advantages),
        "all_rejected": Mean(total=float(rows.tokens > 0 and not bool(keep.any())), count=1),
    }
    merged = Metrics(metrics) if corrected is None else Metrics(metrics).merge(corrected.metrics)
    return loss.to(dtype_of(logprobs)), merged


def _correct(inputs: LossInputs, config: LossConfig) -> Corrected | None:
    """The caller's correction, or the configuration's; None where it asks for none."""
    out, wanted, options = inputs.options.get("corrected"), config.correction, inputs.options
    if out is None:
        if not wanted.is_active and wanted.non_finite == "raise":
            return None
        if inputs.rollout is None:
            raise InputError("rollout_logprobs: needed, the correction compares the trainer with the rollout")
        detached = detach(inputs.current)
        out = correct(
            detached if inputs.old is None else inputs.old, inputs.rollout, inputs.mask, wanted,
            cu_seqlens=options.get("cu_seqlens"), logprobs=detached, advantages=inputs.advantages,
            versions=options.get("versions"), version=options.get("version"),
            support_log_mass=options.get("support_log_mass"),
        )  # fmt: skip
    if out.pending:
        raise InputError(
            "corrected: its weights still need the step's mean; add up .totals of `correct`, and pass "
            "corrected=out.normalised(total, count)"
        )
    return out


def _read_tokens(inputs: LossInputs, config: LossConfig) -> Tokens:
    rows, limit, correction = inputs.rows, config.correction.log_clamp, config.correction
    current, support = rows.read(inputs.current), inputs.options.get("support_log_mass")
    mass = rows.read(support) if correction.align_support and support is not None else torch.zeros_like(current)
    current = current - mass
    value = current.detach()
    if correction.denominator == "rollout":
        why = "the rollout policy is the denominator"
        base = inputs.read("rollout_logprobs", inputs.rollout, why).detach()
    else:
        base = value if inputs.old is None else inputs.read("old_logprobs", inputs.old, "").detach() - mass.detach()
    bad = None
    if not bool(torch.isfinite(value + base).all()):
        if correction.non_finite == "raise":
            raise InputError(
                "log-probabilities: a valid token of the current policy or of the denominator is not finite; correct "
                "the mask"
            )
        is_scored = torch.isfinite(value)
        bad = ~(is_scored & torch.isfinite(base))
        base = torch.where(~bad, base, torch.where(is_scored, value, 0.0))
        current = torch.where(is_scored, current, 0.0)
    advantages = inputs.layout.read_per_token(rows, "advantages", inputs.advantages).detach()
    log_ratio = (current - base).clamp(-limit, limit)
    return Tokens(rows=rows, current=current, base=base, log_ratio=log_ratio, advantages=advantages, bad=bad)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """Per-token values to one number, over the counts of `counted` tokens or the step's."""

    rows: Rows
    counted: Tensor
    config: LossConfig
    options: LossOptions

    def __call__(self, values: Tensor, kept: Tensor) -> Tensor:
        sums = self.rows.sum(values.masked_fill(~kept, 0))
        mode, num_tokens, num_rows = self.config.aggregate, self.options.get("num_tokens"), self.options.get("num_rows")
        if mode == "token_sum":
            return sums.sum()
        counts = self.rows.count(self.counted)
        if mode == "token_mean":
            return sums.sum() / max(float(counts.sum()) if num_tokens is None else num_tokens, 1.0)
        if mode == "seq_mean_token_mean":
            sums = sums / self.row_counts(counts).clamp(min=1)
        elif mode == "fixed_length":
            sums = sums / float(self.config.fixed_length or 1)
        return sums.sum() / max(float((counts > 0).sum()) if num_rows is None else num_rows, 1.0)

    def row_counts(self, counts: Tensor) -> Tensor:
        """The denominators of rows; those of rows that are parts of longer sequences are given."""
        given = self.options.get("row_tokens")
        if given is None:
            return counts
        if len(given) != len(counts) or self.options.get("num_rows") is None:
            raise InputError(
                f"row_tokens: {len(given)} numbers for {len(counts)} rows; one for each, and num_rows with them"
            )
        return torch.tensor(list(given), dtype=torch.float64, device=counts.device)


def _add_penalty(
    inputs: LossInputs, t: Tokens, config: LossConfig, reduce: Reduction, keep: Tensor, metrics: dict[str, Statistic]
) -> Tensor:
    penalty = config.penalty
    assert penalty is not None
    name, paid = f"{penalty.against}_logprobs", keep if penalty.tokens == "kept" else inputs.rows.flags(True)
    policies = {"reference": inputs.options.get("reference_logprobs"), "rollout": inputs.rollout, "trainer": inputs.old}
    base = inputs.read(name, policies[penalty.against], "the penalty is against that policy").detach()
    bad = ~torch.isfinite(base) if t.bad is None else t.bad | ~torch.isfinite(base)
    if config.correction.non_finite == "raise" and bool(bad.any()):
        raise InputError(f"{name}: a valid token's is not finite, and the penalty is against it; correct the mask")
    x = _bound(torch.where(bad, 0.0, base - t.current), penalty.clamp)  # what could not be scored costs nothing
    if penalty.estimator == "unbiased":
        value = t.log_ratio.exp() * _bound(k3(x), penalty.ceiling)
    else:
        value = _bound(ESTIMATORS[penalty.estimator](x), penalty.ceiling)
    metrics["loss/kl"] = Mean.of(value.detach()[paid])
    return penalty.coefficient * reduce(value, paid)


def _bound(values: Tensor, limit: float | None) -> Tensor:
    return values if limit is None else values.clamp(-limit, limit)
