"""A small world for the corridor's tests: a renderer, an engine that says exactly what it is told, and an agent with a
tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokentrue as tt
from tests.parts import loaded_tokenizer, own_dir, tokenizer_dir, whole_chunks
from tokentrue.ids import TokenIds
from tokentrue.providers.scripted import invent_logprob
from tokentrue.renderers import renderer_of
from tokentrue.types import Chunk, Completion, Finish, Ids, Message, Sampling, VersionSpan

ANY = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "look at a file", "parameters": ANY}}]
OTHER_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "write", "parameters": ANY}}]
OPENING: list[Message] = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": "Mend the build."}]


@cache
def renderer(name: str = "qwen3", history: str = "keep") -> Any:
    """`qwen3` is the real tokenizer and template; `own` works on every machine."""
    return renderer_of(loaded_tokenizer(directory(name)), directory(name), history=history)  # type: ignore[arg-type]


class Engine:
    """Answers from a list of id sequences, in order. `delay_s` per token; `hold` makes it wait before the first one."""

    name = "told"
    bans_tokens = False
    truthful_filters: frozenset[str] | None = frozenset({"top_p"})

    def __init__(self, answers: Iterable[Sequence[int]], *, delay_s: float = 0.0, version: int = 7) -> None:
        self.answers = [tuple(answer) for answer in answers]
        self.delay_s, self.version = delay_s, version
        self.prompts: list[tuple[int, ...]] = []
        self.settings: list[Sampling] = []
        self.hold: asyncio.Event | None = None
        self.fail: BaseException | None = None
        self.finish = Finish.STOP
        self.cancelled = 0

    def _next(self, prompt_ids: Ids, sampling: Sampling) -> Completion:
        self.prompts.append(tuple(prompt_ids))
        self.settings.append(sampling)
        if self.fail is not None:
            raise self.fail
        ids = self.answers.pop(0)
        finish = self.finish
        if sampling.max_tokens is not None and len(ids) > sampling.max_tokens:
            ids, finish = ids[: sampling.max_tokens], Finish.LENGTH
        return Completion(
            token_ids=ids,
            logprobs=tuple(invent_logprob(i + len(prompt_ids), token) for i, token in enumerate(ids)),
            finish=finish,
            versions=(VersionSpan(start=0, end=len(ids), version=self.version),),
            prompt_tokens=len(prompt_ids),
            prompt_digest=TokenIds(prompt_ids).sha256(),
        )

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        completion = self._next(prompt_ids, sampling)
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(self.delay_s)
        return completion

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        if whole:
            for chunk in whole_chunks(await self.generate(prompt_ids, sampling, session=session)):
                yield chunk
            return
        completion = self._next(prompt_ids, sampling)
        try:
            if self.hold is not None:
                await self.hold.wait()
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                yield Chunk(token_ids=(token,), logprobs=(logprob,), policy_version=self.version)
                await asyncio.sleep(self.delay_s)
            yield Chunk(final=completion)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def health(self) -> Mapping[str, Any]:
        return {}

    async def close(self) -> None:
        pass


def directory(name: str) -> Path:
    return own_dir("qwen3-like") if name == "own" else tokenizer_dir(name)


def encode(text: str, name: str = "qwen3") -> list[int]:
    return list(loaded_tokenizer(directory(name))(text, add_special_tokens=False)["input_ids"])


def arguments(turn: int) -> dict[str, Any]:
    """Everything that a harness may spell otherwise: key order, spaces, accents, numbers; and none at all."""
    return (
        {}
        if turn % 4 == 3
        else {"path": f"süß/{turn}.py", "line": 1.0, "big": 1e3, "deep": {"y": [1, 2.5], "x": True, "n": None}}
    )


def sampled_turn(
    turn: int, *, tokens: int = 100, call: bool = True, tag: str = "", name: str = "qwen3"
) -> tuple[int, ...]:
    """Exactly `tokens` ids: reasoning (with a split that no tokenizer would make), text with outer blanks, a tool call,
    the stop."""
    head = encode(f"<think>\n{tag}step {turn}, add", name) + encode(" th", name) + encode("em", name)
    spelled = json.dumps(arguments(turn), ensure_ascii=True)
    body = f"\n</think>\n\nLooking at {turn}{tag}. "
    if call:
        body += f'\n<tool_call>\n{{"name": "look", "arguments": {spelled}}}\n</tool_call>'
    rest = [*encode(body, name), renderer(name).stop_token_ids[0]]
    filler = encode(" so", name)
    missing = tokens - len(head) - len(rest)
    assert missing >= 0, f"{tokens} tokens are too few"
    return (*head, *(filler[0] for _ in range(missing)), *rest)


def answer_to(message: Mapping[str, Any], turn: int) -> list[Message]:
    """What the agent appends after a served message: its tool's result, or a question."""
    calls = message.get("tool_calls") or ()
    if not calls:
        return [{"role": "user", "content": f"and then? {turn}"}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"contents of {turn}\n"} for call in calls]


Replay = Callable[[Message, int], Message]


async def agent(
    session: tt.Session, replay: Replay, *, turns: int = 20, messages: Sequence[Message] = OPENING, tools: Any = TOOLS
) -> list[Any]:
    """An agent loop that replays its history through `replay` on every turn, as a harness would."""
    history, replies = list(messages), []
    for turn in range(turns):
        reply = await session.chat(history, tools)
        replies.append(reply)
        replayed = replay(reply.message, turn)
        history = [*history, replayed, *answer_to(replayed, turn)]
    return replies
