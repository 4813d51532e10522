"""Whatever `policy_loss` says of a whole batch, the trainer gives for every cut of it into forward passes, ranks and
packs.

The reference is one call of `policy_loss` on all rows. The rollouts come from another policy and have rows that teach
nothing, rows that rules reject, and rows of one token, so that counts, means and penalties all matter. Ranks are
threads here: each has its own copy of the model and sees only its share of the rows; the real collectives are
tests/train/test_fsdp.py's.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.gradients import flat_gradient
from tests.marks import slow_but_every
from tests.train.rows import groups_for, sample_of, small_model
from tokentrue.mismatch import (
    LOSSES,
    PRESETS,
    Correction,
    LossConfig,
    Normalise,
    Penalty,
    Reject,
    Weights,
    loss_named,
    policy_loss,
)
from tokentrue.train import ExactScorer, OptimConfig, PlainScorer, Ranks, TrainConfig, Trainer
from tokentrue.train.config import OverlongConfig
from tokentrue.train.rows import rows_from_groups, session_advantages
from tokentrue.types import Sample

KEPT = Correction(reject=(Reject(estimator="k3", aggregate="seq_mean", upper=0.0565),), loss_counts="kept")
CONFIGS: dict[str, LossConfig] = {
    **{f"loss {name}": loss_named(name) for name in LOSSES},
    # Score centering has its samples and its test in test_replay.py.
    **{f"preset {name}": LossConfig(correction=preset) for name, preset in PRESETS.items() if preset.centering is None},
    "kept, token mean": LossConfig(correction=KEPT),
    "kept, sequence mean": LossConfig(correction=KEPT, aggregate="seq_mean_token_mean"),
    "kept, sequence sum": LossConfig(correction=KEPT, aggregate="seq_mean_token_sum"),
    "kept, current policy": LossConfig(
        correction=Correction(
            denominator="rollout",
            reject=(Reject(estimator="k3", aggregate="seq_mean", upper=0.0565, signal="ppo_rollout"),),
            loss_counts="kept",
        )
    ),
    "normalised": LossConfig(correction=Correction(weights=Weights(upper=2.0, normalise=Normalise()))),
    "penalty": loss_named("grpo", penalty=Penalty(coefficient=0.5)),
    "penalty on kept rows": LossConfig(correction=KEPT, penalty=Penalty(coefficient=0.5, tokens="valid")),
    "entropy": loss_named("dapo", entropy_coefficient=0.05),
}
CUTS = (
    (100_000, 1, False),
    (1, 1, False),
    (96, 2, False),
)  # tokens in a forward pass, ranks, rows packed end to end (exact operators)
PACKED = (96, 1, True)


def scaled(model: torch.nn.Module, factor: float) -> torch.nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    torch.set_num_threads(1)
    return small_model()


@pytest.fixture(scope="module")
def reference(base: torch.nn.Module) -> torch.nn.Module:
    return scaled(base, 0.97)


@pytest.fixture(scope="module")
def groups(base: torch.nn.Module) -> list[list[Sample]]:
    made = groups_for(scaled(base, 1.01), groups=3, size=3)
    made[1] = [replace(sample, reward=1.0) for sample in made[1]]  # advantage 0, but a penalty of its own
    made[2].append(sample_of([5, 7], [True, False], [0.0, -3.0], name="short", group="g2", reward=0.0))
    return made


def whole_batch(
    base: torch.nn.Module, reference: torch.nn.Module, groups: list[list[Sample]], loss: LossConfig
) -> tuple[Any, float]:
    model = copy.deepcopy(base)
    rows = rows_from_groups(groups)
    scorer = PlainScorer()
    scores = scorer(model, rows, entropy=True)
    with torch.no_grad():
        others = scorer(reference, rows).logprobs
    advantages = session_advantages(rows, "grpo")
    value, _ = policy_loss(
        scores.logprobs,
        [each.detach() for each in scores.logprobs],
        [row.rollout for row in rows],
        [torch.full((row.length,), a, dtype=torch.float64) for row, a in zip(rows, advantages, strict=True)],
        [row.mask for row in rows],
        loss,
        reference_logprobs=others,
        entropy=scores.entropy if loss.entropy_coefficient else None,
        versions=[row.versions for row in rows],
        version=0,
    )
    value.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([each.flatten() for each in gradients]), float(value.detach())


class Meeting:
    """What threads say to each other: every value of every rank, in rank order."""

    def __init__(self, world: int) -> None:
        self.values: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=60)


class ThreadRanks(Ranks):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank=rank, world=len(meeting.values))
        object.__setattr__(self, "meeting", meeting)

    def all_gather_object(self, value: Any) -> list[Any]:
        meeting: Meeting = self.meeting  # type: ignore[attr-defined]
        meeting.values[self.rank] = value
        meeting.barrier.wait()
        found = list(meeting.values)
        meeting.barrier.wait()
        return found


def trained(
    base: torch.nn.Module,
    reference: torch.nn.Module,
    groups: list[list[Sample]],
    loss: LossConfig,
    *,
    budget: int,
    world: int,
    packed: bool = False,
    **settings: Any,
) -> tuple[Any, float]:
    """The trainer's gradient: the mean over ranks of what each adds up."""
    meeting = Meeting(world)
    found: list[tuple[Any, float] | BaseException] = [RuntimeError("did not run")] * world

    def run(rank: int) -> None:
        try:
            ranks = ThreadRanks(rank, meeting) if world > 1 else Ranks()
            config = TrainConfig(exact=False, micro_tokens=budget, **settings)
            other = copy.deepcopy(reference) if loss.penalty is not None else None
            scorer = ExactScorer() if packed else PlainScorer()
            trainer = Trainer(
                copy.deepcopy(base),
                config=config,
                optim=OptimConfig(),
                loss=loss,
                reference=other,
                ranks=ranks,
                scorer=scorer,
            )
            flat, metrics = flat_gradient(trainer, groups)
            found[rank] = flat, metrics["loss"]
        except BaseException as error:
            found[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return sum(flat for flat, _ in found) / world, found[0][1]  # type: ignore[misc]


@pytest.mark.parametrize("name", slow_but_every(5, CONFIGS))
def test_every_cut_gives_the_gradient_of_the_whole_batch(
    base: torch.nn.Module, reference: torch.nn.Module, groups: list[list[Sample]], name: str
) -> None:
    expected, value = whole_batch(base, reference, groups, CONFIGS[name])
    for budget, world, packed in (*CUTS, *(() if name.startswith("preset") else (PACKED,))):
        gradient, loss = trained(base, reference, groups, CONFIGS[name], budget=budget, world=world, packed=packed)
        off, largest = float((gradient - expected).abs().max()), float(expected.abs().max())
        assert off <= 1e-3 * largest + 1e-9, f"budget {budget}, {world} ranks: off by {off:.3g} of {largest:.3g}"
        assert loss == pytest.approx(value, rel=1e-4, abs=1e-7), f"budget {budget}, {world} ranks"


SETTINGS: dict[str, dict[str, Any]] = {
    "overlong": {"overlong": OverlongConfig(mask=True), "baseline": "grpo_batch"},
    "whitened": {"baseline": "whitened"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_rewards_and_advantages_do_not_depend_on_the_cut(
    base: torch.nn.Module, reference: torch.nn.Module, groups: list[list[Sample]], name: str
) -> None:
    groups = [[replace(groups[0][0], finish_reason="length"), *groups[0][1:]], *groups[1:]]
    (expected, value), *others = [
        trained(
            base, reference, groups, loss_named("dapo"), budget=budget, world=world, packed=packed, **SETTINGS[name]
        )
        for budget, world, packed in (*CUTS, PACKED)
    ]
    plain, _ = trained(base, reference, groups, loss_named("dapo"), budget=100_000, world=1)
    assert not torch.allclose(expected, plain, rtol=1e-2)
    for gradient, loss in others:
        assert float((gradient - expected).abs().max()) <= 1e-3 * float(expected.abs().max())
        assert loss == pytest.approx(value, rel=1e-4, abs=1e-7)


def test_the_rules_of_these_configurations_bite(
    base: torch.nn.Module, reference: torch.nn.Module, groups: list[list[Sample]]
) -> None:
    """Without this the property could hold for nothing: rows are rejected, weights differ from 1, the penalty of idle
    rows counts."""
    kept, _ = whole_batch(base, reference, groups, CONFIGS["kept, token mean"])
    plain, _ = whole_batch(base, reference, groups, LossConfig())
    original, _ = whole_batch(base, reference, groups, LossConfig(correction=replace(KEPT, loss_counts="original")))
    assert not torch.allclose(kept, plain, rtol=1e-2) and not torch.allclose(kept, original, rtol=1e-2)
    normalised, _ = whole_batch(base, reference, groups, CONFIGS["normalised"])
    assert not torch.allclose(normalised, plain, rtol=1e-4)


def test_a_lone_row_of_one_token_does_not_crash(base: torch.nn.Module) -> None:
    lone = sample_of([5], [True], [0.0], name="lone", group="g0", reward=1.0)
    groups = groups_for(base, groups=1, size=2)
    groups[0].append(lone)
    for exact in (True, False):
        trainer = Trainer(
            copy.deepcopy(base),
            config=TrainConfig(exact=exact, micro_tokens=1),
            optim=OptimConfig(),
            loss=loss_named("dapo"),
        )
        assert trainer.step(groups).metrics["rows"] == 3
