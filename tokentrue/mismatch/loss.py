"""`LossConfig`, one policy loss by the names of papers, and `policy_loss`: ratio, loss per token, correction, penalty,
aggregate.

Gradient flows through the current policy's log-probabilities only. All arithmetic is float64. A batch of which nothing
is left has loss 0 and zero gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor

from tokentrue.errors import ConfigError, InputError
from tokentrue.json_types import JsonMapping
from tokentrue.mismatch.batch import Bounds, Rows, Values, detach, dtype_of, interpolate_policy
from tokentrue.mismatch.correction import MISSING, PRESETS, Corrected, Correction, correct
from tokentrue.mismatch.metrics import ESTIMATORS, LOG_CLAMP, Extremes, Mean, Metrics, Statistic, k1, k3
from tokentrue.mismatch.rules import Surrogate, refuse
from tokentrue.records import record
from tokentrue.types import AtLeastOne, Checked, Finite, NotNegative, Positive, check_fields

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "token_sum"]


@record
class Penalty(Checked):
    """A divergence of the current policy from another, added to the loss.

    With x = log other - log current: k1 = -x, k2 = x²/2, k3 = eˣ - 1 - x; "unbiased" (DeepSeek-V3.2) is r·k3 with r the
    PPO ratio, differentiated too. x is clamped to ±`clamp` (None in TRL), the estimate to ±`ceiling` (10 in verl).
    """

    coefficient: NotNegative
    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    against: Literal["reference", "rollout", "trainer"] = "reference"
    tokens: Literal["kept", "valid"] = "kept"
    clamp: Positive | None = LOG_CLAMP
    ceiling: Positive | None = None


@record
class LossConfig:
    """Clips bound the ratio to [1 - low, 1 + high] or, for DPPO, the change of probability. `dual_clip` caps the loss
    of negative advantages at that ratio. `ratio_cap` makes DPPO's ratio a constant min(r, cap). GSPO's gradient flows
    through each token or through the row's mean."""

    correction: Correction = field(default_factory=Correction)
    surrogate: Surrogate | None = None
    clip_low: NotNegative | None = 0.2
    clip_high: NotNegative | None = 0.2
    dual_clip: Finite | None = None
    ratio_cap: Annotated[float, Meta(ge=1)] | None = None
    gspo_gradient: Literal["token", "sequence"] = "token"
    aggregate: Aggregation = "token_mean"
    fixed_length: AtLeastOne | None = None
    penalty: Penalty | None = None
    entropy_coefficient: Finite = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "LossConfig")
        if self.surrogate is not None and self.surrogate != self.correction.surrogate:
            # `Correction` refuses a surrogate that counts a ratio twice.
            object.__setattr__(self, "correction", replace(self.correction, surrogate=self.surrogate))
        kind, low, high, dual = self.correction.surrogate, self.clip_low, self.clip_high, self.dual_clip
        refuse(
            "LossConfig",
            {
                f"{kind} needs clip_low and clip_high": kind in ("ppo", "gspo", "dppo_tv") and None in (low, high),
                f"clip_low: {low} leaves no lower bound on a ratio; it must be below 1 for {kind}": (
                    kind in ("ppo", "gspo") and (low or 0) >= 1
                ),
                "ratio_cap: belongs to dppo_tv": self.ratio_cap is not None and kind != "dppo_tv",
                f"dual_clip: {dual!r} must be above 1 + clip_high, and belongs to ppo": (
                    dual is not None and (kind != "ppo" or dual <= 1 + (high or 0))
                ),
                "vespo weighs rows by their whole ratio; use denominator='rollout' instead of weights": (
                    kind == "vespo" and self.correction.weights is not None
                ),
                "aggregate: score centering weighs every token alike; use token_mean, token_sum or fixed_length": (
                    self.correction.centering is not None and self.aggregate.startswith("seq_mean")
                ),
                "fixed_length: a number of tokens, goes with aggregate='fixed_length' and no other": (
                    (self.aggregate == "fixed_length") != (self.fixed_length is not None)
                ),
            },
        )


