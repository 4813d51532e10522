"""Nodes as rows: ids and log-probabilities as raw little-endian bytes (exact), everything else as one JSON object.

Tools stand in a row only where they differ from the parent's: a tool set of 70 kB is stored once per conversation.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Any, cast

import orjson

from tokentrue.errors import JournalError
from tokentrue.sessions.chain import little_endian
from tokentrue.sessions.tree import Given, Node, ServedRef
from tokentrue.types import Attempt, Finish, Message, PromptSpan, RoutedExperts, Sampling, Status, TemplateKwargs, VersionSpan

_SETTINGS = tuple(f.name for f in fields(Sampling))
_SETTINGS_OF = attrgetter(*_SETTINGS)
_AT_REST = _SETTINGS_OF(Sampling())
_OPTIONAL = ("stopped_by", "why", "detail", "origin", "request_key", "request_digest", "choice", "fingerprint")
_OPTIONAL_OF = attrgetter(*_OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the nodes table."""

    id: str
    seq: int
    parent: str | None
    given_ids: bytes
    sampled_ids: bytes
    logprobs: bytes
    chain: bytes
    body: bytes
    routed_experts: bytes | None
    created: float


def dumps(value: Any) -> bytes:
    """JSON; text that is no valid UTF-8 (a cut character, a lone surrogate) goes the slow, escaping way."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)


def ids_from(data: bytes) -> array[int]:
    return _array("i", data)


def floats_from(data: bytes) -> array[float]:
    return _array("d", data)


def _array(typecode: str, data: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder != "little":
        values.byteswap()
    return values


def written_before(
    *,
    started: int,
    given: Sequence[Given],
    spans: Sequence[PromptSpan],
    prompt_length: int,
    projection: str,
    dialect: str,
    template_kwargs: TemplateKwargs,
    sampling: Sampling,
) -> bytes:
    """What a row says of a turn whatever is sampled, as JSON: it need not wait for the engine."""
    return dumps(
        {
            "started": started,
            "given": [{"served": item.node} if isinstance(item, ServedRef) else {"message": item} for item in given],
            "spans": [[span.start, span.end, span.role, span.message] for span in spans],
            "prompt_length": prompt_length,
            "projection": projection,
            "dialect": dialect,
            "template_kwargs": template_kwargs,
            "sampling": sampling_to_json(sampling),
        }
    )


def row_from_node(node: Node, parent: Node | None, before: bytes) -> Row:
    """`before` is what `written_before` made of the node's own fields."""
    body: dict[str, Any] = {
        "versions": [[span.start, span.end, span.version] for span in node.versions],
        "finish": node.finish.value,
        "served": node.served,
    }
    if parent is None or node.tools != parent.tools:
        body["tools"] = node.tools
    for name, value in zip(_OPTIONAL, _OPTIONAL_OF(node), strict=True):
        if value not in (None, "", 0):
            body[name] = value
    if node.outcome != "served":
        body["outcome"] = node.outcome
    if node.attempts:
        body["attempts"] = [asdict(attempt) for attempt in node.attempts]
    if node.top_logprobs is not None:
        body["top_logprobs"] = [[[int(k), v] for k, v in top.items()] for top in node.top_logprobs]
    if node.routed_experts is not None:
        body["routed_shape"] = list(node.routed_experts.shape)
    return Row(
        id=node.id,
        seq=node.seq,
        parent=node.parent,
        given_ids=little_endian(node.given_ids),
        sampled_ids=little_endian(node.sampled_ids),
        logprobs=little_endian(node.logprobs),
        chain=node.chain,
        body=before[:-1] + b"," + dumps(body)[1:],
        routed_experts=None if node.routed_experts is None else node.routed_experts.data,
        created=node.created,
    )


def node_from_row(row: Row, parent: Node | None) -> Node:
    try:
        body = cast("dict[str, Any]", loads(row.body))
        return _node(row, body, parent)
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"node {row.id} cannot be read back: {error!r}") from error


def _node(row: Row, body: dict[str, Any], parent: Node | None) -> Node:
    tops = body.get("top_logprobs")
    shape = body.get("routed_shape")
    tools = body.get("tools", None if parent is None else parent.tools)
    return Node(
        id=row.id,
        seq=row.seq,
        started=body["started"],
        parent=row.parent,
        given=tuple(_given(item) for item in body["given"]),
        given_ids=ids_from(row.given_ids),
        given_spans=tuple(PromptSpan(start=s, end=e, role=r, message=m) for s, e, r, m in body["spans"]),
        sampled_ids=ids_from(row.sampled_ids),
        logprobs=floats_from(row.logprobs),
        versions=tuple(VersionSpan(start=s, end=e, version=v) for s, e, v in body["versions"]),
        finish=Finish(body["finish"]),
        served=body["served"],
        chain=row.chain,
        prompt_length=body["prompt_length"],
        stopped_by=body.get("stopped_by"),
        attempts=tuple(_attempt(item) for item in body.get("attempts", ())),
        dialect=body["dialect"],
        projection=body["projection"],
        why=body.get("why"),
        detail=body.get("detail", ""),
        origin=body.get("origin"),
        outcome=body.get("outcome", "served"),
        tools=tools,
        template_kwargs=body["template_kwargs"],
        sampling=sampling_from_json(body["sampling"]),
        request_key=body.get("request_key"),
        request_digest=body.get("request_digest"),
        choice=body.get("choice", 0),
        created=row.created,
        routed_experts=None if shape is None or row.routed_experts is None else RoutedExperts(shape=tuple(shape), data=row.routed_experts),
        top_logprobs=None if tops is None else tuple({int(k): float(v) for k, v in top} for top in tops),
        fingerprint=body.get("fingerprint"),
    )


def _attempt(item: Mapping[str, Any]) -> Attempt:
    return replace(Attempt(**item), status=Status(item["status"]))


def _given(item: Mapping[str, Any]) -> Given:
    return ServedRef(item["served"]) if "served" in item else cast("Message", item["message"])


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """Only what differs from rest."""
    settings = _SETTINGS_OF(sampling)
    return {name: value for name, value, rest in zip(_SETTINGS, settings, _AT_REST, strict=True) if value != rest}


def sampling_from_json(values: Mapping[str, Any]) -> Sampling:
    settings: dict[str, Any] = dict(values)
    for name in ("stop", "stop_token_ids"):
        if name in settings:
            settings[name] = tuple(cast("Sequence[Any]", settings[name]))
    return Sampling(**settings)
