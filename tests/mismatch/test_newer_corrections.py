"""M2PO, SAPO, VESPO, mixed weights, update acceptance and the length schedule: against the papers' formulas and the
peers' own code."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mismatch.batches import Batch, make
from tests.mismatch.peer_configs import from_areal, from_skyrl
from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch import (
    PRESETS,
    AdaptiveMix,
    Correction,
    LengthDecay,
    LossConfig,
    SecondMoment,
    Weights,
    check_update,
    correct,
    loss_from_trl,
    loss_from_verl,
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
    for seed in range(200):
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
    for seed in range(100):
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


def test_mixed_weights_interpolate() -> None:
    batch = make(2)
    full = correct(batch.trainer, batch.rollout, batch.mask, Correction(weights=Weights(upper=2.0))).weights
    for share in (0.0, 0.3, 1.0):
        mixed = correct(
            batch.trainer, batch.rollout, batch.mask, Correction(weights=Weights(upper=2.0, mix=share))
        ).weights
        torch.testing.assert_close(mixed[batch.mask], (1 - share) + share * full[batch.mask], **CLOSE)
        assert not mixed[~batch.mask].any()
    with pytest.raises(ConfigError, match=r"Weights\.mix"):
        Weights(upper=2.0, mix=1.5)


def test_adaptive_mix_follows_its_three_diagnostics() -> None:
    delta = torch.tensor([[0.2, -0.1, 0.3, 0.0]], dtype=D)
    zeros = torch.zeros_like(delta)
    w = delta.exp()
    share = float(w.mean() ** 2 / (w * w).mean())
    severity = 1 - math.exp(-float((w - 1 - delta).mean()) / 0.05)
    want = share * severity / max(1.0, float((w * w).mean()))
    config = Correction(weights=Weights(mode="raw", mix=AdaptiveMix(divergence=0.05)))
    torch.testing.assert_close(correct(delta, zeros, None, config).weights, 1 - want + want * w, **CLOSE)
    assert correct(zeros, zeros, None, config).weights.tolist() == [[1.0] * 4]  # agreement: nothing to correct
    wild = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=D)  # one weight dominates: hardly trusted
    assert float(correct(wild, zeros, None, config).weights[0, 0]) < 0.01 * math.exp(9.0)


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


def test_the_learning_rate_halves_when_responses_grow() -> None:
    schedule = LengthDecay(window=1, surge=1.5)
    assert schedule.scale([]) == schedule.scale([100, 120, 140]) == 1.0
    assert schedule.scale([100, 151]) == 0.5
    assert schedule.scale([100, 151, 220]) == 0.5 and schedule.scale([100, 151, 230]) == 0.25
    assert schedule.scale([1.0 * 2**n for n in range(20)]) == 0.1
    assert schedule.scale([200, 100, 151]) == 0.5  # measured from the shortest so far
    assert LengthDecay(window=10, surge=1.5).scale([100, 400]) == 1.0  # one long batch is smoothed away


@pytest.mark.parametrize(
    "given",
    [
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4},
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.5,
            "vespo_lambda_pos": 2.0,
            "vespo_k_neg": 2.5,
            "vespo_lambda_neg": 1.0,
        },
    ],
    ids=["sapo", "vespo"],
)
def test_a_loss_read_from_trl_is_trls(trl: SimpleNamespace, given: dict[str, Any]) -> None:
    for seed in range(20):
        batch = make(seed, empty_rows=False)
        rows = batch.advantages[:, :1].expand_as(batch.advantages)
        want = trl.loss(batch.current, trl_inputs(batch, batch.rollout), **given)
        config = loss_from_trl(given)
        if given["loss_type"] == "sapo":  # TRL's old log-probabilities are the trainer's
            loss, _ = policy_loss(batch.current, batch.rollout, batch.rollout, rows, batch.mask, config)
        else:
            loss, _ = policy_loss(batch.current, None, batch.rollout, rows, batch.mask, config)
        torch.testing.assert_close(loss, want.to(loss.dtype), atol=1e-7, rtol=1e-7)


def test_a_loss_read_from_verl_is_verls(verl: SimpleNamespace) -> None:
    for seed in range(20):
        batch = make(seed, empty_rows=False)
        taus = {"tau_pos": 0.8, "tau_neg": 1.3}
        want, _ = verl.core.compute_policy_loss_sapo(
            batch.trainer, batch.current, batch.advantages, batch.float_mask, "seq-mean-token-mean", verl.actor(**taus)
        )
        loss, _ = policy_loss(
            batch.current,
            batch.trainer,
            None,
            batch.advantages,
            batch.mask,
            loss_from_verl({"loss_mode": "sapo", **taus}),
        )
        torch.testing.assert_close(loss, want.to(loss.dtype), atol=1e-7, rtol=1e-7)


def test_imported_losses_have_their_frameworks_defaults_and_refuse_the_rest() -> None:
    assert loss_from_trl({"loss_type": "dapo", "epsilon_high": 0.28}) == loss_named("dapo")
    assert loss_from_trl({"loss_type": "vespo"}) == loss_named("vespo") and loss_from_trl(
        {"loss_type": "sapo"}
    ) == loss_named("sapo")
    assert loss_from_verl({}) == loss_named("decoupled_ppo")
    for read, given, words in (
        (loss_from_trl, {"loss_type": "luspo"}, "luspo"),
        (loss_from_trl, {"sapo_temperatur": 1.0}, "unknown keys sapo_temperatur"),
        (loss_from_verl, {"loss_mode": "gpg"}, "gpg"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(given)
