"""Links to the other gateways of one PostgreSQL record. A request for a session that another gateway owns is forwarded
to it, once: the receiver of a forwarded request either owns the session or answers 503, and the client sends the
request again."""

from __future__ import annotations

import logging

import aiohttp

from tokentrue.errors import SessionElsewhere
from tokentrue.gateway.asgi import Receive, Scope, Send, read_header
from tokentrue.gateway.problems import HttpError
from tokentrue.gateway.workers.forwarding import forward_request

FORWARDED = "x-tokentrue-forwarded"
LOG = logging.getLogger("tokentrue.gateway")


class PeerLinks:
    def __init__(self) -> None:
        self._client: aiohttp.ClientSession | None = None

    async def forward(
        self, elsewhere: SessionElsewhere, scope: Scope, receive: Receive, send: Send, body: bytes | None = None
    ) -> None:
        """Raises `elsewhere` where the owner has no address, or this request has been forwarded already."""
        if not elsewhere.url or read_header(scope["headers"], FORWARDED.encode()):
            raise elsewhere
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False
            )
        message = "the gateway that owns this session does not answer; another takes over when its lease has expired: send this again"
        dead = HttpError(503, "owner_unreachable", message, retry_after_s=1.0)
        try:
            await forward_request(
                self._client, elsewhere.url, scope, receive, send, body, (FORWARDED, "1"), unreachable=dead
            )
        except HttpError as error:
            if error is dead:
                LOG.warning(
                    "owner_unreachable: %s owns the session of %s and does not answer", elsewhere.url, scope["path"]
                )
            raise

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
