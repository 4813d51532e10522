"""verl: one row per `AgentLoopOutput`, as a parquet table. `AgentLoopOutput(metrics=…, **row)` takes the trainer's columns as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentrue.samples.exporters.base import Columns, split, turns_of, unfill_logprobs
from tokentrue.types import Sample


def row(sample: Sample) -> dict[str, Any]:
    parts = split(sample)
    return {
        "prompt_ids": parts.prompt_ids,
        "response_ids": parts.response_ids,
        "response_mask": parts.response_mask,
        "response_logprobs": parts.response_logprobs,
        "reward_score": sample.reward,
        "num_turns": 2 * turns_of(sample),
        "uid": sample.group or sample.session_id,
    }


def columns(row: Mapping[str, Any], head: Mapping[str, Any]) -> Columns:
    ids = [*row["prompt_ids"], *row["response_ids"]]
    mask = [*([0] * len(row["prompt_ids"])), *row["response_mask"]]
    return ids, mask, unfill_logprobs(row["response_logprobs"], head["spans"], length=len(ids))
