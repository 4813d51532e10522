"""slime (and miles): the dictionary that `Sample.from_dict` takes, one per line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentrue.samples.exporters.base import Columns, experts_of, split, token_versions, unfill_logprobs, versions_of
from tokentrue.types import Sample

_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def row(sample: Sample) -> dict[str, Any]:
    parts = split(sample)
    replay: dict[str, Any] = {}
    if sample.routed_experts is not None:
        replay["rollout_routed_experts"] = experts_of(sample)
    if sample.sampling_mask is not None:
        mask = sample.sampling_mask.cut(len(parts.prompt_ids), len(sample.token_ids))
        replay |= {"rollout_top_p_token_ids": mask.token_ids.tolist(), "rollout_top_p_token_offsets": mask.offsets.tolist()}
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


def columns(row: Mapping[str, Any], head: Mapping[str, Any]) -> Columns:
    ids = row["tokens"]
    mask = [*([0] * (len(ids) - row["response_length"])), *row["loss_mask"]]
    return ids, mask, unfill_logprobs(row["rollout_log_probs"], head["spans"], length=len(ids))
