"""Samples as plain JSON objects and back: the documented fields, nothing lost. Log-probabilities survive to the last bit."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokentrue.errors import FileFormatError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.types import Certificate, RoutedExperts, Sample, SamplingMask, Span

_SPAN = ("start", "end", "kind", "role", "turn", "policy_version", "trainable", "why")


def head_to_json(sample: Sample) -> dict[str, Any]:
    """Everything but the three per-token columns."""
    routed = sample.routed_experts
    head: dict[str, Any] = {
        "sample_id": sample.sample_id,
        "session_id": sample.session_id,
        "group": sample.group,
        "spans": [{name: getattr(span, name) for name in _SPAN} for span in sample.spans],
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
        head["sampling_mask"] = {"token_ids": encode_bytes(mask.token_ids.tobytes()), "offsets": encode_bytes(mask.offsets.tobytes())}
    return head


def encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def sample_to_json(sample: Sample) -> dict[str, Any]:
    columns = {"token_ids": list(sample.token_ids), "loss_mask": list(sample.loss_mask), "rollout_logprobs": list(sample.rollout_logprobs)}
    return {**head_to_json(sample), **columns}


def sample_from_json(data: Mapping[str, Any], where: str = "sample") -> Sample:
    columns = [data.get(name) for name in ("token_ids", "loss_mask", "rollout_logprobs")]
    if not all(isinstance(column, Sequence) for column in columns):
        raise FileFormatError(f"{where}: token_ids, loss_mask and rollout_logprobs must be lists")
    return sample_from_parts(data, cast("list[Any]", columns), where)


def sample_from_parts(head: Mapping[str, Any], columns: Sequence[Any], where: str) -> Sample:
    """`columns` are token_ids, loss_mask, rollout_logprobs."""
    try:
        routed, mask = head.get("routed_experts"), head.get("sampling_mask")
        return Sample(
            sample_id=head["sample_id"],
            session_id=head["session_id"],
            group=head.get("group"),
            token_ids=TokenIds(columns[0]),
            loss_mask=columns[1],
            rollout_logprobs=columns[2],
            spans=tuple(Span(**{name: span[name] for name in _SPAN}) for span in head["spans"]),
            reward=head.get("reward"),
            finish_reason=head["finish_reason"],
            metadata=head.get("metadata") or {},
            certificate=Certificate(**{name: head["certificate"][name] for name in ("chain", "template", "tokenizer")}),
            routed_experts=None if routed is None else _routing_from_json(routed),
            sampling_mask=None if mask is None else _mask_from_json(mask),
        )
    except TokenContractError as error:
        raise FileFormatError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise FileFormatError(f"{where}: not a sample: {error!r}") from error


def _routing_from_json(value: Mapping[str, Any]) -> RoutedExperts:
    first, second, third = value["shape"]
    weights = None if value.get("weights") is None else base64.b64decode(value["weights"], validate=True)
    data = base64.b64decode(value["data"], validate=True)
    return RoutedExperts(shape=(first, second, third), data=data, start=value.get("start", 0), weights=weights)


def _mask_from_json(value: Mapping[str, Any]) -> SamplingMask:
    ids, offsets = (TokenIds.from_bytes(base64.b64decode(value[name], validate=True)) for name in ("token_ids", "offsets"))
    return SamplingMask(token_ids=ids, offsets=offsets)
