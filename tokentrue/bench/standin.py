"""An engine stand-in that answers at once: SGLang's /generate wire format over bare asyncio, in a process of its own.

It only counts the prompt's ids, so that a benchmark sees what stands before it. Every answer carries a running number, so that a
load test can tell each generation from every other. `fails` and `hangs` are shares of calls; `/v1/chat/completions` answers a bare
proxy with as many bytes. Run: `python -m tokentrue.bench.standin SETTINGS.json`; it prints its port.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import httptools
import numpy as np
import orjson

LOGPROB = -0.6931471805599453


class StandIn:
    """`head`, `digits` and `tail` are token ids: an answer is head + the digits of its number + tail."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.head, self.digits, self.tail = settings["head"], settings["digits"], settings["tail"]
        self.fails, self.hangs = settings.get("fails", 0.0), settings.get("hangs", 0.0)
        self.hang_s, self.delay_s = settings.get("hang_s", 3600.0), settings.get("delay_s", 0.0)
        self.token_delay_s = settings.get("token_delay_s", 0.0)
        self.chat = orjson.dumps(settings.get("chat", {}))
        self.random = random.Random(settings.get("seed", 0))
        self.number = settings.get("first", 10**6)
        self.prompts = Prompts()
        self._rows = {token: b"[%r,%d,null]" % (LOGPROB, token) for token in {*self.head, *self.digits, *self.tail}}

    def ids(self) -> list[int]:
        self.number += 1
        return [*self.head, *(self.digits[int(digit)] for digit in str(self.number)), *self.tail]

    def event(self, new: list[int], prompt_tokens: int, *, sampled: int, last: bool) -> bytes:
        """`new` are the last of `sampled` tokens. Written from ready parts: whoever is measured must not wait for our JSON."""
        finish = b'{"type":"stop","matched":%d}' % new[-1] if last else b"null"
        rows = b",".join([self._rows[token] for token in new])
        return EVENT % (b",".join([b"%d" % token for token in new]), prompt_tokens, sampled, rows, finish)


EVENT = (
    b'{"text":"","output_ids":[%b],"meta_info":{"id":"x","prompt_tokens":%d,"completion_tokens":%d,"weight_version":"1",'
    b'"output_token_logprobs":[%b],"finish_reason":%b}}'
)


class Prompts:
    """Counts the ids of a prompt, so that a gateway can check that every one arrived. An engine has the beginning of a conversation in its
    cache, and one that answers at once must not count it anew."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[bytearray, int, int]] = {}  # by session: the last body, where its ids end, how many they are

    def count(self, body: bytearray) -> int:
        end = body.rfind(b'],"sampling_params":')
        if end < 0:
            raise ValueError("input_ids and sampling_params were expected one behind the other")
        session = bytes(body[end:]).partition(b'"routing_key":"')[2][:32]
        known, known_end, count = self._seen.get(session, (b"", 0, 1))
        if not body.startswith(memoryview(known)[:known_end]):
            known_end, count = 0, 1
        new = np.frombuffer(body, dtype=np.uint8, count=end - known_end, offset=known_end)
        count += int(np.count_nonzero(new == ord(",")))
        if session:
            self._seen[session] = (body, end, count)
        return count


class Door(asyncio.Protocol):
    """One connection: HTTP/1.1 with keep-alive, one request at a time."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url, self._body = b"", bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        if self._url == b"/generate":
            self._task = asyncio.ensure_future(self._generate())
        elif self._url == b"/v1/chat/completions":
            self._task = asyncio.ensure_future(self._chat())
        elif self._url == b"/model_info":
            self._answer(b'{"model_path":"stand-in","weight_version":"1"}')
        else:
            self._answer(b"{}")

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    async def _chat(self) -> None:
        if b'"stream":true' not in self._body[-4096:] and b'"stream":true' not in self._body[:4096]:
            self._answer(self._engine.chat)
            return
        self._start_events()
        for count in range(1, len(self._engine.head) + 7 + len(self._engine.tail) + 1):
            self._event(b'{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}],"id":"x","object":"chat.completion.chunk"}')
            if count == 1:
                await asyncio.sleep(0)  # an engine sends its first token before it has the second
        self._end_events()

    async def _generate(self) -> None:
        engine = self._engine
        draw = engine.random.random()
        if draw < engine.fails:
            self._answer(b'{"error":{"message":"made to fail"}}', b"500 Internal Server Error")
            return
        if draw < engine.fails + engine.hangs:
            await asyncio.sleep(engine.hang_s)
        if engine.delay_s:
            await asyncio.sleep(engine.delay_s)
        ids = engine.ids()
        prompt_tokens = engine.prompts.count(self._body)
        if b'"stream":true' not in self._body[-2048:]:
            self._answer(engine.event(ids, prompt_tokens, sampled=len(ids), last=True))
            return
        self._start_events()
        for count in range(1, len(ids) + 1):
            if engine.token_delay_s:
                await asyncio.sleep(engine.token_delay_s)
            self._event(engine.event([ids[count - 1]], prompt_tokens, sampled=count, last=count == len(ids)))
            if count == 1:
                await asyncio.sleep(0)
        self._end_events()

    def _start_events(self) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def _event(self, data: bytes) -> None:
        line = b"data: " + data + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _end_events(self) -> None:
        self._event(b"[DONE]")
        self._transport.write(b"0\r\n\r\n")


async def main(path: str) -> None:
    settings = json.loads(Path(path).read_text())
    engine = StandIn(settings)
    server = await asyncio.get_running_loop().create_server(lambda: Door(engine), "127.0.0.1", settings.get("port", 0), backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
