"""Samples to training rows: ids, mask, rollout log-probabilities and policy versions side by side.

Invariant: token ids and log-probabilities are taken as recorded, never padded, cut or re-encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.errors import TokenContractError
from tokentrue.numerics import KeptRows
from tokentrue.samples.recorded_turns import read_turns, scoring_temperatures
from tokentrue.train.data.routing_replay import experts_and_weights, kept_rows
from tokentrue.types import Sample

UNSAMPLED = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One sample, ready to train on. `mask` is True where loss falls; `rollout` is 0 where nothing was sampled.

    `versions` holds the policy version of each sampled token and -1 elsewhere; `temperatures` the one that each token
    is scored at:
    for a sampled token the one it was sampled at.
    """

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


def row_of(sample: Sample, group: str, temperature: float = 1.0) -> Row:
    """`temperature` is that of samples which do not say at which one they were sampled."""
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
        temperatures=temperatures_of(sample, temperature),
        reward=float(sample.reward),
        kept=kept_rows(sample),
        experts=experts,
        expert_weights=weights,
    )


def temperatures_of(sample: Sample, default: float) -> Tensor:
    """As `scoring_temperatures` gives them. Refused besides: a trained turn sampled greedily."""
    found = torch.tensor(scoring_temperatures(sample, default), dtype=torch.float32)
    for number, turn in enumerate(read_turns(sample)):
        if turn.row.temperature == 0 and any(sample.loss_mask[turn.start : turn.end]):
            raise TokenContractError(
                f"sample {sample.sample_id}, turn {number}: sampled at temperature 0, which has no policy gradient"
            )
    return found


def rows_of(groups: Sequence[Sequence[Sample]], temperature: float = 1.0) -> list[Row]:
    """All rows in order. A group without a name gets one from its place."""
    rows: list[Row] = []
    for number, group in enumerate(groups):
        rows += [row_of(sample, sample.group or f"group-{number}", temperature) for sample in group]
    return rows


def sessions_of(rows: Sequence[Row]) -> list[list[int]]:
    """The row numbers of each session, in the order in which sessions first appear."""
    found: dict[tuple[str, str], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault((row.group, row.sample.session_id), []).append(number)
    return list(found.values())
