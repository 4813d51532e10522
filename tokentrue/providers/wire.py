"""What the adapters to HTTP engines share: one aiohttp client, prompt ids as growing JSON, errors of one tree.

A request is retried only while nothing has been sampled for it; after the first token a failure is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from tokentrue.errors import EngineContractError, EngineRejected, EngineTimeout, EngineUnreachable
from tokentrue.types import UNVERSIONED, Ids

RETRIED_STATUS = frozenset({502, 503})
LARGE_BODY_BYTES = 1 << 20


def version_of(text: object) -> int:
    """The integer at the end of an engine's weight version ("7", "step-7"); engines start with a word such as "default"."""
    match = re.search(r"(\d+)\s*$", str(text)) if text is not None else None
    return int(match.group(1)) if match else UNVERSIONED


class IdsJson:
    """Prompt ids as JSON text, grown by what is new: the prompt of a session's next turn starts with the last one's."""

    def __init__(self, *, max_sessions: int = 2048, max_bytes: int = 1 << 30) -> None:
        self._kept: OrderedDict[str, tuple[bytes, bytearray]] = OrderedDict()
        self._bytes = 0
        self._max_sessions, self._max_bytes = max_sessions, max_bytes

    def dump(self, ids: Ids, session: str | None) -> bytes:
        packed = ids if isinstance(ids, array) and ids.itemsize == 4 else array("i", ids)
        raw = packed.tobytes()
        if session is None:
            return _joined(packed)
        known = self._kept.pop(session, None)
        if known is not None and raw.startswith(known[0]) and known[0]:
            text = known[1]
            self._bytes -= len(known[0]) + len(text)
            delta = packed[len(known[0]) // 4 :]
            if delta:
                text += b"," + _joined(delta)
        else:
            self._bytes -= len(known[0]) + len(known[1]) if known is not None else 0
            text = bytearray(_joined(packed))
        self._kept[session] = (raw, text)
        self._bytes += len(raw) + len(text)
        while len(self._kept) > self._max_sessions or (self._bytes > self._max_bytes and len(self._kept) > 1):
            _, (old_raw, old_text) = self._kept.popitem(last=False)
            self._bytes -= len(old_raw) + len(old_text)
        return bytes(text)


def _joined(ids: array[int]) -> bytes:
    return orjson.dumps(ids.tolist())[1:-1]


class Wire:
    """One engine's HTTP door."""

    def __init__(self, url: str, *, timeout_s: float, connect_s: float, retries: int, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=timeout_s)
        self._retries = retries
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._client: aiohttp.ClientSession | None = None

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None or self._client.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
            self._client = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    @asynccontextmanager
    async def open(self, method: str, path: str, body: bytes | None = None, *, retry: bool = True) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response of an accepted request; what the engine refuses becomes a typed error with the engine's own words."""
        attempt = 0
        while True:
            try:
                response = await self._session().request(method, self.url + path, data=_payload(body), headers=_length(body))
            except (TimeoutError, aiohttp.ServerTimeoutError) as error:
                raise EngineTimeout(f"{self.url}{path} did not answer in {self._timeout.sock_read:g} s") from error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if retry and attempt < self._retries:
                    attempt += 1
                    await asyncio.sleep(0.1 * 2**attempt)
                    continue
                raise EngineUnreachable(f"no engine at {self.url}: {_reason(error)}; is it running?") from error
            if response.status in RETRIED_STATUS and retry and attempt < self._retries:
                response.release()
                attempt += 1
                await asyncio.sleep(0.1 * 2**attempt)
                continue
            break
        try:
            if response.status >= 400:
                raise _refusal(self.url + path, response.status, await response.read())
            yield response
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise EngineTimeout(f"{self.url}{path} fell silent for {self._timeout.sock_read:g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EngineUnreachable(f"{self.url}{path} broke off: {_reason(error)}") from error
        finally:
            response.close() if not response.content.at_eof() else response.release()

    async def json(self, method: str, path: str, body: bytes | None = None, *, retry: bool = True) -> Any:
        async with self.open(method, path, body, retry=retry) as response:
            return parsed(await response.read(), self.url + path)

    async def events(self, path: str, body: bytes) -> AsyncGenerator[Any]:
        """The data of a server-sent event stream, parsed, up to [DONE]."""
        async with self.open("POST", path, body) as response:
            async for line in _lines(response.content):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield parsed(data, self.url + path)


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: cumulative events outgrow the reader's own line limit."""
    rest = bytearray()
    async for block in stream.iter_any():
        rest += block
        while (end := rest.find(b"\n")) >= 0:
            yield bytes(rest[:end])
            del rest[: end + 1]
    if rest:
        yield bytes(rest)


def parsed(data: bytes, where: str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineContractError(f"{where} answered something that is not JSON: {data[:80]!r}") from error


def _payload(body: bytes | None) -> Any:
    if body is None or len(body) < LARGE_BODY_BYTES:
        return body

    async def pieces() -> AsyncIterator[bytes]:  # a large body in pieces leaves the event loop room to breathe
        for start in range(0, len(body), 1 << 18):
            yield body[start : start + (1 << 18)]

    return pieces()


def _length(body: bytes | None) -> dict[str, str] | None:
    return {"content-length": str(len(body))} if body is not None and len(body) >= LARGE_BODY_BYTES else None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refusal(where: str, status: int, data: bytes) -> Exception:
    words = data[:300].decode("utf-8", "replace").replace("\n", " ")
    if status in {408, 504}:
        return EngineTimeout(f"{where} answered {status}: {words}")
    if status in {401, 403, 404, 405}:
        return EngineContractError(f"{where} answered {status}: {words}; see the provider's page for how to start the engine")
    if status in RETRIED_STATUS:
        return EngineUnreachable(f"{where} answered {status}: {words}")
    return EngineRejected(f"{where} answered {status}: {words}")
