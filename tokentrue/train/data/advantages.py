"""From rewards to advantages: one reward per session, shaped where the configuration says so, and one advantage for all
of its rows.

Invariant: every row of a session carries the session's own advantage, and a group's baseline counts each session once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokentrue.mismatch import grpo_advantages, rloo_advantages, whitened_advantages
from tokentrue.samples.groups import group_sessions
from tokentrue.samples.recorded_turns import read_turns
from tokentrue.train.config import AdvantageConfig, Baseline, OverlongConfig
from tokentrue.train.data.batch import Row
from tokentrue.types import Finish


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionRewards:
    """The sessions of a batch in the order of their first row. `of_row` has each row's session number."""

    rewards: Tensor  # float64
    groups: Sequence[str]
    sampled: Sequence[int]  # tokens sampled in the session
    trained: Sequence[int]  # tokens with loss
    of_row: Sequence[int]

    @staticmethod
    def of(rows: Sequence[Row]) -> SessionRewards:
        found = group_sessions((row.group, row.sample.session_id, row.reward) for row in rows)
        sampled, trained = [0] * len(found.groups), [0] * len(found.groups)
        for row, number in zip(rows, found.of_sample, strict=True):
            sampled[number] += int(row.sampled.sum())
            trained[number] += int(row.mask.sum())
        rewards = torch.tensor(found.rewards, dtype=torch.float64)
        return SessionRewards(
            rewards=rewards, groups=found.groups, sampled=sampled, trained=trained, of_row=found.of_sample
        )

    def less(self, cost: Tensor) -> SessionRewards:
        return replace(self, rewards=self.rewards - cost)

    def sum_rows(self, values: Mapping[int, float]) -> Tensor:
        """One number per session from one number per row."""
        found = torch.zeros_like(self.rewards)
        for row, value in sorted(values.items()):
            found[self.of_row[row]] += value
        return found


def overlong_cost(sampled: Sequence[int], config: OverlongConfig) -> Tensor:
    """DAPO's soft punishment as a cost: 0 up to max_tokens - buffer, then linear, `penalty` from max_tokens on."""
    over = torch.tensor(sampled, dtype=torch.float64) - (config.max_tokens - config.buffer)
    return config.penalty * (over / max(config.buffer, 1)).clamp(0.0, 1.0)


def is_truncated(row: Row) -> bool:
    """Whether a turn of the row ended at its limit of tokens. Files from before `finish` was recorded name the last
    turn's end alone."""
    return row.sample.finish_reason == Finish.LENGTH or any(
        turn.row.finish == Finish.LENGTH for turn in read_turns(row.sample)
    )


def mask_truncated(rows: Sequence[Row]) -> list[Row]:
    """The same rows without loss in sessions that hold a turn which ended at its limit of tokens."""
    cut = {(row.group, row.sample.session_id) for row in rows if is_truncated(row)}
    return [
        replace(row, mask=torch.zeros_like(row.mask)) if (row.group, row.sample.session_id) in cut else row
        for row in rows
    ]


def session_advantages(
    sessions: SessionRewards, baseline: Baseline, config: AdvantageConfig | None = None
) -> list[float]:
    """One advantage per row."""
    config = config or AdvantageConfig()
    values, groups, eps, lone = sessions.rewards, sessions.groups, config.epsilon, config.lone_group
    tokens = sessions.trained if config.whiten_by == "tokens" else None
    ways: Mapping[Baseline, Callable[[], Tensor]] = {
        "grpo": lambda: grpo_advantages(values, groups, eps=eps, lone=lone),
        "grpo_batch": lambda: grpo_advantages(values, groups, eps=eps, lone=lone, scale="batch"),
        "dr_grpo": lambda: grpo_advantages(values, groups, std=False, lone=lone),
        "rloo": lambda: rloo_advantages(values, groups, lone=lone),
        "whitened": lambda: whitened_advantages(values, eps=eps, tokens=tokens),
        "whitened_groups": lambda: whitened_advantages(values, groups, eps=eps, tokens=tokens, lone=lone),
        "none": lambda: values,
    }
    made = ways[baseline]().tolist()
    return [made[number] for number in sessions.of_row]
