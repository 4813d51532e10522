"""prime-rl: the fields of `TrainingSample`, one per line: flat tokens, `mask` for the trainable ones, everything
aligned per token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokentrue.errors import TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonObject
from tokentrue.samples.exporters.base import fill_logprobs, unfill_logprobs
from tokentrue.samples.recorded_turns import read_turns
from tokentrue.samples.shape import MaskBit, SampleColumns, SpanRow, encode_bytes
from tokentrue.types import Sample


def row(sample: Sample) -> JsonObject:
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


def replay_fields(sample: Sample) -> JsonObject:
    """`RoutedExperts` and `SamplingMask` of prime-rl: raw bytes (base64 in JSON); one row for each token, the last
    without experts."""
    found: JsonObject = {}
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
        found["sampling_mask"] = {
            "ids": encode_bytes(mask.token_ids.tobytes()),
            "counts": encode_bytes(counts.tobytes()),
        }
    return found


def temperatures(sample: Sample) -> list[float]:
    """The temperature that each token was sampled at; 1.0 where none was sampled."""
    found = [1.0] * len(sample.token_ids)
    turns = read_turns(sample)
    for turn in turns:
        if turn.row.temperature is None:
            raise TokenContractError(f"sample {sample.sample_id}: a turn without its temperature, which prime-rl needs")
        found[turn.start : turn.end] = [turn.row.temperature] * (turn.end - turn.start)
    if not turns:
        raise TokenContractError(
            f"sample {sample.sample_id}: metadata.tokentrue records no turns, and prime-rl needs their temperatures"
        )
    return found


class PrimeRlColumns(msgspec.Struct):
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]

    def to_sample_columns(self, spans: Sequence[SpanRow]) -> SampleColumns:
        mask: list[MaskBit] = [1 if bit else 0 for bit in self.mask]
        return SampleColumns(self.token_ids, mask, unfill_logprobs(self.logprobs, spans, length=len(self.token_ids)))
