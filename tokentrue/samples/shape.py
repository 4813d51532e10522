"""Converts samples to plain JSON objects and back, losslessly; log-probabilities keep every bit.

A file is foreign input: `decode` types its values, and errors name the path (`$.spans[3].start`).
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal, TypeVar

import msgspec

from tokentrue.errors import FileFormatError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.types import Certificate, Count, ImageRun, RoutedExperts, Sample, SamplingMask, Span

T = TypeVar("T")
Width = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Bounded: a damaged number must not allocate gigabytes."""


def head_to_json(sample: Sample) -> JsonObject:
    """Everything but the three per-token columns."""
    routed, mask = sample.routed_experts, sample.sampling_mask
    head: JsonObject = {
        "sample_id": sample.sample_id,
        "session_id": sample.session_id,
        "group": sample.group,
        "spans": [msgspec.to_builtins(span) for span in sample.spans],
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "metadata": sample.metadata,
        "certificate": msgspec.to_builtins(sample.certificate),
    }
    if sample.images:
        head["images"] = [msgspec.to_builtins(run) for run in sample.images]
    if routed is not None:
        head["routed_experts"] = {
            "shape": list(routed.shape),
            "start": routed.start,
            "data": encode_bytes(routed.data),
            "weights": None if routed.weights is None else encode_bytes(routed.weights),
        }
    if mask is not None:
        head["sampling_mask"] = {
            "token_ids": encode_bytes(mask.token_ids.tobytes()),
            "offsets": encode_bytes(mask.offsets.tobytes()),
        }
    return head


def encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def sample_to_json(sample: Sample) -> JsonObject:
    return {
        **head_to_json(sample),
        "token_ids": list(sample.token_ids),
        "loss_mask": list(sample.loss_mask),
        "rollout_logprobs": list(sample.rollout_logprobs),
    }


class RoutedExpertsRow(msgspec.Struct):
    shape: tuple[Count, Width, Width]
    data: bytes
    start: Count
    weights: bytes | None


class SamplingMaskRow(msgspec.Struct):
    token_ids: bytes
    offsets: bytes


class SampleRow(msgspec.Struct, kw_only=True):
    sample_id: str
    session_id: str
    group: str | None = None
    token_ids: list[int]
    loss_mask: list[Literal[0, 1]]
    rollout_logprobs: list[float | None]
    spans: tuple[Span, ...]
    reward: float | None = None
    finish_reason: str
    metadata: JsonObject = {}
    certificate: Certificate
    routed_experts: RoutedExpertsRow | None = None
    sampling_mask: SamplingMaskRow | None = None
    images: tuple[ImageRun, ...] | None = None


def decode(value: JsonValue, kind: type[T], where: str) -> T:
    """Raises FileFormatError with the path of the bad value."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise FileFormatError(f"{where}: {error}") from error


def sample_from_json(data: JsonMapping, where: str = "sample") -> Sample:
    row = decode(data, SampleRow, where)
    routed, mask, fields = row.routed_experts, row.sampling_mask, msgspec.structs.asdict(row)
    try:
        fields["token_ids"] = TokenIds(row.token_ids)
        fields["images"] = row.images or ()
        if routed is not None:
            fields["routed_experts"] = RoutedExperts(**msgspec.structs.asdict(routed))
        if mask is not None:
            columns = {name: TokenIds.from_bytes(data) for name, data in msgspec.structs.asdict(mask).items()}
            fields["sampling_mask"] = SamplingMask(**columns)
        return Sample(**fields)
    except TokenContractError as error:
        raise FileFormatError(f"{where}: {error}") from error
