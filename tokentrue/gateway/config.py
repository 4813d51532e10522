"""The gateway's settings: names, keys, limits, deadlines. Secrets come from the environment, through the wiring of the
command line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from tokentrue.errors import ConfigError
from tokentrue.sessions.limits import SessionLimits as SessionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Past a size: 413; past a number or a sum in flight: 429 with Retry-After; past a time: the connection is closed,
    or 504.

    Byte limits of one process: `bodies_bytes` for request bodies being read, `message_caches_bytes` for conversations
    that are kept (`session_limits.conversation_bytes` for those of one session), `live_sessions_bytes` for the records of sessions in memory. A session that leaves the memory is in
    the journal.
    """

    body_bytes: int = 64 << 20
    bodies_bytes: int = 512 << 20
    head_bytes: int = 256 << 10
    messages: int = 20_000
    in_flight: int = 1024
    in_flight_per_session: int = 64
    queue: int = 1024
    queue_s: float = 10.0
    connections: int = 4096
    message_caches_bytes: int = 512 << 20
    live_sessions: int = 4096
    live_sessions_bytes: int = 2 << 30
    idle_session_s: float = 3600.0
    session_age_s: float = 14 * 86400.0
    free_disk_bytes: int = 64 << 20  # with less where the journal is, /ready says 503
    head_s: float = 30.0
    body_s: float = 300.0
    write_s: float = 60.0
    turn_s: float = 3600.0
    render_s: float = 10.0  # one rendering of the chat template; past it `serve` ends its process and starts again

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if value < 0 or (value == 0 and field_.name != "queue"):
                raise ConfigError(f"limits.{field_.name} must be positive, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """`model` is the name that /v1/models shows. `admin_key` opens `/sessions*` and `/admin*`."""

    model: str
    admin_key: str
    base_url: str = ""
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    history: Literal["keep", "template"] = "keep"
    training: bool = True
    pin: tuple[
        str, ...
    ] = ()  # of sessions that do not say: ("system",) keeps the first system prompt of each conversation
    keep_alive_s: float = 10.0
    pause_wait_s: float = 600.0  # how long a held-back generation waits for /admin/resume
    drain_s: float = 30.0
    purge_after_s: float = 30 * 86400.0  # ended sessions older than this leave the journal
