"""Advantages against their definitions, and against verl's where it can be loaded."""

from __future__ import annotations

import pytest
import torch

from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch import gae_advantages, grpo_advantages, rloo_advantages, whitened_advantages

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
    grouped = whitened_advantages(REWARDS, GROUPS, eps=0.0)
    assert grouped[3:].tolist() == pytest.approx([0.0] * 4, abs=1e-12)


def test_gae_by_hand_and_with_a_hole() -> None:
    """Two valid steps around a given token: the given token is no step."""
    rewards = torch.tensor([[0.0, 9.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 9.0, 0.25]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1]])
    got, returns = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    last = 1.0 - 0.25
    first = (0.0 + 0.9 * 0.25 - 0.5) + 0.9 * 0.8 * last
    assert got.tolist() == [pytest.approx([first, 0.0, last])]  # type: ignore[union-attr]
    assert returns.tolist() == [pytest.approx([first + 0.5, 0.0, 1.0])]  # type: ignore[union-attr]
    cut, _ = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.8, last_values=torch.tensor([2.0]))
    assert float(cut[0, 2]) == pytest.approx(1.0 + 0.9 * 2.0 - 0.25)  # type: ignore[call-overload]


def test_gae_against_the_recursion_in_all_layouts() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.rand(5, 300, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(5, 300, generator=generator) < 0.7
    got, _ = gae_advantages(rewards, values, mask, gamma=0.99, lam=0.95)
    for row in range(5):
        r, v = rewards[row][mask[row]], values[row][mask[row]]
        carry, want = 0.0, []
        for t in range(len(r) - 1, -1, -1):
            after = float(v[t + 1]) if t + 1 < len(r) else 0.0
            carry = float(r[t]) + 0.99 * after - float(v[t]) + 0.99 * 0.95 * carry
            want.append(carry)
        assert got[row][mask[row]].tolist() == pytest.approx(want[::-1])  # type: ignore[index]
    ragged = [[part[m] for part, m in zip(whole, mask, strict=True)] for whole in (rewards, values)]
    rows, _ = gae_advantages(*ragged, gamma=0.99, lam=0.95)
    assert all(torch.equal(a, b[m]) for a, b, m in zip(rows, got, mask, strict=True))  # type: ignore[arg-type]


def test_refusals() -> None:
    with pytest.raises(InputError, match="one reward and one group per row"):
        grpo_advantages(REWARDS, ["a"])
    with pytest.raises(InputError, match="not all finite"):
        rloo_advantages(torch.tensor([1.0, torch.nan]), [0, 0])
    with pytest.raises(ConfigError, match="gamma"):
        gae_advantages(torch.zeros(1, 2), torch.zeros(1, 2), gamma=1.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_whitening_refuses_rewards_that_are_not_finite(bad: float) -> None:
    with pytest.raises(InputError, match="rewards: not all finite"):
        whitened_advantages(torch.tensor([bad, 1.0, 2.0]))


def test_gae_of_no_rows_is_empty() -> None:
    assert gae_advantages([], []) == ([], [])
