"""Sessions on a gateway over HTTP: opened by the admin routes, played with the real OpenAI client, closed with a reward."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tokentrue.environments.runner import Plan
from tokentrue.errors import ConfigError, EngineRejected, EngineUnreachable


class GatewaySession:
    """One open session; `client` is an `openai.AsyncOpenAI` that knows its key."""

    def __init__(self, owner: GatewaySessions, session_id: str, client: Any) -> None:
        self.session_id = session_id
        self.client = client
        self._owner = owner

    async def finish(self, reward: float) -> tuple[Sequence[Any], Mapping[str, Any]]:
        await self._owner.call("POST", f"/sessions/{self.session_id}/reward", {"reward": reward})
        answer = await self._owner.call("GET", f"/sessions/{self.session_id}/samples")
        return answer["samples"], answer["coverage"]


class GatewaySessions:
    """A pool of connections to one gateway. Use as an async context manager."""

    def __init__(
        self, base_url: str, *, sampling: Mapping[str, Any], admin_key: str | None = None, purge: bool = False, timeout_s: float = 120.0
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._sampling = dict(sampling)
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._purge = purge
        self._timeout_s = timeout_s
        self._http: Any = None
        self._openai: Any = None

    async def __aenter__(self) -> GatewaySessions:
        import aiohttp

        try:
            import openai
        except ImportError as error:
            raise ConfigError("the OpenAI client is missing: pip install 'tokentrue[train]'") from error
        limits = openai.DefaultAsyncHttpxClient(limits=_limits(), timeout=self._timeout_s)
        self._openai = openai.AsyncOpenAI(base_url=self.base_url, api_key="unset", http_client=limits, max_retries=2)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s), connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._openai.close()
        await self._http.close()

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[GatewaySession]:
        metadata = {"task": plan.task.task_id, "index": plan.index, "rollout": plan.key}
        sampling = {**self._sampling, "seed": plan.seed}
        made = await self.call("POST", "/sessions", {"group": plan.group, "metadata": metadata, "sampling": sampling})
        session_id = made["session_id"]
        client = self._openai.with_options(base_url=made["base_url"], api_key=made["api_key"])
        try:
            yield GatewaySession(self, session_id, client)
        finally:
            await self.call("DELETE", f"/sessions/{session_id}" + ("?purge=true" if self._purge else ""))

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        import aiohttp

        try:
            async with self._http.request(method, self.base_url + path, json=body, headers=self._headers) as answer:
                if answer.status >= 400:
                    raise EngineRejected(f"{method} {path}: the gateway answered {answer.status}: {(await answer.text())[:300]}")
                return await answer.json() if answer.content_type == "application/json" else None
        except aiohttp.ClientConnectionError as error:
            raise EngineUnreachable(f"no gateway at {self.base_url}: {error}") from error


def _limits() -> Any:
    import httpx

    return httpx.Limits(max_connections=None, max_keepalive_connections=256)
