"""A gateway inside this process: the real server on a port of its host (loopback unless told), for as long as a block runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tokentrue.app.wiring import ADMIN_KEY, ServeConfig, gateway_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    base_url: str
    gateway: Any
    provider: Any  # the engine itself: where weights are published
    admin_key: str | None


@contextlib.asynccontextmanager
async def embedded_gateway(settings: ServeConfig) -> AsyncIterator[Embedded]:
    """Serves until the block ends; signals stay with the caller."""
    import uvicorn

    from tokentrue.gateway.server import listen, log_to_stderr

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    log_to_stderr(enabled=False)
    admin_key = os.environ.get(ADMIN_KEY) or None
    public = listen(settings.server.host, settings.server.port, admin_key=admin_key is not None)
    gateway = gateway_for(settings)
    config = uvicorn.Config(
        gateway,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=5,  # after an error, turns that nobody waits for must not keep the process
    )
    server = Quiet(config)
    running = asyncio.ensure_future(server.serve(sockets=[public]))
    while not server.started and not running.done():
        await asyncio.sleep(0.005)
    if running.done():
        await running
        raise RuntimeError("the gateway ended before it began")
    try:
        base_url = f"http://{settings.server.host}:{public.getsockname()[1]}"
        yield Embedded(base_url=base_url, gateway=gateway, provider=gateway.provider.inner, admin_key=admin_key)
    finally:
        server.should_exit = True
        await running
