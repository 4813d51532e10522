"""Samples to training rows, and rewards to advantages.

Invariants: token ids and log-probabilities are taken as recorded, never padded, cut or re-encoded. Every row of a
session carries the session's advantage, and a group's baseline counts each session once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokentrue.errors import TokenContractError
from tokentrue.mismatch import grpo_advantages, rloo_advantages, whitened_advantages
from tokentrue.mismatch.routing import routing_of, routing_weights_of
from tokentrue.numerics import KeptRows
from tokentrue.samples.groups import group_sessions
from tokentrue.samples.recorded_turns import read_turns, scoring_temperatures
from tokentrue.train.config import AdvantageConfig, Baseline, OverlongConfig
from tokentrue.types import Finish, Sample

UNSAMPLED = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One sample, ready to train on. `mask` is True where loss falls; `rollout` is 0 and `versions` -1 where nothing
    was sampled."""

    sample: Sample
    group: str
    ids: Tensor  # int64 [T]
    mask: Tensor  # bool [T]
    sampled: Tensor  # bool [T]
    rollout: Tensor  # float32 [T]
    versions: Tensor  # int64 [T]
    temperatures: Tensor  # float32 [T]
    reward: float
    kept: KeptRows | None = None  # ids that the sampler's filters kept, a row for each token
    experts: Tensor | None = None  # int16 [T, layers, top_k] of the rollout, and their weights
    expert_weights: Tensor | None = None

    @property
    def length(self) -> int:
        return int(self.ids.shape[0])


def row_from_sample(sample: Sample, group: str, temperature: float = 1.0) -> Row:
    """`temperature` is that of samples which do not record theirs."""
    if sample.reward is None:
        raise TokenContractError(f"sample {sample.sample_id} has no reward; score its session first")
    length = len(sample.token_ids)
    if not length:
        raise TokenContractError(f"sample {sample.sample_id} has no tokens; leave it out")
    versions = torch.full((length,), UNSAMPLED, dtype=torch.int64)
    for span in sample.spans:
        if span.kind == "sampled":
            versions[span.start : span.end] = span.policy_version or 0
    logprobs = sample.rollout_logprobs
    sampled = torch.tensor([value is not None for value in logprobs], dtype=torch.bool)
    if not set(sample.loss_mask) <= {0, 1}:
        raise TokenContractError(f"sample {sample.sample_id}: loss_mask holds values other than 0 and 1")
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    if bool((mask & ~sampled).any()):
        raise TokenContractError(f"sample {sample.sample_id}: the loss mask covers a token that was not sampled")
    if bool(mask[0]):
        raise TokenContractError(f"sample {sample.sample_id}: its first token has no context and cannot be trained")
    experts, weights = experts_and_weights(sample)
    return Row(
        sample=sample,
        group=group,
        ids=torch.tensor(sample.token_ids, dtype=torch.int64),
        mask=mask,
        sampled=sampled,
        rollout=torch.tensor([0.0 if value is None else value for value in logprobs], dtype=torch.float64).float(),
        versions=versions,
        temperatures=read_temperatures(sample, temperature),
        reward=float(sample.reward),
        kept=kept_rows(sample),
        experts=experts,
        expert_weights=weights,
    )


def kept_rows(sample: Sample) -> KeptRows | None:
    mask = sample.sampling_mask
    if mask is None or not mask.token_ids:
        return None
    return KeptRows(token_ids=torch.tensor(mask.token_ids.tolist()), offsets=torch.tensor(mask.offsets.tolist()))


def experts_and_weights(sample: Sample) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if sample.routed_experts is None else (routing_of(sample), routing_weights_of(sample))


def read_temperatures(sample: Sample, default: float) -> Tensor:
    """Refuses a trained turn that was sampled greedily."""
    found = torch.tensor(scoring_temperatures(sample, default), dtype=torch.float32)
    for number, turn in enumerate(read_turns(sample)):
        if turn.row.temperature == 0 and any(sample.loss_mask[turn.start : turn.end]):
            raise TokenContractError(
                f"sample {sample.sample_id}, turn {number}: sampled at temperature 0, which has no policy gradient"
            )
    return found


def rows_from_groups(groups: Sequence[Sequence[Sample]], temperature: float = 1.0) -> list[Row]:
    """All rows in order; a group without a name gets one from its place."""
    rows: list[Row] = []
    for number, group in enumerate(groups):
        rows += [row_from_sample(sample, sample.group or f"group-{number}", temperature) for sample in group]
    return rows


def list_sessions(rows: Sequence[Row]) -> list[list[int]]:
    """The row numbers of each session, in the order in which sessions first appear."""
    found: dict[tuple[str, str], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault((row.group, row.sample.session_id), []).append(number)
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionRewards:
    """The sessions of a batch in the order of their first row."""

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
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then linear up to `penalty` at max_tokens."""
    over = torch.tensor(sampled, dtype=torch.float64) - (config.max_tokens - config.buffer)
    return config.penalty * (over / max(config.buffer, 1)).clamp(0.0, 1.0)


def is_truncated(row: Row) -> bool:
    """Whether a turn ended at its limit of tokens. Old files name the last turn's end alone."""
    return row.sample.finish_reason == Finish.LENGTH or any(
        turn.row.finish == Finish.LENGTH for turn in read_turns(row.sample)
    )


def mask_truncated(rows: Sequence[Row]) -> list[Row]:
    """The same rows without loss in sessions that hold a truncated turn."""
    cut = {(row.group, row.sample.session_id) for row in rows if is_truncated(row)}
    return [
        replace(row, mask=torch.zeros_like(row.mask)) if (row.group, row.sample.session_id) in cut else row
        for row in rows
    ]


def session_advantages(
    sessions: SessionRewards, baseline: Baseline, config: AdvantageConfig | None = None
) -> list[float]:
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
