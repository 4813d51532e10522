"""HTTP to one engine, by aiohttp: retries before the first answer, server-sent events, errors of one tree.

A request is sent again only until its response begins. A generation that is not streamed begins to respond when it is
complete: one that breaks off is sampled again, and what the engine had sampled of it never arrived. Later failures are
the caller's to handle. A body, and a line of an event stream, has at most `limit` bytes: an engine that sends more is at
fault, and is not read to the end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import orjson

from tokentrue.errors import (
    ConfigError,
    EngineContractError,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    PromptTooLong,
)

RETRIED_STATUS = frozenset({502, 503})
FIRST_BACKOFF_S = 0.2
QUOTED_CHARS = 300
TOO_LONG = re.compile(r"(context|model|allowed) length", re.IGNORECASE)
END_S = 0.05
BODY_BYTES = 16 << 20  # of an answer, before what a generation's tokens may take


class EngineHttp:
    """One engine's base URL. `timeout_s` bounds the silence between two reads, `connect_s` the connection."""

    def __init__(
        self, url: str, *, timeout_s: float, connect_s: float, retries: int, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of an engine; give one such as http://127.0.0.1:30000")
        self.place = f"{parts.hostname}-{parts.port or parts.scheme}"  # names this engine's files
        self._timeout_s, self._retries = timeout_s, retries
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=timeout_s)
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def read(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        *,
        retry: bool = True,
        limit: int = BODY_BYTES,
    ) -> bytes:
        """The whole body of a successful response; any other response becomes a typed error with the engine's own
        words."""
        async with await self._respond(method, path, body, self._retries if retry else 0) as response:
            return b"".join([part async for part in self._parts(path, response, limit)])

    async def answers(
        self, path: str, body: bytes, *, whole: bool = False, limit: int = BODY_BYTES
    ) -> AsyncGenerator[bytes]:
        """The data of each server-sent event, up to [DONE]; with `whole`, the one body of an answer that is no
        stream."""
        if whole:
            yield await self.read("POST", path, body, limit=limit)
            return
        async with await self._respond("POST", path, body, self._retries) as response:
            async for line in self._lines(path, response, limit):
                data = line[5:].strip() if line.startswith(b"data:") else None
                if data == b"[DONE]":
                    await _read_end(response)
                    return
                if data is not None:
                    yield data

    async def _lines(self, path: str, response: aiohttp.ClientResponse, limit: int) -> AsyncGenerator[bytes]:
        """Each line of the body, the last one also without a line break."""
        begun: list[bytes] = []  # parts of a line, joined once: an event may be many reads long
        size = 0
        async for part in self._parts(path, response, None):
            first, *others = part.split(b"\n")
            begun.append(first)
            size += len(first)
            if size > limit:
                raise self._too_large(path, limit)
            if others:
                yield b"".join(begun)
                for line in others[:-1]:
                    yield line
                begun, size = [others[-1]], len(others[-1])
        yield b"".join(begun)

    async def _parts(self, path: str, response: aiohttp.ClientResponse, limit: int | None) -> AsyncGenerator[bytes]:
        """The body as it arrives; refused where it is longer than `limit`."""
        size = 0
        try:
            async for part in response.content.iter_any():
                size += len(part)
                if limit is not None and size > limit:
                    raise self._too_large(path, limit)
                yield part
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._broken(path, error) from error

    def _too_large(self, path: str, limit: int) -> EngineContractError:
        return EngineContractError(
            f"{self.url}{path} answers with more than {limit >> 20} MiB, which no answer to this request takes"
        )

    async def _respond(
        self, method: str, path: str, body: Mapping[str, object] | bytes | None, retries: int
    ) -> aiohttp.ClientResponse:
        """A response with status 2xx, to be used in a block: leaving it before the response's end closes the
        connection, which cancels the request."""
        data = body if isinstance(body, bytes | None) else orjson.dumps(body)
        response = await self._request(method, path, data, retries)
        if response.status < 300:
            return response
        async with response:
            words = (await response.content.read(QUOTED_CHARS)).decode("utf-8", "replace").replace("\n", " ")
            raise _refusal(self.url + path, response.status, words)

    async def _request(self, method: str, path: str, data: bytes | None, retries: int) -> aiohttp.ClientResponse:
        session = self._open()
        attempt = 0
        while True:
            try:
                response = await session.request(method, self.url + path, data=data, allow_redirects=False)
                if response.status not in RETRIED_STATUS or attempt >= retries:
                    return response
                response.release()
            except aiohttp.SocketTimeoutError as error:
                raise EngineTimeout(f"{self.url}{path} did not answer in {self._timeout_s:g} s") from error
            except aiohttp.ClientConnectionError as error:
                # A server may close an idle connection at the moment when a request is sent on it: that costs no
                # attempt.
                free = isinstance(error, aiohttp.ServerDisconnectedError) and attempt == 0
                if attempt >= retries and not free:
                    raise EngineUnreachable(
                        f"no engine is reachable at {self.url}: {error or type(error).__name__}"
                    ) from error
            except aiohttp.ClientError as error:
                raise EngineContractError(f"{self.url}{path} does not answer in HTTP: {error}") from error
            await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
            attempt += 1

    def _open(self) -> aiohttp.ClientSession:
        """The client session, created on first use because aiohttp binds it to the running event loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=self._timeout, headers=self._headers, cookie_jar=jar
            )
        return self._session

    def _broken(self, path: str, error: Exception) -> EngineError:
        if isinstance(error, TimeoutError):
            return EngineTimeout(f"{self.url}{path} sent nothing for {self._timeout_s:g} s")
        return EngineUnreachable(f"{self.url}{path} broke off: {error or type(error).__name__}")


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """The end of the body follows [DONE] at once; a connection that has read it can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(END_S):
            await response.content.read(1)


def rejected(message: str) -> EngineRejected:
    """The engine's refusal in its own words; vLLM and SGLang name a prompt that is too long in words alone."""
    return PromptTooLong(f"prompt is too long: {message}") if TOO_LONG.search(message) else EngineRejected(message)


def _refusal(where: str, status: int, words: str) -> EngineError:
    if status in {408, 504}:
        return EngineTimeout(f"{where} answered {status}: {words}")
    if status in {401, 403, 404, 405}:
        return EngineContractError(f"{where} answered {status}: {words}; docs/engines.md says how to start the engine")
    if status in RETRIED_STATUS:
        return EngineUnreachable(f"{where} answered {status}: {words}")
    return rejected(f"{where} answered {status}: {words}")
