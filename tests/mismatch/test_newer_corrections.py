"""M2PO, SAPO, VESPO, mixed weights, update acceptance and the length schedule: against the papers' formulas and the
peers' own code."""

from __future__ import annotations

import dataclasses
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import examples
from tests.mismatch.batches import Batch, make
from tests.mismatch.peer_configs import from_areal, from_skyrl
from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch import (
    PRESETS,
    Correction,
    LossConfig,
    SecondMoment,
    Weights,
    check_update,
    check_update_mipu,
    correct,
    loss_named,
    policy_loss,
)

CLOSE = {"atol": 1e-9, "rtol": 1e-9}
D = torch.float64


def algorithm_one(log_ratio: Tensor, advantages: Tensor, valid: Tensor, threshold: float, tokens: str) -> Tensor:
    """The paper's mask, token by token: while the mean of (log r)² is above the threshold, the largest goes."""
    harmful = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    looked_at = (valid & (harmful if tokens == "harmful" else torch.ones_like(valid))).nonzero().tolist()
    squares = {tuple(place): float(log_ratio[tuple(place)]) ** 2 for place in looked_at}
    keep = valid.clone()
    while squares and sum(squares.values()) / len(squares) > threshold:
        worst = max(squares, key=lambda place: squares[place])
        del squares[worst]
        keep[worst] = False
    return keep


@pytest.mark.parametrize("tokens", ["harmful", "all"])
@pytest.mark.parametrize("threshold", [0.04, 0.4, 0.0])
def test_m2po_masks_what_algorithm_one_masks(tokens: Any, threshold: float) -> None:
    dropped = 0
    for seed in range(40):
        batch = make(seed)
        rule = SecondMoment(threshold=threshold, tokens=tokens)
        out = correct(
            batch.trainer,
            batch.rollout,
            batch.mask,
            Correction(second_moment=rule),
            logprobs=batch.current,
            advantages=batch.advantages,
        )
        want = algorithm_one(batch.current - batch.rollout, batch.advantages, batch.mask, threshold, tokens)
        assert torch.equal(out.mask, want)
        dropped += int(batch.mask.sum() - out.mask.sum())
        assert out.metrics["fraction/second_moment_tokens"] == pytest.approx(
            float((batch.mask & ~want).sum() / batch.mask.sum())
        )
    assert dropped > 0


def test_m2po_drops_equal_values_together() -> None:
    """The mean of what is left never exceeds the threshold, also where the value at the cut occurs twice."""
    delta = torch.tensor([[0.1, 0.5, 0.5, 0.5]], dtype=D)
    out = correct(
        delta,
        torch.zeros_like(delta),
        None,
        Correction(second_moment=SecondMoment(threshold=0.15, signal="corr", tokens="all")),
    )
    assert out.mask.tolist() == [[True, False, False, False]]


def test_m2po_objective_is_the_masked_ratio_over_all_valid_tokens() -> None:
    for seed in range(20):
        batch = make(seed)
        current = batch.current.clone().requires_grad_()
        loss, _ = policy_loss(current, batch.trainer, batch.rollout, batch.advantages, batch.mask, loss_named("m2po"))
        keep = algorithm_one(batch.current - batch.rollout, batch.advantages, batch.mask, 0.04, "harmful")
        ratio = (batch.current - batch.rollout).clamp(-20, 20).exp()
        want = -(ratio * batch.advantages)[keep].sum() / max(int(batch.mask.sum()), 1)
        torch.testing.assert_close(loss.detach(), want.to(loss.dtype), **CLOSE)


def test_m2po_needs_advantages() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(InputError, match="advantages"):
        correct(x, x, None, Correction(second_moment=SecondMoment()), logprobs=x)


def test_presets_of_areal_and_skyrl_are_their_settings() -> None:
    imported = from_areal({"use_decoupled_loss": True, "m2_threshold": 0.04})
    assert imported.second_moment == SecondMoment(threshold=0.04, signal="corr", tokens="all")
    assert PRESETS["areal_m2po"] == dataclasses.replace(imported, notes=())
    assert PRESETS["areal_token_mask"] == from_areal({"use_decoupled_loss": True, "rejection_sampling": {}})
    recommended = from_skyrl({"tis_ratio_type": "token", "sequence_mask_metric": "geometric"})
    assert PRESETS["skyrl_recommended"] == recommended


