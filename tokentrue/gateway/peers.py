"""Several workers, one gateway: a session belongs to one worker, found by rendezvous hashing of its id; any worker accepts any
request and hands it to the owner over a Unix socket. A request that came from a peer is never handed on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from tokentrue.gateway.asgi import ClientGone, Receive, Scope, Send, read_body
from tokentrue.gateway.problems import Refused

FROM_PEER = "tokentrue.from_peer"
HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"upgrade", b"te", b"trailer"}


def owner_of(session_id: str, workers: int) -> int:
    """Growing from N to N+1 workers moves one session in N+1."""
    return max(range(workers), key=lambda worker: hashlib.blake2b(f"{session_id}:{worker}".encode(), digest_size=8).digest())


def socket_path(folder: str | Path, worker: int) -> Path:
    return Path(folder) / f"worker-{worker}.sock"


class Peers:
    def __init__(self, *, me: int, workers: int, folder: str, body_limit: int) -> None:
        self.me, self.workers, self._folder, self._limit = me, workers, folder, body_limit
        self._clients: dict[int, aiohttp.ClientSession] = {}

    def owner(self, session_id: str) -> int:
        return owner_of(session_id, self.workers)

    def others(self) -> list[int]:
        return [worker for worker in range(self.workers) if worker != self.me]

    def _client(self, worker: int) -> aiohttp.ClientSession:
        if worker not in self._clients:
            connector = aiohttp.UnixConnector(str(socket_path(self._folder, worker)), limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            self._clients[worker] = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._clients[worker]

    async def forwarded(self, session_id: str, scope: Scope, receive: Receive, send: Send) -> bool:
        """Hands the request to its owner; False where that is this worker."""
        worker = self.owner(session_id)
        if worker == self.me or scope.get(FROM_PEER):
            return False
        body = await read_body(scope, receive, self._limit)
        await self.forward(worker, scope, body, receive, send)
        return True

    async def forward(self, worker: int, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        relay = asyncio.ensure_future(self._relay(worker, scope, body, send))
        gone = asyncio.ensure_future(receive())  # after the body, this returns when the client has left
        try:
            await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not relay.done():
                raise ClientGone
            await relay
        finally:
            gone.cancel()
            if not relay.done():
                relay.cancel()
                await asyncio.wait({relay})

    async def _relay(self, worker: int, scope: Scope, body: bytes, send: Send) -> None:
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in HOP_BY_HOP]
        query = scope.get("query_string", b"").decode("latin-1")
        url = "http://peer" + scope.get("raw_path", scope["path"].encode()).decode("latin-1") + (f"?{query}" if query else "")
        try:
            response = await self._client(worker).request(scope["method"], url, data=body, headers=headers, allow_redirects=False)
        except aiohttp.ClientConnectionError:
            raise Refused(503, "worker_restarting", "the worker of this session restarts; send this again", retry_after_s=1.0) from None
        async with response:
            kept = [(k.lower(), v) for k, v in response.raw_headers if k.lower() not in HOP_BY_HOP or k.lower() == b"content-length"]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            try:
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except aiohttp.ClientError:
                return  # the owner died in mid-answer: the client sees a broken answer, and retries
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask(self, worker: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Any:
        """A question to one peer; None where it does not answer."""
        try:
            async with self._client(worker).request(method, "http://peer" + path, data=body, headers=headers) as response:
                return await response.json(content_type=None) if response.status < 400 else None
        except aiohttp.ClientError:
            return None

    async def ask_all(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> list[Any]:
        return list(await asyncio.gather(*(self.ask(worker, method, path, body, headers) for worker in self.others())))

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


class FromPeer:
    """The same application, for the socket on which only peers speak."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope[FROM_PEER] = True
        await self._app(scope, receive, send)
