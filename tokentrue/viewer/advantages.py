"""Advantages for display, without torch: the formula of the trainer's default baseline
(`tokentrue.mismatch.grpo_advantages`) over the sessions that `tokentrue.samples.groups` compares. A sample whose
metadata says its `advantage` keeps that one.

A test compares both with the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokentrue.samples.groups import group_of, group_sessions
from tokentrue.types import Sample

EPS = 1e-6


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward less the group's mean, over its standard deviation (n - 1) plus `EPS`; 0 where there is nothing to
    compare."""
    if len(rewards) < 2 or all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (spread + EPS) for reward in rewards]


def advantages_of(samples: Sequence[Sample]) -> dict[str, float]:
    """By sample id, for the samples that have a reward; groups must be whole."""
    scored = [(sample, sample.reward) for sample in samples if sample.reward is not None]
    sessions = group_sessions((group_of(sample), sample.session_id, reward) for sample, reward in scored)
    found = {
        sample.sample_id: value
        for (sample, _), value in zip(scored, sessions.advantages(group_advantages), strict=True)
    }
    for sample in samples:
        given = sample.metadata.get("advantage")
        if isinstance(given, int | float) and math.isfinite(given):
            found[sample.sample_id] = float(given)
    return found
