"""A gateway with an embedded engine in a thread of this process, for synchronous trainers and notebooks.

with BackgroundGateway(model="path/to/model") as gateway:
    client = tt.Client(gateway.url, gateway.admin_key)
    gateway.publish(model.state_dict(), version=1)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from tokentrue.app.embedded import Embedded, embedded_gateway
from tokentrue.app.wiring import EngineConfig, ModelConfig, ServeConfig, ServerConfig


class BackgroundGateway:
    """Use as a context manager. `engine` and `options` are those of `tokentrue serve`; `settings` stand for all of
    them."""

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
        self._embedded: Embedded | None = None

    def __enter__(self) -> BackgroundGateway:
        self._thread.start()
        try:
            self._embedded = self._run(self._context.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._context.__aexit__(None, None, None))
        finally:
            self._stop()

    @property
    def url(self) -> str:
        return self._running.base_url

    @property
    def admin_key(self) -> str:
        return self._running.admin_key

    def publish(self, weights: Mapping[str, Any], *, version: int) -> None:
        """Returns when every later token is sampled from these weights."""
        self._run(self._running.provider.publish(list(weights.items()), version=version))

    @property
    def _running(self) -> Embedded:
        assert self._embedded is not None, "use BackgroundGateway as a context manager"
        return self._embedded

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
