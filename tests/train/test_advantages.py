"""Rewards to advantages: what TRL divides by, written out; sessions that are too long; the penalty's clamps."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from tests.train.rows import groups_for, sample_of, small_model
from tokentrue.mismatch import LossConfig, Penalty, loss_named, policy_loss
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.config import AdvantageConfig, Baseline, OverlongConfig, default_learning_rate
from tokentrue.train.rows import (
    Row,
    mask_truncated,
    row_from_sample,
    session_advantages,
)
from tokentrue.types import Sample

REWARDS = {"a": [1.0, 0.0, 0.25], "b": [0.5, 0.5], "alone": [0.8]}
TOKENS = {"a": [3, 9, 2], "b": [4, 1], "alone": [6]}


def rows() -> list[Row]:
    made: list[Row] = []
    for group, rewards in REWARDS.items():
        for i, (reward, tokens) in enumerate(zip(rewards, TOKENS[group], strict=True)):
            given = [True, *[False] * tokens]
            sample = sample_of(
                [7] * len(given), given, [-1.0] * len(given), name=f"{group}{i}", group=group, reward=reward
            )
            made.append(row_from_sample(sample, group))
    return made


def advantages(baseline: Baseline, **options: object) -> list[float]:
    return session_advantages(rows(), baseline, AdvantageConfig(**options))  # type: ignore[arg-type]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def test_epsilon_of_trl() -> None:
    """TRL: (r - mean) / (std + 1e-4)."""
    a = REWARDS["a"]
    expected = [(reward - mean(a)) / (deviation(a) + 1e-4) for reward in a]
    assert advantages("grpo", epsilon=1e-4)[:3] == pytest.approx(expected, rel=1e-14)
    assert advantages("grpo")[:3] != pytest.approx(expected, rel=1e-5)


def test_scale_of_the_batch_of_trl() -> None:
    """TRL's scale_rewards="batch": centred by group, over the deviation of all rewards."""
    everything = [reward for rewards in REWARDS.values() for reward in rewards]
    expected = [
        (reward - mean(rewards)) / (deviation(everything) + 1e-4) for rewards in REWARDS.values() for reward in rewards
    ]
    assert advantages("grpo_batch", epsilon=1e-4) == pytest.approx(expected, rel=1e-14, abs=1e-15)


def test_the_clamps_of_verl_and_trl() -> None:
    """verl: x clamped to ±20, then e^x - 1 - x to ±10. TRL: no clamp at all."""
    current = torch.tensor([-0.5, -4.0, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.7, -1.0, -5.0], dtype=torch.float64)

    def penalty(**options: float | None) -> tuple[float, list[float]]:
        config = LossConfig(aggregate="token_sum", penalty=Penalty(coefficient=1.0, **options))  # type: ignore[arg-type]
        loss, _ = policy_loss(
            [current],
            [current.detach()],
            [current.detach()],
            [torch.zeros(3, dtype=torch.float64)],
            None,
            config,
            reference_logprobs=[reference],
        )
        (gradient,) = torch.autograd.grad(loss, current)
        return float(loss.detach()), gradient.tolist()

    x = (reference - current.detach()).tolist()
    verl = sum(min(10.0, math.exp(min(20.0, value)) - 1 - min(20.0, value)) for value in x)
    value, gradient = penalty(ceiling=10.0)
    assert value == pytest.approx(verl, rel=1e-12) and gradient[1] == gradient[2] == 0.0 != gradient[0]
    value, gradient = penalty(clamp=None)
    assert value == pytest.approx(sum(math.exp(each) - 1 - each for each in x), rel=1e-12)
    assert gradient == pytest.approx([1 - math.exp(each) for each in x], rel=1e-12)


# ---- overlong --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    torch.set_num_threads(1)
    return small_model()


def trainer(base: torch.nn.Module, *, loss: LossConfig | None = None, **config: object) -> Trainer:
    settings = TrainConfig(**{"exact": False, **config})  # type: ignore[arg-type]
    other = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.99)
    return Trainer(
        copy.deepcopy(base),
        config=settings,
        optim=OptimConfig(lr=1e-3),
        loss=loss or loss_named("dapo"),
        reference=other,
    )


def cut_off(groups: list[list[Sample]]) -> list[list[Sample]]:
    groups[0][1] = replace(groups[0][1], finish_reason="length")
    return groups


def test_masked_sessions_count_in_the_baseline_and_are_not_trained_on(base: torch.nn.Module) -> None:
    groups = cut_off(groups_for(base))
    masked, plain = (trainer(base, overlong=OverlongConfig(mask=mask)).step(groups).metrics for mask in (True, False))
    assert masked["rows_trained"] == plain["rows_trained"] - 1
    assert masked["reward"] == plain["reward"] and masked["truncated"] == plain["truncated"] > 0
    assert masked["tokens_trained"] == plain["tokens_trained"] - sum(groups[0][1].loss_mask)
    before = [row_from_sample(sample, "g0") for sample in groups[0]]
    after = mask_truncated(before)
    assert session_advantages(after, "grpo") == session_advantages(before, "grpo")
    everything = [[replace(sample, finish_reason="length") for sample in group] for group in groups]
    assert trainer(base, overlong=OverlongConfig(mask=True)).step(everything).metrics["rows_trained"] == 0


@pytest.mark.parametrize(("finish", "is_cut"), [(None, False), ("stop", False), ("abort", False), ("length", True)])
def test_a_turn_before_the_last_that_was_cut_off_masks_its_session(
    base: torch.nn.Module, finish: str | None, is_cut: bool
) -> None:
    """None: a file from before the ends of turns were recorded."""
    groups = groups_for(base)
    ends = [{} if finish is None else {"finish": finish}, {"finish": "stop"}]
    counts = [
        [span.end - span.start for span in groups[0][1].spans if span.kind == kind] for kind in ("given", "sampled")
    ]
    nodes = [{"given": given, "sampled": sampled, **end} for given, sampled, end in zip(*counts, ends, strict=True)]
    groups[0][1] = replace(groups[0][1], metadata={"tokentrue": {"nodes": nodes}})
    metrics = trainer(base, overlong=OverlongConfig(mask=True)).step(groups).metrics
    rows = sum(len(group) for group in groups)
    assert metrics["truncated"] == is_cut / rows
    sampled = sum(sum(sample.loss_mask) for group in groups for sample in group)
    assert metrics["tokens_trained"] == sampled - is_cut * sum(groups[0][1].loss_mask)


def test_the_learning_rate_of_a_real_model_is_not_that_of_the_shipped_one(base: torch.nn.Module) -> None:
    t = Trainer(copy.deepcopy(base), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    assert t.optim.lr == 2.5e-4 and t.optimizer.param_groups[0]["lr"] == 2.5e-4
    assert default_learning_rate(135_000_000) == 1e-6
