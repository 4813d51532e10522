"""What the adapters to HTTP engines share: one door over HTTP, prompt ids as growing JSON, errors of one tree.

A request is retried only while nothing has been sampled for it; after the first token a failure is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import orjson

from tokentrue.errors import EngineContractError, EngineRejected, EngineTimeout, EngineUnreachable
from tokentrue.providers.connection import Broken, Connection, Connections, Silent
from tokentrue.types import UNVERSIONED, Ids, JoinedIds, Sampling, starts_with, whole_of

RETRIED_STATUS = frozenset({502, 503})
PARTS = 16  # of a prompt's text, before they are made one again
Body: TypeAlias = bytes | Sequence[bytes]  # whole, or in parts that are sent one behind the other


def version_of(text: object) -> int:
    """The integer at the end of an engine's weight version ("7", "step-7"); engines start with a word such as "default"."""
    return _version_in(str(text)) if text is not None else UNVERSIONED


@lru_cache(64)
def _version_in(text: str) -> int:
    match = re.search(r"(\d+)\s*$", text)
    return int(match.group(1)) if match else UNVERSIONED


class Written(NamedTuple):
    """The last prompt of a session, or what is known of the next: `parts` are the JSON text of the first `length` of `ids`."""

    ids: array[int] | JoinedIds
    length: int
    parts: tuple[bytes, ...]
    size: int

    def begins(self, ids: array[int] | JoinedIds) -> bool:
        """`ids` go on where these end. The same array, grown, has the same beginning: see `protocols.Provider`."""
        start = ids.before if isinstance(ids, JoinedIds) else ids
        if start is self.ids:
            return 0 < self.length <= len(start)
        whole, known = whole_of(ids), whole_of(self.ids)
        return self.length > 0 and starts_with(whole, known if len(known) == self.length else known[: self.length])


class IdsJson:
    """Prompt ids as JSON text, grown by what is new: the prompt of a session's next turn starts with the last one's."""

    def __init__(self, *, max_sessions: int = 2048, max_bytes: int = 1 << 30) -> None:
        self._kept: OrderedDict[str, Written] = OrderedDict()
        self._bytes = 0
        self._max_sessions, self._max_bytes = max_sessions, max_bytes

    def dump(self, ids: Ids, session: str | None) -> tuple[bytes, ...]:
        """The text, in a few parts: what has been written before is neither written nor copied again."""
        packed = ids if isinstance(ids, JoinedIds) or (isinstance(ids, array) and ids.typecode == "i") else array("i", ids)
        known = self._kept.get(session) if session is not None else None
        parts = self._grown(known, packed, most=2 * PARTS) if known is not None and known.begins(packed) else (_joined(packed[:]),)
        if session is not None:
            self._keep(session, packed, parts)
        return parts

    def foresee(self, ids: Ids, session: str) -> None:
        """While nobody waits for it: the text of what the next prompt will probably begin with, where it is a little more than the last."""
        known = self._kept.get(session)
        if known is not None and isinstance(ids, array) and known.begins(ids):
            self._keep(session, ids, self._grown(known, ids, most=PARTS))

    def _grown(self, known: Written, ids: array[int] | JoinedIds, *, most: int) -> tuple[bytes, ...]:
        parts = known.parts if len(known.parts) < most else (b"".join(known.parts),)
        return (*parts, b"," + _joined(ids[known.length :])) if len(ids) > known.length else parts

    def _keep(self, session: str, ids: array[int] | JoinedIds, parts: tuple[bytes, ...]) -> None:
        size = len(ids) * 4 + sum(map(len, parts))
        self.forget(session)
        self._kept[session] = Written(ids, len(ids), parts, size)
        self._bytes += size
        while len(self._kept) > self._max_sessions or (self._bytes > self._max_bytes and len(self._kept) > 1):
            self._bytes -= self._kept.popitem(last=False)[1].size

    def forget(self, session: str) -> None:
        """A session that is no longer in memory; where it comes back, its text is made anew."""
        known = self._kept.pop(session, None)
        if known is not None:
            self._bytes -= known.size


