"""What the adapters to HTTP engines share: one door over HTTP, prompt ids as growing JSON, errors of one tree.

A request is retried only while nothing has been sampled for it; after the first token a failure is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson

from tokentrue.errors import EngineContractError, EngineRejected, EngineTimeout, EngineUnreachable
from tokentrue.providers.connection import Broken, Connection, Connections, Silent
from tokentrue.types import UNVERSIONED, Ids, starts_with

RETRIED_STATUS = frozenset({502, 503})


def version_of(text: object) -> int:
    """The integer at the end of an engine's weight version ("7", "step-7"); engines start with a word such as "default"."""
    match = re.search(r"(\d+)\s*$", str(text)) if text is not None else None
    return int(match.group(1)) if match else UNVERSIONED


class IdsJson:
    """Prompt ids as JSON text, grown by what is new: the prompt of a session's next turn starts with the last one's."""

    def __init__(self, *, max_sessions: int = 2048, max_bytes: int = 1 << 30) -> None:
        self._kept: OrderedDict[str, tuple[array[int], bytearray]] = OrderedDict()
        self._bytes = 0
        self._max_sessions, self._max_bytes = max_sessions, max_bytes

    def dump(self, ids: Ids, session: str | None) -> bytes | bytearray:
        """For use at once: the text is the memory itself, and grows with the session's next turn."""
        packed = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        if session is None:
            return _joined(packed)
        known = self._kept.pop(session, None)
        if known is not None:
            self._bytes -= _size(known)
        if known is not None and len(known[0]) and starts_with(packed, known[0]):
            text = known[1]
            if delta := packed[len(known[0]) :]:
                text += b"," + _joined(delta)
        else:
            text = bytearray(_joined(packed))
        kept = self._kept[session] = (packed[:], text)  # a copy: what the caller does to its own must not change what we compare with
        self._bytes += _size(kept)
        while len(self._kept) > self._max_sessions or (self._bytes > self._max_bytes and len(self._kept) > 1):
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return text

    def forget(self, session: str) -> None:
        """A session that is no longer in memory; where it comes back, its text is made anew."""
        known = self._kept.pop(session, None)
        if known is not None:
            self._bytes -= _size(known)


def _size(kept: tuple[array[int], bytearray]) -> int:
    return len(kept[0]) * kept[0].itemsize + len(kept[1])


def _joined(ids: array[int]) -> bytes:
    return orjson.dumps(ids.tolist())[1:-1]


class Wire:
    """One engine's HTTP door."""

    def __init__(self, url: str, *, timeout_s: float, connect_s: float, retries: int, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._silence_s, self._retries = timeout_s, retries
        self._connections = Connections(self.url, connect_s=connect_s, headers={"content-type": "application/json", **(headers or {})})

    async def close(self) -> None:
        await self._connections.close()

    @asynccontextmanager
    async def open(self, method: str, path: str, body: bytes | None = None, *, retry: bool = True) -> AsyncIterator[Connection]:
        """The answer to an accepted request; what the engine refuses becomes a typed error with the engine's own words."""
        where = self.url + path
        connection = await self._answered(method, path, body or b"", self._retries if retry else 0)
        try:
            if connection.status >= 300:
                raise _refusal(where, connection.status, await connection.read())
            yield connection
        except Silent as error:
            raise EngineTimeout(f"{where} fell silent for {self._silence_s:g} s") from error
        except Broken as error:
            raise EngineUnreachable(f"{where} broke off: {error}") from error
        finally:
            self._connections.give_back(connection, read=connection.read_enough)

    async def _answered(self, method: str, path: str, body: bytes, retries: int) -> Connection:
        """A connection on which an answer has begun. Nothing was sampled before that, so the request may be sent again."""
        head = self._connections.head(method, path, len(body))
        attempt = 0
        while True:
            try:
                connection = await self._ask(head, body)
                if connection.status not in RETRIED_STATUS or attempt >= retries:
                    return connection
                await self._drop(connection)
            except Silent as error:
                raise EngineTimeout(f"{self.url}{path} did not answer in {self._silence_s:g} s") from error
            except Broken as error:
                if error.reused:  # the engine had closed it, as servers do with idle connections
                    continue
                if attempt >= retries:
                    raise EngineUnreachable(f"no engine at {self.url}: {error}; is it running?") from error
            attempt += 1
            await asyncio.sleep(0.1 * 2**attempt)

    async def _ask(self, head: bytes, body: bytes) -> Connection:
        connection = await self._connections.take()
        try:
            connection.send(head, body, silence_s=self._silence_s)
            await connection.started()
        except BaseException:
            connection.finish()  # half an exchange: it is closed
            raise
        return connection

    async def _drop(self, connection: Connection) -> None:
        try:
            await connection.read()
        finally:
            self._connections.give_back(connection)

    async def json(self, method: str, path: str, body: bytes | None = None, *, retry: bool = True) -> Any:
        async with self.open(method, path, body, retry=retry) as answer:
            return parsed(await answer.read(), self.url + path)

    async def events(self, path: str, body: bytes) -> AsyncGenerator[Any]:
        """The data of a server-sent event stream, parsed, up to [DONE]."""
        async with self.open("POST", path, body) as answer, aclosing(answer.blocks()) as blocks:
            async for line in _lines(blocks):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    answer.read_enough = True
                    return
                yield parsed(data, self.url + path)


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of any length."""
    parts: list[bytes] = []
    async for block in blocks:
        first, newline, rest = block.partition(b"\n")
        parts.append(first)
        if not newline:
            continue
        yield b"".join(parts)
        *lines, last = rest.split(b"\n")
        for line in lines:
            yield line
        parts = [last] if last else []
    if parts:
        yield b"".join(parts)


def parsed(data: bytes, where: str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineContractError(f"{where} answered something that is not JSON: {data[:80]!r}") from error


def _refusal(where: str, status: int, data: bytes) -> Exception:
    words = data[:300].decode("utf-8", "replace").replace("\n", " ")
    if status in {408, 504}:
        return EngineTimeout(f"{where} answered {status}: {words}")
    if status in {401, 403, 404, 405}:
        return EngineContractError(f"{where} answered {status}: {words}; see the provider's page for how to start the engine")
    if status in RETRIED_STATUS:
        return EngineUnreachable(f"{where} answered {status}: {words}")
    return EngineRejected(f"{where} answered {status}: {words}")
