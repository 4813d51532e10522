"""What is known of a session besides its nodes, and its row in the sessions table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from tokentrue.errors import InputError, JournalError, MessageError, SessionNotFound
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import dumps, freeze, loads
from tokentrue.sessions.journal.database import Database

COLUMNS = ("id", "grp", "state", "key_hash", "created", "ended", "body")
RECORD = f"{', '.join(COLUMNS)}, digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """`session` is the reward of the whole session; `leaves` those of single leaves; both carry free metadata."""

    session: float | None = None
    leaves: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: JsonMapping = field(default_factory=JsonObject)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """What is stored of a session besides its nodes.

    `sampling` holds the pinned values, `pin` names the pinned prompts. `key_hash` is that of its API key,
    `first_key_hash` that of its first one, where it was replaced: signatures on reasoning are verified with it.
    `late_keys` are request keys that joined a turn while its nodes were being written, with the ids of those nodes.
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
    """The user's own, checked before it is stored. Samples keep their own data under `tokentrue`."""
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
    """Of a row's columns, types included: a flipped bit anywhere in them changes it."""
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
    """From what `RECORD` selects."""
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
