"""One choice of a turn: the engine is asked, whole or streamed, and its tokens are parsed. Nothing here writes to the record."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tokentrue.errors import EngineContractError
from tokentrue.protocols import Provider, Renderer, TurnParser
from tokentrue.sessions.prompts import INLINE_IDS, inline_or_thread
from tokentrue.sessions.recording import Asked, Draft, checked
from tokentrue.sessions.serve import Deltas
from tokentrue.sessions.spare_time import Meanwhile, let_out
from tokentrue.types import UNVERSIONED, Chunk, Completion, Finish, Parsed, Sampling, TurnEvent, VersionSpan

T = TypeVar("T")
Emit = Callable[[TurnEvent], None]


class Disconnected(asyncio.CancelledError):
    """The last listener left. `draft` is what had been sampled, if anything was."""

    def __init__(self, draft: Draft | None) -> None:
        super().__init__("the client disconnected")
        self.draft = draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the n answers to one request; `node` is the name reserved for it."""

    asked: Asked
    index: int
    node: str
    provider: Provider
    renderer: Renderer
    session_id: str

    @property
    def sampling(self) -> Sampling:
        base = self.asked.sampling
        return base if base.seed is None or self.index == 0 else replace(base, seed=base.seed + self.index)

    async def generate(self) -> Draft:
        parser = Meanwhile(lambda: self._parser(early=False))
        completion = await self.provider.generate(self.asked.prompt.ids, self.sampling, session=self.session_id)
        return await self._draft(checked(completion, self.asked.prompt), parser.result())

    def _parser(self, *, early: bool) -> TurnParser:
        """`early` shows calls while they are written."""
        return self.renderer.parser(prompt_ids=self.asked.prompt.ids, tools=self.asked.request.tools, early=early)

    async def stream(self, emit: Emit) -> Draft:
        """Emits what the client may see, as it is sampled. A cancellation comes out as `Disconnected` with what there is."""
        emit(TurnEvent(index=self.index, node=self.node))
        heard = _Heard()
        try:
            completion, parsed = await self._listen(emit, heard)
        except asyncio.CancelledError as error:
            partial = heard.completion(len(self.asked.prompt.ids))
            draft = None if partial is None else replace(await self._draft(partial, self._parser(early=False)), outcome="disconnected")
            raise Disconnected(draft) from error
        return Draft(node=self.node, choice=self.index, completion=completion, parsed=parsed)

    async def _listen(self, emit: Emit, heard: _Heard) -> tuple[Completion, Parsed]:
        parser = Meanwhile(lambda: self._parser(early=True))
        shown = Deltas(self.node, self.asked.sampling.stop)
        final: Completion | None = None
        first = True
        stream = self.provider.stream(self.asked.prompt.ids, self.sampling, session=self.session_id)
        async with aclosing(cast("AsyncGenerator[Chunk, None]", stream)) as chunks:
            async for chunk in chunks:
                final = chunk.final or final
                if chunk.token_ids:
                    heard.add(chunk)
                    self._emit_chunk(emit, chunk, [seen for delta in parser.result().feed(chunk.token_ids) if (seen := shown.feed(delta))])
                    if first:
                        first = False
                        await let_out()
        if final is None or final.token_ids != tuple(heard.ids):
            raise EngineContractError("the engine's stream and its final answer differ")
        rest, parsed = parser.result().finish()
        for delta in (*map(shown.feed, rest), shown.finish()):
            if delta is not None:
                emit(TurnEvent(index=self.index, node=self.node, delta=delta))
        return checked(final, self.asked.prompt), parsed

    def _emit_chunk(self, emit: Emit, chunk: Chunk, deltas: list[Any]) -> None:
        first = deltas[0] if deltas else None
        emit(TurnEvent(index=self.index, node=self.node, delta=first, token_ids=chunk.token_ids, logprobs=chunk.logprobs))
        for delta in deltas[1:]:
            emit(TurnEvent(index=self.index, node=self.node, delta=delta))

    async def _draft(self, completion: Completion, parser: TurnParser) -> Draft:
        parsed = await inline_or_thread(parser.whole, len(completion.token_ids) < INLINE_IDS, completion.token_ids)
        return Draft(node=self.node, choice=self.index, completion=completion, parsed=parsed)


class _Heard:
    """What a stream has said so far."""

    def __init__(self) -> None:
        self.ids, self.logprobs = array("i"), array("d")
        self.versions: list[VersionSpan] = []

    def add(self, chunk: Chunk) -> None:
        start = len(self.ids)
        self.ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        if self.versions and self.versions[-1].version == chunk.policy_version:
            self.versions[-1] = replace(self.versions[-1], end=len(self.ids))
        else:
            self.versions.append(VersionSpan(start=start, end=len(self.ids), version=chunk.policy_version))

    def completion(self, prompt_tokens: int) -> Completion | None:
        if not self.ids:
            return None
        unversioned = [span.version for span in self.versions] == [UNVERSIONED]
        return Completion(
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish=Finish.ABORT,
            versions=() if unversioned else tuple(self.versions),
            prompt_tokens=prompt_tokens,
        )


async def all_of(works: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, or the first failure after the others were cancelled and have ended."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # seen: the first one is being raised
        raise
