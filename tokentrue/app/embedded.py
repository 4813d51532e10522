"""A gateway inside this process: the real server on a port of its host (loopback unless told), for as long as a block
runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from tokentrue.app.wiring import ADMIN_KEY, ServeConfig, gateway_for

DRAIN_S = 5.0  # after an error, turns that nobody waits for must not keep the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    base_url: str
    gateway: Any
    provider: Any  # the engine itself: where weights are published
    admin_key: str


@contextlib.asynccontextmanager
async def embedded_gateway(settings: ServeConfig) -> AsyncGenerator[Embedded, None]:
    """Serves until the block ends; signals stay with the caller. Where no admin key is set, this gateway gets one of
    its own."""
    from tokentrue.gateway.auth import new_admin_key
    from tokentrue.gateway.serving.server import listen, log_to_stderr, serve_embedded, url_of

    log_to_stderr(enabled=False)
    admin_key = os.environ.get(ADMIN_KEY) or new_admin_key()
    public = listen(settings.server.host, settings.server.port, admin_key=admin_key)
    base_url = url_of(settings.server.host, public)
    settings = replace(settings, server=replace(settings.server, address=settings.server.address or base_url))
    try:
        gateway = gateway_for(settings, admin_key=admin_key)
    except BaseException:
        public.close()
        raise
    async with serve_embedded(gateway, public, drain_s=DRAIN_S):
        yield Embedded(base_url=base_url, gateway=gateway, provider=gateway.provider.inner, admin_key=admin_key)
