"""The gateway's settings. Secrets come from the environment."""

from dataclasses import field
from typing import Literal

from tokentrue.images import ImageSettings
from tokentrue.records import record
from tokentrue.sessions.requests import SessionLimits as SessionLimits
from tokentrue.types import AtLeastOne, Count, Positive


@record
class GatewayLimits:
    """Beyond a size: 413; a number or a sum in flight: 429 with Retry-After; a time: a closed connection or 504."""

    body_bytes: AtLeastOne = 64 << 20
    bodies_bytes: AtLeastOne = 512 << 20  # of all requests being read by one process
    head_bytes: AtLeastOne = 256 << 10
    messages: AtLeastOne = 20_000
    in_flight: AtLeastOne = 1024
    in_flight_per_session: AtLeastOne = 64
    queue: Count = 1024
    queue_s: Positive = 10.0
    connections: AtLeastOne = 4096
    message_caches_bytes: AtLeastOne = 512 << 20  # of conversations; `session_limits.conversation_bytes` per session
    live_sessions: AtLeastOne = 4096
    live_sessions_bytes: AtLeastOne = 2 << 30
    idle_session_s: Positive = 3600.0
    session_age_s: Positive = 14 * 86400.0
    free_disk_bytes: AtLeastOne = 64 << 20  # with less free space for the journal, /ready returns 503
    head_s: Positive = 30.0
    body_s: Positive = 300.0
    write_s: Positive = 60.0
    turn_s: Positive = 3600.0
    render_s: Positive = 10.0  # of one rendering; beyond it `serve` kills and restarts the process


@record
class ServingConfig:
    base_url: str = ""
    training: bool = True
    pin: tuple[Literal["system"], ...] = ()  # default for sessions: keeps each conversation's first system prompt
    side_requests: Literal["leave_out", "train"] = "leave_out"  # default for sessions: titles and the like
    keep_alive_s: float = 10.0
    drain_s: float = 30.0
    purge_after_s: float = 30 * 86400.0  # ended sessions older than this are purged


@record
class GatewayConfig(ServingConfig):
    model: str
    admin_key: str
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    images: ImageSettings = field(default_factory=ImageSettings)
    history: Literal["keep", "template"] = "keep"
    pause_wait_s: float = 600.0  # how long a held-back generation waits for /admin/resume
