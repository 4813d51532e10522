"""Links between the workers of one gateway. A session belongs to one worker, found by rendezvous hashing of its id; any
worker accepts any request and forwards it to the owner over a Unix socket. A request that came from another worker is
never forwarded again.

Bodies are passed on part by part: the owner checks the key before it reads one, and no worker holds a body that is not
its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from tokentrue.gateway.asgi import ClientGone, Receive, Scope, Send
from tokentrue.gateway.problems import HttpError
from tokentrue.json_types import JsonObject

FROM_WORKER = "tokentrue.from_worker"
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"content-length",
    b"upgrade",
    b"te",
    b"trailer",
    b"expect",
}
ASK_S = 5.0


def owner_of(session_id: str, workers: int) -> int:
    """Growing from N to N+1 workers moves one session in N+1."""
    return max(
        range(workers), key=lambda worker: hashlib.blake2b(f"{session_id}:{worker}".encode(), digest_size=8).digest()
    )


def socket_path(folder: str | Path, worker: int) -> Path:
    return Path(folder) / f"worker-{worker}.sock"


class WorkerLinks:
    """The other workers, as worker `me` sees them."""

    def __init__(self, *, me: int, workers: int, folder: str) -> None:
        self.me, self.workers, self._folder = me, workers, folder
        self._clients: dict[int, aiohttp.ClientSession] = {}

    def owner(self, session_id: str) -> int:
        return owner_of(session_id, self.workers)

    def is_owner(self, session_id: str, scope: Scope) -> bool:
        """True where this worker answers for the session: it is the owner, or the request was forwarded to it."""
        return self.owner(session_id) == self.me or bool(scope.get(FROM_WORKER))

    def _client(self, worker: int) -> aiohttp.ClientSession:
        if worker not in self._clients:
            connector = aiohttp.UnixConnector(str(socket_path(self._folder, worker)), limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            self._clients[worker] = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._clients[worker]

    async def forward(
        self, session_id: str, scope: Scope, receive: Receive, send: Send, body: bytes | None = None
    ) -> None:
        """Forwards a request to its owner and the answer back. `body` is given where this worker has read it
        already."""
        client = self._client(self.owner(session_id))
        restarting = HttpError(
            503, "worker_restarting", "the worker of this session restarts; send this again", retry_after_s=1.0
        )
        await forward_request(client, "http://worker", scope, receive, send, body, unreachable=restarting)

    async def ask(
        self, worker: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Any:
        """A question to one worker; None where it does not answer in time."""
        timeout = aiohttp.ClientTimeout(total=None if method == "POST" else ASK_S)
        client, url = self._client(worker), "http://worker" + path
        try:
            async with client.request(method, url, data=body, headers=headers, timeout=timeout) as response:
                return await response.json(content_type=None) if response.status < 400 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def ask_all(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> list[Any]:
        others = [worker for worker in range(self.workers) if worker != self.me]
        return list(await asyncio.gather(*(self.ask(worker, method, path, body, headers) for worker in others)))

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


async def forward_request(
    client: aiohttp.ClientSession,
    base: str,
    scope: Scope,
    receive: Receive,
    send: Send,
    body: bytes | None,
    *headers: tuple[str, str],
    unreachable: HttpError,
) -> None:
    """Raises `unreachable` where the owner does not answer."""
    body_sent = asyncio.Event()
    parts = whole_part(body, body_sent) if body is not None else body_parts(receive, body_sent)

    async def watch() -> None:
        """Returns when the client has disconnected, which `receive` tells after the body."""
        await body_sent.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    relay = asyncio.create_task(relay_request(client, base, scope, parts, send, *headers, unreachable=unreachable))
    gone = asyncio.create_task(watch())
    try:
        await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not relay.done():
            raise ClientGone
        await relay
    finally:
        for task in (relay, gone):
            task.cancel()
        await asyncio.wait({relay, gone})


async def relay_request(
    client: aiohttp.ClientSession,
    base: str,
    scope: Scope,
    parts: AsyncIterator[bytes],
    send: Send,
    *more: tuple[str, str],
    unreachable: HttpError,
) -> None:
    headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in HOP_BY_HOP]
    query = scope.get("query_string", b"").decode("latin-1")
    url = base + scope.get("raw_path", scope["path"].encode()).decode("latin-1") + (f"?{query}" if query else "")
    declared = [v.decode("latin-1") for k, v in scope["headers"] if k == b"content-length"]
    headers += [("content-length", value) for value in declared[:1]]
    headers += more
    settings: JsonObject = {"data": parts, "headers": headers, "allow_redirects": False}
    if scope["method"] == "POST":
        settings["expect100"] = True  # the owner answers 100 when it reads the body, which is after the key was checked
    try:
        # As it was received: aiohttp would resolve dot segments and quote again.
        response = await client.request(scope["method"], URL(url, encoded=True), **settings)
    except aiohttp.ClientConnectionError:
        raise unreachable from None
    async with response:
        kept = [
            (k.lower(), v)
            for k, v in response.raw_headers
            if k.lower() not in HOP_BY_HOP or k.lower() == b"content-length"
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": kept})
        try:
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except aiohttp.ClientError:
            return  # the owner died in mid-answer: the client sees a broken answer, and retries
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def body_parts(receive: Receive, sent: asyncio.Event) -> AsyncIterator[bytes]:
    """The body as it arrives; raises `ClientGone` where the client disconnects before its end."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            sent.set()
            return


async def whole_part(body: bytes, sent: asyncio.Event) -> AsyncIterator[bytes]:
    if body:
        yield body
    sent.set()


class FromWorker:
    """The same application, for the socket on which only other workers speak."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope[FROM_WORKER] = True
        await self._app(scope, receive, send)
