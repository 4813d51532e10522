"""The VeXact paper's own example: Table 1's eight tokens, their δ, ΣK3 and what its four corrections decide (arXiv
2605.14220)."""

from __future__ import annotations

import math

import pytest
import torch

from tokentrue.mismatch import PRESETS, Correction, Reject, correct, diagnose

TOKENS = ("The", "problem", "states", "that", "there", "exist", "real", "numbers")
ROLLOUT = torch.tensor([[-0.279, -0.063, -0.314, -0.694, 0.0, -0.030, 0.0, 0.0]], dtype=torch.float64)
TRAINER = torch.tensor([[-0.278, -0.063, -0.314, -0.827, 0.0, -0.038, 0.0, 0.0]], dtype=torch.float64)
DELTA = [0.001, 0.0, 0.0, -0.133, 0.0, -0.008, 0.0, 0.0]
THAT = TOKENS.index("that")


def test_delta_and_k3() -> None:
    assert (TRAINER - ROLLOUT)[0].tolist() == pytest.approx(DELTA, abs=1e-12)
    by_hand = sum(math.exp(d) - 1 - d for d in DELTA)
    found = diagnose(TRAINER, ROLLOUT)
    assert found.worst[0].sum_k3 == pytest.approx(by_hand, rel=1e-9)
    assert round(found.worst[0].sum_k3, 4) == 0.0085
    assert found["corr/k3"] == pytest.approx(0.00106, abs=5e-6)
    assert found.worst[0].position == THAT and found.worst[0].max_abs_delta == pytest.approx(0.133)
    assert found["corr/k1"] == pytest.approx(-sum(DELTA) / 8)


def test_argmax_flip_is_at_that() -> None:
    """Greedy rollout: its top token is the sampled one. The trainer's top at "that" is another, with log-probability
    -0.577."""
    sampled = torch.arange(8).view(1, 8)
    trainer_top = sampled.clone()
    trainer_top[0, THAT] = 99
    assert TRAINER[0, THAT] < -0.577
    assert diagnose(TRAINER, ROLLOUT, flips=trainer_top != sampled)["flips"] == 1 / 8


@pytest.mark.parametrize("name", ["srs-k3-corr", "tis-srs-k3-corr", "tis-srs-k1-corr"])
def test_the_literal_sum_rejects_it(name: str) -> None:
    """ΣK3 = 0.0085 and ΣK1 = 0.140 are both above τ_seq = 0.001."""
    assert not correct(TRAINER, ROLLOUT, None, PRESETS[name]).mask.any()


def test_the_mean_rejects_it_too_but_barely() -> None:
    """Mean K3 is 0.00106: above 0.001 by a hair, and kept at 0.0011."""
    assert not correct(TRAINER, ROLLOUT, None, PRESETS["srs-k3-corr-mean"]).mask.any()
    looser = Correction(reject=(Reject(estimator="k3", aggregate="seq_mean", upper=0.0011),))
    assert correct(TRAINER, ROLLOUT, None, looser).mask.all()


def test_the_signal_of_the_rejection_is_a_choice_of_its_own() -> None:
    """srs-k3-ppo looks at current ÷ rollout: a policy that has moved back onto the rollout is kept, whatever the
    trainer recomputed."""
    on_policy = correct(TRAINER, ROLLOUT, None, PRESETS["srs-k3-ppo"], logprobs=ROLLOUT)
    assert on_policy.mask.all()
    assert not correct(TRAINER, ROLLOUT, None, PRESETS["srs-k3-corr"], logprobs=ROLLOUT).mask.any()


def test_token_weights_are_truncated_ratios() -> None:
    weights = correct(TRAINER, ROLLOUT, None, PRESETS["tis-srs-k3-corr"]).weights
    assert weights[0].tolist() == pytest.approx([math.exp(d) for d in DELTA])
    assert PRESETS["tis-srs-k3-corr"].weights is not None and PRESETS["tis-srs-k3-corr"].weights.upper == 2.0


def test_the_literal_sum_cannot_hold_on_long_rows() -> None:
    """δ ~ N(0, 1e-3): at 8,192 tokens no row passes ΣK3 <= 0.001, all pass the mean. Both readings are there, named
    apart."""
    delta = torch.randn(16, 8192, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-3
    zeros = torch.zeros_like(delta)
    assert not correct(delta, zeros, None, PRESETS["srs-k3-corr"]).mask.any()
    assert correct(delta, zeros, None, PRESETS["srs-k3-corr-mean"]).mask.all()
