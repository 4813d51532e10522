"""One rollout may be several rows (compaction, sub-agents, forks): what a session weighs, and how many updates there
are, must not change.

A session's row is cut into k rows of the same ids whose loss masks share out its trained tokens, as forks of one
conversation do. The model computes the same numbers for both, so that gradients may differ in rounding only.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.gradients import flat_gradient
from tests.marks import examples
from tests.train.rows import groups_for, small_model
from tokentrue.errors import InputError
from tokentrue.mismatch import Correction, LossConfig, Penalty, Reject, Weights, loss_named, policy_loss
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.rows import (
    Packing,
    list_sessions,
    plan_minibatches,
    rows_from_groups,
    session_advantages,
)
from tokentrue.types import Sample

KEPT = Correction(
    weights=Weights(upper=1.0), reject=(Reject(estimator="k2", aggregate="token", upper=1e-5),), loss_counts="kept"
)
LOSSES: dict[str, LossConfig] = {
    "token mean": loss_named("dapo"),
    "sequence mean": loss_named("grpo"),
    "sequence sum": loss_named("grpo", aggregate="seq_mean_token_sum"),
    "fixed length": loss_named("grpo", aggregate="fixed_length", fixed_length=50),
    "penalty": loss_named("grpo", penalty=Penalty(coefficient=0.5)),
    "kept tokens": loss_named("grpo", correction=KEPT),
}


def cut(sample: Sample, pieces: int, rng: random.Random) -> list[Sample]:
    """The sample as `pieces` rows (some perhaps without a trained token), each trained token in exactly one of them."""
    owner = [rng.randrange(pieces) for _ in sample.loss_mask]
    masks = ([int(bit and owner[t] == k) for t, bit in enumerate(sample.loss_mask)] for k in range(pieces))
    return [replace(sample, sample_id=f"{sample.session_id}/{k}", loss_mask=mask) for k, mask in enumerate(masks)]


def cut_some(groups: list[list[Sample]], pieces: list[int], seed: int) -> list[list[Sample]]:
    rng = random.Random(seed)
    counts = iter(pieces)
    return [[row for sample in group for row in cut(sample, next(counts), rng)] for group in groups]


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    torch.set_num_threads(1)
    return small_model()


@pytest.fixture(scope="module")
def groups(base: torch.nn.Module) -> list[list[Sample]]:
    other = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.003)  # another policy sampled, so that the correction has something to correct
    return groups_for(other, groups=2, size=3)


def trainer(base: torch.nn.Module, loss: LossConfig, **changes: object) -> Trainer:
    config = TrainConfig(**{"exact": False, "micro_tokens": 160, **changes})  # type: ignore[arg-type]
    reference = None
    if loss.penalty is not None:
        reference = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.97)
    return Trainer(copy.deepcopy(base), config=config, optim=OptimConfig(), loss=loss, reference=reference)


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("pieces", [[1, 4, 1, 2, 1, 1], [3, 3, 3, 3, 3, 3]])
def test_a_session_cut_into_rows_gives_the_same_gradient(
    base: torch.nn.Module, groups: list[list[Sample]], name: str, pieces: list[int]
) -> None:
    whole, told = flat_gradient(trainer(base, LOSSES[name]), groups)
    many, also = flat_gradient(trainer(base, LOSSES[name]), cut_some(groups, pieces, seed=len(name)))
    assert float(whole.abs().max()) > 0
    assert float((many - whole).abs().max()) <= 1e-4 * float(whole.abs().max())
    assert also["loss"] == pytest.approx(told["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("shuffle", [False, True])
def test_updates_and_weights_after_a_step_are_those_of_one_row_per_session(
    base: torch.nn.Module, groups: list[list[Sample]], shuffle: bool
) -> None:
    """Three updates of two sessions each, also where one session has seven of twelve rows."""
    one, many = (trainer(base, LOSSES["sequence mean"], minibatches=3, shuffle=shuffle) for _ in range(2))
    one.step(groups)
    report = many.step(cut_some(groups, [7, 1, 1, 1, 1, 1], seed=3))
    assert one.updates == many.updates == 3 and report.metrics["rows"] == 12 and report.metrics["sessions"] == 6
    moved = max(float((a - b).abs().max()) for a, b in zip(*map(weights_of, (one.model, base)), strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(*map(weights_of, (one.model, many.model)), strict=True))
    assert moved > 1e-4 and apart < 0.02 * moved  # AdamW's first steps divide tiny gradients by their own size


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=6, max_size=6),
    st.integers(1, 8),
    st.integers(0, 9),
    st.booleans(),
    st.integers(0, 99),
)
def test_minibatches_hold_whole_sessions(
    groups: list[list[Sample]], pieces: list[int], parts: int, seed: int, shuffled: bool, mixing: int
) -> None:
    rows = rows_from_groups(cut_some(groups, pieces, seed))
    random.Random(mixing).shuffle(rows)  # rows of a session need not be neighbours
    packing = Packing(budget=200, padded=False)
    made = plan_minibatches(rows, [True] * len(rows), packing, parts=parts, shuffle_seed=(seed,) if shuffled else None)
    assert len(made) == min(parts, 6), "as many updates as with one row per session"
    assert sorted(number for part in made for number in part.rows) == list(range(len(rows)))
    for numbers in list_sessions(rows):
        assert sum(bool(set(numbers) & set(part.rows)) for part in made) == 1
    counts = [len({rows[number].sample.session_id for number in part.rows}) for part in made]
    assert max(counts) - min(counts) <= 1
    advantages = session_advantages(rows, "grpo")
    assert all(len({advantages[number] for number in numbers}) == 1 for numbers in list_sessions(rows))


def test_row_tokens_go_with_the_number_of_sequences() -> None:
    values = torch.zeros(2, 3)
    with pytest.raises(InputError, match="row_tokens: 2 numbers for 2 rows"):
        policy_loss(values, values, None, torch.ones(2), None, loss_named("grpo"), row_tokens=[6.0, 6.0])
