"""Rows and advantages: recorded values untouched, sessions counted once, nonsense refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.train.rows import sample_of
from tokentrue.errors import TokenContractError
from tokentrue.train.rows import row_from_sample, session_advantages
from tokentrue.types import Sample


def one(name: str, reward: float, group: str = "g", version: int = 3) -> Sample:
    ids, given, values = [5, 6, 7, 8], [True, False, True, False], [0.0, -0.5, 0.0, -0.25]
    return sample_of(ids, given, values, name=name, group=group, reward=reward, version=version)


def test_a_row_keeps_what_was_recorded() -> None:
    row = row_from_sample(one("a", 1.0), "g")
    assert row.ids.tolist() == [5, 6, 7, 8]
    assert row.mask.tolist() == [False, True, False, True]
    assert row.rollout.tolist() == [0.0, -0.5, 0.0, -0.25]
    assert row.versions.tolist() == [-1, 3, -1, 3]


def test_a_row_without_tokens_is_refused() -> None:
    with pytest.raises(TokenContractError, match="sample a/0 has no tokens; leave it out"):
        row_from_sample(sample_of([], [], [], name="a", group="g", reward=1.0, version=0), "g")


def test_grpo_by_hand() -> None:
    rows = [
        row_from_sample(one(name, reward), "g") for name, reward in (("a", 1.0), ("b", 0.0), ("c", 0.0), ("d", 1.0))
    ]
    found = session_advantages(rows, "grpo")
    std = (4 * 0.25 / 3) ** 0.5
    assert found == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std], rel=1e-5)


def test_a_session_with_two_samples_counts_once() -> None:
    """Compaction leaves two samples of one session; the mean of the group is over three sessions, not four rows."""
    twice = one("a", 1.0)
    rows = [row_from_sample(s, "g") for s in (twice, replace(twice, sample_id="a/1"), one("b", 0.0), one("c", 0.0))]
    found = session_advantages(rows, "dr_grpo")
    assert found == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])


def test_equal_rewards_give_exactly_nothing() -> None:
    rows = [row_from_sample(one(name, 0.1), "g") for name in "abcdefg"]
    assert session_advantages(rows, "grpo") == [0.0] * 7


def test_what_cannot_be_trained_is_refused() -> None:
    good = one("a", 1.0)
    with pytest.raises(TokenContractError, match="no reward"):
        row_from_sample(replace(good, reward=None), "g")
    with pytest.raises(TokenContractError, match="not sampled"):
        row_from_sample(replace(good, loss_mask=[0, 1, 1, 1]), "g")
    with pytest.raises(TokenContractError, match="first token"):
        row_from_sample(replace(good, loss_mask=[1, 1, 0, 1], rollout_logprobs=[-0.1, -0.5, None, -0.25]), "g")


def test_log_probabilities_survive_as_float32_bits() -> None:
    value = float(torch.tensor(-0.123456789, dtype=torch.float32))
    row = row_from_sample(replace(one("a", 1.0), rollout_logprobs=[None, value, None, -0.25]), "g")
    assert float(row.rollout[1]) == value


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_turn_sampled_under_a_penalty_is_refused(penalty: str) -> None:
    """Such samples come from sessions that were not meant for training; the file says so, turn by turn."""
    nodes = [{"given": 1, "sampled": 1}, {"given": 1, "sampled": 1, "sampling": {penalty: 0.5}}]
    sample = replace(one("a", 1.0), metadata={"tokentrue": {"nodes": nodes}})
    with pytest.raises(TokenContractError, match=f"turn 1: sampled under {penalty}"):
        row_from_sample(sample, "g")
    row_from_sample(replace(sample, loss_mask=[0, 1, 0, 0]), "g")
