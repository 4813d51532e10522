"""verl: one row per `AgentLoopOutput`, as a parquet table. `AgentLoopOutput(metrics=…, **row)` takes the trainer's
columns as they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokentrue.json_types import JsonObject
from tokentrue.samples.exporters.base import experts_of, split, token_versions, turns_of, unfill_logprobs, zero_mask
from tokentrue.samples.shape import MaskBit, SampleColumns, SpanRow
from tokentrue.types import Sample


def row(sample: Sample) -> JsonObject:
    parts = split(sample)
    return {
        "prompt_ids": parts.prompt_ids,
        "response_ids": parts.response_ids,
        "response_mask": parts.response_mask,
        "response_logprobs": parts.response_logprobs,
        "reward_score": sample.reward,
        "num_turns": 2 * turns_of(sample),
        "uid": sample.group or sample.session_id,
        "routed_experts": experts_of(sample),
        "extra_fields": replay_fields(sample, start=len(parts.prompt_ids)),
    }


def replay_fields(sample: Sample, *, start: int) -> JsonObject:
    """verl's own names for the versions; it has none for kept ids: compressed rows, one for each response token."""
    versions = token_versions(sample, start=start)
    sampled = [version for version in versions if version >= 0]
    mask = None if sample.sampling_mask is None else sample.sampling_mask.cut(start, len(sample.token_ids))
    return {
        "min_global_steps": min(sampled, default=None),
        "max_global_steps": max(sampled, default=None),
        "policy_versions": versions,
        "sampling_mask_token_ids": None if mask is None else mask.token_ids.tolist(),
        "sampling_mask_offsets": None if mask is None else mask.offsets.tolist(),
    }


class VerlColumns(msgspec.Struct):
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[MaskBit]
    response_logprobs: list[float]

    def to_sample_columns(self, spans: Sequence[SpanRow]) -> SampleColumns:
        ids = [*self.prompt_ids, *self.response_ids]
        mask: list[MaskBit] = [*zero_mask(len(self.prompt_ids)), *self.response_mask]
        return SampleColumns(ids, mask, unfill_logprobs(self.response_logprobs, spans, length=len(ids)))
