"""Nodes and session records as rows. Ids and log-probabilities are raw little-endian bytes, everything else is one JSON
object. A row stores tools only if they differ from the parent's."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from tokentrue.errors import (
    EngineContractError,
    InputError,
    JournalError,
    MessageError,
    SamplingError,
    TokenContractError,
)
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import digest, dumps, freeze, loads
from tokentrue.records import record
from tokentrue.sessions.tree import Node, ServedRef
from tokentrue.types import (
    Attempt,
    Finish,
    ImageRun,
    PromptSpan,
    RoutedExperts,
    Sampling,
    SamplingMask,
    Status,
    VersionSpan,
)

_DEFAULTS: JsonMapping = {field.name: getattr(Sampling(), field.name) for field in fields(Sampling)}
# Fields of a node that its JSON has under the same name: always, or unless they have this value.
_ALWAYS = ("started", "prompt_length", "projection", "dialect", "template_kwargs", "served")
_OPTIONAL: JsonMapping = {
    "stopped_by": None, "detail": "", "origin": None, "outcome": "served", "request_key": None, "request_digest": None,
    "choice": 0, "fingerprint": None, "model": None,
}  # fmt: skip
_REPORTED = ("versions", "stopped_by", "replay", "top_logprobs", "fingerprint", "attempts", "served")  # by the engine


class Row(NamedTuple):
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
    body: JsonObject = {
        **{name: getattr(node, name) for name in _ALWAYS},
        **{name: value for name, default in _OPTIONAL.items() if (value := getattr(node, name)) != default},
        "given": [{"served": item.node} if isinstance(item, ServedRef) else {"message": item} for item in node.given],
        "spans": [[span.start, span.end, span.role, span.message] for span in node.given_spans],
        "prompt_sha256": node.prompt_digest.hex(),
        "sampling": sampling_to_json(node.sampling),
        "versions": [[span.start, span.end, span.version] for span in node.versions],
        "finish": node.finish.value,
    }
    if parent is None or (node.tools is not parent.tools and digest(node.tools) != digest(parent.tools)):
        body["tools"] = node.tools
    if node.top_logprobs is not None:
        body["top_logprobs"] = [[[int(k), v] for k, v in top.items()] for top in node.top_logprobs]
    replay, layout = pack_replay(node.routed_experts, node.sampling_mask)
    rare: JsonObject = {
        "why": node.edge_reason,
        "joined_keys": list(node.joined_keys),
        "replaced": list(node.replaced),
        "images": [[run.sha256, run.start, run.count, list(run.grid), run.processor] for run in node.images],
        "attempts": [asdict(attempt) for attempt in node.attempts],
        "replay": layout,
    }
    body |= {name: value for name, value in rare.items() if value}
    try:
        data = dumps(body)
    except (TypeError, ValueError) as error:
        raise MessageError(f"messages and tools must be plain JSON values: {error}", field="messages") from error
    reread = loads(data)
    if reread != body:
        name = next(name for name in body if reread.get(name, ...) != body[name])
        if name in _REPORTED:
            raise EngineContractError(f"the engine's {name} cannot be recorded exactly: {body[name]!r}")
        raise MessageError("cannot be recorded exactly; send plain JSON values", field=name)
    ids, logprobs = (node.given_ids.tobytes(), node.sampled_ids.tobytes()), node.logprobs.tobytes()
    return Row(node.id, node.seq, node.parent, *ids, logprobs, node.chain, data, replay, node.created)


def node_from_row(row: Row, parent: Node | None, prompt_digest: bytes | None = None) -> Node:
    try:
        return _node_from_body(row, loads(row.body), parent, prompt_digest)
    except (ValueError, KeyError, TypeError, TokenContractError) as error:
        raise JournalError(f"node {row.id} cannot be read back: {error!r}") from error


def _node_from_body(row: Row, body: JsonObject, parent: Node | None, prompt_digest: bytes | None) -> Node:
    tops = body.get("top_logprobs")
    routing, mask = unpack_replay(row.routed_experts, body)
    if "prompt_sha256" in body or prompt_digest is None:
        prompt_digest = bytes.fromhex(body["prompt_sha256"])
    try:
        sampling = Sampling(**body["sampling"])
    except SamplingError:
        sampling = _OldSampling(**body["sampling"])
    return Node(
        id=row.id,
        seq=row.seq,
        parent=row.parent,
        given=tuple(ServedRef(item["served"]) if "served" in item else item["message"] for item in body["given"]),
        given_ids=TokenIds.from_bytes(row.given_ids),
        given_spans=tuple(PromptSpan(start=s, end=e, role=r, message=m) for s, e, r, m in body["spans"]),
        sampled_ids=TokenIds.from_bytes(row.sampled_ids),
        logprobs=array("d", row.logprobs),
        versions=tuple(VersionSpan(start=s, end=e, version=v) for s, e, v in body["versions"]),
        finish=Finish(body["finish"]),
        chain=row.chain,
        prompt_digest=prompt_digest,
        attempts=tuple(Attempt(**item | {"status": Status(item["status"])}) for item in body.get("attempts", ())),
        edge_reason=body.get("why"),
        replaced=tuple(body.get("replaced", ())),
        tools=body.get("tools", None if parent is None else parent.tools),
        sampling=sampling,
        joined_keys=tuple(body.get("joined_keys", ())),
        created=row.created,
        images=tuple(
            ImageRun(sha256=name, start=start, count=count, grid=tuple(grid), processor=processor)
            for name, start, count, grid, processor in body.get("images", ())
        ),
        routed_experts=routing,
        sampling_mask=mask,
        top_logprobs=None if tops is None else tuple({int(k): float(v) for k, v in top} for top in tops),
        **{name: body[name] for name in (*_ALWAYS, *_OPTIONAL) if name in body},
    )


def pack_replay(routing: RoutedExperts | None, mask: SamplingMask | None) -> tuple[bytes | None, JsonObject]:
    """The blob that a trainer replays (experts, their weights, kept ids, offsets), and its layout."""
    layout: JsonObject = {}
    blob = b""
    if routing is not None:
        has_weights = routing.weights is not None
        layout["routing"] = {"start": routing.start, "shape": list(routing.shape), "weights": has_weights}
        blob = routing.data + (routing.weights or b"")
    if mask is not None:
        layout["mask"] = {"ids": len(mask.token_ids), "rows": len(mask)}
        blob += mask.token_ids.tobytes() + mask.offsets.tobytes()
    return (blob, {**layout, "sha256": sha256(blob).hexdigest()}) if layout else (None, {})


def unpack_replay(blob: bytes | None, body: JsonMapping) -> tuple[RoutedExperts | None, SamplingMask | None]:
    layout = body.get("replay")
    if layout is None and blob is not None:  # a row of an older release: experts of the sampled positions only
        return RoutedExperts(shape=tuple(body["routed_shape"]), data=blob, start=body["prompt_length"] - 1), None
    if layout is None:
        return None, None
    if blob is None or sha256(blob).hexdigest() != layout["sha256"]:
        raise ValueError("the recorded routing or sampling mask was changed")
    at, routing, mask = 0, None, None
    if (table := layout.get("routing")) is not None:
        size = 2 * math.prod(table["shape"])
        weights = blob[size : 3 * size] if table["weights"] else None
        routing = RoutedExperts(shape=tuple(table["shape"]), data=blob[:size], start=table["start"], weights=weights)
        at = size if weights is None else 3 * size
    if (rows := layout.get("mask")) is not None:
        cut = at + 4 * rows["ids"]
        mask = SamplingMask(token_ids=TokenIds.from_bytes(blob[at:cut]), offsets=TokenIds.from_bytes(blob[cut:]))
    return routing, mask


def sampling_to_json(sampling: Sampling) -> JsonObject:
    values = {name: value for name, default in _DEFAULTS.items() if (value := getattr(sampling, name)) != default}
    return values | {name: list(values[name]) for name in ("stop", "stop_token_ids") if name in values}


class _OldSampling(Sampling):
    """Accepts values that an earlier release recorded and this one refuses."""

    __slots__ = ()

    def __post_init__(self) -> None:
        self._copy_stops()


@record
class Rewards:
    session: float | None = None
    leaves: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: JsonMapping = field(default_factory=JsonObject)


@record
class SessionRecord:
    """`sampling`: the pinned values; `pin`: the pinned prompts. `first_key_hash` verifies signatures on reasoning after
    the API key was replaced. `late_keys`: request keys that joined a turn while its nodes were being written."""

    id: str
    group: str | None = None
    metadata: JsonMapping = field(default_factory=JsonObject)
    sampling: JsonMapping = field(default_factory=JsonObject)
    history: str = "keep"
    training: bool = True
    pin: tuple[str, ...] = ()
    side_requests: str = "leave_out"
    template: str = ""
    tokenizer: str = ""
    key_hash: str | None = None
    first_key_hash: str | None = None
    state: Literal["open", "ended"] = "open"
    created: float = 0.0
    ended: float | None = None
    rewards: Rewards = field(default_factory=Rewards)
    late_keys: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


COLUMNS = ("id", "grp", "state", "key_hash", "created", "ended", "body")
RECORD = f"{', '.join(COLUMNS)}, digest"


def values_from_record(record: SessionRecord) -> tuple[Any, ...]:
    stored = ("metadata", "sampling", "history", "training", "template", "tokenizer")
    body: JsonObject = {name: getattr(record, name) for name in stored}
    body |= {name: value for name in ("first_key_hash", "pin", "late_keys") if (value := getattr(record, name))}
    if record.side_requests != "leave_out":
        body["side_requests"] = record.side_requests
    body["rewards"] = asdict(record.rewards)
    ended = None if record.ended is None else float(record.ended)
    values = (record.id, record.group, record.state, record.key_hash, float(record.created), ended, dumps(body))
    return *values, row_digest(values)


def record_from_values(row: tuple[Any, ...]) -> SessionRecord:
    *values, digest = row
    if digest != row_digest(values):
        raise damaged(f"the row of session {values[0]!r} does not fit its digest")
    body = loads(values.pop())
    body |= {"rewards": Rewards(**body["rewards"]), "pin": tuple(body.get("pin", ()))}
    return SessionRecord(
        **dict(zip(("id", "group", "state", "key_hash", "created", "ended"), values, strict=True)), **body
    )


def damaged(what: str, *, journal: str = "") -> JournalError:
    return JournalError(f"the journal {journal and f'{journal} '}is damaged: {what}; restore it from a backup")


def row_digest(values: Sequence[Any]) -> bytes:
    parts: list[bytes] = []
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        parts += (f"{type(value).__name__}:{len(data)}:".encode(), data)
    return sha256(b"".join(parts)).digest()


def copy_metadata(metadata: JsonMapping | None) -> JsonObject:
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
