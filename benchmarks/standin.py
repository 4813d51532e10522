"""An engine stand-in over bare asyncio, in its own process: SGLang's /generate, and chat completions with vLLM's
`return_token_ids`.

It answers at once, or at `token_delay_s` a token in pieces of `piece` tokens. It only counts the prompt's ids, so that
a benchmark sees what is in front of it. Every answer carries a running number, so that a load test can tell each
generation from every other. `fails` and `hangs` are shares of calls.
Run: `python -m benchmarks.standin SETTINGS.json`; it prints its port.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httptools

LOGPROB = -0.6931471805599453


class Answer(NamedTuple):
    """One generation, written before it is asked for; only the count of the prompt's ids is missing."""

    ids: list[int]
    before: bytes
    behind: bytes
    number: int = 0

    def whole(self, prompt_tokens: int) -> bytes:
        return b"%b%d%b" % (self.before, prompt_tokens, self.behind)


class StandIn:
    """`head`, `digits` and `tail` are token ids: an answer is head + the digits of its number + tail."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.head, self.digits, self.tail = settings["head"], settings["digits"], settings["tail"]
        self.fails, self.hangs = settings.get("fails", 0.0), settings.get("hangs", 0.0)
        self.hang_s, self.delay_s = settings.get("hang_s", 3600.0), settings.get("delay_s", 0.0)
        self.token_delay_s, self.piece = settings.get("token_delay_s", 0.0), settings.get("piece", 1)
        self.random = random.Random(settings.get("seed", 0))
        self.number = settings.get("first", 10**6)
        self.prompts = Prompts()
        self._rows = {token: b"[%r,%d,null]" % (LOGPROB, token) for token in {*self.head, *self.digits, *self.tail}}
        self._ready: list[Answer] = []
        self.make_ready()

    def make_ready(self) -> None:
        """The next answer, while nobody waits for it: what is measured must not wait for our JSON."""
        if not self._ready:
            self._ready.append(self._answer())

    def next(self) -> Answer:
        return self._ready.pop() if self._ready else self._answer()

    def _answer(self) -> Answer:
        self.number += 1
        ids = [*self.head, *(self.digits[int(digit)] for digit in str(self.number)), *self.tail]
        return Answer(ids, *self._event(ids, sampled=len(ids), last=True), number=self.number)

    def piece_of(self, answer: Answer, first: int, last: int, prompt_tokens: int) -> bytes:
        """The event of the tokens from `first` to `last` of a stream."""
        new = answer.ids[first:last]
        return Answer(new, *self._event(new, sampled=last, last=last == len(answer.ids))).whole(prompt_tokens)

    def chat(self, answer: Answer, prompt_ids: bytes | None) -> bytes:
        """A whole chat completion; with ids and log-probabilities where `prompt_ids` are given."""
        call = b'{"id":"call_%d","type":"function","function":%b}' % (answer.number, CALL % answer.number)
        message = b'{"role":"assistant","content":"Reading on.","reasoning_content":"%b","tool_calls":[%b]}'
        text = b"compare the numbers " * (len(answer.ids) // 4)
        ids = b"" if prompt_ids is None else b',"prompt_token_ids":[%b]' % prompt_ids
        choice = b'{"index":0,"message":%b,"finish_reason":"tool_calls"%b}'
        shown = choice % (message % (text, call), self._chat_ids(answer.ids, is_shown=prompt_ids is not None))
        return b'{"id":"chat-%d","object":"chat.completion",%b,"choices":[%b],"usage":%b%b}' % (
            answer.number, MADE, shown, USAGE % len(answer.ids), ids,
        )  # fmt: skip

    def chat_piece(self, answer: Answer, first: int, last: int, prompt_ids: bytes | None) -> bytes:
        """One chunk of a streamed chat completion; the last one has the call."""
        new = answer.ids[first:last]
        is_last = last == len(answer.ids)
        role = b'"role":"assistant",' if first == 0 else b""
        delta = b'{%b"reasoning_content":"%b"}' % (role, b" number" * len(new))
        if is_last:
            function = CALL % answer.number
            delta = b'{"tool_calls":[{"index":0,"id":"call_%d","type":"function","function":%b}]}' % (
                answer.number, function,
            )  # fmt: skip
        ids = b',"prompt_token_ids":[%b]' % prompt_ids if prompt_ids is not None and first == 0 else b""
        finish = b'"tool_calls"' if is_last else b"null"
        shown = self._chat_ids(new, is_shown=prompt_ids is not None)
        choice = b'{"index":0,"delta":%b,"finish_reason":%b%b}' % (delta, finish, shown)
        return b'{"id":"chat-%d","object":"chat.completion.chunk",%b,"choices":[%b]%b}' % (
            answer.number, MADE, choice, ids,
        )  # fmt: skip

    def _chat_ids(self, ids: list[int], *, is_shown: bool) -> bytes:
        if not is_shown:
            return b""
        rows = b",".join(
            b'{"token":"token_id:%d","logprob":%r,"bytes":null,"top_logprobs":[]}' % (i, LOGPROB) for i in ids
        )
        return b',"token_ids":[%b],"logprobs":{"content":[%b]}' % (b",".join(b"%d" % i for i in ids), rows)

    def _event(self, new: list[int], *, sampled: int, last: bool) -> tuple[bytes, bytes]:
        """`new` are the last of `sampled` tokens; the bytes before the count of the prompt's ids, and after it."""
        finish = b'{"type":"stop","matched":%d}' % new[-1] if last else b"null"
        rows = b",".join([self._rows[token] for token in new])
        return BEFORE % b",".join([b"%d" % token for token in new]), BEHIND % (sampled, rows, finish)


