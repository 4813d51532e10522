"""Gradients of every surrogate: autograd against closed forms and finite differences; weights and rejection are
constants to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.mismatch.batches import make
from tokentrue.mismatch import (
    LOSSES,
    PRESETS,
    Correction,
    LossConfig,
    Penalty,
    Reject,
    Weights,
    correct,
    loss_named,
    policy_loss,
)

CLOSE = {"atol": 1e-10, "rtol": 1e-8}


def grad_of(current: Tensor, *rest: object, **named: object) -> Tensor:
    current = current.clone().requires_grad_()
    loss, _ = policy_loss(current, *rest, **named)  # type: ignore[arg-type]
    return torch.autograd.grad(loss, current)[0]


def test_reinforce_closed_form() -> None:
    batch = make(11)
    grad = grad_of(batch.current, batch.trainer, None, batch.advantages, batch.mask, loss_named("reinforce"))
    want = torch.where(batch.mask, -batch.advantages / batch.mask.sum(), 0.0)
    torch.testing.assert_close(grad, want, **CLOSE)


@pytest.mark.parametrize("denominator", ["trainer", "rollout"])
def test_clipped_closed_form(denominator: str) -> None:
    """-r·A inside the band or on its good side, 0 where the clip holds, dual clip for negative advantages far out."""
    for seed in range(30):
        batch = make(seed)
        base = batch.trainer if denominator == "trainer" else batch.rollout
        config = LossConfig(correction=Correction(denominator=denominator), clip_low=0.1, clip_high=0.3, dual_clip=3.0)  # type: ignore[arg-type]
        grad = grad_of(batch.current, batch.trainer, batch.rollout, batch.advantages, batch.mask, config)
        ratio, a = (batch.current - base).clamp(-20, 20).exp(), batch.advantages
        held = (
            ((a > 0) & (ratio > 1.3))
            | ((a < 0) & (ratio < 0.9))
            | ((a < 0) & (ratio > 3.0))
            | ((batch.current - base).abs() > 20)
        )
        want = torch.where(batch.mask & ~held, -a * ratio / batch.mask.sum(), 0.0)
        torch.testing.assert_close(grad, want, **CLOSE)


def test_weights_and_rejection_scale_the_gradient_and_nothing_else() -> None:
    for seed in range(30):
        batch = make(seed)
        correction = Correction(
            weights=Weights(upper=2.0), reject=(Reject(estimator="k3", aggregate="seq_mean", upper=0.5),)
        )
        plain = grad_of(batch.current, batch.trainer, batch.rollout, batch.advantages, batch.mask, LossConfig())
        mine = grad_of(
            batch.current, batch.trainer, batch.rollout, batch.advantages, batch.mask, LossConfig(correction=correction)
        )
        out = correct(batch.trainer, batch.rollout, batch.mask, correction)
        torch.testing.assert_close(mine, plain * out.weights * out.mask, **CLOSE)


def test_nothing_but_the_current_policy_is_differentiated() -> None:
    """Weights of current ÷ rollout (REINFORCE) hold the current policy too, and still carry no gradient through it."""
    batch = make(5)
    leaves = {
        name: getattr(batch, name).clone().requires_grad_() for name in ("current", "trainer", "rollout", "advantages")
    }
    for preset in ("bypass_pg_is", "tis-srs-k3-corr-mean", "decoupled_token_icepop"):
        config = LossConfig(correction=PRESETS[preset])
        loss, _ = policy_loss(
            leaves["current"], leaves["trainer"], leaves["rollout"], leaves["advantages"], batch.mask, config
        )
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        assert all(grad is None or not grad.any() for grad in grads[1:])
    weights = correct(
        batch.trainer, batch.rollout, batch.mask, PRESETS["bypass_pg_is"], logprobs=leaves["current"]
    ).weights
    assert not weights.requires_grad
    config = LossConfig(correction=PRESETS["bypass_pg_is"])
    loss, _ = policy_loss(leaves["current"], None, batch.rollout, batch.advantages, batch.mask, config)
    (grad,) = torch.autograd.grad(loss, leaves["current"])
    torch.testing.assert_close(
        grad, torch.where(batch.mask, -batch.advantages * weights / batch.mask.sum(), 0.0), **CLOSE
    )


# VESPO's weight is a constant; its gradient is compared with TRL's in test_newer_corrections.py.
SMOOTH = [*(name for name in LOSSES if name != "vespo"), "penalty_k1", "penalty_k2", "penalty_k3", "penalty_unbiased"]


@pytest.mark.parametrize("name", SMOOTH)
def test_finite_differences(name: str) -> None:
    """In float64, away from kinks; losses with a stopped gradient are differentiated with what they stop held still."""
    batch = make(21, empty_rows=False)
    current = batch.trainer + (batch.current - batch.trainer).clamp(-0.05, 0.05) + 0.011
    reference = batch.trainer - 0.3
    if name.startswith("penalty_"):
        config = LossConfig(penalty=Penalty(coefficient=0.7, estimator=name.removeprefix("penalty_")))  # type: ignore[arg-type]
    else:
        config = loss_named(name)

    def loss_at(values: Tensor) -> Tensor:
        loss, _ = policy_loss(
            values, batch.trainer, batch.trainer, batch.advantages, batch.mask, config, reference_logprobs=reference
        )
        return loss

    grad = grad_of(
        current, batch.trainer, batch.trainer, batch.advantages, batch.mask, config, reference_logprobs=reference
    )
    if name in ("cispo", "gspo"):
        _stopped(name, config, current, batch.trainer, batch.advantages, batch.mask, grad)
        return
    step = 1e-6
    for row, column in batch.mask.nonzero()[:40].tolist():
        up, down = current.clone(), current.clone()
        up[row, column] += step
        down[row, column] -= step
        slope = (loss_at(up) - loss_at(down)) / (2 * step)
        assert float(grad[row, column]) == pytest.approx(float(slope), rel=1e-5, abs=1e-9)


def _stopped(
    name: str, config: LossConfig, current: Tensor, base: Tensor, a: Tensor, mask: Tensor, grad: Tensor
) -> None:
    """CISPO: -clip(r)·A per token. GSPO: the sequence's ratio, each token through its own log-probability, where
    unclipped."""
    assert config.clip_high is not None
    if name == "cispo":
        want = -(current - base).exp().clamp(max=1 + config.clip_high) * a / mask.sum()
    else:
        assert config.clip_low is not None
        count = mask.sum(dim=1, keepdim=True)
        ratio = (((current - base) * mask).sum(dim=1, keepdim=True) / count).exp().expand_as(a)
        free = ~(((a > 0) & (ratio > 1 + config.clip_high)) | ((a < 0) & (ratio < 1 - config.clip_low)))
        want = -ratio * a * free / count / mask.shape[0]
    torch.testing.assert_close(grad, torch.where(mask, want, 0.0), **CLOSE)


def test_unbiased_penalty_has_the_gradient_of_the_divergence() -> None:
    """Over all tokens of a small vocabulary, weighted by the sampling policy: the gradient of KL(current ‖ reference);
    plain k3 is not."""
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    sampler = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).log_softmax(0)
    reference = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).log_softmax(0)
    current = logits.log_softmax(0)
    (want,) = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits, retain_graph=True)
    found = {}
    for estimator in ("unbiased", "k3"):
        total = torch.zeros((), dtype=torch.float64)
        for token in range(6):
            one = {"reference_logprobs": reference[token].view(1, 1)}
            config = LossConfig(surrogate="reinforce", penalty=Penalty(coefficient=1.0, estimator=estimator))  # type: ignore[arg-type]
            value, _ = policy_loss(
                current[token].view(1, 1), sampler[token].view(1, 1), None, torch.zeros(1, 1), None, config, **one
            )
            total = total + math.exp(float(sampler[token])) * value
        (found[estimator],) = torch.autograd.grad(total, logits, retain_graph=True)
    torch.testing.assert_close(found["unbiased"], want, **CLOSE)
    assert (found["k3"] - want).abs().max() > 1e-2


def test_entropy_bonus() -> None:
    batch = make(2)
    entropy = batch.rollout.abs().requires_grad_()
    loss, metrics = policy_loss(
        batch.current,
        batch.trainer,
        None,
        batch.advantages * 0,
        batch.mask,
        LossConfig(entropy_coefficient=0.1),
        entropy=entropy,
    )
    (grad,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(grad, torch.where(batch.mask, -0.1 / batch.mask.sum(), 0.0).double(), **CLOSE)
    assert metrics["entropy"] == pytest.approx(float(entropy.detach()[batch.mask].mean()))


@pytest.mark.parametrize("name", list(LOSSES))
def test_micro_batches_add_up_to_the_step(name: str) -> None:
    batch = make(8, empty_rows=False)
    config = loss_named(name, correction=LossConfig(**LOSSES[name]).correction)
    whole = grad_of(batch.current, batch.trainer, batch.rollout, batch.advantages, batch.mask, config)
    counts = {"num_tokens": float(batch.mask.sum()), "num_rows": float(batch.mask.shape[0])}
    parts = [
        grad_of(batch.current[i : i + 1], batch.trainer[i : i + 1], batch.rollout[i : i + 1], batch.advantages[i : i + 1],
                batch.mask[i : i + 1], config, **counts)
        for i in range(batch.mask.shape[0])
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)
