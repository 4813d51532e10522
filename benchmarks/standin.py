"""An engine stand-in that answers at once: SGLang's /generate wire format over bare asyncio, in a process of its own.

It only counts the prompt's ids, so that a benchmark sees what stands before it. Every answer carries a running number,
so that a load test can tell each generation from every other. `fails` and `hangs` are shares of calls;
`/v1/chat/completions` answers a bare
proxy with as many bytes. Run: `python -m benchmarks.standin SETTINGS.json`; it prints its port.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httptools
import orjson

LOGPROB = -0.6931471805599453


class Answer(NamedTuple):
    """One generation, written before it is asked for; only the count of the prompt's ids is missing."""

    ids: list[int]
    before: bytes
    behind: bytes

    def whole(self, prompt_tokens: int) -> bytes:
        return b"%b%d%b" % (self.before, prompt_tokens, self.behind)


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
        self._ready: list[Answer] = []
        self.make_ready()

    def make_ready(self) -> None:
        """The next answer, while nobody waits for it: whoever is measured must not wait for our JSON."""
        if not self._ready:
            self._ready.append(self._answer())

    def next(self) -> Answer:
        return self._ready.pop() if self._ready else self._answer()

    def _answer(self) -> Answer:
        self.number += 1
        ids = [*self.head, *(self.digits[int(digit)] for digit in str(self.number)), *self.tail]
        return Answer(ids, *self._event(ids, sampled=len(ids), last=True))

    def token(self, answer: Answer, count: int, prompt_tokens: int) -> bytes:
        """The event of the `count`th token of a stream."""
        new = answer.ids[count - 1 : count]
        return Answer(new, *self._event(new, sampled=count, last=count == len(answer.ids))).whole(prompt_tokens)

    def _event(self, new: list[int], *, sampled: int, last: bool) -> tuple[bytes, bytes]:
        """`new` are the last of `sampled` tokens; what stands before the count of the prompt's ids, and behind it."""
        finish = b'{"type":"stop","matched":%d}' % new[-1] if last else b"null"
        rows = b",".join([self._rows[token] for token in new])
        return BEFORE % b",".join([b"%d" % token for token in new]), BEHIND % (sampled, rows, finish)


BEFORE = b'{"text":"","output_ids":[%b],"meta_info":{"id":"x","prompt_tokens":'
BEHIND = b',"completion_tokens":%d,"weight_version":"1","output_token_logprobs":[%b],"finish_reason":%b}}'


class Prompts:
    """Counts the ids of a prompt, so that a gateway can check that every one arrived. An engine has the beginning of a
    conversation in its cache, and one that answers at once must not count it anew."""

    def __init__(self) -> None:
        self._seen: dict[
            bytes, tuple[bytes, int, int]
        ] = {}  # by session: the last body, where its ids end, how many they are

    def count(self, body: bytes) -> int:
        end = body.rfind(b'],"sampling_params":')
        if end < 0:
            raise ValueError("input_ids and sampling_params were expected one behind the other")
        session = body[end:].partition(b'"routing_key":"')[2][:32]
        known, known_end, count = self._seen.get(session, (b"", 0, 1))
        if not body.startswith(memoryview(known)[:known_end]):
            known_end, count = 0, 1
        count += body.count(b",", known_end, end)
        if session:
            self._seen[session] = (body, end, count)
        return count


class Door(asyncio.Protocol):
    """One connection: HTTP/1.1 with keep-alive, one request at a time."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url, self._parts = b"", list[bytes]()
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
        self._url, self._parts = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if self._url == b"/generate":
            self._task = asyncio.ensure_future(self._generate(body))
        elif self._url == b"/v1/chat/completions":
            self._task = asyncio.ensure_future(self._chat(body))
        elif self._url == b"/model_info":
            self._answer(b'{"model_path":"stand-in","weight_version":"1"}')
        else:
            self._answer(b"{}")

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    async def _chat(self, body: bytes) -> None:
        if b'"stream":true' not in body[-4096:] and b'"stream":true' not in body[:4096]:
            self._answer(self._engine.chat)
            return
        self._start_events()
        for count in range(1, len(self._engine.head) + 7 + len(self._engine.tail) + 1):
            self._event(
                b'{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}],"id":"x","object":"chat.completion.chunk"}'
            )
            if count == 1:
                await asyncio.sleep(0)  # an engine sends its first token before it has the second
        self._end_events()

    async def _generate(self, body: bytes) -> None:
        engine = self._engine
        draw = engine.random.random()
        if draw < engine.fails:
            self._answer(b'{"error":{"message":"made to fail"}}', b"500 Internal Server Error")
            return
        if draw < engine.fails + engine.hangs:
            await asyncio.sleep(engine.hang_s)
        if engine.delay_s:
            await asyncio.sleep(engine.delay_s)
        answer, prompt_tokens = engine.next(), engine.prompts.count(body)
        if b'"stream":true' not in body[-2048:]:
            self._answer(answer.whole(prompt_tokens))
        else:
            await self._stream(answer, prompt_tokens)
        asyncio.get_running_loop().call_soon(engine.make_ready)

    async def _stream(self, answer: Answer, prompt_tokens: int) -> None:
        self._start_events()
        for count in range(1, len(answer.ids) + 1):
            if self._engine.token_delay_s:
                await asyncio.sleep(self._engine.token_delay_s)
            self._event(self._engine.token(answer, count, prompt_tokens))
            if count == 1:
                await asyncio.sleep(0)
        self._end_events()

    def _start_events(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def _event(self, data: bytes) -> None:
        line = b"data: " + data + b"\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _end_events(self) -> None:
        self._event(b"[DONE]")
        self._transport.write(b"0\r\n\r\n")


async def main(path: str) -> None:
    settings = json.loads(Path(path).read_text())
    engine = StandIn(settings)
    place = settings.get("host", "127.0.0.1"), settings.get("port", 0)
    server = await asyncio.get_running_loop().create_server(lambda: Door(engine), *place, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