LOSSES: Mapping[str, JsonMapping] = {
    "reinforce": {"surrogate": "reinforce"},
    "ppo": {"surrogate": "ppo"},
    "grpo": {"surrogate": "ppo", "aggregate": "seq_mean_token_mean"},
    "dapo": {"surrogate": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean"},
    "decoupled_ppo": {"surrogate": "ppo", "dual_clip": 3.0},
    "bypass_ppo": {"correction": PRESETS["bypass_ppo_clip"]},
    "gspo": {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "seq_mean_token_mean"},
    "cispo": {"surrogate": "cispo", "clip_low": None, "clip_high": 4.0},
    "dppo_tv": {"correction": Correction(denominator="rollout", surrogate="dppo_tv")},
    "sapo": {"surrogate": "sapo", "aggregate": "seq_mean_token_mean"},
    "vespo": {"correction": PRESETS["vespo"]},
    "m2po": {"correction": PRESETS["m2po"]},
}
"""Losses by the name they go by in papers: starting points for `loss_named`."""


def loss_named(name: str, **changes: Any) -> LossConfig:
    if name not in LOSSES:
        raise ConfigError(f"no loss {name!r}; choose one of {', '.join(LOSSES)}")
    return LossConfig(**{**LOSSES[name], **changes})


TokenLoss = tuple[Tensor, dict[str, Statistic]]


@record(eq=False)
class Tokens:
    """A value per valid token."""

    rows: Rows
    current: Tensor
    base: Tensor  # log-probabilities of the denominator
    log_ratio: Tensor  # current - base, clamped; carries gradient
    advantages: Tensor
    bad: Tensor  # not finite, and set to agreement


def _reinforce(t: Tokens, config: LossConfig) -> TokenLoss:
    return -t.advantages * t.current, {}


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
    metrics = _count_clipped(bounded > plain, t.advantages > 0)
    if config.dual_clip is not None:
        cap = -t.advantages * config.dual_clip
        metrics["clip/dual"] = Mean.of((t.advantages < 0) & (loss > cap))
        loss = torch.where(t.advantages < 0, torch.minimum(loss, cap), loss)
    return loss, metrics


def _cispo(t: Tokens, config: LossConfig) -> TokenLoss:
    ratio = t.log_ratio.detach().exp()
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    clipped = ratio.clamp(low, math.inf if config.clip_high is None else 1 + config.clip_high)
    return -clipped * t.advantages * t.current, _count_clipped(clipped != ratio, clipped < ratio)


def _dppo_tv(t: Tokens, config: LossConfig) -> TokenLoss:
    assert config.clip_low is not None and config.clip_high is not None
    change = t.current.detach().exp() - t.base.exp()
    drop = torch.where(t.advantages > 0, change > config.clip_high, change < -config.clip_low)
    if config.ratio_cap is None:
        loss = -t.advantages * t.log_ratio.exp()
    else:
        loss = -t.advantages * t.log_ratio.detach().exp().clamp(max=config.ratio_cap) * t.current
    return loss.masked_fill(drop, 0), _count_clipped(drop, t.advantages > 0)


def _count_clipped(hits: Tensor, is_high: Tensor) -> dict[str, Statistic]:
    return {"clip/high": Mean.of(hits & is_high), "clip/low": Mean.of(hits & ~is_high)}


def _sapo(t: Tokens, config: LossConfig) -> TokenLoss:
    """σ(τ(r - 1))·4/τ (arXiv 2511.20347), τ by the sign of the advantage."""
    temperature = torch.where(t.advantages > 0, 1.0, 1.05)
    gate = torch.sigmoid(temperature * torch.expm1(t.log_ratio)) * 4 / temperature
    return -t.advantages * gate, {}


def _vespo(t: Tokens, config: LossConfig) -> TokenLoss:
    """A row's weight φ(W) = W^k · e^(λ(1 - W)) (arXiv 2602.10693), k and λ by the sign of the advantage."""
    positive = t.advantages >= 0
    log_w = t.rows.spread(t.rows.sum(t.log_ratio.detach()).clamp(math.log(1e-8), LOG_CLAMP))
    k, steepness = torch.where(positive, 2.0, 3.0), torch.where(positive, 3.0, 2.0)
    weight = (k * log_w - steepness * torch.expm1(log_w)).exp()
    return -weight * t.advantages * t.current, {"vespo/weight": Mean.of(weight)}


SURROGATES: Mapping[Surrogate, Callable[[Tokens, LossConfig], TokenLoss]] = {
    "ppo": lambda t, config: _clip(t, t.log_ratio.exp(), config),
    "reinforce": _reinforce,
    "gspo": _gspo,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
    "ratio": lambda t, config: (-t.advantages * t.log_ratio.exp(), {}),
    "sapo": _sapo,
    "vespo": _vespo,
}


def policy_loss(
    logprobs: Values,
    old_logprobs: Values | None,
    rollout_logprobs: Values | None,
    advantages: Values,
    mask: Values | None = None,
    config: LossConfig | Correction | None = None,
    *,
    cu_seqlens: Bounds = None,
    corrected: Corrected | None = None,  # made once for the step, used instead of one made from these inputs
    reference_logprobs: Values | None = None,
    entropy: Values | None = None,  # per token
    num_tokens: float | None = None,  # the step's global counts: with them, micro-batch losses add up to the step's
    num_rows: float | None = None,
    row_tokens: Sequence[float] | None = None,  # of each row's whole sequence, where several rows are one
    versions: Values | None = None,  # the policy version that sampled each token, or each row
    version: int | None = None,  # the current policy version
    head_logprobs: Values | None = None,  # current, with gradient, at the sampler's K most likely ids: [..., K]
    rollout_head_logprobs: Values | None = None,  # the sampler's own; -inf where a token has fewer
) -> tuple[Tensor, Metrics]:
    """The loss to call `.backward()` on, and its metrics; without `old_logprobs` the current policy is the old one."""
    config = LossConfig(correction=config) if isinstance(config, Correction) else config or LossConfig()
    correction = config.correction
    if corrected is None and (correction.is_active or correction.non_finite != "raise"):
        if rollout_logprobs is None:
            raise InputError("rollout_logprobs: needed, the correction compares the trainer with the rollout")
        detached = detach(logprobs)
        corrected = correct(
            detached if old_logprobs is None else old_logprobs, rollout_logprobs, mask, correction,
            cu_seqlens=cu_seqlens, logprobs=detached, advantages=advantages, versions=versions, version=version,
        )  # fmt: skip
    rows = Rows.of(logprobs, mask, cu_seqlens)
    policies = {"trainer": old_logprobs, "rollout": rollout_logprobs, "reference": reference_logprobs}
    age = None if versions is None or version is None else version - rows.read_per_token("versions", versions)
    tokens = _read_tokens(rows, logprobs, policies, advantages, correction, age)
    per_token, metrics = SURROGATES[correction.surrogate](tokens, config)
    keep = everything = rows.flags(True)
    if corrected is not None:
        keep = rows.read("corrected.mask", corrected.mask, torch.bool)
        per_token = per_token * rows.read("corrected.weights", corrected.weights)
    if correction.centering is not None:
        if head_logprobs is None or rollout_head_logprobs is None:
            raise InputError(f"{MISSING['head']}; ScoreCentering needs them")
        term, mass = correction.centering.term(
            rows.read_wide("head_logprobs", head_logprobs),
            rows.read_wide("rollout_head_logprobs", rollout_head_logprobs),
            None if correction.weights is None else correction.weights.upper,
        )
        per_token = per_token + tokens.advantages * term
        metrics["centering/head_mass"] = Mean.of(mass)
    counted = everything if correction.loss_counts == "original" else keep
    lengths = rows.count(counted)
    if row_tokens is not None and config.aggregate == "seq_mean_token_mean":
        if len(row_tokens) != len(lengths) or num_rows is None:
            given = f"{len(row_tokens)} numbers for {len(lengths)} rows"
            raise InputError(f"row_tokens: {given}; one for each, and num_rows with them")
        lengths = torch.tensor(list(row_tokens), dtype=torch.float64, device=lengths.device)
    num_tokens = float(counted.sum()) if num_tokens is None else num_tokens
    num_rows = float((lengths > 0).sum()) if num_rows is None else num_rows
    reduce = partial(_reduce, rows, config, lengths=lengths, num_tokens=num_tokens, num_rows=num_rows)
    loss = reduce(per_token, keep)
    metrics["loss/policy"] = Mean.of(loss.detach().reshape(1), 1)
    if config.penalty is not None:
        divergence = _divergence(tokens, policies, config.penalty, correction)
        paid = keep if config.penalty.tokens == "kept" else everything
        metrics["loss/kl"] = Mean.of(divergence.detach()[paid])
        loss = loss + config.penalty.coefficient * reduce(divergence, paid)
    if entropy is not None:
        values = rows.read("entropy", entropy)
        metrics["entropy"] = Mean.of(values.detach()[keep])
        loss = loss - config.entropy_coefficient * reduce(values, keep)
    elif config.entropy_coefficient:
        raise InputError("entropy: needed, the entropy coefficient is not 0: pass each token's")
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


def _read_tokens(
    rows: Rows,
    logprobs: Values,
    policies: Mapping[str, Values | None],
    advantages: Values,
    correction: Correction,
    age: Tensor | None,
) -> Tokens:
    current = rows.read("logprobs", logprobs)
    value = current.detach()
    old, rollout = policies["trainer"], policies["rollout"]
    if correction.denominator != "trainer":
        if rollout is None:
            raise InputError("rollout_logprobs: needed, the rollout policy is the denominator")
        base = rows.read("rollout_logprobs", rollout).detach()
        if correction.denominator == "interpolated":
            assert age is not None, "`correct` refuses a batch without versions"
            base = interpolate_policy(value, base, age)
    else:
        base = value if old is None else rows.read("old_logprobs", old).detach()
    bad = ~torch.isfinite(value + base)
    if bool(bad.any()):
        if correction.non_finite == "raise":
            raise InputError(
                "log-probabilities: a valid token of the current policy or of the denominator is not finite; correct "
                "the mask"
            )
        is_scored = torch.isfinite(value)
        base = torch.where(~bad, base, torch.where(is_scored, value, 0.0))
        current = torch.where(is_scored, current, 0.0)
    return Tokens(
        rows=rows,
        current=current,
        base=base,
        log_ratio=(current - base).clamp(-correction.log_clamp, correction.log_clamp),
        advantages=rows.read_per_token("advantages", advantages).detach(),
        bad=bad,
    )


def _reduce(
    rows: Rows, config: LossConfig, values: Tensor, kept: Tensor, *, lengths: Tensor, num_tokens: float, num_rows: float
) -> Tensor:
    sums = rows.sum(values.masked_fill(~kept, 0))
    if config.aggregate == "token_sum":
        return sums.sum()
    if config.aggregate == "token_mean":
        return sums.sum() / max(num_tokens, 1.0)
    if config.aggregate == "fixed_length":
        sums = sums / float(config.fixed_length or 1)
    elif config.aggregate == "seq_mean_token_mean":
        sums = sums / lengths.clamp(min=1)
    return sums.sum() / max(num_rows, 1.0)


def _divergence(t: Tokens, policies: Mapping[str, Values | None], penalty: Penalty, correction: Correction) -> Tensor:
    name, values = f"{penalty.against}_logprobs", policies[penalty.against]
    if values is None:
        raise InputError(f"{name}: needed, the penalty is against that policy")
    base = t.rows.read(name, values).detach()
    bad = t.bad | ~torch.isfinite(base)
    if correction.non_finite == "raise" and bool(bad.any()):
        raise InputError(f"{name}: a valid token's is not finite, and the penalty is against it; correct the mask")
    x = torch.where(bad, 0.0, base - t.current)  # what could not be scored costs nothing
    if penalty.clamp is not None:
        x = x.clamp(-penalty.clamp, penalty.clamp)
    estimate = k3(x) if penalty.estimator == "unbiased" else ESTIMATORS[penalty.estimator](x)
    if penalty.ceiling is not None:
        estimate = estimate.clamp(-penalty.ceiling, penalty.ceiling)
    return t.log_ratio.exp() * estimate if penalty.estimator == "unbiased" else estimate
