"""Advantages against their definitions, and against verl's where it can be loaded."""

from __future__ import annotations

import pytest
import torch

from tokentrue.errors import InputError
from tokentrue.mismatch import grpo_advantages, rloo_advantages, whitened_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.3], dtype=torch.float64)
GROUPS = ["a", "a", "a", "b", "b", "b", "lonely"]


def test_grpo() -> None:
    std = (2 / 9 + 4 / 9) ** 0.5 / 2**0.5
    got = grpo_advantages(REWARDS, GROUPS, eps=0.0)
    assert got[:3].tolist() == pytest.approx([(2 / 3) / std, (-1 / 3) / std, (-1 / 3) / std])
    assert got[3:].tolist() == [0.0] * 4  # equal rewards and a group of one: exactly nothing
    assert grpo_advantages(REWARDS, GROUPS, std=False)[:3].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_rloo() -> None:
    assert rloo_advantages(REWARDS, GROUPS)[:3].tolist() == pytest.approx([1.0, -0.5, -0.5])
    assert rloo_advantages(REWARDS, GROUPS)[3:].tolist() == [0.0] * 4


def test_rounding_of_the_mean_gives_no_signal() -> None:
    """0.1 three times: the float mean is not 0.1, and dividing its error by a tiny deviation would be an advantage of
    order 1."""
    rewards = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float32)
    assert grpo_advantages(rewards, [0, 0, 0], eps=0.0).tolist() == [0.0, 0.0, 0.0]
    assert whitened_advantages(rewards).tolist() == [0.0, 0.0, 0.0]


def test_whitened() -> None:
    got = whitened_advantages(REWARDS, eps=0.0)
    assert float(got.mean()) == pytest.approx(0.0, abs=1e-12) and float(got.std()) == pytest.approx(1.0)


def test_refusals() -> None:
    with pytest.raises(InputError, match="one reward and one group per row"):
        grpo_advantages(REWARDS, ["a"])
    with pytest.raises(InputError, match="not all finite"):
        rloo_advantages(torch.tensor([1.0, torch.nan]), [0, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_whitening_refuses_rewards_that_are_not_finite(bad: float) -> None:
    with pytest.raises(InputError, match="rewards: not all finite"):
        whitened_advantages(torch.tensor([bad, 1.0, 2.0]))
