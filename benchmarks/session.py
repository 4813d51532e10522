"""A session whose renderer and engine cost nothing, so that what is measured is the session itself."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from statistics import median
from typing import Any, Literal

from tokentrue.ids import TokenIds
from tokentrue.protocols import Streaming
from tokentrue.types import (
    Chunk,
    Completion,
    Ended,
    Extension,
    Finish,
    Ids,
    Messages,
    Parsed,
    Refusal,
    Rendered,
    Sampling,
    Tools,
    TurnRequest,
)

GIVEN, SAMPLED, STOP = 200, 80, 1


class FreeRenderer:
    """Fixed ids for any message; the content of a sampled turn is its number."""

    stop_token_ids = (STOP,)
    template_hash = tokenizer_hash = "sha256:free"
    history: Literal["keep", "template"] = "keep"
    placeholder_ids: tuple[int, ...] = ()
    _given = tuple(range(10, 10 + GIVEN))

    def call_tag(self, tools: Tools, *, name: str | None = None) -> Refusal:
        return Refusal(why="no_call_form", detail="calls are fixed")

    def render(self, messages: Messages, tools: Tools | None = None, *, template_kwargs: Any = None) -> Rendered:
        return Rendered(token_ids=TokenIds(self._given * len(messages)))

    def extend(
        self, prefix_ids: Ids, messages: Messages, new: Messages, tools: Any = None, *, template_kwargs: Any = None
    ) -> Extension:
        return Extension(prefix_ids=TokenIds(prefix_ids), added_ids=TokenIds(self._given))

    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Any = None) -> Parsed:
        number = str(sampled_ids[0])
        call = {
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"path": f"src/{number}.py", "lines": [1, 40]})},
        }
        message = {
            "role": "assistant",
            "content": f"step {number}",
            "reasoning_content": "let me see " * 20,
            "tool_calls": [call],
        }
        return Parsed(message=message, ended=Ended.STOP, stop_id=STOP)

    def parser(self, *, prompt_ids: Ids = (), tools: Any = None, early: bool = True) -> Any:
        return self

    whole = parse

    def decode(self, token_ids: Ids) -> str:
        return ""

    def encode_sampled(self, text: str) -> tuple[int, ...]:
        return ()


class FreeEngine(Streaming):
    """Answers at once."""

    name = "free"
    truthful_filters = frozenset[str]()

    def __init__(self) -> None:
        self.count = 100

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        self.count += 1
        ids, logprobs = TokenIds((self.count, *range(1_000, 1_000 + SAMPLED - 2), STOP)), (-0.5,) * SAMPLED
        yield Chunk(token_ids=ids, logprobs=logprobs)
        yield Chunk(
            final=Completion(token_ids=ids, logprobs=logprobs, finish=Finish.STOP, prompt_tokens=len(prompt_ids))
        )

    async def health(self) -> Mapping[str, Any]:
        return {}

    async def close(self) -> None:
        pass


def _follow(message: Mapping[str, Any]) -> list[Any]:
    replay = {k: v for k, v in message.items() if k != "reasoning_content"}
    return [
        replay,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "def f():\n    return 1\n" * 60},
    ]


async def measure_turn(turns: int, *, times: int = 30) -> tuple[float, float, int]:
    """Median CPU µs of one more turn after `turns` turns, for a history of new objects and of the same ones; and prompt
    tokens."""
    from tokentrue.turn import Session

    session = Session(renderer=FreeRenderer(), provider=FreeEngine())
    history: list[Any] = [
        {"role": "system", "content": "You are careful. " * 50},
        {"role": "user", "content": "Mend the build."},
    ]
    (reply,) = await session.turn(TurnRequest(messages=history))
    fresh: list[float] = []
    shared: list[float] = []
    for turn in range(turns - 1 + 2 * times):
        history = [*history, *_follow(reply.message)]
        measured = None if turn < turns - 1 else (fresh, shared)[turn % 2]
        request = TurnRequest(messages=json.loads(json.dumps(history)) if measured is fresh else history)
        start = time.thread_time()
        (reply,) = await session.turn(request)
        if measured is not None:
            measured.append(time.thread_time() - start)
    return median(fresh) * 1e6, median(shared) * 1e6, reply.prompt_tokens
