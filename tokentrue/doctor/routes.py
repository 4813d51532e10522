"""An engine's own routes beside generation: how it tokenises, which model it serves, its log-probabilities of a prompt.

Engines in this process take ids only; `NoRoutes` stands for them, and a probe that needs a route then cannot tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokentrue.errors import EngineContractError, EngineError, EngineRejected
from tokentrue.protocols import Provider
from tokentrue.providers.transport.http import EngineHttp
from tokentrue.providers.transport.scoring import ROUTE, prompt_logprobs_in, prompt_scoring_body
from tokentrue.types import Sampling


class EngineRoutes(Protocol):
    """Each returns None where the engine has no such route."""

    async def tokenize(self, text: str) -> list[int] | None: ...

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None: ...

    async def prompt_logprobs(self, ids: Sequence[int]) -> list[float] | None:
        """Of `ids[1:]`."""
        ...

    async def facts(self) -> Mapping[str, str]: ...

    async def pause(self) -> bool:
        """Holds every running generation where it is. False: no such route."""
        ...

    async def preempt(self) -> bool:
        """Of a paused engine: drops the keys and values of running generations, which are computed again. False: no such route."""
        ...

    async def resume(self) -> bool: ...

    async def close(self) -> None: ...


class NoRoutes:
    """An engine in this process. The exact engine gives prompt log-probabilities through its provider."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def tokenize(self, text: str) -> list[int] | None:
        return None

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        return None

    async def prompt_logprobs(self, ids: Sequence[int]) -> list[float] | None:
        if self._provider.name != "exact":
            return None
        found = await self._provider.generate(ids, Sampling(max_tokens=1, extra={"prompt_logprobs": True}))
        return None if found.prompt_logprobs is None else list(found.prompt_logprobs)

    async def facts(self) -> Mapping[str, str]:
        return {}

    async def pause(self) -> bool:
        return False

    async def preempt(self) -> bool:
        return False

    async def resume(self) -> bool:
        return False

    async def close(self) -> None:
        pass


class HttpRoutes:
    """What vLLM and SGLang serve under the same names; a route that is missing there is reported as None."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._http = EngineHttp(url, timeout_s=120.0, connect_s=5.0, retries=1, api_key=api_key)
        self._model: str | None = None

    async def tokenize(self, text: str) -> list[int] | None:
        return _ids_in(await self._ask("/tokenize", {"prompt": text, "add_special_tokens": False}))

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        return _ids_in(await self._ask("/tokenize", {"messages": list(messages), "add_generation_prompt": True}))

    async def prompt_logprobs(self, ids: Sequence[int]) -> list[float] | None:
        return prompt_logprobs_in(await self._ask(ROUTE, prompt_scoring_body(ids)), ids)

    async def facts(self) -> Mapping[str, str]:
        answer = await self._ask("/v1/models", None)
        models = answer.get("data") if answer else None
        if not models:
            return {}
        keys = ("id", "root", "max_model_len")
        return {f"engine {key}": str(models[0][key]) for key in keys if models[0].get(key) is not None}

    async def pause(self) -> bool:
        return await self._post("/pause?mode=keep") or await self._post("/pause_generation", {"mode": "in_place"})

    async def preempt(self) -> bool:
        reset = "/reset_prefix_cache?reset_running_requests=true"
        return await self._post(reset) or await self._post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> bool:
        return await self._post("/resume") or await self._post("/continue_generation")

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> bool:
        try:
            await self._http.read("POST", path, body or {}, retry=False)
        except (EngineContractError, EngineRejected):
            return False
        return True

    async def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """The answer as JSON; None where the route is missing or does not take this request."""
        try:
            if body is not None:
                body = {"model": await self._served_model(), **body}
            data = await self._http.read("GET" if body is None else "POST", path, body, retry=False)
            found: Any = json.loads(data)
        except (EngineContractError, EngineRejected, ValueError):
            return None
        return found if isinstance(found, dict) else None

    async def _served_model(self) -> str:
        if self._model is None:
            try:
                found: Any = json.loads(await self._http.read("GET", "/v1/models", retry=False))
                self._model = str(found["data"][0]["id"])
            except (EngineError, ValueError, KeyError, IndexError, TypeError):
                self._model = "default"
        return self._model


def routes_for(provider: Provider, url: str | None, *, api_key: str | None = None) -> EngineRoutes:
    return NoRoutes(provider) if url is None else HttpRoutes(url, api_key=api_key)


def _ids_in(answer: dict[str, Any] | None) -> list[int] | None:
    ids: Any = answer.get("tokens") if answer else None
    return [int(i) for i in ids] if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else None