MADE = b'"created":0,"model":"m"'
CALL = rb'{"name":"read","arguments":"{\"path\": \"src/module_%d.py\"}"}'
USAGE = b'{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":1}'
BEFORE = b'{"text":"","output_ids":[%b],"meta_info":{"id":"x","prompt_tokens":'
BEHIND = b',"completion_tokens":%d,"weight_version":"1","output_token_logprobs":[%b],"finish_reason":%b}}'


class Prompts:
    """Counts the ids of a prompt, so that a gateway can check that every one arrived. An engine has the beginning of a
    conversation in its cache, and one that answers at once must not count it again."""

    def __init__(self) -> None:
        self._seen: dict[
            bytes, tuple[bytes, int, int]
        ] = {}  # by session: the last body, where its ids end, how many they are

    def count(self, body: bytes) -> int:
        end = body.rfind(b'],"sampling_params":')
        if end < 0:
            raise ValueError("input_ids and sampling_params were expected one after the other")
        session = body[end:].partition(b'"routing_key":"')[2][:32]
        known, known_end, count = self._seen.get(session, (b"", 0, 1))
        if not body.startswith(memoryview(known)[:known_end]):
            known_end, count = 0, 1
        count += body.count(b",", known_end, end)
        if session:
            self._seen[session] = (body, end, count)
        return count


def has_flag(body: bytes, name: bytes) -> bool:
    """Whether a request says `name` is true, written with or without a space."""
    return b'"%b":true' % name in body or b'"%b": true' % name in body


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
        engine, answer = self._engine, self._engine.next()
        # About four characters a token; which ids they are is no matter to a proxy.
        ids = (b"%d," % engine.digits[0] * (len(body) // 4))[:-1] if has_flag(body, b"return_token_ids") else None
        if has_flag(body, b"stream"):
            self._start_events()
            async for first, last in self._pieces(len(answer.ids)):
                self._event(engine.chat_piece(answer, first, last, ids))
            self._end_events()
        else:
            await asyncio.sleep(len(answer.ids) * engine.token_delay_s)
            self._answer(engine.chat(answer, ids))
        asyncio.get_running_loop().call_soon(engine.make_ready)

    async def _pieces(self, count: int) -> AsyncIterator[tuple[int, int]]:
        """Positions of the pieces of `count` tokens, each when an engine would have sampled it."""
        loop, delay = asyncio.get_running_loop(), self._engine.token_delay_s
        began = loop.time()
        for first in range(0, count, self._engine.piece):
            last = min(first + self._engine.piece, count)
            if delay:
                # What is late catches up: the pace is that of the whole answer.
                await asyncio.sleep(max(delay / 2, began + last * delay - loop.time()))
            yield first, last
            if first == 0:
                await asyncio.sleep(0)  # an engine sends its first token before it has the second

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
        if b'"stream":true' in body[-2048:]:
            self._start_events()
            async for first, last in self._pieces(len(answer.ids)):
                self._event(engine.piece_of(answer, first, last, prompt_tokens))
            self._end_events()
        else:
            await asyncio.sleep(len(answer.ids) * engine.token_delay_s)
            self._answer(answer.whole(prompt_tokens))
        asyncio.get_running_loop().call_soon(engine.make_ready)

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
