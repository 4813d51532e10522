"""The step: exactness or an error that points, neutrality of packing and dropping, PPO's several updates,
corrections."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train.rows import groups_for, small_model
from tokentrue.errors import ConfigError, ExactnessError
from tokentrue.mismatch import Correction, LossConfig, Normalise, Penalty, Weights, loss_named
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.exactness import ulps
from tokentrue.train.reporting import find_falling
from tokentrue.types import Sample


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    torch.set_num_threads(1)
    return small_model()


def trainer(
    base: torch.nn.Module, *, loss: LossConfig | None = None, reference: torch.nn.Module | None = None, **config: object
) -> Trainer:
    settings = TrainConfig(**{"micro_tokens": 128, **config})  # type: ignore[arg-type]
    return Trainer(
        copy.deepcopy(base),
        config=settings,
        optim=OptimConfig(lr=1e-3),
        loss=loss or loss_named("dapo"),
        reference=reference,
    )


def bits(model: torch.nn.Module) -> list[np.ndarray]:
    return [p.detach().numpy().view(np.uint32) for p in model.parameters()]


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def nudged(sample: Sample, token: int, ulp: int = 1) -> Sample:
    values = list(sample.rollout_logprobs)
    old = values[token]
    assert old is not None
    raw = np.array([old], dtype=np.float32).view(np.int32) + ulp
    values[token] = float(raw.view(np.float32)[0])
    return replace(sample, rollout_logprobs=values)


def test_the_same_step_gives_the_same_bits(base: torch.nn.Module) -> None:
    groups = groups_for(base)
    a, b = trainer(base), trainer(base)
    first, second = a.step(groups), b.step(groups)
    assert first.metrics == second.metrics
    assert same(a.model, b.model)
    assert not same(a.model, base)


def test_exact_tokens_are_compared_and_equal_through_updates(base: torch.nn.Module) -> None:
    t = trainer(base)
    for version in range(3):
        report = t.step(groups_for(t.model, seed=version, version=version))
        assert report.agreement.compared == report.metrics["tokens_trained"] > 0
        assert report.agreement.differing == 0


def test_one_bit_stops_the_run_and_is_located(base: torch.nn.Module) -> None:
    groups = groups_for(base)
    groups[1][2] = nudged(groups[1][2], 4)
    t = trainer(base)
    with pytest.raises(ExactnessError) as caught:
        t.step(groups)
    text = str(caught.value)
    assert "s0-1-2/0" in text and "token 4," in text and f"id {groups[1][2].token_ids[4]}:" in text and " 1 ulp" in text
    assert same(t.model, base), "a weight moved before the check"
    assert t.version == 0


def test_other_weights_are_not_mistaken_for_the_same(base: torch.nn.Module) -> None:
    t = trainer(base)
    groups = groups_for(base)
    t.step(groups)
    stale = t.step(groups)  # sampled by version 0, trainer at version 1: nothing to compare, staleness 1
    assert stale.agreement.compared == 0
    assert stale.metrics["staleness_max"] == 1
    t.version = 0  # now the trainer believes that it is still the policy that sampled
    with pytest.raises(ExactnessError):
        t.step(groups)


def test_without_exact_differences_are_reported(base: torch.nn.Module) -> None:
    groups = groups_for(base)
    groups[0][0] = nudged(groups[0][0], 4, ulp=1000)
    report = trainer(base, exact=False).step(groups)
    assert report.agreement.differing > 0
    assert report.agreement.largest > 0


def gradients(base: torch.nn.Module, groups: list[list[Sample]], **config: object) -> list[torch.Tensor]:
    t = trainer(base, **config)
    t.optim = OptimConfig(lr=1e-3, clip_norm=1e9)  # clipping would hide a wrong denominator
    t.optimizer.step = lambda *a, **k: None  # type: ignore[method-assign]
    t.step(groups)
    return [p.grad.clone() for p in t.model.parameters() if p.grad is not None]


def test_packing_and_dropping_idle_rows_change_nothing_but_rounding(base: torch.nn.Module) -> None:
    groups = groups_for(base)
    groups[2] = [replace(sample, reward=1.0) for sample in groups[2]]  # nothing to learn from this one
    whole = gradients(base, groups, micro_tokens=10_000)
    for config in ({"micro_tokens": 64}, {"micro_tokens": 1}, {"drop_idle_rows": False}):
        for a, b in zip(whole, gradients(base, groups, **config), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_several_updates_move_the_ratio_and_clip_it(base: torch.nn.Module) -> None:
    once = trainer(base).step(groups_for(base))
    assert once.metrics["update/ppo_ratio/max"] == 1.0
    many = trainer(base, epochs=3, minibatches=2).step(groups_for(base))
    assert many.metrics["update/ppo_ratio/max"] > 1.01
    assert many.metrics["update/clip/low"] + many.metrics["update/clip/high"] > 0


def test_step_normalised_weights_do_not_depend_on_micro_batches(base: torch.nn.Module) -> None:
    other = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.02)
    groups = groups_for(other)  # sampled by another policy: real ratios
    weights = Weights(upper=2.0, normalise=Normalise())
    loss = loss_named("reinforce", correction=Correction(surrogate="reinforce", weights=weights))
    a = trainer(base, loss=loss, exact=False, micro_tokens=10_000).step(groups)
    b = trainer(base, loss=loss, exact=False, micro_tokens=70).step(groups)
    assert a.metrics["update/loss"] == pytest.approx(b.metrics["update/loss"], rel=1e-5)
    assert a.metrics["update/grad_norm"] == pytest.approx(b.metrics["update/grad_norm"], rel=1e-4)


def test_a_penalty_needs_its_reference(base: torch.nn.Module) -> None:
    loss = loss_named("grpo", penalty=Penalty(coefficient=0.1))
    with pytest.raises(ConfigError, match="reference"):
        trainer(base, loss=loss)
    t = trainer(base, loss=loss, reference=copy.deepcopy(base))
    assert t.step(groups_for(base)).metrics["update/loss/kl"] == 0.0
    assert t.step(groups_for(t.model, seed=1, version=1)).metrics["update/loss/kl"] > 0.0


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "whitened"])
@pytest.mark.parametrize("name", ["reinforce", "ppo", "decoupled_ppo", "bypass_ppo"])
def test_every_algorithm_takes_a_step(base: torch.nn.Module, name: str, baseline: str) -> None:
    report = trainer(base, loss=loss_named(name), baseline=baseline).step(groups_for(base, groups=2, size=3))
    assert report.metrics["update/grad_norm"] > 0


def test_ulps() -> None:
    assert ulps(1.0, 1.0) == 0
    assert ulps(-0.5, float(np.nextafter(np.float32(-0.5), np.float32(0)))) == 1
    assert ulps(-1e-45, 1e-45) == 2


def test_mismatch_is_reported_by_turn_and_as_a_rate(base: torch.nn.Module) -> None:
    """The second turn of every sample was reported 0.5 too low; the share of its tokens is the rate."""
    groups, moved, trained = [], 0, 0
    for group in groups_for(base):
        groups.append([])
        for sample in group:
            logprobs = list(sample.rollout_logprobs)
            for span in sample.spans:
                if span.kind == "sampled":
                    trained += span.end - span.start
                    for i in range(span.start, span.end) if span.turn == 1 else ():
                        logprobs[i] = (logprobs[i] or 0.0) - 0.5
                        moved += 1
            groups[-1].append(dataclasses.replace(sample, rollout_logprobs=logprobs))
    found = trainer(base, exact=False).step(groups).metrics
    assert found["mismatch_rate"] == pytest.approx(moved / trained) and 0 < moved < trained
    assert found["mismatch/turn/0"] == pytest.approx(0, abs=1e-4)
    assert found["mismatch/turn/1"] == pytest.approx(0.5, abs=1e-4)
    assert "mismatch/turn/2" not in found


def test_a_steady_fall_is_one_line_and_noise_is_none() -> None:
    rng = random.Random(3)

    def lines(norms: list[float], shares: list[float]) -> list[str]:
        rows = [{"update/grad_norm": a, "mismatch/ess": b} for a, b in zip(norms, shares, strict=True)]
        return [line for count in range(len(rows) + 1) for line in find_falling(rows[:count])]

    def noise(level: float, spread: float, count: int) -> list[float]:
        return [level * math.exp(rng.gauss(0, spread)) for _ in range(count)]

    for _ in range(40):  # 400 steps each, norms within a factor of three of each other, a slow natural decline
        norms = [value * 0.998**step for step, value in enumerate(noise(0.5, 0.35, 400))]
        assert lines(norms, [min(1.0, value) for value in noise(0.9, 0.1, 400)]) == []
    falling = [0.07 * 0.93**step for step in range(20)]
    norms = [a * b for a, b in zip([0.07] * 40 + falling, noise(1.0, 0.1, 60), strict=True)]
    (line,) = lines(norms, noise(0.9, 0.05, 60))
    assert line.startswith("gradient norm fell from 0.0") and "in 20 steps" in line
    shares = [
        a * b for a, b in zip([0.9] * 35 + [0.9 * 0.9**step for step in range(25)], noise(1, 0.05, 60), strict=True)
    ]
    assert any(line.startswith("effective sample share fell") for line in lines(noise(0.5, 0.3, 60), shares))
    assert lines(norms[:15], shares[:15]) == [] and lines([math.nan] * 60, shares[:1] * 60) == []
