"""Engines that are servers: HTTP by aiohttp, typed responses, and the adapters' common base.

A request is retried only until its response begins. A generation that is not streamed responds when it is complete:
if it breaks off, it is sampled again, since none of its tokens arrived. Later failures are the caller's to handle. A
body, and a line of an event stream, has at most `limit` bytes; reading stops there. A response of the wrong shape is
an `EngineContractError` that quotes the engine; unknown fields are ignored, because engines add them with every
release.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import msgspec
import orjson

from tokentrue.errors import (
    ConfigError,
    EngineContractError,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    PromptTooLong,
    SamplingError,
)
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import Streaming
from tokentrue.providers.building import CONSTRAINTS, CompletionBuilder
from tokentrue.providers.publishing import DiskPublisher, WrittenWeights
from tokentrue.types import MAX_INT64, UNVERSIONED, Chunk, Completion, Ids, Sampling

T = TypeVar("T")
RETRIED_STATUS = frozenset({502, 503})
FIRST_BACKOFF_S = 0.2
QUOTED_CHARS = 300
TOO_LONG = re.compile(r"(context|model|allowed) length", re.IGNORECASE)
END_S = 0.05
ABORT_S = 30.0
ABORT_RETRY_S = 0.1  # a request may reach the engine after the abort that was meant for it
BODY_BYTES = 16 << 20  # of a response, without its tokens
ANSWER_BYTES = 64 << 20
POSITION_BYTES = 4096  # per token: log-probabilities, sampling mask and routing, in JSON
UNBOUNDED_TOKENS = 16_384  # assumed for a request without max_tokens
MOST_TOKENS = 65_536


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
        body: JsonMapping | bytes | None = None,
        *,
        retry: bool = True,
        limit: int = BODY_BYTES,
    ) -> bytes:
        """The body of a 2xx response; any other response raises a typed error that quotes the engine."""
        parts: list[bytes] = []
        size = 0
        async with await self._respond(method, path, body, self._retries if retry else 0) as response:
            while part := await self._read_part(path, response):
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise self._too_large(path, limit)
        return b"".join(parts)

    async def answers(
        self, path: str, body: bytes, *, whole: bool = False, limit: int = BODY_BYTES
    ) -> AsyncGenerator[list[bytes]]:
        """The data of the server-sent events up to [DONE], in one list per read. With `whole`, the single body of a
        response that is not streamed."""
        if whole:
            yield [await self.read("POST", path, body, limit=limit)]
            return
        begun: list[bytes] = []  # parts of a line, joined once: an event may span many reads
        size = 0
        async with await self._respond("POST", path, body, self._retries) as response:
            while True:
                part = await self._read_part(path, response)
                first, *others = part.split(b"\n")
                begun.append(first)
                size += len(first)
                if size > limit:
                    raise self._too_large(path, limit)
                if part and not others:
                    continue
                lines = [b"".join(begun), *others[:-1]]  # the last line may have no line break
                events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                is_over = b"[DONE]" in events
                if is_over:
                    del events[events.index(b"[DONE]") :]
                if events:
                    yield events
                if is_over:
                    await _read_end(response)
                if is_over or not part:
                    return
                begun, size = [others[-1]], len(others[-1])

    async def _read_part(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        """Empty at the end of the body."""
        try:
            return await response.content.readany()
        except TimeoutError as error:
            raise EngineTimeout(f"{self.url}{path} sent nothing for {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{self.url}{path} broke off: {error or type(error).__name__}") from error

    def _too_large(self, path: str, limit: int) -> EngineContractError:
        return EngineContractError(
            f"{self.url}{path} answers with more than {limit >> 20} MiB, which no answer to this request takes"
        )

    async def _respond(
        self, method: str, path: str, body: JsonMapping | bytes | None, retries: int
    ) -> aiohttp.ClientResponse:
        """Yields a 2xx response. Leaving the block early closes the connection, which cancels the request."""
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
                # A server may close an idle connection at the moment a request is sent on it: that does not count as
                # an attempt.
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
        # Created on first use, because aiohttp binds the session to the running event loop.
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=self._timeout, headers=self._headers, cookie_jar=jar
            )
        return self._session


async def _read_end(response: aiohttp.ClientResponse) -> None:
    # The end of the body follows [DONE] at once; a connection that has read it can be reused.
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(END_S):
            await response.content.read(1)


def rejected(message: str) -> EngineRejected:
    """The engine's refusal, quoted. vLLM and SGLang report a prompt that is too long only in the text."""
    return PromptTooLong(f"prompt is too long: {message}") if TOO_LONG.search(message) else EngineRejected(message)


