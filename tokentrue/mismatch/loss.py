"""`policy_loss`: the surrogates of the field on one skeleton: ratio, per-token loss, correction, penalty, aggregate.

Gradient flows through the current policy's log-probabilities only; weights, masks and bands are constants. All arithmetic is float64;
the gradient comes back in the dtype of the inputs. A batch of which nothing is left has loss 0 and zero gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch.bag import Extremes, Mean, Metrics, Statistic
from tokentrue.mismatch.config import Correction
from tokentrue.mismatch.correct import Corrected, correct
from tokentrue.mismatch.layout import Layout
from tokentrue.mismatch.metrics import k1, k2, k3
from tokentrue.mismatch.parts import Surrogate, choose
from tokentrue.mismatch.rows import Rows, Values
from tokentrue.mismatch.signals import read_per_token

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "token_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """A divergence of the current policy from another, added to the loss.

    With x = log other - log current: k1 = -x, k2 = x²/2, k3 = eˣ - 1 - x. "unbiased" (DeepSeek-V3.2) is r·k3 with r the PPO ratio,
    differentiated too: its expected gradient is that of the true divergence. `tokens`: pay on kept tokens, or on all valid ones.
    """

    coefficient: float
    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    against: Literal["reference", "rollout", "trainer"] = "reference"
    tokens: Literal["kept", "valid"] = "kept"

    def __post_init__(self) -> None:
        choose("Penalty", "estimator", self.estimator, Literal["k1", "k2", "k3", "unbiased"])
        choose("Penalty", "against", self.against, Literal["reference", "rollout", "trainer"])
        choose("Penalty", "tokens", self.tokens, Literal["kept", "valid"])
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise ConfigError(f"Penalty.coefficient: {self.coefficient!r} must be finite and >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """One policy loss. `surrogate=None` takes the correction's.

    `clip_low`/`clip_high` bound the ratio to [1 - low, 1 + high] (PPO, GSPO, CISPO; None is no bound) or are DPPO's bounds on the change
    of probability. `dual_clip` caps the loss of negative advantages at that ratio. `ratio_cap` turns DPPO's ratio into a constant
    min(r, cap) on the log-probability. `gspo_gradient`: per "token" through its own log-probability, or through the "sequence" mean.
    """

    correction: Correction = field(default_factory=Correction)
    surrogate: Surrogate | None = None
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    ratio_cap: float | None = None
    gspo_gradient: Literal["token", "sequence"] = "token"
    aggregate: Aggregation = "token_mean"
    fixed_length: int | None = None
    penalty: Penalty | None = None
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        choose("LossConfig", "surrogate", self.surrogate or self.correction.surrogate, Surrogate)
        choose("LossConfig", "aggregate", self.aggregate, Aggregation)
        choose("LossConfig", "gspo_gradient", self.gspo_gradient, Literal["token", "sequence"])
        if self.surrogate is not None and self.surrogate != self.correction.surrogate:
            object.__setattr__(self, "correction", replace(self.correction, surrogate=self.surrogate))  # refuses double counting
        kind = self.correction.surrogate
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"LossConfig.{name}: {value!r} must be finite and >= 0, or None for no bound")
        if kind in ("ppo", "gspo", "dppo_tv") and (self.clip_low is None or self.clip_high is None):
            raise ConfigError(f"LossConfig: {kind} needs clip_low and clip_high")
        if kind in ("ppo", "gspo") and (self.clip_low or 0) >= 1:
            raise ConfigError(f"LossConfig.clip_low: {self.clip_low} leaves no lower bound on a ratio; it must be below 1 for {kind}")
        if self.dual_clip is not None and (kind != "ppo" or self.dual_clip <= 1 + (self.clip_high or 0)):
            raise ConfigError(f"LossConfig.dual_clip: {self.dual_clip} must be above 1 + clip_high, and belongs to ppo")
        if self.ratio_cap is not None and (kind != "dppo_tv" or self.ratio_cap < 1):
            raise ConfigError(f"LossConfig.ratio_cap: {self.ratio_cap} must be >= 1, and belongs to dppo_tv")
        if (self.aggregate == "fixed_length") != (self.fixed_length is not None and self.fixed_length > 0):
            raise ConfigError("LossConfig.fixed_length: goes with aggregate='fixed_length', and must be a positive number of tokens")


LOSSES: Mapping[str, Mapping[str, Any]] = {
    "reinforce": {"surrogate": "reinforce"},
    "ppo": {"surrogate": "ppo"},
    "grpo": {"surrogate": "ppo", "aggregate": "seq_mean_token_mean"},
    "dapo": {"surrogate": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean"},
    "decoupled_ppo": {"surrogate": "ppo", "dual_clip": 3.0},
    "bypass_ppo": {"correction": Correction(denominator="rollout")},
    "gspo": {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "seq_mean_token_mean"},
    "cispo": {"surrogate": "cispo", "clip_low": None, "clip_high": 4.0},
    "dppo_tv": {"correction": Correction(denominator="rollout", surrogate="dppo_tv"), "clip_low": 0.2, "clip_high": 0.2},
}
"""Losses by the name they go by in papers: starting points for `loss_named`."""


def loss_named(name: str, **changes: Any) -> LossConfig:
    """`loss_named("grpo", clip_high=0.28, correction=PRESETS["decoupled_token_is"])`."""
    if name not in LOSSES:
        raise ConfigError(f"no loss {name!r}; choose one of {', '.join(LOSSES)}")
    return LossConfig(**{**LOSSES[name], **changes})


def policy_loss(
    logprobs: Values,
    old_logprobs: Values | None,
    rollout_logprobs: Values | None,
    advantages: Values,
    mask: Values | None = None,
    config: LossConfig | Correction | None = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    corrected: Corrected | None = None,
    reference_logprobs: Values | None = None,
    entropy: Values | None = None,
    num_tokens: float | None = None,
    num_rows: float | None = None,
    versions: Values | None = None,
    version: int | None = None,
    support_log_mass: Values | None = None,
) -> tuple[Tensor, Metrics]:
    """The loss to call `.backward()` on, and its metrics.

    `old_logprobs` is the trainer's recomputed policy; None stands for the current one (one update per batch, its ratio is 1 in value).
    `num_tokens`, `num_rows` are the step's global counts: with them, micro-batch losses add up to the loss of the whole step.
    `corrected` reuses a correction made once for the step instead of making it anew from these inputs.
    """
    config = LossConfig(correction=config) if isinstance(config, Correction) else config or LossConfig()
    layout = Layout.of(logprobs, mask, cu_seqlens)
    rows = layout.whole()
    if corrected is None:
        corrected = _correction(
            logprobs, old_logprobs, rollout_logprobs, mask, config,
            cu_seqlens=cu_seqlens, advantages=advantages, versions=versions, version=version, support_log_mass=support_log_mass,
        )  # fmt: skip
    elif corrected.pending:
        raise InputError("corrected: its weights still want the step's mean; call corrected.normalised(total, count) first")
    tokens = _tokens(layout, rows, logprobs, old_logprobs, rollout_logprobs, advantages, config, support_log_mass)
    keep, weights = rows.valid, None
    if corrected is not None:
        keep, weights = rows.read(corrected.mask, torch.bool), rows.read(corrected.weights)
    per_token, metrics = SURROGATES[config.correction.surrogate](tokens, config)
    if weights is not None:
        per_token = per_token * weights
    counted = rows.valid if config.correction.loss_counts == "original" else keep
    reduce = Reduction(rows=rows, counted=counted, config=config, num_tokens=num_tokens, num_rows=num_rows)
    loss = reduce(per_token, keep)
    metrics["loss/policy"] = Mean.of(loss.detach().reshape(1), 1)
    if config.penalty is not None:
        value = _penalty(config, tokens, layout, reference_logprobs, rollout_logprobs, old_logprobs)
        paid = keep if config.penalty.tokens == "kept" else rows.valid
        loss = loss + config.penalty.coefficient * reduce(value, paid)
        metrics["loss/kl"] = Mean.of(rows.sum(value.detach().masked_fill(~paid, 0)), int(paid.sum()))
    if entropy is not None:
        layout.check("entropy", entropy)
        spread = rows.read(entropy)
        loss = loss - config.entropy_coefficient * reduce(spread, keep)
        metrics["entropy"] = Mean.of(rows.sum(spread.detach().masked_fill(~keep, 0)), int(keep.sum()))
    elif config.entropy_coefficient:
        raise InputError("entropy: the entropy coefficient is not 0, so pass each token's entropy")
    metrics |= _common(tokens, keep)
    merged = Metrics(metrics) if corrected is None else Metrics(metrics).merge(corrected.metrics)
    return loss.to(torch.promote_types(_dtype(logprobs), torch.float32)), merged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """What a surrogate sees, in slots."""

    rows: Rows
    current: Tensor
    base: Tensor  # log-probabilities of the denominator
    log_ratio: Tensor  # current - base, clamped; carries gradient
    advantages: Tensor
    bad: Tensor | None = None  # not finite, and set to agreement


def _tokens(
    layout: Layout,
    rows: Rows,
    logprobs: Values,
    old_logprobs: Values | None,
    rollout_logprobs: Values | None,
    advantages: Values,
    config: LossConfig,
    support: Values | None,
) -> Tokens:
    current = rows.read(logprobs)
    mass = None
    if config.correction.align_support and support is not None:
        mass = rows.read(support)
        current = current - mass
    if config.correction.denominator == "rollout":
        if rollout_logprobs is None:
            raise InputError("rollout_logprobs: needed, the rollout policy is the denominator")
        layout.check("rollout_logprobs", rollout_logprobs)
        base = rows.read(rollout_logprobs).detach()
    elif old_logprobs is None:
        base = current.detach()
    else:
        layout.check("old_logprobs", old_logprobs)
        base = rows.read(old_logprobs).detach()
        base = base if mass is None else base - mass.detach()
    bad = None
    if not bool(torch.isfinite(current.detach() + base).all()):
        if config.correction.non_finite == "raise":
            raise InputError("log-probabilities: a valid token of the current policy or of the denominator is not finite; mend the mask")
        bad = ~(torch.isfinite(current.detach()) & torch.isfinite(base))
        base = torch.where(~bad, base, torch.where(torch.isfinite(current.detach()), current.detach(), 0.0))
        current = torch.where(torch.isfinite(current.detach()), current, 0.0)
    limit = config.correction.log_clamp
    spread = read_per_token(layout, rows, "advantages", advantages).detach()
    log_ratio = (current - base).clamp(-limit, limit)
    return Tokens(rows=rows, current=current, base=base, log_ratio=log_ratio, advantages=spread, bad=bad)


def _correction(
    logprobs: Values, old: Values | None, rollout: Values | None, mask: Values | None, config: LossConfig, **rest: Any
) -> Corrected | None:
    wanted = config.correction
    active = wanted.weights or wanted.reject or wanted.veto or wanted.outlier or wanted.off_policy_mask or wanted.staleness
    if not active and wanted.non_finite == "raise":
        return None
    if rollout is None:
        raise InputError("rollout_logprobs: needed, the correction compares the trainer with the rollout")
    detached = logprobs.detach() if isinstance(logprobs, Tensor) else [row.detach() for row in logprobs]
    out = correct(detached if old is None else old, rollout, mask, wanted, logprobs=detached, **rest)
    if out.pending:
        raise InputError("corrected: scope='step' needs the step's totals; call correct, add up .totals, pass corrected=out.normalised(…)")
    return out


def _ppo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    return _clipped(t, t.log_ratio.exp(), config)


def _gspo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    limit = config.correction.log_clamp
    mean = t.rows.mean(t.current - t.base).clamp(-limit, limit)
    if config.gspo_gradient == "sequence":
        return _clipped(t, t.rows.spread(mean).exp(), config)
    carrier = t.current - t.current.detach()  # zero in value, each token's own gradient
    return _clipped(t, (carrier + t.rows.spread(mean.detach())).exp(), config)


def _clipped(t: Tokens, ratio: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    assert config.clip_low is not None and config.clip_high is not None
    plain = -t.advantages * ratio
    bounded = -t.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(plain, bounded)
    hits = t.rows.valid & (bounded > plain)
    metrics: dict[str, Statistic] = {
        "clip/high": _share(t.rows, hits & (t.advantages > 0)),
        "clip/low": _share(t.rows, hits & (t.advantages < 0)),
    }
    if config.dual_clip is not None:
        cap = -t.advantages * config.dual_clip
        metrics["clip/dual"] = _share(t.rows, t.rows.valid & (t.advantages < 0) & (loss > cap))
        loss = torch.where(t.advantages < 0, torch.minimum(loss, cap), loss)
    return loss, metrics


def _reinforce(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    return -t.advantages * t.current, {}


def _cispo(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    ratio = t.log_ratio.detach().exp()
    low = None if config.clip_low is None else 1 - config.clip_low
    high = None if config.clip_high is None else 1 + config.clip_high
    clipped = ratio if low is None and high is None else ratio.clamp(low, high)
    metrics: dict[str, Statistic] = {
        "clip/high": _share(t.rows, t.rows.valid & (clipped < ratio)),
        "clip/low": _share(t.rows, t.rows.valid & (clipped > ratio)),
    }
    return -clipped * t.advantages * t.current, metrics


def _dppo_tv(t: Tokens, config: LossConfig) -> tuple[Tensor, dict[str, Statistic]]:
    assert config.clip_low is not None and config.clip_high is not None
    change = t.current.detach().exp() - t.base.exp()
    drop = torch.where(t.advantages > 0, change > config.clip_high, change < -config.clip_low)
    if config.ratio_cap is None:
        loss = -t.advantages * t.log_ratio.exp()
    else:
        loss = -t.advantages * t.log_ratio.detach().exp().clamp(max=config.ratio_cap) * t.current
    hits = t.rows.valid & drop
    metrics: dict[str, Statistic] = {
        "clip/high": _share(t.rows, hits & (t.advantages > 0)),
        "clip/low": _share(t.rows, hits & (t.advantages <= 0)),
    }
    return loss.masked_fill(drop, 0), metrics


SURROGATES: Mapping[Surrogate, Callable[[Tokens, LossConfig], tuple[Tensor, dict[str, Statistic]]]] = {
    "ppo": _ppo,
    "reinforce": _reinforce,
    "gspo": _gspo,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """Per-token values to one number. The denominators come from `counted` tokens unless the step's global counts are given."""

    rows: Rows
    counted: Tensor
    config: LossConfig
    num_tokens: float | None
    num_rows: float | None

    def __call__(self, values: Tensor, kept: Tensor) -> Tensor:
        sums = self.rows.sum(values.masked_fill(~kept, 0))
        mode = self.config.aggregate
        if mode == "token_sum":
            return sums.sum()
        counts = self.rows.sum(self.counted.double())
        if mode == "token_mean":
            return sums.sum() / max(float(counts.sum()) if self.num_tokens is None else self.num_tokens, 1.0)
        if mode == "seq_mean_token_mean":
            sums = sums / counts.clamp(min=1)
        elif mode == "fixed_length":
            sums = sums / float(self.config.fixed_length or 1)
        return sums.sum() / max(float((counts > 0).sum()) if self.num_rows is None else self.num_rows, 1.0)


