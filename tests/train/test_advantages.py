"""Rewards to advantages: what TRL and verl divide by, written out; sessions that are too long; the divergence as a
cost."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from tests.train.rows import groups_for, sample_of, small_model
from tokentrue.errors import ConfigError
from tokentrue.mismatch import LossConfig, Penalty, loss_named, policy_loss
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.config import AdvantageConfig, Baseline, KlConfig, OverlongConfig, default_learning_rate
from tokentrue.train.rows import (
    Row,
    SessionRewards,
    mask_truncated,
    overlong_cost,
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
    return session_advantages(SessionRewards.of(rows()), baseline, AdvantageConfig(**options))  # type: ignore[arg-type]


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


def test_a_group_of_one_of_verl() -> None:
    """verl: the mean of a group of one is 0 and its deviation 1."""
    assert [advantages(name)[-1] for name in ("grpo", "dr_grpo", "rloo")] == [0.0, 0.0, 0.0]
    assert advantages("grpo", lone_group="reward")[-1] == pytest.approx(0.8 / (1 + 1e-6), rel=1e-15)
    assert advantages("dr_grpo", lone_group="reward")[-1] == advantages("rloo", lone_group="reward")[-1] == 0.8
    assert advantages("grpo", lone_group="reward")[:-1] == advantages("grpo")[:-1]


@pytest.mark.parametrize("baseline", ["whitened", "whitened_groups"])
def test_whitening_by_tokens_of_verl(baseline: Baseline) -> None:
    """verl's masked_whiten: every token of a row has the row's value; the variance has n - 1, and 1e-8 is added to
    it."""
    values: list[float] = []
    for group, group_rewards in REWARDS.items():
        centre = 0.0 if baseline == "whitened" or len(group_rewards) == 1 else mean(group_rewards)
        for reward, tokens in zip(group_rewards, TOKENS[group], strict=True):
            values += [reward - centre] * tokens
    expected = [(value - mean(values)) / math.sqrt(deviation(values) ** 2 + 1e-8) for value in values]
    lengths = [n for group in TOKENS.values() for n in group]
    got = advantages(baseline, whiten_by="tokens", epsilon=1e-8, lone_group="reward")
    assert [value for value, n in zip(got, lengths, strict=True) for _ in range(n)] == pytest.approx(
        expected, rel=1e-13
    )
    assert advantages(baseline) != pytest.approx(got, rel=1e-2)


def test_the_clamps_of_verl_and_trl() -> None:
    """verl: x clamped to ±20, then e^x - 1 - x to ±10. TRL: no clamp at all."""
    current = torch.tensor([-0.5, -4.0, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.7, -1.0, -5.0], dtype=torch.float64)

    def penalty(**options: float | None) -> tuple[float, list[float]]:
        config = LossConfig(aggregate="token_sum", penalty=Penalty(coefficient=1.0, **options))  # type: ignore[arg-type]
        loss, _ = policy_loss(
            [current], [current.detach()], [current.detach()], [torch.zeros(3, dtype=torch.float64)], None, config,
            reference_logprobs=[reference],
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, current)
        return float(loss.detach()), gradient.tolist()

    x = (reference - current.detach()).tolist()
    verl = sum(min(10.0, math.exp(min(20.0, value)) - 1 - min(20.0, value)) for value in x)
    value, gradient = penalty(ceiling=10.0)
    assert value == pytest.approx(verl, rel=1e-12) and gradient[1] == gradient[2] == 0.0 != gradient[0]
    value, gradient = penalty(clamp=None)
    assert value == pytest.approx(sum(math.exp(each) - 1 - each for each in x), rel=1e-12)
    assert gradient == pytest.approx([1 - math.exp(each) for each in x], rel=1e-12)


# ---- overlong ---------------------------------------------------------------------------------------------------------------------------
def test_soft_punishment_by_hand() -> None:
    """DAPO: 0 up to L_max - L_cache, ((L_max - L_cache) - n) / L_cache up to L_max, then -1."""
    config = OverlongConfig(max_tokens=100, buffer=20)
    assert overlong_cost([1, 80, 85, 100, 140], config).tolist() == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert overlong_cost([90], replace(config, penalty=0.5)).tolist() == [0.25]
    for wrong in ({"max_tokens": 10}, {"buffer": 5}, {"max_tokens": 10, "buffer": 11}, {"penalty": -1.0}):
        with pytest.raises(ConfigError, match=r"train\.overlong"):
            OverlongConfig(**wrong)  # type: ignore[arg-type]


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
    assert session_advantages(SessionRewards.of(after), "grpo") == session_advantages(SessionRewards.of(before), "grpo")
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


def test_shaping_changes_the_reward_that_is_trained_on(base: torch.nn.Module) -> None:
    groups = groups_for(base)
    t = trainer(base, overlong=OverlongConfig(max_tokens=60, buffer=50))
    metrics = t.step(groups).metrics
    lengths = [sum(sample.loss_mask) for group in groups for sample in group]
    cost = mean([min(1.0, max(0.0, (n - 10) / 50)) for n in lengths])
    assert metrics["reward_shaped"] == pytest.approx(metrics["reward"] - cost) and cost > 0.1


# ---- divergence --------------------------------------------------------------------------------------------------------------------------
def test_the_divergence_is_subtracted_from_the_reward(base: torch.nn.Module) -> None:
    groups = groups_for(base)
    t = trainer(base, baseline="none", kl=KlConfig(reward_coefficient=0.3))
    made = t.rows(groups)
    values = t.recompute(made)
    for i, row in enumerate(made):
        cost = float((values.recomputed[i].double() - values.reference[i].double())[row.mask].sum())
        assert values.advantages[i] == pytest.approx(row.reward - 0.3 * cost, rel=1e-9, abs=1e-9)
        assert cost != 0
    metrics = t.step(groups).metrics
    assert metrics["rows_trained"] == metrics["rows"] and metrics["kl/coefficient"] == 0.3
    assert metrics["reward_shaped"] == pytest.approx(
        metrics["reward"] - 0.3 * metrics["kl/mean"] * metrics["tokens_trained"] / 12
    )


@pytest.mark.parametrize("place", ["reward", pytest.param("loss", marks=pytest.mark.slow)])
def test_an_adaptive_coefficient_follows_its_target(base: torch.nn.Module, place: str) -> None:
    """value · (1 + clip(kl / target - 1, ±0.2) · sessions / horizon), of the divergence that the step had."""
    penalty = None if place == "reward" else Penalty(coefficient=0.1)
    for target, factor in ((1e-9, 1 + 0.2 * 12 / 100), (1e9, 1 - 0.2 * 12 / 100)):
        kl = KlConfig(
            reward_coefficient=0.1 if place == "reward" else 0.0, reward_estimator="k3", target=target, horizon=100
        )
        t = trainer(base, loss=replace(loss_named("dapo"), penalty=penalty), kl=kl)
        first, second = t.step(groups_for(base)).metrics, t.step(groups_for(base)).metrics
        assert first["kl/coefficient"] == 0.1 and second["kl/coefficient"] == pytest.approx(0.1 * factor)
        if place == "loss":
            assert t.loss.penalty is not None and t.loss.penalty.coefficient == t.kl.value


def test_what_makes_no_sense_is_refused(base: torch.nn.Module) -> None:
    with pytest.raises(ConfigError, match="no coefficient to adapt"):
        trainer(base, kl=KlConfig(target=0.1))
    with pytest.raises(ConfigError, match="not both"):
        trainer(
            base,
            loss=loss_named("dapo", penalty=Penalty(coefficient=0.1)),
            kl=KlConfig(target=0.1, reward_coefficient=0.1),
        )
    with pytest.raises(ConfigError, match="needs a reference model"):
        config = TrainConfig(kl=KlConfig(reward_coefficient=0.1))
        Trainer(base, config=config, optim=OptimConfig(), loss=loss_named("dapo"))


def test_the_learning_rate_of_a_real_model_is_not_that_of_the_shipped_one(base: torch.nn.Module) -> None:
    t = Trainer(copy.deepcopy(base), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    assert t.optim.lr == 2.5e-4 and t.optimizer.param_groups[0]["lr"] == 2.5e-4
    assert default_learning_rate(135_000_000) == 1e-6
