"""Nodes as rows: ids and log-probabilities as raw little-endian bytes (exact), everything else as one JSON object.

A row stores tools only if they differ from the parent's: a tool set of 70 kB is stored once per conversation.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from typing import Any, Literal, cast

from tokentrue.errors import InputError, JournalError, MessageError, SamplingError, SessionNotFound, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import digest, dumps, freeze, loads
from tokentrue.sessions.journal.database import Database
from tokentrue.sessions.tree import Given, Node, ServedRef, float_bytes
from tokentrue.types import (
    Attempt,
    Finish,
    Message,
    PromptSpan,
    RoutedExperts,
    Sampling,
    SamplingMask,
    Status,
    VersionSpan,
)

_DEFAULTS: JsonMapping = {field.name: getattr(Sampling(), field.name) for field in fields(Sampling)}
_OPTIONAL: JsonMapping = {
    "stopped_by": None, "detail": "", "origin": None, "request_key": None, "request_digest": None, "choice": 0,
    "fingerprint": None,
}  # fmt: skip
"""Omitted from a row when they have this value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


def body_from_node(node: Node, parent: Node | None) -> tuple[JsonObject, bytes | None]:
    """The JSON object of a row, and its replay blob."""
    body: JsonObject = {
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
    if parent is None or (node.tools is not parent.tools and digest(node.tools) != digest(parent.tools)):
        body["tools"] = node.tools
    body |= {name: value for name, default in _OPTIONAL.items() if (value := getattr(node, name)) != default}
    if node.edge_reason is not None:
        body["why"] = node.edge_reason
    if node.joined_keys:
        body["joined_keys"] = list(node.joined_keys)
    if node.replaced:
        body["replaced"] = list(node.replaced)
    if node.outcome != "served":
        body["outcome"] = node.outcome
    if node.attempts:
        body["attempts"] = [asdict(attempt) for attempt in node.attempts]
    if node.top_logprobs is not None:
        body["top_logprobs"] = [[[int(k), v] for k, v in top.items()] for top in node.top_logprobs]
    replay, layout = pack_replay(node.routed_experts, node.sampling_mask)
    if layout:
        body["replay"] = layout
    return body, replay


def row_from_body(node: Node, body: JsonMapping, replay: bytes | None) -> Row:
    return Row(
        id=node.id,
        seq=node.seq,
        parent=node.parent,
        given_ids=node.given_ids.tobytes(),
        sampled_ids=node.sampled_ids.tobytes(),
        logprobs=float_bytes(node.logprobs),
        chain=node.chain,
        body=dumps(body),
        routed_experts=replay,
        created=node.created,
    )


def node_from_row(row: Row, parent: Node | None, prompt_digest: bytes | None = None) -> Node:
    """`prompt_digest` is used for rows of releases that did not store it."""
    try:
        return _node(row, cast("JsonObject", loads(row.body)), parent, prompt_digest)
    except (ValueError, KeyError, TypeError, TokenContractError) as error:
        raise JournalError(f"node {row.id} cannot be read back: {error!r}") from error


def _node(row: Row, body: JsonObject, parent: Node | None, prompt_digest: bytes | None) -> Node:
    tops = body.get("top_logprobs")
    routing, mask = unpack_replay(row.routed_experts, body)
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
        edge_reason=body.get("why"),
        detail=body.get("detail", ""),
        replaced=tuple(body.get("replaced", ())),
        origin=body.get("origin"),
        outcome=body.get("outcome", "served"),
        tools=body.get("tools", None if parent is None else parent.tools),
        template_kwargs=body["template_kwargs"],
        sampling=_recorded_sampling(body["sampling"]),
        request_key=body.get("request_key"),
        joined_keys=tuple(body.get("joined_keys", ())),
        request_digest=body.get("request_digest"),
        choice=body.get("choice", 0),
        created=row.created,
        routed_experts=routing,
        sampling_mask=mask,
        top_logprobs=None if tops is None else tuple({int(k): float(v) for k, v in top} for top in tops),
        fingerprint=body.get("fingerprint"),
    )


def pack_replay(routing: RoutedExperts | None, mask: SamplingMask | None) -> tuple[bytes | None, JsonObject]:
    """The blob that a trainer replays (experts, their weights, kept ids, offsets), and its layout."""
    layout: JsonObject = {}
    parts: list[bytes] = []
    if routing is not None:
        layout["routing"] = {
            "start": routing.start,
            "shape": list(routing.shape),
            "weights": routing.weights is not None,
        }
        parts += [routing.data, routing.weights or b""]
    if mask is not None:
        layout["mask"] = {"ids": len(mask.token_ids), "rows": len(mask)}
        parts += [mask.token_ids.tobytes(), mask.offsets.tobytes()]
    if not layout:
        return None, {}
    blob = b"".join(parts)
    return blob, {**layout, "sha256": sha256(blob).hexdigest()}


