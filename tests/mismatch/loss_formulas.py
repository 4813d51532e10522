"""The policy losses of Miles, slime, AReaL and SkyRL written out from their formulas, row by row, without our code:
oracles of test_losses.

Plain loops over rows of 1-D float64 tensors; gradient flows through `new` alone. `new`, `old`, `roll` are the
log-probabilities of the current, the trainer's recomputed and the rollout policy, `a` the advantages, `m` the row's
mask before any correction. Weights and kept masks come from `formulas`, whose functions are as independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.mismatch import formulas


def _rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*tensors, strict=True)


def _clipped(ratio: Tensor, a: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """PPO's pessimistic minimum, written as a loss; `dual` bounds what a negative advantage can cost."""
    inside = torch.minimum(torch.maximum(ratio, torch.full_like(ratio, 1 - low)), torch.full_like(ratio, 1 + high))
    loss = -torch.minimum(ratio * a, inside * a)
    return loss if dual is None else torch.where(a < 0, torch.minimum(loss, -dual * a), loss)


def miles(new: Tensor, old: Tensor, roll: Tensor, a: Tensor, mask: Tensor, reference: Tensor, **o: Any) -> Tensor:
    """Sum over rows of their means, or over tokens with `per_token`. Rejection leaves the numerators only.

    `helper` are the options of its mismatch helper, `opsm` the bound of the off-policy sequence mask, `gspo` one ratio
    for a row with gradient through its mean, `cispo` slime's, `kl` the weight of k3 to the reference times the PPO
    ratio, `bypass` takes the rollout as the old policy.
    """
    weights, kept = torch.ones_like(mask), mask
    if o.get("helper"):
        weights, kept = formulas.miles(old, roll, mask, **o["helper"])
    elif o.get("clip") is not None:
        low, high = o["clip"]
        weights = torch.stack([(t - b).exp().clamp(low, high) for t, b in _rows(old, roll)])
    base = roll if o.get("bypass") else old
    total = torch.zeros((), dtype=new.dtype)
    for now, b, r, adv, m, w, keep in _rows(new, base, reference, a, mask, weights, kept):
        log = now - b
        if o.get("gspo"):
            log = ((now - b) * m).sum() / max(float(m.sum()), 1.0) * torch.ones_like(now)
        if o.get("cispo"):
            value = -log.exp().clamp(1 - o["low"], 1 + o["high"]).detach() * adv * now
        else:
            value = _clipped(log.exp(), adv, o["low"], o["high"], o.get("dual"))
        if o.get("opsm") is not None:
            drift = float(((b - now.detach()) * m).sum()) / max(float(m.sum()), 1.0)
            value = value * (1 - ((adv < 0) & (drift > o["opsm"])).double())
        value = value * w
        if o.get("kl"):
            x = r - now
            value = value + o["kl"] * (now - b).exp() * (x.exp() - 1 - x)
        share = (value * keep).sum()
        total = total + (share if o.get("per_token") else share / max(float(m.sum()), 1.0))
    return total


def areal(new: Tensor, old: Tensor, roll: Tensor, a: Tensor, mask: Tensor, **o: Any) -> Tensor:
    """Over the count of the mask before rejection. `rule` is its rejection_sampling; without one there is no behaviour
    weight at all.

    `gspo`: one ratio and the mean advantage for a row, over the tokens that rejection left.
    """
    weights, kept = torch.ones_like(mask), mask
    if o.get("rule"):
        weights, kept = formulas.areal(old, roll, mask, **o["rule"])
    base = old if o.get("decoupled", True) else roll
    total = torch.zeros((), dtype=new.dtype)
    for now, b, adv, w, keep in _rows(new, base, a, weights, kept):
        ratio = (now - b).exp()
        if o.get("gspo"):
            count = max(float(keep.sum()), 1.0)
            ratio = (((now - b) * keep).sum() / count).exp() * torch.ones_like(now)
            adv = (adv * keep).sum() / count * torch.ones_like(now)
        value = -torch.minimum(ratio * adv, ratio.clamp(1 - o["low"], 1 + o["high"]) * adv)
        if o.get("dual") is not None:
            value = torch.minimum(value, o["dual"] * adv.abs())
        total = total + torch.where(keep.bool(), value * w, 0.0).sum()
    return total / max(float(mask.sum()), 1.0)


def skyrl(
    new: Tensor, old: Tensor, roll: Tensor, a: Tensor, mask: Tensor, *, correction: dict[str, Any], **o: Any
) -> Tensor:
    """A sum of advantages scaled beforehand by the counts of the mask before correction.

    `kind`: regular, dual_clip, gspo, cispo (`anchor` old or rollout), rollout_is, dppo (total variation).
    """
    weights, kept = formulas.skyrl(old, roll, mask, **correction)
    total = torch.zeros((), dtype=new.dtype)
    for now, b, r, adv, m, w, keep in _rows(new, old, roll, a, mask, weights, kept):
        if o["reduction"] == "token_mean":
            adv = adv / max(float(mask.sum()), 1.0)
        elif o["reduction"] == "sequence_mean":
            adv = adv / (mask.shape[0] * max(float(m.sum()), 1.0))
        else:
            adv = adv / (mask.shape[0] * o["max_seq_len"])
        if o["kind"] in ("regular", "dual_clip"):
            value = _clipped((now - b).exp(), adv, o["low"], o["high"], o["dual"] if o["kind"] == "dual_clip" else None)
        elif o["kind"] == "gspo":
            mean = float(((now.detach() - b) * m).sum()) / max(float(m.sum()), 1.0)
            value = _clipped((now - now.detach() + mean).clamp(max=10).exp(), adv, o["low"], o["high"], None)
        elif o["kind"] == "cispo":
            ratio = (now - (r if o["anchor"] == "rollout" else b)).exp()
            value = -adv * ratio.clamp(1 - o["low"], 1 + o["high"]).detach() * now
        elif o["kind"] == "rollout_is":
            ratio = (now - r).exp().detach()
            value = -adv * now * torch.where((ratio > 1 - o["low"]) & (ratio < 1 + o["high"]), ratio, 0.0)
        else:
            change = (now.exp() - r.exp()).detach()
            drop = ((adv > 0) & (change > o["high"])) | ((adv < 0) & (-change > o["low"]))
            value = -(now - r).exp() * adv * (~drop).double()
        total = total + (value * w * keep).sum()
    return total