def trl_inputs(batch: Batch, old: Tensor) -> dict[str, Any]:
    rows = batch.advantages[:, :1]
    return {
        "completion_mask": batch.float_mask, "advantages": rows.squeeze(1), "old_per_token_logps": old,
        "importance_sampling_ratio": torch.ones_like(old), "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["sapo", "vespo"])
def test_equal_to_trl_with_gradients(trl: SimpleNamespace, kind: str) -> None:
    for seed in range(examples(200)):
        batch = make(seed, empty_rows=False)
        rows = batch.advantages[:, :1].expand_as(batch.advantages)
        mine, theirs = (batch.current.clone().requires_grad_() for _ in range(2))
        want = trl.loss(theirs, trl_inputs(batch, batch.rollout), loss_type=kind)
        config = loss_named(kind, correction=Correction(denominator="rollout", surrogate=kind))  # type: ignore[arg-type]
        loss, _ = policy_loss(mine, None, batch.rollout, rows, batch.mask, config)
        torch.testing.assert_close(loss, want.to(loss.dtype), atol=1e-7, rtol=1e-7)
        got, expected = (torch.autograd.grad(value, leaf)[0] for value, leaf in ((loss, mine), (want, theirs)))
        torch.testing.assert_close(got[batch.mask], expected[batch.mask], atol=1e-7, rtol=1e-7)


def test_sapo_equals_verl(verl: SimpleNamespace) -> None:
    for seed in range(examples(100)):
        batch = make(seed, empty_rows=False)
        want, _ = verl.core.compute_policy_loss_sapo(
            batch.trainer,
            batch.current,
            batch.advantages,
            batch.float_mask,
            "seq-mean-token-mean",
            verl.actor(tau_pos=1.0, tau_neg=1.05),
        )
        loss, _ = policy_loss(batch.current, batch.trainer, None, batch.advantages, batch.mask, loss_named("sapo"))
        torch.testing.assert_close(loss, want.to(loss.dtype), atol=1e-7, rtol=1e-7)


def test_vespo_weight_is_one_on_policy_and_falls_on_both_sides() -> None:
    """φ(W) = W^k·e^(λ(1 - W)); k = 2, λ = 3 for a positive advantage: φ(1) = 1, φ(2) = 4e⁻³, φ(1/2) = e^1.5/4."""
    rollout = torch.zeros(3, 2, dtype=D)
    current = torch.tensor(
        [[0.0, 0.0], [math.log(2), 0.0], [-math.log(2) / 2, -math.log(2) / 2]], dtype=D
    ).requires_grad_()
    loss, metrics = policy_loss(
        current, None, rollout, torch.ones(3, dtype=D), None, loss_named("vespo", aggregate="token_sum")
    )
    (gradient,) = torch.autograd.grad(loss, current)
    want = [1.0, 4 * math.exp(-3), math.exp(1.5) / 4]
    torch.testing.assert_close(gradient, -torch.tensor(want, dtype=D).unsqueeze(1).expand(3, 2), **CLOSE)
    assert metrics["vespo/weight"] == pytest.approx(sum(want) / 3)
    with pytest.raises(ConfigError, match="vespo weighs rows by their whole ratio"):
        LossConfig(surrogate="vespo", correction=Correction(weights=Weights(upper=2.0)))


def test_an_update_is_accepted_where_the_inference_policy_improves() -> None:
    rollout = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]], dtype=D)
    advantages = torch.tensor([1.0, -1.0], dtype=D)
    better = rollout + torch.tensor([[0.1, 0.1], [-0.1, -0.1]], dtype=D)
    found = check_update(better, rollout, advantages)
    assert found.accepted and found.gain == pytest.approx((math.expm1(0.1) - math.expm1(-0.1)) / 2)
    worse = check_update(rollout - (better - rollout), rollout, advantages)
    assert not worse.accepted and worse.gain < 0
    assert not check_update(better, rollout, advantages, max_divergence=1e-4).accepted
    assert not check_update(better, rollout, advantages, min_gain=1.0).accepted
    none, first = torch.zeros_like(advantages), torch.tensor([[1, 0], [0, 0]], dtype=torch.bool)
    assert check_update(better, rollout, none, min_gain=1.0).accepted, "there is nothing to gain"
    assert not check_update(better, rollout, none, min_gain=1.0, max_divergence=1e-4).accepted
    assert check_update(better, rollout, advantages * ~first, first, min_gain=1.0).accepted, (
        "advantages of masked tokens do not count"
    )
    masked = check_update(better, rollout, advantages, torch.tensor([[1, 0], [0, 0]], dtype=torch.bool))
    assert (masked.tokens, masked.gain) == (1, pytest.approx(math.expm1(0.1)))
    with pytest.raises(InputError, match="no valid token"):
        check_update(better, rollout, advantages, torch.zeros(2, 2))


def test_mipu_accepts_by_the_papers_gap() -> None:
    """Accept if -mean(ρ·Â) >= -c over new samples of the engine on held-out prompts; ρ is the row's ratio trainer ÷
    engine, to the power 1/length; c falls linearly to its end in 100 steps. Written out row by row."""
    rng = random.Random(5)
    verdicts = set()
    for _ in range(60):
        lengths = [rng.randint(1, 6) for _ in range(8)]
        engine = [[-rng.random() * 3 for _ in range(n)] for n in lengths]
        trainer = [[value + rng.gauss(0, 0.05) for value in row] for row in engine]
        rewards = [rng.random() for _ in lengths]
        mean = sum(rewards) / 8
        advantages = [reward - mean for reward in rewards]
        gap = 0.0
        for a, mine, theirs in zip(advantages, trainer, engine, strict=True):
            probability = [math.exp(x) / math.exp(y) for x, y in zip(mine, theirs, strict=True)]
            gap += a * math.prod(probability) ** (1 / len(mine)) / 8
        step = rng.randrange(150)
        c = max(0.0, 4e-3 + (1e-3 - 4e-3) * step / 100) if step < 100 else 1e-3
        found = check_update_mipu(
            [torch.tensor(row, dtype=D) for row in trainer],
            [torch.tensor(row, dtype=D) for row in engine],
            torch.tensor(advantages, dtype=D),
            step=step,
            slack=(4e-3, 1e-3),
        )
        assert found.gain == pytest.approx(-gap, abs=1e-12) and found.accepted == (-gap >= -c)
        verdicts.add(found.accepted)
    assert verdicts == {True, False}
    ones = torch.ones(2, 2, dtype=D)
    with pytest.raises(InputError, match="no valid token"):
        check_update_mipu(-ones, -ones, ones, torch.zeros(2, 2))
    padded = check_update_mipu(-ones, -ones * 1.1, torch.tensor([1.0, -1.0], dtype=D), torch.tensor([[1, 0], [0, 0]]))
    assert padded.gain == pytest.approx(-math.exp(0.1)), "rows without a token do not count"
