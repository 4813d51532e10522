"""An engine's own routes that no provider has: how it renders a conversation, and how it is paused and preempted."""

from __future__ import annotations

from collections.abc import Sequence

from tokentrue.errors import EngineContractError, EngineRejected
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Provider
from tokentrue.providers.remote import EngineHttp, read_tokens


class EngineRoutes:
    """An engine in this process, which has none of them: None and False say so."""

    async def tokenize_chat(self, messages: Sequence[JsonMapping]) -> TokenIds | None:
        return None

    async def pause(self) -> bool:
        """Holds every running generation where it is."""
        return False

    async def preempt(self) -> bool:
        """Of a paused engine: drops the keys and values of running generations, which are computed again."""
        return False

    async def resume(self) -> bool:
        return False

    async def close(self) -> None:
        pass


class HttpRoutes(EngineRoutes):
    """Of vLLM and of SGLang."""

    def __init__(self, provider: Provider, url: str, *, api_key: str | None = None) -> None:
        self._provider = provider
        self._http = EngineHttp(url, timeout_s=120.0, connect_s=5.0, retries=1, api_key=api_key)

    async def tokenize_chat(self, messages: Sequence[JsonMapping]) -> TokenIds | None:
        model = (await self._provider.health())["model"]
        body = {"model": model, "messages": list(messages), "add_generation_prompt": True}
        return await read_tokens(self._http, "/tokenize", body)

    async def pause(self) -> bool:
        return await self._post("/pause?mode=keep") or await self._post("/pause_generation", {"mode": "in_place"})

    async def preempt(self) -> bool:
        reset = "/reset_prefix_cache?reset_running_requests=true"
        return await self._post(reset) or await self._post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> bool:
        return await self._post("/resume") or await self._post("/continue_generation")

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, path: str, body: dict[str, str] | None = None) -> bool:
        try:
            await self._http.read("POST", path, body or {}, retry=False)
        except (EngineContractError, EngineRejected):
            return False
        return True


def routes_for(provider: Provider, url: str | None, *, api_key: str | None = None) -> EngineRoutes:
    return EngineRoutes() if url is None else HttpRoutes(provider, url, api_key=api_key)
