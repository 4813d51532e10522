"""A gateway with an embedded engine inside this process: the real server on a port of its host, loopback by default.

with BackgroundGateway(model="path/to/model") as gateway:      # in a thread, for synchronous trainers and notebooks
    client = tt.Client(gateway.url, gateway.admin_key)
    gateway.publish(model.state_dict(), version=1)"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tokentrue.app.wiring import (
    ADMIN_KEY,
    EngineConfig,
    ModelConfig,
    ServeConfig,
    ServerConfig,
    gateway_for,
    identify_model,
)
from tokentrue.records import record

if TYPE_CHECKING:
    from torch import Tensor

    from tokentrue.providers.pool import Pool

T = TypeVar("T")

DRAIN_S = 5.0  # after an error, turns without callers must not keep the process alive


@record
class Embedded:
    base_url: str
    provider: "Pool"  # the engine itself, to publish weights to
    admin_key: str


@contextlib.asynccontextmanager
async def embedded_gateway(settings: ServeConfig) -> AsyncGenerator[Embedded]:
    """Serves until the block ends and installs no signal handlers. Generates an admin key if none is set."""
    from tokentrue.gateway.auth import new_admin_key
    from tokentrue.gateway.serving.server import find_url, listen, log_to_stderr, serve_embedded

    log_to_stderr(enabled=False)
    admin_key = os.environ.get(ADMIN_KEY) or new_admin_key()
    settings = await identify_model(settings)
    public = listen(settings.server.host, settings.server.port, admin_key=admin_key)
    base_url = find_url(settings.server.host, public)
    settings = replace(settings, server=replace(settings.server, address=settings.server.address or base_url))
    try:
        gateway = gateway_for(settings, admin_key=admin_key)
    except BaseException:
        public.close()
        raise
    async with serve_embedded(gateway, public, drain_s=DRAIN_S):
        yield Embedded(base_url=base_url, provider=cast("Pool", gateway.provider.inner), admin_key=admin_key)


class BackgroundGateway:
    """Use as a context manager: it sets `url` and `admin_key`. `engine` and `options` are those of `tokentrue serve`;
    `settings` replaces all of them."""

    url: str
    admin_key: str

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: str = "exact",
        store: str = "memory",
        settings: ServeConfig | None = None,
        **options: Any,
    ) -> None:
        chosen = settings or ServeConfig(
            model=ModelConfig(path=model),
            engine=EngineConfig(name=engine, options=options),
            server=ServerConfig(port=0, store=store),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokentrue-gateway", daemon=True)
        self._context = embedded_gateway(chosen)

    def __enter__(self) -> "BackgroundGateway":
        self._thread.start()
        try:
            running = self._run(self._context.__aenter__())
        except BaseException:
            self._stop()
            raise
        self.url, self.admin_key, self._provider = running.base_url, running.admin_key, running.provider
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._context.__aexit__(None, None, None))
        finally:
            self._stop()

    def publish(self, weights: "Mapping[str, Tensor]", *, version: int) -> None:
        """Returns when every later token is sampled from these weights."""
        self._run(self._provider.publish(list(weights.items()), version=version))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
