"""Generates the n choices of a turn, and checks and parses their tokens. A choice keeps the tokens received so far: a
turn that ends early can still be recorded."""

import asyncio
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from secrets import token_hex
from typing import Any, TypeVar, cast

from msgspec import structs

from tokentrue.conversation.match_keys import calls_of
from tokentrue.errors import EngineContractError, RenderError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import Provider, Renderer
from tokentrue.routing_replay import join_masks_if_whole
from tokentrue.sessions.requests import CHARS_PER_ID, run_by_size
from tokentrue.sessions.singleflight import InFlightTurn
from tokentrue.sessions.tree import Outcome
from tokentrue.tracing import traced
from tokentrue.types import (
    MAX_INT32,
    MAX_INT64,
    UNVERSIONED,
    Chunk,
    Completion,
    Delta,
    Finish,
    Message,
    Parsed,
    PromptImage,
    Reply,
    Sampling,
    SamplingMask,
    TurnEvent,
    are_logprobs,
    choice_seed,
    spans_from_runs,
)

T = TypeVar("T")
MOST_SAMPLED = 1 << 20  # tokens of one choice whose request has no max_tokens


class Choice:
    """One of the n answers: what the engine sampled (`completion`) and what the client gets (`served`)."""

    completion: Completion
    parsed: Parsed
    served: Message
    outcome: Outcome = "served"

    def __init__(
        self,
        index: int,
        turn: InFlightTurn,
        prompt_ids: TokenIds,
        renderer: Renderer,
        images: Sequence[PromptImage] = (),
    ) -> None:
        self.index, self.node_id = index, token_hex(16)
        self.sampling = sampling = turn.sampling
        if sampling.seed is not None and index:
            self.sampling = replace(sampling, seed=choice_seed(sampling.seed, index))
        self._prompt_ids, self._tools, self._renderer = prompt_ids, turn.conversation.tools, renderer
        # An engine that takes no images has no such argument.
        self._images: JsonMapping = {"images": images} if images else {}
        self._placeholders = frozenset(renderer.placeholder_ids)
        self._emit = turn.emit if turn.streamed else None
        self._limit = sampling.max_tokens or MOST_SAMPLED
        self._received = _Received(self._limit)
        self._is_complete = self._is_parsed = False

    async def generate(self, provider: Provider, session_id: str) -> None:
        emit, index, node_id = self._emit, self.index, self.node_id
        if emit is None:
            return await self._read(provider, session_id, None)
        parser = self._renderer.parser(prompt_ids=self._prompt_ids, tools=self._tools)
        shown = StreamedMessage(node_id, self.sampling.stop)

        def show(deltas: Sequence[Delta]) -> None:
            for delta in deltas:
                emit(TurnEvent(index=index, node_id=node_id, delta=delta))

        def feed(chunk: Chunk) -> None:
            deltas = shown.feed(_parse(parser.feed, chunk.token_ids))
            first, ids, logprobs = deltas[0] if deltas else None, chunk.token_ids, chunk.logprobs
            emit(TurnEvent(index=index, node_id=node_id, delta=first, token_ids=ids, logprobs=logprobs))
            show(deltas[1:])

        emit(TurnEvent(index=index, node_id=node_id))
        await self._read(provider, session_id, feed)
        rest, self.parsed = _parse(parser.finish)
        show([*shown.feed(rest), *shown.finish()])
        self.served = serve_message(self.parsed, node_id, stops=self.sampling.stop)
        self._is_parsed = True

    async def _read(self, provider: Provider, session_id: str, feed: Callable[[Chunk], None] | None) -> None:
        final: Completion | None = None
        sampling = self.sampling
        if self._placeholders and provider.bans_tokens:
            sampling = ban_tokens(sampling, self._placeholders)
        stream = provider.stream(self._prompt_ids, sampling, session=session_id, whole=feed is None, **self._images)
        try:
            async with aclosing(cast("AsyncGenerator[Chunk]", stream)) as chunks:
                async for chunk in chunks:
                    final = chunk.final or final
                    if chunk.token_ids:
                        fitting = self._received.add(chunk)
                        if self._placeholders and (found := self._placeholders.intersection(fitting.token_ids)):
                            raise EngineContractError(
                                f"the model sampled the placeholder {min(found)}, which has no image; ask again"
                            )
                        if feed is not None and fitting.token_ids:
                            feed(fitting)
                        if fitting is not chunk:
                            raise EngineContractError(
                                f"the engine sampled more than max_tokens={self._limit}; the first {self._limit} "
                                "tokens are recorded"
                            )
        except TokenContractError as error:
            raise EngineContractError(f"the engine's answer is not a completion: {error}") from error
        if final is None or not self._received.is_all_of(final):
            raise EngineContractError("the engine's stream and its final answer differ")
        counted, sent = final.prompt_tokens, len(self._prompt_ids)
        if counted not in (None, sent):
            raise EngineContractError(f"the engine counted {counted} prompt tokens of the {sent} that were sent")
        if not final.token_ids:
            raise EngineContractError("the engine sampled no token; raise max_tokens or shorten the prompt")
        for span in final.versions:
            _check_version(span.version)
        self.completion, self._is_complete = final, True

    @traced("parse")
    async def parse(self) -> None:
        if not self._is_parsed:
            ids, parse = self.completion.token_ids, self._renderer.parse
            self.parsed = await run_by_size(
                _parse, CHARS_PER_ID * len(ids), parse, ids, prompt_ids=self._prompt_ids, tools=self._tools
            )
            self.served = serve_message(self.parsed, self.node_id, stops=self.sampling.stop)

    async def parse_partial(self, outcome: Outcome) -> bool:
        """False if nothing was received. `outcome`: why it is not served."""
        if not self._is_complete:
            received = self._received.completion(len(self._prompt_ids))
            if received is None:
                return False
            self.completion = received
        self.outcome = outcome if self._placeholders.isdisjoint(self.completion.token_ids) else "placeholder"
        try:
            await self.parse()
        except EngineContractError:  # record it even if it cannot be parsed: the ids are what matters
            self.served = {"role": "assistant", "content": ""}
            self.parsed = Parsed(message=self.served)
        return True


