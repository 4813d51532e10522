"""Miles, AReaL, SkyRL and prime-rl written out from their formulas, row by row and without our code: the oracles of
test_formulas.

Plain loops over rows of 1-D float64 tensors. `delta` is trainer - rollout log-probability, `m` the row's mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LIMIT = 20.0


def _safe_exp(log: Tensor) -> Tensor:
    return log.clamp(-LIMIT, LIMIT).exp()


def _at_level(delta: Tensor, m: Tensor, level: str) -> Tensor:
    total = (delta * m).sum()
    return {
        "token": delta,
        "sequence": total.expand_as(delta),
        "geometric": (total / m.sum().clamp(min=1)).expand_as(delta),
    }[level]


def miles(trainer: Tensor, rollout: Tensor, mask: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    """Weights and modified masks of the mismatch helper; options as in mis.yaml."""
    lower = 1 / o["tis_upper_bound"] if o["tis_lower_bound"] is None else o["tis_lower_bound"]
    rs_low = lower if o["rs_lower_bound"] is None else o["rs_lower_bound"]
    rs_high = o["tis_upper_bound"] if o["rs_upper_bound"] is None else o["rs_upper_bound"]
    weights, masks = [], []
    for delta, m in zip(trainer - rollout, mask, strict=True):
        w = _safe_exp(_at_level(delta, m, o["tis_level"]))
        kept = m.clone()
        if o["tis_mode"] == "truncate":
            w = w.clamp(0, o["tis_upper_bound"])
        elif o["tis_mode"] == "clip":
            w = w.clamp(lower, o["tis_upper_bound"])
        else:
            kept = kept * ((w >= lower) & (w <= o["tis_upper_bound"]))
        w = w * m
        if o["use_rs"]:
            r = _safe_exp(_at_level(delta, m, o["rs_level"]))
            kept = kept * ((r >= rs_low) & (r <= rs_high))
            if o["rs_veto_threshold"] is not None and bool(
                ((delta < math.log(o["rs_veto_threshold"])) & m.bool()).any()
            ):
                kept = kept * 0
        weights.append(w)
        masks.append(kept)
    if o["tis_batch_normalize"]:
        if o["tis_level"] == "token":
            mean = sum(float((w * m).sum()) for w, m in zip(weights, mask, strict=True)) / max(float(mask.sum()), 1)
        else:
            mean = sum(float((w * m).sum() / m.sum().clamp(min=1)) for w, m in zip(weights, mask, strict=True)) / len(
                weights
            )
        if mean > 1e-8:
            weights = [w / mean for w in weights]
    return torch.stack(weights), torch.stack(masks)


def areal(trainer: Tensor, rollout: Tensor, mask: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    """Behaviour weights and kept mask of apply_rejection_sampling; the KL metrics are of rollout ÷ trainer, as its code
    has them."""
    weights, masks = [], []
    for delta, m in zip(trainer - rollout, mask, strict=True):
        log = delta * m
        count = m.sum().clamp(min=1)
        metric = {
            "ratio": log,
            "kl_k1": log,
            "kl_k2": 0.5 * log**2,
            "kl_k3": torch.exp(-log) - 1 + log,
        }[o["metric"]]
        w = log.exp() * m
        if o["level"] == "token":
            value = metric
        else:
            valid = torch.where(m.bool(), metric, -torch.inf)
            best = valid.max() if m.any() else torch.zeros((), dtype=metric.dtype)
            value = {"sum": (metric * m).sum(), "mean": (metric * m).sum() / count, "max": best}[o["agg"]].expand_as(
                delta
            )
            if o["metric"] == "ratio":
                w = ((log.sum() / count).exp() * m).expand_as(delta)
        if o["metric"] == "ratio":
            value = value.exp()
        if o["action"] == "clamp":
            weights.append(w.clamp(o["lower"] or 0.0, o["upper"]) * m)
            masks.append(m)
            continue
        keep = value <= o["upper"]
        if o["lower"] is not None:
            keep = keep & (value >= o["lower"])
        weights.append(w)
        masks.append(m * keep)
    return torch.stack(weights), torch.stack(masks)


def skyrl(trainer: Tensor, rollout: Tensor, mask: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    """Weights (1 without TIS) and the mask after each stage has reduced it in turn."""
    weights, masks = [], []
    for delta, m in zip(trainer - rollout, mask, strict=True):
        ratio = _safe_exp(delta)
        low, high = o["outlier_token_is_threshold_low"], o["outlier_token_is_threshold_high"]
        bad = torch.zeros_like(m, dtype=torch.bool)
        bad |= (ratio > high) if high is not None else False
        bad |= (ratio < low) if low is not None else False
        if bool((bad & m.bool()).any()):
            m = m * 0
        low, high = o["token_mask_is_threshold_low"], o["token_mask_is_threshold_high"]
        if low is not None:
            m = m * ((ratio >= low) & (ratio <= high))
        if o["tis_ratio_type"] == "token":
            w = ratio.clamp(max=o["token_tis_ratio_clip_high"])
        elif o["tis_ratio_type"] == "sequence":
            w = _safe_exp((delta * m).sum()).clamp(max=o["sequence_tis_ratio_clip_high"]).expand_as(delta)
        else:
            w = torch.ones_like(delta)
        total = (delta * m).sum()
        if o["sequence_mask_metric"] == "geometric":
            value = _safe_exp(total / m.sum().clamp(min=1))
            m = m * float(o["geo_mask_low"] <= value <= o["geo_mask_high"])
        elif o["sequence_mask_metric"] == "product":
            value = _safe_exp(total)
            m = m * float(o["product_mask_low"] <= value <= o["product_mask_high"])
        weights.append(w)
        masks.append(m)
    return torch.stack(weights), torch.stack(masks)


def prime_rl(current: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, *, tau: float, scale: float) -> Tensor:
    """DPPO-Binary-TV with Kimi's squared log-ratio on every valid token, over a global token count."""
    total = torch.zeros((), dtype=current.dtype)
    for new, behaviour, a, m in zip(current, rollout, advantages, mask, strict=True):
        log = new - behaviour
        change = (new.exp() - behaviour.exp()).detach()
        drop = torch.where(a > 0, change > 0.2, change < -0.2)
        total = total + (-(~drop).double() * m * a * log.exp() + tau * m * log**2).sum()
    return total / scale


def slime_off_policy_mask(current: Tensor, trainer: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """OPSM per token: a negative advantage in a row whose mean trainer - current exceeds delta."""
    rows = []
    for new, old, a, m in zip(current, trainer, advantages, mask, strict=True):
        drift = ((old - new) * m).sum() / m.sum().clamp(min=1)
        rows.append(~((a < 0) & (drift > delta)))
    return torch.stack(rows)