def _joined(ids: array[int]) -> bytes:
    return orjson.dumps(ids.tolist())[1:-1]


class OncePerSampling:
    """What `write` makes of a `Sampling`, made once: a session asks with the same object turn after turn."""

    def __init__(self, write: Callable[[Sampling], bytes], *, kept: int = 2048, longest: int = 1 << 14) -> None:
        self._write, self._max, self._longest = write, kept, longest
        self._kept: dict[int, tuple[Sampling, bytes]] = {}  # by identity, which the kept object holds

    def __call__(self, sampling: Sampling) -> bytes:
        found = self._kept.get(id(sampling))
        if found is not None:
            return found[1]
        text = self._write(sampling)
        if len(text) <= self._longest:
            if len(self._kept) >= self._max:
                self._kept.clear()
            self._kept[id(sampling)] = (sampling, text)
        return text


class Wire:
    """One engine's HTTP door."""

    def __init__(self, url: str, *, timeout_s: float, connect_s: float, retries: int, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._silence_s, self._retries = timeout_s, retries
        self._connections = Connections(self.url, connect_s=connect_s, headers={"content-type": "application/json", **(headers or {})})

    async def close(self) -> None:
        await self._connections.close()

    async def json(self, method: str, path: str, body: Body = (), *, retry: bool = True) -> Any:
        """A whole answer, parsed."""
        return parsed(await self.read(method, path, body, retry=retry), self.url + path)

    async def read(self, method: str, path: str, body: Body = (), *, retry: bool = True) -> bytes:
        """A whole answer; what the engine refuses becomes a typed error with the engine's own words."""
        connection = await self._answered(method, path, body, self._retries if retry else 0)
        try:
            data = await connection.read()
        except (Silent, Broken) as error:
            raise self._broken_off(path, error) from error
        finally:
            self._connections.give_back(connection)
        if connection.status >= 300:
            raise _refusal(self.url + path, connection.status, data)
        return data

    def _broken_off(self, path: str, error: Silent | Broken) -> Exception:
        if isinstance(error, Silent):
            return EngineTimeout(f"{self.url}{path} fell silent for {self._silence_s:g} s")
        return EngineUnreachable(f"{self.url}{path} broke off: {error}")

    async def _answered(self, method: str, path: str, body: Body, retries: int) -> Connection:
        """A connection on which an answer has begun. Nothing was sampled before that, so the request may be sent again."""
        parts = (body,) if isinstance(body, bytes) else body
        head = self._connections.head(method, path, sum(map(len, parts)))
        attempt = 0
        while True:
            try:
                connection = await self._ask(head, parts)
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

    async def _ask(self, head: bytes, body: Sequence[bytes]) -> Connection:
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

    async def events(self, path: str, body: Body) -> AsyncGenerator[list[Any]]:
        """The data of a server-sent event stream, parsed, up to [DONE]: what came together, together."""
        connection, lines = await self._answered("POST", path, body, self._retries), Lines()
        try:
            if connection.status >= 300:
                raise _refusal(self.url + path, connection.status, await connection.read())
            while not connection.read_enough:
                block = await connection.block()
                found: list[Any] = []
                for line in lines.of(block or b"\n"):  # the end ends a line too
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        connection.read_enough = True
                        break
                    try:
                        found.append(parsed(data, self.url + path))
                    except EngineContractError:
                        if found:
                            yield found  # what was sampled before the stream went wrong is not lost
                        raise
                if found:
                    yield found
                if not block:
                    return
        except (Silent, Broken) as error:
            raise self._broken_off(path, error) from error
        finally:
            self._connections.give_back(connection, read=connection.read_enough)


class Lines:
    """Lines of any length, of text that comes in blocks."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def of(self, block: bytes) -> list[bytes]:
        """The lines that end in this block."""
        *lines, last = block.split(b"\n")
        if lines and self._begun:
            lines[0] = b"".join((*self._begun, lines[0]))
            self._begun = []
        if last:
            self._begun.append(last)
        return lines


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