def _parse(parse: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    # Unknown ids are the engine's error, not the client's.
    try:
        return parse(*args, **kwargs)
    except (RenderError, TokenContractError) as error:
        raise EngineContractError(f"the engine's answer cannot be read: {error}") from error


def _check_version(version: int) -> None:
    if not -MAX_INT64 <= version <= MAX_INT64:
        raise EngineContractError(
            f"policy version {version} is not a 64-bit integer; have the engine report a smaller one"
        )


class _Received:
    """What the engine has sent; recorded in place of a completion if the turn ends early."""

    def __init__(self, limit: int) -> None:
        self._room = limit
        self._token_ids, self._logprobs = array("i"), array("d")
        self._runs: list[tuple[int, int]] = []  # (tokens, policy version) of each chunk
        self._masks: list[SamplingMask | None] = []  # of each chunk

    def add(self, chunk: Chunk) -> Chunk:
        """The chunk, cut at the token limit."""
        ids, logprobs, mask = chunk.token_ids, chunk.logprobs, chunk.sampling_mask
        if len(ids) != len(logprobs) or not are_logprobs(logprobs):
            raise EngineContractError(f"{len(ids)} streamed ids came with log-probabilities {list(logprobs)!r}")
        _check_version(chunk.policy_version)
        if min(ids) < 0 or max(ids) > MAX_INT32:
            TokenIds(ids)  # raises with the position
        if len(ids) > self._room:
            ids, logprobs = ids[: self._room], logprobs[: self._room]
            mask = None if mask is None else mask.cut(0, self._room)
            chunk = Chunk(token_ids=ids, logprobs=logprobs, policy_version=chunk.policy_version, sampling_mask=mask)
        self._room -= len(ids)
        self._token_ids.extend(ids)
        self._logprobs.extend(logprobs)
        self._runs.append((len(ids), chunk.policy_version))
        self._masks.append(mask)
        return chunk

    def is_all_of(self, final: Completion) -> bool:
        is_same = final.token_ids == TokenIds(self._token_ids)
        return is_same and array("d", final.logprobs) == self._logprobs

    def completion(self, prompt_tokens: int) -> Completion | None:
        if not self._token_ids:
            return None
        versions = spans_from_runs(self._runs)
        return Completion(
            token_ids=TokenIds(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish=Finish.ABORT,
            versions=() if [span.version for span in versions] == [UNVERSIONED] else versions,
            prompt_tokens=prompt_tokens,
            sampling_mask=join_masks_if_whole(self._masks),
        )


@traced("generate")
async def generate_all(choices: Sequence[Choice], provider: Provider, session_id: str) -> None:
    if len(choices) == 1:
        return await choices[0].generate(provider, session_id)
    tasks = [asyncio.create_task(choice.generate(provider, session_id)) for choice in choices]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # unlike gather, a second cancellation does not interrupt their cleaning up
        for task in tasks:
            _ = task.cancelled() or task.exception()  # retrieved: the first one is being raised
        raise


_MADE_UP = re.compile(r"call_[0-9a-f]{24}")  # generated by a parser, for a format that carries no ids


def choose_call_id(written: str, node_id: str, index: int) -> str:
    """An id that the model wrote is kept, unless it has the form that parsers generate. Any other is equal in a stream
    and in the committed turn, and different in two answers to one prompt."""
    return f"call_{node_id[:20]}{index:04x}" if not written or _MADE_UP.fullmatch(written) else written


def serve_message(parsed: Parsed, node_id: str, *, stops: Sequence[str]) -> Message:
    message: JsonObject = dict(parsed.message)
    if calls := calls_of(message):
        message["tool_calls"] = [
            {**call, "id": choose_call_id(str(call.get("id") or ""), node_id, at), "type": call.get("type", "function")}
            for at, call in enumerate(calls)
        ]
    content = message.get("content")
    if isinstance(content, str) and (at := find_stop(content, stops)) is not None:
        message["content"] = content[:at]
    return message


def chat_finish_reason(reply: Reply) -> str:
    # An aborted turn is incomplete, too; "length" is the protocol's only word for it.
    if reply.completion.finish is not Finish.STOP:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def count_sampled(replies: Sequence[Reply]) -> int:
    return sum(len(reply.completion.token_ids) for reply in replies)


def chat_usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt, sampled = replies[0].prompt_tokens, count_sampled(replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """The start of the stop string that completes first (the longer of two): where an engine stops."""
    found = [(at + len(stop), at) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def ban_tokens(sampling: Sampling, ids: Iterable[int]) -> Sampling:
    bias: JsonObject = {**(sampling.extra.get("logit_bias") or {}), **{str(token): -100.0 for token in sorted(ids)}}
    return replace(sampling, extra={**sampling.extra, "logit_bias": bias})


class StreamedMessage:
    """What a client may see. Text that may begin a stop string is held back."""

    def __init__(self, node_id: str, stops: Sequence[str]) -> None:
        self._node, self._stops = node_id, [stop for stop in stops if stop]
        self._held, self._is_cut = "", False

    def feed(self, deltas: Iterable[Delta]) -> list[Delta]:
        seen: list[Delta] = []
        for delta in deltas:
            if delta.call is not None and (delta.name or delta.call_id):
                delta = structs.replace(delta, call_id=choose_call_id(delta.call_id, self._node, delta.call))
            if self._stops and delta.content:
                delta = structs.replace(delta, content=self._release(delta.content))
            if delta.content or delta.reasoning or delta.call is not None:
                seen.append(delta)
        return seen

    def _release(self, text: str) -> str:
        if self._is_cut:
            return ""
        self._held += text
        end = find_stop(self._held, self._stops)
        self._is_cut = end is not None
        if end is None:
            starts = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
            end = len(self._held) - max(starts, default=0)
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> list[Delta]:
        return [Delta(content=self._held)] if self._held and not self._is_cut else []


def deltas_from_message(message: Message) -> list[Delta]:
    reasoning, content = message.get("reasoning_content"), message.get("content") or ""
    deltas = [Delta(reasoning=reasoning)] if reasoning else []
    if content or not deltas:
        deltas.append(Delta(content=content))
    for index, call in enumerate(calls_of(message)):
        function = call["function"]
        deltas.append(Delta(call=index, call_id=call["id"], name=function["name"], arguments=function["arguments"]))
    return deltas
