"""One baseline: a session counts once, with its first sample's reward, in the trainer, the viewer, diagnose and the
adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.train.rows import sample_of
from tokentrue.integrations.rollouts import centre_rewards
from tokentrue.samples.groups import group_of, group_sessions
from tokentrue.train.config import Baseline
from tokentrue.train.rows import row_from_sample, session_advantages
from tokentrue.types import Sample
from tokentrue.viewer import SampleList, ViewerData


def session(name: str, *rewards: float, group: str = "g") -> list[Sample]:
    """A session with one sample for each reward."""
    one = sample_of([5, 6], [True, False], [0.0, -0.5], name=name, group=group, reward=0.0)
    return [replace(one, sample_id=f"{name}/{i}", reward=reward) for i, reward in enumerate(rewards)]


SEVERAL = [*session("three", 1.0, 1.0, 1.0), *session("one", 0.0)]
LEAVES = [*session("leaves", 0.25, 1.0), *session("one", 0.0), *session("two", 0.75, 0.0)]
LONE = [*SEVERAL, *(replace(sample, group=None) for sample in session("lone", 0.5, 1.0))]


def trained(samples: list[Sample], baseline: Baseline) -> list[float]:
    return session_advantages([row_from_sample(sample, group_of(sample)) for sample in samples], baseline)


def shown(samples: list[Sample]) -> list[float]:
    data = ViewerData(SampleList(samples, name="s"))
    heads = [head for name in dict.fromkeys(s.session_id for s in samples) for head in data.session(name)["branches"]]
    return [head["advantage"] for head in heads]


@pytest.mark.parametrize("samples", [SEVERAL, LEAVES, LONE], ids=["several", "leaves", "lone"])
def test_the_viewer_and_the_adapters_show_what_the_trainer_computes(samples: list[Sample]) -> None:
    assert shown(samples) == pytest.approx(trained(samples, "grpo"), abs=1e-12)
    assert centre_rewards(samples) == pytest.approx(trained(samples, "dr_grpo"), abs=1e-12)


def test_by_hand() -> None:
    assert centre_rewards(SEVERAL) == [0.5, 0.5, 0.5, -0.5]
    assert centre_rewards(LONE)[-2:] == [0.0, 0.0]
    assert group_sessions((group_of(s), s.session_id, s.reward or 0.0) for s in LEAVES).rewards == [0.25, 0.0, 0.75]