def _penalty(config: LossConfig, t: Tokens, layout: Layout, reference: Values | None, rollout: Values | None, old: Values | None) -> Tensor:
    penalty, rows = config.penalty, t.rows
    assert penalty is not None
    other = {"reference": reference, "rollout": rollout, "trainer": old}[penalty.against]
    if other is None:
        raise InputError(f"{penalty.against}_logprobs: needed for the penalty against the {penalty.against} policy")
    layout.check(f"{penalty.against}_logprobs", other)
    base = rows.read(other).detach()
    bad = ~torch.isfinite(base) if t.bad is None else t.bad | ~torch.isfinite(base)
    if config.correction.non_finite == "raise" and bool(bad.any()):
        raise InputError(f"{penalty.against}_logprobs: a valid token's is not finite, and the penalty is against it; mend the mask")
    x = torch.where(bad, 0.0, base - t.current).clamp(-20.0, 20.0)  # what could not be scored costs nothing
    if penalty.estimator == "unbiased":
        return t.log_ratio.exp() * k3(x)
    return {"k1": k1, "k2": k2, "k3": k3}[penalty.estimator](x)


def _common(t: Tokens, keep: Tensor) -> dict[str, Statistic]:
    rows, x = t.rows, t.log_ratio.detach()
    ratio = x.exp()
    low, high = -rows.max(-ratio, empty=-math.inf), rows.max(ratio, empty=-math.inf)
    return {
        "kept": Mean.fraction(int(keep.sum()), rows.tokens),
        "ppo_ratio": Extremes.of(low, high),
        "ppo_kl": Mean.of(rows.sum(k1(x)), rows.tokens),
        "ppo_k3": Mean.of(rows.sum(k3(x)), rows.tokens),
        "advantage": Mean.of(rows.sum(t.advantages), rows.tokens),
        "all_rejected": Mean.fraction(int(rows.tokens > 0 and not bool(keep.any())), 1),
    }


def _share(rows: Rows, hits: Tensor) -> Mean:
    return Mean.fraction(int(hits.sum()), rows.tokens)


def _dtype(values: Values) -> torch.dtype:
    return values.dtype if isinstance(values, Tensor) else values[0].dtype if len(values) else torch.float32
