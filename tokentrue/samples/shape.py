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
from tokentrue.types import Certificate, RoutedExperts, Sample, SamplingMask, Span

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
MaskBit = Literal[0, 1]
Utf8 = Annotated[str, msgspec.Meta(pattern=r"^[^\ud800-\udfff]*$")]
"""Text without lone surrogates, which JSON can escape and UTF-8 cannot encode."""


def head_to_json(sample: Sample) -> JsonObject:
    routed = sample.routed_experts
    head: JsonObject = {
        "sample_id": sample.sample_id,
        "session_id": sample.session_id,
        "group": sample.group,
        "spans": [{name: getattr(span, name) for name in SpanRow.__struct_fields__} for span in sample.spans],
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "metadata": sample.metadata,
        "certificate": {
            "chain": sample.certificate.chain,
            "template": sample.certificate.template,
            "tokenizer": sample.certificate.tokenizer,
        },
    }
    if routed is not None:
        head["routed_experts"] = {
            "shape": list(routed.shape),
            "start": routed.start,
            "data": encode_bytes(routed.data),
            "weights": None if routed.weights is None else encode_bytes(routed.weights),
        }
    if sample.sampling_mask is not None:
        mask = sample.sampling_mask
        head["sampling_mask"] = {
            "token_ids": encode_bytes(mask.token_ids.tobytes()),
            "offsets": encode_bytes(mask.offsets.tobytes()),
        }
    return head


def encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def sample_to_json(sample: Sample) -> JsonObject:
    columns = {
        "token_ids": list(sample.token_ids),
        "loss_mask": list(sample.loss_mask),
        "rollout_logprobs": list(sample.rollout_logprobs),
    }
    return {**head_to_json(sample), **columns}


class SpanRow(msgspec.Struct):
    start: Count
    end: Count
    kind: Literal["given", "sampled"]
    role: str
    turn: Count
    policy_version: int | None
    trainable: bool
    why: str


class CertificateRow(msgspec.Struct):
    chain: str
    template: Utf8
    tokenizer: Utf8


class RoutedExpertsRow(msgspec.Struct):
    """`shape` is bounded: a damaged number must not allocate gigabytes."""

    shape: tuple[Count, Annotated[int, msgspec.Meta(ge=1, le=4096)], Annotated[int, msgspec.Meta(ge=1, le=4096)]]
    data: bytes
    start: Count
    weights: bytes | None


class SamplingMaskRow(msgspec.Struct):
    token_ids: bytes
    offsets: bytes


class SampleHead(msgspec.Struct, kw_only=True):
    """Everything but the three per-token columns."""

    sample_id: str
    session_id: str
    spans: list[SpanRow]
    finish_reason: str
    certificate: CertificateRow
    group: str | None = None
    reward: float | None = None
    metadata: JsonObject = {}
    routed_experts: RoutedExpertsRow | None = None
    sampling_mask: SamplingMaskRow | None = None


class SampleColumns(msgspec.Struct):
    token_ids: list[int]
    loss_mask: list[MaskBit]
    rollout_logprobs: list[float | None]


def decode(value: JsonValue, kind: type[T], where: str) -> T:
    """Raises FileFormatError with the path of the bad value."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise FileFormatError(f"{where}: {error}") from error


def sample_from_json(data: JsonMapping, where: str = "sample") -> Sample:
    return sample_from_parts(decode(data, SampleHead, where), decode(data, SampleColumns, where), where)


def sample_from_parts(head: SampleHead, columns: SampleColumns, where: str) -> Sample:
    try:
        return Sample(
            sample_id=head.sample_id,
            session_id=head.session_id,
            group=head.group,
            token_ids=TokenIds(columns.token_ids),
            loss_mask=columns.loss_mask,
            rollout_logprobs=columns.rollout_logprobs,
            spans=msgspec.convert(head.spans, tuple[Span, ...], from_attributes=True),
            reward=head.reward,
            finish_reason=head.finish_reason,
            metadata=head.metadata,
            certificate=msgspec.convert(head.certificate, Certificate, from_attributes=True),
            routed_experts=msgspec.convert(head.routed_experts, RoutedExperts | None, from_attributes=True),
            sampling_mask=_mask_from_row(head.sampling_mask),
        )
    except TokenContractError as error:
        raise FileFormatError(f"{where}: {error}") from error


def _mask_from_row(row: SamplingMaskRow | None) -> SamplingMask | None:
    if row is None:
        return None
    return SamplingMask(token_ids=TokenIds.from_bytes(row.token_ids), offsets=TokenIds.from_bytes(row.offsets))
