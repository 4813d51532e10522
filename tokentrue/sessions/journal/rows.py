"""Nodes as rows: ids and log-probabilities as raw little-endian bytes (exact), everything else as one JSON object.

Tools stand in a row only where they differ from the parent's: a tool set of 70 kB is stored once per conversation.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from tokentrue.errors import JournalError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.sessions.certificate import float_bytes
from tokentrue.sessions.plain_json import digest, dumps, loads
from tokentrue.sessions.tree import Given, Node, ServedRef
from tokentrue.types import Attempt, Finish, Message, PromptSpan, RoutedExperts, Sampling, Status, VersionSpan

_SETTINGS = tuple(f.name for f in fields(Sampling))
_OPTIONAL: Mapping[str, Any] = {
    "stopped_by": None, "why": None, "detail": "", "origin": None, "request_key": None, "request_digest": None, "choice": 0,
    "fingerprint": None,
}  # fmt: skip
"""Left out of a row where they have this value."""


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


def row_from_node(node: Node, parent: Node | None) -> Row:
    body: dict[str, Any] = {
        "started": node.started,
        "given": [{"served": item.node} if isinstance(item, ServedRef) else {"message": item} for item in node.given],
        "spans": [[span.start, span.end, span.role, span.message] for span in node.given_spans],
        "prompt_length": node.prompt_length,
        "prompt_sha256": node.prompt_digest.hex(),
        "projection": node.projection,
        "dialect": node.dialect,
        "template_kwargs": node.template_kwargs,
        "sampling": sampling_to_json(node.sampling),
        "versions": [[span.start, span.end, span.version] for span in node.versions],
        "finish": node.finish.value,
        "served": node.served,
    }
    if parent is None or digest(node.tools) != digest(parent.tools):
        body["tools"] = node.tools
    body |= {name: value for name, default in _OPTIONAL.items() if (value := getattr(node, name)) != default}
    if node.joined_keys:
        body["joined_keys"] = list(node.joined_keys)
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
        given_ids=node.given_ids.tobytes(),
        sampled_ids=node.sampled_ids.tobytes(),
        logprobs=float_bytes(node.logprobs),
        chain=node.chain,
        body=dumps(body),
        routed_experts=None if node.routed_experts is None else node.routed_experts.data,
        created=node.created,
    )


def node_from_row(row: Row, parent: Node | None, prompt_digest: bytes | None = None) -> Node:
    """`prompt_digest` stands in where the row is older than the record of it."""
    try:
        return _node(row, cast("dict[str, Any]", loads(row.body)), parent, prompt_digest)
    except (ValueError, KeyError, TypeError, TokenContractError) as error:
        raise JournalError(f"node {row.id} cannot be read back: {error!r}") from error


def _node(row: Row, body: dict[str, Any], parent: Node | None, prompt_digest: bytes | None) -> Node:
    tops, shape = body.get("top_logprobs"), body.get("routed_shape")
    sent = bytes.fromhex(body["prompt_sha256"]) if "prompt_sha256" in body or prompt_digest is None else prompt_digest
    return Node(
        id=row.id,
        seq=row.seq,
        started=body["started"],
        parent=row.parent,
        given=tuple(_given_from_json(item) for item in body["given"]),
        given_ids=TokenIds.from_bytes(row.given_ids),
        given_spans=tuple(PromptSpan(start=s, end=e, role=r, message=m) for s, e, r, m in body["spans"]),
        sampled_ids=TokenIds.from_bytes(row.sampled_ids),
        logprobs=_floats_from_bytes(row.logprobs),
        versions=tuple(VersionSpan(start=s, end=e, version=v) for s, e, v in body["versions"]),
        finish=Finish(body["finish"]),
        served=body["served"],
        chain=row.chain,
        prompt_length=body["prompt_length"],
        prompt_digest=sent,
        stopped_by=body.get("stopped_by"),
        attempts=tuple(_attempt(item) for item in body.get("attempts", ())),
        dialect=body["dialect"],
        projection=body["projection"],
        why=body.get("why"),
        detail=body.get("detail", ""),
        origin=body.get("origin"),
        outcome=body.get("outcome", "served"),
        tools=body.get("tools", None if parent is None else parent.tools),
        template_kwargs=body["template_kwargs"],
        sampling=sampling_from_json(body["sampling"]),
        request_key=body.get("request_key"),
        joined_keys=tuple(body.get("joined_keys", ())),
        request_digest=body.get("request_digest"),
        choice=body.get("choice", 0),
        created=row.created,
        routed_experts=None if shape is None or row.routed_experts is None else RoutedExperts(shape=tuple(shape), data=row.routed_experts),
        top_logprobs=None if tops is None else tuple({int(k): float(v) for k, v in top} for top in tops),
        fingerprint=body.get("fingerprint"),
    )


def _floats_from_bytes(data: bytes) -> array[float]:
    values = array("d")
    values.frombytes(data)
    if sys.byteorder != "little":
        values.byteswap()
    return values


def _attempt(item: Mapping[str, Any]) -> Attempt:
    return replace(Attempt(**item), status=Status(item["status"]))


def _given_from_json(item: Mapping[str, Any]) -> Given:
    return ServedRef(item["served"]) if "served" in item else cast("Message", item["message"])


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """Only what differs from the defaults."""
    defaults = Sampling()
    return {name: value for name in _SETTINGS if (value := getattr(sampling, name)) != getattr(defaults, name)}


def sampling_from_json(values: Mapping[str, Any]) -> Sampling:
    settings: dict[str, Any] = dict(values)
    for name in ("stop", "stop_token_ids"):
        if name in settings:
            settings[name] = tuple(cast("Sequence[Any]", settings[name]))
    return Sampling(**settings)
