"""Agents for benchmarks: conversations with one tool call and one tool result per turn, and the smallest HTTP client
that times them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httptools
import orjson

from tokentrue.errors import ConfigError

PATH = "/v1/chat/completions"
ANSWER = (
    "<think>\nThe next file is the one to read, then the numbers can be compared with what the test wants.\n</think>\n\n"
    'Reading on.\n<tool_call>\n{"name": "read", "arguments": {"path": "src/module_'
)
ANSWER_END = '.py", "first": 1, "last": 40}}\n</tool_call>'
TOOL = {
    "name": "read",
    "description": "Read lines of a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
RULES = "You mend programs. Read before you write, change one thing at a time, and run the tests after each change. "
PAGE = 1900  # characters of a file that a tool reads at a time: about 5k, 18k, 70k and 140k tokens of history at turns 8, 32, 128 and 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedResponse:
    body: bytes
    first_s: float  # from the request to the first byte of the body
    whole_s: float


class HttpClient(asyncio.Protocol):
    """One connection, one request at a time. It costs less than a general client, so that the servers are what is
    measured."""

    def __init__(self) -> None:
        self._parser: Any = None
        self._finished: asyncio.Future[None] | None = None
        self._body = bytearray()
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(ConfigError("the server closed the connection before it had answered"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self._body:
            self._first = time.perf_counter()
        self._body += data

    def on_message_complete(self) -> None:
        assert self._finished is not None
        self._finished.set_result(None)

    def close(self) -> None:
        self._transport.close()

    async def post(self, path: str, body: bytes, key: str) -> TimedResponse:
        if self._transport.is_closing():
            raise ConfigError("the server closed the connection while it was idle")
        self._parser, self._body = httptools.HttpResponseParser(self), bytearray()
        self._finished = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        started = time.perf_counter()
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self._finished
        ended = time.perf_counter()
        if self._parser.get_status_code() >= 300:
            raise ConfigError(f"the benchmark was refused: {bytes(self._body[:300])!r}")
        return TimedResponse(body=bytes(self._body), first_s=self._first - started, whole_s=ended - started)


async def connect(port: int) -> HttpClient:
    _, client = await asyncio.get_running_loop().create_connection(HttpClient, "127.0.0.1", port)
    return client


async def open_session(port: int, admin_key: str) -> tuple[HttpClient, str]:
    """A connection, and the key of a new session where the server has sessions. A trainer opens the session over its
    own connection."""
    if not admin_key:
        return await connect(port), "none"
    trainer = await connect(port)
    key = orjson.loads((await trainer.post("/sessions", b"{}", admin_key)).body)["api_key"]
    trainer.close()
    return await connect(port), key


@cache
def all_pages() -> Sequence[str]:
    """Pages of the source files of Python's standard library."""
    files = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [text[start : start + PAGE] for text in texts for start in range(0, len(text) - PAGE, PAGE)]


def read_pages(*, skip: int = 0) -> Iterator[str]:
    """Pages without end, from the one of number `skip`."""
    pages = all_pages()
    while True:
        yield pages[skip % len(pages)]
        skip += 1


class Agent:
    """A conversation as the bytes of its request: the client appends to them, so that it costs the same at every
    turn."""

    def __init__(
        self,
        pages: Iterator[str],
        *,
        opening: str = RULES * 60,
        task: str = "The sum is off in the last bit. Find out why.",
        tools: Sequence[dict[str, Any]] = (TOOL,),
    ) -> None:
        self._pages = pages
        system, user = {"role": "system", "content": opening}, {"role": "user", "content": task}
        self._messages = b'{"messages":[' + orjson.dumps(system) + b"," + orjson.dumps(user)
        functions = [{"type": "function", "function": tool} for tool in tools]
        self._tail = b'],"model":"m","tools":' + orjson.dumps(functions)

    def body(self, *, streamed: bool = False) -> bytes:
        return self._messages + self._tail + (b',"stream":true}' if streamed else b"}")

    def append(self, message: dict[str, Any]) -> None:
        """The assistant's message, and the tool result that follows it."""
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": next(self._pages)}
        self._messages += b"," + orjson.dumps(message) + b"," + orjson.dumps(tool)


def message_from_answer(answer: bytes) -> dict[str, Any]:
    return orjson.loads(answer)["choices"][0]["message"]


def message_from_stream(stream: bytes) -> dict[str, Any]:
    """The message that a stream of chunks adds up to."""
    text: dict[str, str] = {"content": "", "reasoning_content": "", "arguments": "", "id": "", "name": ""}
    for line in stream.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in orjson.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for call in delta.get("tool_calls", ()):
                text["id"] += call.get("id", "")
                text["name"] += call["function"].get("name", "")
                text["arguments"] += call["function"]["arguments"]
            for name in ("content", "reasoning_content"):
                text[name] += delta.get(name) or ""
    call = {"id": text["id"], "type": "function", "function": {"name": text["name"], "arguments": text["arguments"]}}
    return {
        "role": "assistant",
        "content": text["content"],
        "reasoning_content": text["reasoning_content"],
        "tool_calls": [call],
    }
