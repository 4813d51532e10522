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
from tokentrue.types import Certificate, Count, ImageRun, RoutedExperts, Sample, SamplingMask, Span, TopLogprobs

T = TypeVar("T")
Width = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Bounded: a damaged number must not allocate gigabytes."""


def head_to_json(sample: Sample) -> JsonObject:
    """Everything but the three per-token columns."""
    routed = sample.routed_experts
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
    for name, rows in (("sampling_mask", sample.sampling_mask), ("top_logprobs", sample.top_logprobs)):
        if rows is not None:
            head[name] = {
                "token_ids": encode_bytes(rows.token_ids.tobytes()),
                "offsets": encode_bytes(rows.offsets.tobytes()),
            }
    if sample.top_logprobs is not None:
        head["top_logprobs"]["logprobs"] = encode_bytes(sample.top_logprobs.logprobs)
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


class TopLogprobsRow(SamplingMaskRow):
    logprobs: bytes


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
    top_logprobs: TopLogprobsRow | None = None


def decode(value: JsonValue, kind: type[T], where: str) -> T:
    """Raises FileFormatError with the path of the bad value."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise FileFormatError(f"{where}: {error}") from error


def sample_from_json(data: JsonMapping, where: str = "sample") -> Sample:
    row = decode(data, SampleRow, where)
    routed, fields = row.routed_experts, msgspec.structs.asdict(row)
    try:
        fields["token_ids"] = TokenIds(row.token_ids)
        fields["images"] = row.images or ()
        if routed is not None:
            fields["routed_experts"] = RoutedExperts(**msgspec.structs.asdict(routed))
        if (mask := row.sampling_mask) is not None:
            fields["sampling_mask"] = SamplingMask(**_ids_in(mask))
        if (tops := row.top_logprobs) is not None:
            fields["top_logprobs"] = TopLogprobs(**_ids_in(tops), logprobs=tops.logprobs)
        return Sample(**fields)
    except TokenContractError as error:
        raise FileFormatError(f"{where}: {error}") from error


def _ids_in(row: SamplingMaskRow) -> dict[str, TokenIds]:
    return {"token_ids": TokenIds.from_bytes(row.token_ids), "offsets": TokenIds.from_bytes(row.offsets)}
