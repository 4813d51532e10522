"""The n choices of a turn: the engine is asked, whole or streamed, and its tokens are checked and parsed. Nothing is
written here.

A choice keeps what the engine has reported so far, so that a turn that ends early (the client left, the engine failed,
the session was deleted) can still be recorded.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tokentrue.errors import EngineContractError, RenderError, TokenContractError
from tokentrue.protocols import Provider, Renderer
from tokentrue.replay import join_masks_if_whole
from tokentrue.sessions.offload import INLINE_IDS, run_inline_or_thread
from tokentrue.sessions.stages.prompts import Prompt
from tokentrue.sessions.stages.serving import StreamedMessage, serve_message
from tokentrue.sessions.tree import Outcome
from tokentrue.tracing import traced
from tokentrue.types import (
    UNVERSIONED,
    Chunk,
    Completion,
    Delta,
    Finish,
    Message,
    Parsed,
    Sampling,
    SamplingMask,
    Tools,
    TurnEvent,
    are_logprobs,
    choice_seed,
    spans_from_runs,
)

T = TypeVar("T")
_LARGEST_VERSION = 2**63 - 1
MOST_SAMPLED = 1 << 20  # tokens of one choice whose request has no max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One sampled turn that is not in the record yet."""

    node: str
    choice: int
    completion: Completion
    parsed: Parsed
    served: Message
    sampling: Sampling  # of this choice: its own seed
    outcome: Outcome = "served"


class Choice:
    """One of the n answers to one request; `node` is the name reserved for it. With `emit`, the answer is streamed."""

    def __init__(
        self,
        *,
        index: int,
        node: str,
        prompt: Prompt,
        tools: Tools | None,
        sampling: Sampling,
        renderer: Renderer,
        emit: Callable[[TurnEvent], None] | None,
    ) -> None:
        self.index, self.node = index, node
        self._prompt, self._tools, self._renderer, self._emit = prompt, tools, renderer, emit
        self.sampling = (
            sampling
            if sampling.seed is None or index == 0
            else replace(sampling, seed=choice_seed(sampling.seed, index))
        )
        self._received = _Received(MOST_SAMPLED if sampling.max_tokens is None else sampling.max_tokens)
        self._completion: Completion | None = None
        self._streamed: tuple[Parsed, Message] | None = None

    async def generate(self, provider: Provider, session_id: str) -> None:
        """Asks the engine. The answer is kept here; `parse` gives it."""
        try:
            if self._emit is None:
                async for _ in self._read_chunks(provider, session_id):
                    pass  # they are kept in case that the end does not come
            else:
                self._emit(TurnEvent(index=self.index, node=self.node))
                await self._stream(provider, session_id, self._emit)
        except TokenContractError as error:
            raise EngineContractError(f"the engine's answer is not a completion: {error}") from error

    async def _stream(self, provider: Provider, session_id: str, emit: Callable[[TurnEvent], None]) -> None:
        parser = self._renderer.parser(prompt_ids=self._prompt.ids, tools=self._tools)
        shown = StreamedMessage(self.node, self.sampling.stop)
        async with aclosing(self._read_chunks(provider, session_id)) as chunks:
            async for chunk in chunks:
                deltas = [seen for delta in _parse(parser.feed, chunk.token_ids) if (seen := shown.feed(delta))]
                emit(self._event(deltas[0] if deltas else None, chunk))
                for delta in deltas[1:]:
                    emit(self._event(delta))
        rest, parsed = _parse(parser.finish)
        for delta in map(shown.feed, rest):
            if delta is not None:
                emit(self._event(delta))
        missing, served = shown.finish(serve_message(parsed, self.node, stops=self.sampling.stop))
        for delta in missing:
            emit(self._event(delta))
        self._streamed = parsed, served

    async def _read_chunks(self, provider: Provider, session_id: str) -> AsyncGenerator[Chunk, None]:
        """Chunks with tokens, each kept before it is yielded; then the completion is checked and kept."""
        final: Completion | None = None
        stream = provider.stream(self._prompt.ids, self.sampling, session=session_id, whole=self._emit is None)
        async with aclosing(cast("AsyncGenerator[Chunk, None]", stream)) as chunks:
            async for chunk in chunks:
                final = chunk.final or final
                if chunk.token_ids:
                    self._received.add(chunk)
                    yield chunk
        if final is None or not self._received.is_all_of(final):
            raise EngineContractError("the engine's stream and its final answer differ")
        check_completion(final, self._prompt)
        self._completion = final

    def _event(self, delta: Delta | None, chunk: Chunk | None = None) -> TurnEvent:
        chunk = chunk or Chunk()
        return TurnEvent(
            index=self.index, node=self.node, delta=delta, token_ids=chunk.token_ids, logprobs=chunk.logprobs
        )

    @traced("parse")
    async def parse(self) -> Draft:
        """The finished answer."""
        assert self._completion is not None
        return await self._build_draft(self._completion, "served")

    async def parse_partial(self, outcome: Outcome) -> Draft | None:
        """Whatever the engine has reported, labelled with why it is not served; None where that is nothing."""
        completion = self._completion or self._received.completion(len(self._prompt.ids))
        if completion is None or not completion.token_ids or self._is_invalid(completion):
            completion = self._received.completion(len(self._prompt.ids))
        if completion is None:
            return None
        try:
            return await self._build_draft(completion, outcome)
        except EngineContractError:  # what cannot be parsed is still recorded: the ids are what matters
            empty: Message = {"role": "assistant", "content": ""}
            parsed = Parsed(message=empty)
            return self._make_draft(completion, parsed, empty, outcome)

    def _is_invalid(self, completion: Completion) -> bool:
        """True for an answer that cannot be recorded."""
        try:
            check_completion(completion, self._prompt)
        except EngineContractError:
            return True
        return False

    async def _build_draft(self, completion: Completion, outcome: Outcome) -> Draft:
        if self._streamed is not None:
            parsed, served = self._streamed
        else:
            small = len(completion.token_ids) < INLINE_IDS
            parsed = await run_inline_or_thread(self._parse_whole, small, completion)
            served = serve_message(parsed, self.node, stops=self.sampling.stop)
        return self._make_draft(completion, parsed, served, outcome)

    def _make_draft(self, completion: Completion, parsed: Parsed, served: Message, outcome: Outcome) -> Draft:
        return Draft(
            node=self.node,
            choice=self.index,
            completion=completion,
            parsed=parsed,
            served=served,
            sampling=self.sampling,
            outcome=outcome,
        )

    def _parse_whole(self, completion: Completion) -> Parsed:
        return _parse(self._renderer.parse, completion.token_ids, prompt_ids=self._prompt.ids, tools=self._tools)


