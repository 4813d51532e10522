"""TRL: the keys that a GRPO `rollout_func` returns, one line per completion; collect each key over the lines into a
list."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokentrue.json_types import JsonObject
from tokentrue.samples.exporters.base import split, unfill_logprobs, zero_mask
from tokentrue.samples.shape import MaskBit, SampleColumns, SpanRow
from tokentrue.types import Sample


def row(sample: Sample) -> JsonObject:
    parts = split(sample)
    return {
        "prompt_ids": parts.prompt_ids,
        "completion_ids": parts.response_ids,
        "env_mask": parts.response_mask,
        "logprobs": parts.response_logprobs,
        "reward": sample.reward,
    }


class TrlColumns(msgspec.Struct):
    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[MaskBit]
    logprobs: list[float]

    def to_sample_columns(self, spans: Sequence[SpanRow]) -> SampleColumns:
        ids = [*self.prompt_ids, *self.completion_ids]
        mask: list[MaskBit] = [*zero_mask(len(self.prompt_ids)), *self.env_mask]
        return SampleColumns(ids, mask, unfill_logprobs(self.logprobs, spans, length=len(ids)))
