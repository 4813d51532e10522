"""Converts samples to plain JSON objects and back, losslessly; errors name the path (`$.spans[3].start`)."""

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec

from tokentrue.errors import FileFormatError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.types import Sample, Span

T = TypeVar("T")


def head_to_json(sample: Sample) -> JsonObject:
    """All but the three per-token columns; optional ones only where a sample has them."""
    head: JsonObject = {"sample_id": sample.sample_id, "session_id": sample.session_id, "group": sample.group}
    head |= {"spans": list(map(_plain, sample.spans)), "reward": sample.reward, "finish_reason": sample.finish_reason}
    head |= {"metadata": sample.metadata, "certificate": _plain(sample.certificate)}
    if sample.images:
        head["images"] = list(map(_plain, sample.images))
    for name in ("routed_experts", "sampling_mask", "top_logprobs"):
        if (value := getattr(sample, name)) is not None:
            head[name] = _plain(value)
    return head


def _plain(value: object) -> JsonValue:
    """JSON values; bytes, and ids within records, in base64."""
    return msgspec.to_builtins(value, enc_hook=lambda ids: encode_bytes(ids.tobytes()))


def encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def spread_spans(sample: Sample, value: Callable[[Span], T], fill: T) -> list[T]:
    """A value for each token from its span; in a damaged file a span may begin or end beyond the tokens."""
    found = [fill] * len(sample.token_ids)
    for span in sample.spans:
        start, end = (min(at, len(found)) for at in (span.start, span.end))
        found[start:end] = [value(span)] * (end - start)
    return found


def sample_to_json(sample: Sample) -> JsonObject:
    return {
        **head_to_json(sample),
        "token_ids": list(sample.token_ids),
        "loss_mask": list(sample.loss_mask),
        "rollout_logprobs": list(sample.rollout_logprobs),
    }


def decode(value: JsonValue, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind, dec_hook=_decode_ids)
    except (msgspec.ValidationError, UnicodeEncodeError, TokenContractError) as error:
        raise FileFormatError(f"{where}: {error}") from error


def _decode_ids(kind: type, value: str) -> TokenIds:
    return TokenIds.from_bytes(msgspec.convert(value, bytes))


def sample_from_json(data: JsonMapping, where: str = "sample") -> Sample:
    images = () if data.get("images") is None else data["images"]  # a table has null for none
    sample = decode({**data, "images": images}, Sample, where)
    try:
        return replace(sample, token_ids=TokenIds(sample.token_ids))
    except TokenContractError as error:
        raise FileFormatError(f"{where}: {error}") from error
