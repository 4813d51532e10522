"""prime-rl: the fields of `TrainingSample`, one per line: flat tokens, `mask` for the trainable ones, everything aligned per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentrue.ids import TokenIds
from tokentrue.samples.exporters.base import Columns, fill_logprobs, unfill_logprobs
from tokentrue.samples.shape import encode_bytes
from tokentrue.types import Sample


def row(sample: Sample) -> dict[str, Any]:
    return {
        "token_ids": list(sample.token_ids),
        "mask": [bool(bit) for bit in sample.loss_mask],
        "logprobs": fill_logprobs(sample.rollout_logprobs),
        "temperatures": temperatures(sample),
        "env_name": str(sample.metadata.get("env_name") or sample.group or "tokentrue"),
        "trace_id": sample.sample_id,
        "branch_index": 0,
        **replay_fields(sample),
    }


def replay_fields(sample: Sample) -> dict[str, Any]:
    """`RoutedExperts` and `SamplingMask` of prime-rl: raw bytes (base64 in JSON); one row for each token, the last without experts."""
    found: dict[str, Any] = {}
    if (routed := sample.routed_experts) is not None:
        _, layers, top_k = routed.shape
        last = b"\xff\xff" * (layers * top_k)
        found["routed_experts"] = {
            "data": encode_bytes(routed.data + last),
            "shape": [len(sample.token_ids), layers, top_k],
            "dtype": "int16",
        }
    if (mask := sample.sampling_mask) is not None:
        counts = TokenIds(len(mask.row(index)) for index in range(len(mask)))
        found["sampling_mask"] = {"ids": encode_bytes(mask.token_ids.tobytes()), "counts": encode_bytes(counts.tobytes())}
    return found


def temperatures(sample: Sample) -> list[float]:
    """The temperature that each token was sampled at; 1.0 where none was sampled."""
    found: list[float] = []
    for node in sample.metadata["tokentrue"]["nodes"]:
        found += [1.0] * node["given"] + [float(node["temperature"])] * node["sampled"]
    return found


def columns(row: Mapping[str, Any], head: Mapping[str, Any]) -> Columns:
    ids = row["token_ids"]
    return ids, [int(bit) for bit in row["mask"]], unfill_logprobs(row["logprobs"], head["spans"], length=len(ids))
