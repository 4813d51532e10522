"""TRL: the keys that a GRPO `rollout_func` returns, one line per completion; collect each key over the lines into a list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentrue.samples.exporters.base import Columns, split, unfill_logprobs
from tokentrue.types import Sample


def row(sample: Sample) -> dict[str, Any]:
    parts = split(sample)
    return {
        "prompt_ids": parts.prompt_ids,
        "completion_ids": parts.response_ids,
        "env_mask": parts.response_mask,
        "logprobs": parts.response_logprobs,
        "reward": sample.reward,
    }


def columns(row: Mapping[str, Any], head: Mapping[str, Any]) -> Columns:
    ids = [*row["prompt_ids"], *row["completion_ids"]]
    mask = [*([0] * len(row["prompt_ids"])), *row["env_mask"]]
    return ids, mask, unfill_logprobs(row["logprobs"], head["spans"], length=len(ids))
