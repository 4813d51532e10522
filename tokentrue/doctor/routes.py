"""An engine's own routes that no provider has: how it renders a conversation, and how it is paused and preempted."""

from __future__ import annotations

from collections.abc import Sequence

from tokentrue.errors import EngineContractError, EngineRejected
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Provider
from tokentrue.providers.remote import EngineHttp, read_tokens


class EngineRoutes:
    """Those of vLLM and of SGLang. An engine in this process, without a URL, has none: None and False say so."""

    _http: EngineHttp | None = None
    _provider: Provider | None = None

    def __init__(self, provider: Provider | None = None, url: str | None = None, *, api_key: str | None = None) -> None:
        if url is not None:
            self._http = EngineHttp(url, timeout_s=120.0, connect_s=5.0, retries=1, api_key=api_key)
            self._provider = provider

    async def tokenize_chat(self, messages: Sequence[JsonMapping]) -> TokenIds | None:
        if self._http is None or self._provider is None:
            return None
        model = (await self._provider.health())["model"]
        body = {"model": model, "messages": list(messages), "add_generation_prompt": True}
        return await read_tokens(self._http, "/tokenize", body)

    async def pause(self) -> bool:
        """Holds every running generation where it is."""
        return await self._post("/pause?mode=keep") or await self._post("/pause_generation", {"mode": "in_place"})

    async def preempt(self) -> bool:
        """Of a paused engine: drops the keys and values of running generations, which are computed again."""
        reset = "/reset_prefix_cache?reset_running_requests=true"
        return await self._post(reset) or await self._post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> bool:
        return await self._post("/resume") or await self._post("/continue_generation")

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _post(self, path: str, body: dict[str, str] | None = None) -> bool:
        if self._http is None:
            return False
        try:
            await self._http.read("POST", path, body or {}, retry=False)
        except (EngineContractError, EngineRejected):
            return False
        return True
