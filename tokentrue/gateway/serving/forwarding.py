"""Forwards requests for a session that another process owns: a worker of this server, or another gateway on the same
record. Bodies are streamed: the owner checks the key before it reads one."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
from yarl import URL

from tokentrue.errors import SessionElsewhere
from tokentrue.gateway.asgi import LOG, ClientGone, HttpError, Receive, Scope, Send, cancel_on_disconnect, read_header

FORWARDED = b"x-tokentrue-forwarded"  # how often a request has been forwarded
MOST_FORWARDS = 3  # to the worker that owns it, to the gateway that owns it, to its worker there
HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"expect", FORWARDED}
ASK_S = 5.0
UNIX = "unix:"


def find_owner(session_id: str, workers: int) -> int:
    """Rendezvous hash: growing from N to N+1 workers moves one session in N+1."""

    def weigh(worker: int) -> bytes:
        return hashlib.blake2b(f"{session_id}:{worker}".encode(), digest_size=8).digest()

    return max(range(workers), key=weigh)


def count_forwards(scope: Scope) -> int:
    given = read_header(scope["headers"], FORWARDED) or "0"
    return int(given) if given.isdecimal() and len(given) == 1 else MOST_FORWARDS


class Peers:
    """`sockets`: of this server's workers, of which this one is number `me`."""

    def __init__(self, *, me: int = 0, sockets: Sequence[str] = ()) -> None:
        self._me, self._sockets = me, sockets
        self._clients: dict[str, aiohttp.ClientSession] = {}

    def is_own(self, session_id: str) -> bool:
        return len(self._sockets) < 2 or find_owner(session_id, len(self._sockets)) == self._me

    def require_own(self, session_id: str) -> None:
        if not self.is_own(session_id):
            url = UNIX + self._sockets[find_owner(session_id, len(self._sockets))]
            raise SessionElsewhere(f"session {session_id!r} is owned by another worker; send this again", url=url)

    def _connect(self, url: str) -> tuple[aiohttp.ClientSession, str]:
        is_local = url.startswith(UNIX)
        name = url if is_local else "tcp"
        if name not in self._clients:
            connector = aiohttp.UnixConnector(url.removeprefix(UNIX), limit=0) if is_local else None
            self._clients[name] = aiohttp.ClientSession(
                connector=connector or aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                auto_decompress=False,
            )
        return self._clients[name], "http://worker" if is_local else url

    async def forward(
        self, elsewhere: SessionElsewhere, scope: Scope, receive: Receive, send: Send, body: bytes | None = None
    ) -> None:
        """`body`: if it has been read already."""
        if not elsewhere.url or count_forwards(scope) >= MOST_FORWARDS:
            raise elsewhere
        client, base = self._connect(elsewhere.url)
        body_sent = asyncio.Event()

        async def receive_later() -> Any:
            await body_sent.wait()
            return await receive()

        try:
            with cancel_on_disconnect(receive_later):
                await _relay(client, base, scope, _read_parts(receive, body_sent, body), send)
        except aiohttp.ClientConnectionError:
            said = "owner_unreachable: %s owns the session of %s and does not answer"
            LOG.warning(said, elsewhere.url, scope["path"])
            cure = "it is started again, or another one takes over when its lease has expired: send this again"
            message = f"the process that owns this session does not answer; {cure}"
            raise HttpError(503, "owner_unreachable", message, retry_after_s=1.0) from None

    async def ask_workers(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> list[bytes | None]:
        timeout = aiohttp.ClientTimeout(total=None if method == "POST" else ASK_S)
        marked = {**(headers or {}), FORWARDED.decode(): "1"}

        async def ask(socket: str) -> bytes | None:
            client, base = self._connect(UNIX + socket)
            try:
                async with client.request(method, base + path, data=body, headers=marked, timeout=timeout) as response:
                    return await response.read() if response.status < 400 else None
            except (aiohttp.ClientError, TimeoutError):
                return None

        others = [socket for number, socket in enumerate(self._sockets) if number != self._me]
        return list(await asyncio.gather(*map(ask, others)))

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


async def _relay(
    client: aiohttp.ClientSession, base: str, scope: Scope, parts: AsyncIterator[bytes], send: Send
) -> None:
    headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in HOP_BY_HOP]
    headers.append((FORWARDED.decode(), str(count_forwards(scope) + 1)))
    query = scope.get("query_string", b"").decode("latin-1")
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    response = await client.request(
        scope["method"],
        # As it was received: aiohttp would resolve dot segments and quote again.
        URL(f"{base}{path}{'?' if query else ''}{query}", encoded=True),
        data=parts,
        headers=headers,
        allow_redirects=False,
        # The owner answers 100 when it reads the body, which is after it has checked the key.
        expect100=scope["method"] == "POST",
    )
    async with response:
        kept = [(k.lower(), v) for k, v in response.raw_headers if k.lower() not in HOP_BY_HOP]
        await send({"type": "http.response.start", "status": response.status, "headers": kept})
        try:
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except aiohttp.ClientError:
            return  # the owner died during the reply: the client sees it break off, and retries
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_parts(receive: Receive, sent: asyncio.Event, body: bytes | None) -> AsyncIterator[bytes]:
    more = body is None
    if body:
        yield body
    while more:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if message.get("body"):
            yield message["body"]
        more = message.get("more_body", False)
    sent.set()