def unpack_replay(blob: bytes | None, body: JsonMapping) -> tuple[RoutedExperts | None, SamplingMask | None]:
    layout = cast("JsonMapping | None", body.get("replay"))
    if layout is None and blob is not None:  # a row of an older release: experts of the sampled positions only
        return RoutedExperts(shape=tuple(body["routed_shape"]), data=blob, start=body["prompt_length"] - 1), None
    if layout is None:
        return None, None
    if blob is None or sha256(blob).hexdigest() != layout["sha256"]:
        raise ValueError("the recorded routing or sampling mask was changed")
    at, routing, mask = 0, None, None
    if (told := layout.get("routing")) is not None:
        first, second, third = told["shape"]
        size = 2 * first * second * third
        weights = blob[size : 3 * size] if told["weights"] else None
        routing = RoutedExperts(shape=(first, second, third), data=blob[:size], start=told["start"], weights=weights)
        at = size if weights is None else 3 * size
    if (told := layout.get("mask")) is not None:
        cut = at + 4 * told["ids"]
        mask = SamplingMask(token_ids=TokenIds.from_bytes(blob[at:cut]), offsets=TokenIds.from_bytes(blob[cut:]))
    return routing, mask


def _floats_from_bytes(data: bytes) -> array[float]:
    values = array("d")
    values.frombytes(data)
    if sys.byteorder != "little":
        values.byteswap()
    return values


def _attempt(item: JsonMapping) -> Attempt:
    return replace(Attempt(**item), status=Status(item["status"]))


def _given_from_json(item: JsonMapping) -> Given:
    return ServedRef(item["served"]) if "served" in item else cast("Message", item["message"])


def sampling_to_json(sampling: Sampling) -> JsonObject:
    """Only the values that differ from the defaults."""
    values = {name: value for name, default in _DEFAULTS.items() if (value := getattr(sampling, name)) != default}
    return values | {name: list(values[name]) for name in ("stop", "stop_token_ids") if name in values}


def sampling_from_json(values: JsonMapping) -> Sampling:
    return Sampling(**values)


class _OldSampling(Sampling):
    """Accepts values that an earlier release recorded and this one refuses."""

    __slots__ = ()

    def __post_init__(self) -> None:
        self._check_types()


def _recorded_sampling(values: JsonMapping) -> Sampling:
    try:
        return sampling_from_json(values)
    except SamplingError:
        return _OldSampling(**values)


COLUMNS = ("id", "grp", "state", "key_hash", "created", "ended", "body")
RECORD = f"{', '.join(COLUMNS)}, digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    session: float | None = None
    leaves: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: JsonMapping = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session's stored fields, without its nodes.

    `sampling` holds the pinned values, `pin` names the pinned prompts. `key_hash` belongs to its API key and
    `first_key_hash` to the first one, if that was replaced: it verifies signatures on reasoning. `late_keys` maps
    request keys that joined a turn while its nodes were being written to the ids of those nodes.
    """

    id: str
    group: str | None = None
    metadata: JsonMapping = field(default_factory=JsonObject)
    sampling: JsonMapping = field(default_factory=JsonObject)
    history: str = "keep"
    training: bool = True
    pin: tuple[str, ...] = ()
    template: str = ""
    tokenizer: str = ""
    key_hash: str | None = None
    first_key_hash: str | None = None
    state: Literal["open", "ended"] = "open"
    created: float = 0.0
    ended: float | None = None
    rewards: Rewards = field(default_factory=Rewards)
    late_keys: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


def copy_metadata(metadata: JsonMapping | None) -> JsonObject:
    """A checked copy; refuses the reserved key `tokentrue`."""
    if "tokentrue" in (metadata or {}):
        raise MessageError("is reserved; use another name", field="metadata.tokentrue")
    return freeze(metadata or {}, "metadata")


def read_reward(value: Any) -> float:
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise InputError(f"reward: must be a finite number, got {value!r}")
    return reward


def row_digest(values: tuple[Any, ...]) -> bytes:
    """Types included."""
    parts: list[bytes] = []
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        parts += (f"{type(value).__name__}:{len(data)}:".encode(), data)
    return sha256(b"".join(parts)).digest()


def values_from_record(record: SessionRecord) -> tuple[Any, ...]:
    """In the order of `COLUMNS`."""
    rewards = record.rewards
    body: JsonObject = {
        "metadata": record.metadata,
        "sampling": record.sampling,
        "history": record.history,
        "training": record.training,
        "template": record.template,
        "tokenizer": record.tokenizer,
        "rewards": {"session": rewards.session, "leaves": rewards.leaves, "metadata": rewards.metadata},
    }
    if record.first_key_hash is not None:
        body["first_key_hash"] = record.first_key_hash
    if record.pin:
        body["pin"] = list(record.pin)
    if record.late_keys:
        body["late_keys"] = record.late_keys
    ended = None if record.ended is None else float(record.ended)
    return record.id, record.group, record.state, record.key_hash, float(record.created), ended, dumps(body)


def load_record(db: Database, session_id: str) -> SessionRecord:
    row = db.execute(f"SELECT {RECORD} FROM sessions WHERE id=?", (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(f"no session {session_id!r}")
    return record_from_values(row)


def record_from_values(row: tuple[Any, ...]) -> SessionRecord:
    *values, digest = row
    if digest != row_digest(tuple(values)):
        raise JournalError(
            f"the journal is damaged: the row of session {values[0]!r} does not fit its digest; restore it from a backup"
        )
    body = loads(values[6])
    rewards = Rewards(**body.pop("rewards"))
    body["pin"] = tuple(body.get("pin", ()))
    names = ("id", "group", "state", "key_hash", "created", "ended")
    return SessionRecord(**dict(zip(names, values, strict=False)), rewards=rewards, **body)