def _refusal(where: str, status: int, words: str) -> EngineError:
    if status in {408, 504}:
        return EngineTimeout(f"{where} answered {status}: {words}")
    if status in {401, 403, 404, 405}:
        return EngineContractError(f"{where} answered {status}: {words}; docs/engines.md says how to start the engine")
    if status in RETRIED_STATUS:
        return EngineUnreachable(f"{where} answered {status}: {words}")
    return rejected(f"{where} answered {status}: {words}")


# ---- responses -------------------------------------------------------------------------------------------------------
class EngineFault(msgspec.Struct):
    """The error object of both engines; some versions send plain text instead."""

    message: str | None = None


class Tokenized(msgspec.Struct):
    """/tokenize of both engines."""

    tokens: list[int]


def decode_answer(data: bytes, kind: type[T], *, where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # a ValidationError is one, too
        words = data[:QUOTED_CHARS].decode("utf-8", "replace")
        raise EngineContractError(f"{where} answered something unexpected ({error}): {words}") from error


def raise_fault(engine: str, fault: EngineFault | str | None) -> None:
    """Raises for an error inside a 200 response or a stream."""
    if fault is not None:
        raise rejected(f"{engine}: {fault if isinstance(fault, str) else fault.message or 'error without a message'}")


def version_from(text: str | int | None) -> int:
    """The integer at the end of an engine's weight version ("7", "step-7"); engines start with a word such as
    "default"."""
    words = "" if text is None else str(text).rstrip()
    digits = words[len(words.rstrip("0123456789")) :]
    version = int(digits) if digits else UNVERSIONED
    if version > MAX_INT64:  # what the journal's integer column holds
        raise EngineContractError(f"weight version {text!r} does not fit 64 bits; publish versions that count steps")
    return version


async def read_tokens(http: EngineHttp, path: str, body: JsonMapping) -> TokenIds | None:
    """None if the server has no such route, or a different one of that name."""
    try:
        data = await http.read("POST", path, body, retry=False)
        return TokenIds(decode_answer(data, Tokenized, where=http.url + path).tokens)
    except (EngineContractError, EngineRejected):
        return None


# ---- common base of the adapters -------------------------------------------------------------------------------------
class Answer(Protocol):
    builder: CompletionBuilder

    def add(self, event: bytes) -> None:
        """Appends one event, or a whole response."""
        ...

    def complete(self) -> Completion:
        """Raises if the engine has not reported the end of the generation."""
        ...


class RemoteEngine(Streaming):
    """A server that generates, aborts by request id, and loads weights from a shared directory (`weights_dir`).

    If a request's caller leaves or fails, the request is aborted at the engine.
    """

    name: str

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        connect_s: float = 5.0,
        retries: int = 3,
        api_key: str | None = None,
        weights_dir: str | Path | None = None,
    ) -> None:
        self._http = EngineHttp(url, timeout_s=timeout_s, connect_s=connect_s, retries=retries, api_key=api_key)
        self.url = self._http.url
        self._running: set[str] = set()  # request ids
        self._publisher = DiskPublisher(self, weights_dir, place=self._http.place)

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        await self._prepare(sampling)
        ids = TokenIds(prompt_ids)
        answer = self._new_answer(CompletionBuilder(self.name, ids), sampling)
        tokens = min(sampling.max_tokens or UNBOUNDED_TOKENS, MOST_TOKENS)
        limit = ANSWER_BYTES + POSITION_BYTES * (len(ids) + tokens)
        async with self._hold() as request_id:
            path, body = self._body(ids, sampling, session=session, request_id=request_id, stream=not whole)
            async with aclosing(self._http.answers(path, body, whole=whole, limit=limit)) as reads:
                async for events in reads:
                    for chunk in answer.builder.take_read(events, answer.add):
                        yield chunk
            completion = answer.complete()
        yield Chunk(final=completion)

    async def _prepare(self, sampling: Sampling) -> None:
        raise NotImplementedError

    def _new_answer(self, builder: CompletionBuilder, sampling: Sampling) -> Answer:
        raise NotImplementedError

    def _body(
        self, ids: TokenIds, sampling: Sampling, *, session: str | None, request_id: str, stream: bool
    ) -> tuple[str, bytes]:
        raise NotImplementedError

    async def _abort(self, request_ids: Sequence[str]) -> None:
        raise NotImplementedError

    async def pause_for_weights(self) -> None:
        raise NotImplementedError

    async def load_from_disk(self, written: WrittenWeights) -> None:
        """Loads the weights, drops caches of older ones, and stamps the version; raises EngineError if any of it
        fails."""
        raise NotImplementedError

    async def resume_with_weights(self) -> None:
        raise NotImplementedError

    async def weight_version(self) -> int:
        raise NotImplementedError

    @asynccontextmanager
    async def _hold(self) -> AsyncGenerator[str]:
        """Aborts the request if the block raises."""
        request_id = uuid4().hex
        self._running.add(request_id)
        try:
            yield request_id
        except BaseException:
            self._running.discard(request_id)
            with suppress(EngineError):  # the engine is unreachable: nothing is left to abort
                await self._abort([request_id])
            raise
        finally:
            self._running.discard(request_id)

    async def interrupt(self) -> int:
        """Aborts all our generations at the engine and waits until each has returned its tokens; returns their
        number."""
        count, end = len(self._running), time.monotonic() + ABORT_S
        while self._running:
            if time.monotonic() > end:
                raise EngineTimeout(
                    f"the engine did not end {len(self._running)} aborted generations within {ABORT_S:g} s"
                )
            await self._abort(sorted(self._running))
            await asyncio.sleep(ABORT_RETRY_S if self._running else 0)
        return count

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Works during generations, too."""
        await self._publisher.publish(weights, version=version)

    async def rejoin(self) -> None:
        """Loads the last written weights into a server that missed their publication."""
        await self._publisher.rejoin()

    async def _require_version(self, version: int) -> None:
        reported = await self.weight_version()
        if reported != version:
            raise EngineRejected(f"{self.name} reports weight version {reported} after loading version {version}")

    async def _post(self, path: str, body: JsonMapping | None = None) -> bytes:
        return await self._http.read("POST", path, body or {}, retry=False)

    async def close(self) -> None:
        await self._http.close()


# ---- constraints enforced while sampling -----------------------------------------------------------------------------
# The mask that enforces a constraint is part of the sampled distribution, so the reported
# log-probabilities are those under the mask.
def engine_settings(extra: JsonMapping) -> JsonObject:
    return {name: value for name, value in extra.items() if name not in CONSTRAINTS}


def find_constraint(extra: JsonMapping, *, own: tuple[str, ...]) -> str | None:
    given = [name for name in (*sorted(CONSTRAINTS), *own) if extra.get(name) is not None]
    if len(given) > 1:
        raise SamplingError(f"{' and '.join(given)} cannot be enforced together; send one of them")
    return given[0] if given and given[0] in CONSTRAINTS else None


def structural_tag(extra: JsonMapping) -> str:
    tag = _object(extra["tool_choice"])
    if tag.get("type") != "structural_tag":
        raise SamplingError("tool_choice: must be a structural tag, as the renderer's call_tag gives it")
    return dump_settings(tag).decode()


def response_schema(extra: JsonMapping) -> JsonMapping | None:
    """None for any object."""
    asked = _object(extra["response_format"])
    if asked.get("type") == "json_object":
        return None
    schema = _object(asked.get("json_schema")).get("schema")
    if asked.get("type") != "json_schema" or not isinstance(schema, Mapping):
        raise SamplingError("response_format: must be of type json_object, or json_schema with a json_schema.schema")
    return cast("JsonMapping", schema)


def _object(value: object) -> JsonMapping:
    """Reads anything but a JSON object as an empty one."""
    return cast("JsonMapping", value) if isinstance(value, Mapping) else {}


def dump_settings(value: object) -> bytes:
    """Values that JSON cannot hold come from the client, so they are its error."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise SamplingError(f"the sampling settings cannot be sent to an engine: {error}") from error
