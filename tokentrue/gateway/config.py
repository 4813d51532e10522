"""What the gateway is told: names, keys, limits. Secrets come from the environment, by way of the command line's wiring."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from tokentrue.errors import ConfigError
from tokentrue.sessions.limits import Limits as SessionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Past a size: 413; past a number in flight: 429 with Retry-After."""

    body_bytes: int = 64 << 20
    messages: int = 20_000
    in_flight: int = 1024
    in_flight_per_session: int = 64
    session_age_s: float = 14 * 86400.0
    live_sessions: int = 4096  # kept in memory; the others wait in the journal

    def __post_init__(self) -> None:
        for field_ in fields(self):
            if getattr(self, field_.name) <= 0:
                raise ConfigError(f"limits.{field_.name} must be positive, got {getattr(self, field_.name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """`model` is the name that /v1/models shows. `admin_key=None` leaves administration open, which only a loopback address may do."""

    model: str
    admin_key: str | None = None
    base_url: str = ""
    limits: Limits = field(default_factory=Limits)
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    history: Literal["keep", "template"] = "keep"
    training: bool = True
    keep_alive_s: float = 10.0
    pause_wait_s: float = 600.0  # how long a held-back generation waits for /admin/resume
    drain_s: float = 30.0
    purge_after_s: float = 30 * 86400.0  # ended sessions older than this leave the journal
