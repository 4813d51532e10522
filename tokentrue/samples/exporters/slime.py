"""slime (and miles): the dictionary that `Sample.from_dict` takes, one per line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokentrue.json_types import JsonObject
from tokentrue.samples.exporters.base import experts_of, split, token_versions, unfill_logprobs, versions_of, zero_mask
from tokentrue.samples.shape import Count, MaskBit, SampleColumns, SpanRow
from tokentrue.types import Sample

_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def row(sample: Sample) -> JsonObject:
    parts = split(sample)
    replay: JsonObject = {}
    if sample.routed_experts is not None:
        replay["rollout_routed_experts"] = experts_of(sample)
    if sample.sampling_mask is not None:
        mask = sample.sampling_mask.cut(len(parts.prompt_ids), len(sample.token_ids))
        replay |= {
            "rollout_top_p_token_ids": mask.token_ids.tolist(),
            "rollout_top_p_token_offsets": mask.offsets.tolist(),
        }
    return {
        "tokens": list(sample.token_ids),
        "response_length": len(parts.response_ids),
        "loss_mask": parts.response_mask,
        "rollout_log_probs": parts.response_logprobs,
        "reward": sample.reward,
        "status": _STATUS.get(sample.finish_reason, "completed"),
        "weight_versions": [str(version) for version in versions_of(sample)],
        "session_id": sample.session_id,
        "metadata": {
            "sample_id": sample.sample_id,
            "group": sample.group,
            "policy_versions": token_versions(sample, start=len(parts.prompt_ids)),
        },
        **replay,
    }


class SlimeColumns(msgspec.Struct):
    tokens: list[int]
    response_length: Count
    loss_mask: list[MaskBit]
    rollout_log_probs: list[float]

    def to_sample_columns(self, spans: Sequence[SpanRow]) -> SampleColumns:
        mask: list[MaskBit] = [*zero_mask(max(len(self.tokens) - self.response_length, 0)), *self.loss_mask]
        return SampleColumns(self.tokens, mask, unfill_logprobs(self.rollout_log_probs, spans, length=len(self.tokens)))