def _parse(parse: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Sampled ids that no tokenizer knows are the engine's fault, not the client's."""
    try:
        return parse(*args, **kwargs)
    except (RenderError, TokenContractError) as error:
        raise EngineContractError(f"the engine's answer cannot be read: {error}") from error


def check_completion(completion: Completion, prompt: Prompt) -> None:
    """The engine's own account must agree with what it was sent, and the record must be able to hold it."""
    if completion.prompt_tokens is not None and completion.prompt_tokens != len(prompt.ids):
        raise EngineContractError(
            f"the engine counted {completion.prompt_tokens} prompt tokens of the {len(prompt.ids)} that were sent"
        )
    if not completion.token_ids:
        raise EngineContractError("the engine sampled no token; raise max_tokens or shorten the prompt")
    for span in completion.versions:
        _check_version(span.version)


def _check_version(version: int) -> None:
    if not -_LARGEST_VERSION <= version <= _LARGEST_VERSION:
        raise EngineContractError(
            f"policy version {version} is not a 64-bit integer; have the engine report a smaller one"
        )


class _Received:
    """What the engine has reported so far, each chunk checked before anyone sees it; at most `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.token_ids: list[int] = []
        self._logprobs = array("d")
        self._runs: list[tuple[int, int]] = []  # (tokens, policy version) of each chunk
        self._masks: list[SamplingMask | None] = []  # of each chunk

    def add(self, chunk: Chunk) -> None:
        if len(chunk.token_ids) != len(chunk.logprobs) or not are_logprobs(chunk.logprobs):
            raise EngineContractError(
                f"{len(chunk.token_ids)} streamed ids came with log-probabilities {list(chunk.logprobs)!r}"
            )
        _check_version(chunk.policy_version)
        room = self._limit - len(self.token_ids)
        if len(chunk.token_ids) > room:
            cut = replace(chunk, token_ids=chunk.token_ids[:room], logprobs=chunk.logprobs[:room], sampling_mask=None)
            self._keep(cut)
            raise EngineContractError(
                f"the engine sampled more than max_tokens={self._limit}; the first {self._limit} tokens are recorded"
            )
        self._keep(chunk)

    def _keep(self, chunk: Chunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._runs.append((len(chunk.token_ids), chunk.policy_version))
        self._masks.append(chunk.sampling_mask)

    def is_all_of(self, final: Completion) -> bool:
        """What was streamed, and what is recorded, are the same tokens with the same log-probabilities."""
        return final.token_ids == self.token_ids and array("d", final.logprobs) == self._logprobs

    def completion(self, prompt_tokens: int) -> Completion | None:
        """An aborted one; None where nothing was reported."""
        if not self.token_ids:
            return None
        versions = spans_from_runs(self._runs)
        return Completion(
            token_ids=cast("Any", self.token_ids),
            logprobs=tuple(self._logprobs),
            finish=Finish.ABORT,
            versions=() if [span.version for span in versions] == [UNVERSIONED] else versions,
            prompt_tokens=prompt_tokens,
            sampling_mask=join_masks_if_whole(self._masks),
        )


@traced("generate")
async def generate_all(choices: Sequence[Choice], provider: Provider, session_id: str) -> None:
    """Returns when every choice has its answer, or raises the first failure after the others were cancelled and have
    ended."""
    await _run_all([choice.generate(provider, session_id) for choice in choices])


async def _run_all(works: list[Coroutine[Any, Any, None]]) -> None:
    if len(works) == 1:
        return await works[0]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved: the first one is being raised
        raise
