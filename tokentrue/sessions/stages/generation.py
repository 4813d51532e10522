"""Generates the n choices of a turn, whole or streamed, and checks and parses their tokens. Writes nothing.

A choice keeps the tokens received so far, so that a turn that ends early (the client left, the engine failed, the
session was deleted) can still be recorded.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tokentrue.conversation.match_keys import calls_of
from tokentrue.errors import EngineContractError, RenderError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import Provider, Renderer
from tokentrue.routing_replay import join_masks_if_whole
from tokentrue.sessions.limits import INLINE_IDS, run_inline_or_thread
from tokentrue.sessions.stages.prompts import Prompt
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
    Reply,
    Sampling,
    SamplingMask,
    Tools,
    TurnEvent,
    are_logprobs,
    choice_seed,
    spans_from_runs,
)

T = TypeVar("T")
MOST_SAMPLED = 1 << 20  # tokens of one choice whose request has no max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    node_id: str
    choice: int
    completion: Completion
    parsed: Parsed
    served: Message
    sampling: Sampling  # this choice's sampling, with its seed
    outcome: Outcome = "served"


class Choice:
    """One of the n answers to one request; `node_id` is reserved for it. With `emit`, the answer is streamed."""

    def __init__(
        self,
        *,
        index: int,
        node_id: str,
        prompt: Prompt,
        tools: Tools | None,
        sampling: Sampling,
        renderer: Renderer,
        emit: Callable[[TurnEvent], None] | None,
    ) -> None:
        self.index, self.node_id = index, node_id
        self.prompt, self.tools, self._renderer, self._emit = prompt, tools, renderer, emit
        self.sampling = (
            sampling
            if sampling.seed is None or index == 0
            else replace(sampling, seed=choice_seed(sampling.seed, index))
        )
        self._limit = MOST_SAMPLED if sampling.max_tokens is None else sampling.max_tokens
        self._received = _Received(self._limit)
        self._completion: Completion | None = None
        self._streamed: tuple[Parsed, Message] | None = None

    async def generate(self, provider: Provider, session_id: str) -> None:
        view = None if self._emit is None else _StreamView(self, self._renderer, self._emit)
        try:
            self._completion = await self._read(provider, session_id, view)
        except TokenContractError as error:
            raise EngineContractError(f"the engine's answer is not a completion: {error}") from error
        if view is not None:
            self._streamed = view.finish()

    async def _read(self, provider: Provider, session_id: str, view: _StreamView | None) -> Completion:
        # Keep chunks as they arrive, in case the stream breaks off.
        final: Completion | None = None
        stream = provider.stream(self.prompt.ids, self.sampling, session=session_id, whole=view is None)
        async with aclosing(cast("AsyncGenerator[Chunk, None]", stream)) as chunks:
            async for chunk in chunks:
                final = chunk.final or final
                if chunk.token_ids:
                    fitting = self._received.add(chunk)
                    if view is not None and fitting.token_ids:
                        view.feed(fitting)
                    if fitting is not chunk:
                        raise EngineContractError(
                            f"the engine sampled more than max_tokens={self._limit}; the first {self._limit} tokens "
                            "are recorded"
                        )
        if final is None or not self._received.is_all_of(final):
            raise EngineContractError("the engine's stream and its final answer differ")
        check_completion(final, self.prompt)
        return final

    @traced("parse")
    async def parse(self) -> Draft:
        assert self._completion is not None
        return await self._build_draft(self._completion, "served")

    async def parse_partial(self, outcome: Outcome) -> Draft | None:
        """The tokens received so far, labelled with why they are not served; None if there are none."""
        completion = self._completion or self._received.completion(len(self.prompt.ids))
        if completion is None or not completion.token_ids or self._is_invalid(completion):
            completion = self._received.completion(len(self.prompt.ids))
        if completion is None:
            return None
        try:
            return await self._build_draft(completion, outcome)
        except EngineContractError:  # record it even if it cannot be parsed: the ids are what matters
            empty: Message = {"role": "assistant", "content": ""}
            parsed = Parsed(message=empty)
            return self._make_draft(completion, parsed, empty, outcome)

    def _is_invalid(self, completion: Completion) -> bool:
        try:
            check_completion(completion, self.prompt)
        except EngineContractError:
            return True
        return False

    async def _build_draft(self, completion: Completion, outcome: Outcome) -> Draft:
        if self._streamed is not None:
            parsed, served = self._streamed
        else:
            small = len(completion.token_ids) < INLINE_IDS
            parsed = await run_inline_or_thread(self._parse_whole, small, completion)
            served = serve_message(parsed, self.node_id, stops=self.sampling.stop)
        return self._make_draft(completion, parsed, served, outcome)

    def _make_draft(self, completion: Completion, parsed: Parsed, served: Message, outcome: Outcome) -> Draft:
        return Draft(
            node_id=self.node_id,
            choice=self.index,
            completion=completion,
            parsed=parsed,
            served=served,
            sampling=self.sampling,
            outcome=outcome,
        )

    def _parse_whole(self, completion: Completion) -> Parsed:
        return _parse(self._renderer.parse, completion.token_ids, prompt_ids=self.prompt.ids, tools=self.tools)


class _StreamView:
    def __init__(self, choice: Choice, renderer: Renderer, emit: Callable[[TurnEvent], None]) -> None:
        self._choice, self._emit = choice, emit
        self._parser = renderer.parser(prompt_ids=choice.prompt.ids, tools=choice.tools)
        self._shown = StreamedMessage(choice.node_id, choice.sampling.stop)
        emit(TurnEvent(index=choice.index, node_id=choice.node_id))

    def feed(self, chunk: Chunk) -> None:
        deltas = [seen for delta in _parse(self._parser.feed, chunk.token_ids) if (seen := self._shown.feed(delta))]
        first = deltas[0] if deltas else None
        index, node_id = self._choice.index, self._choice.node_id
        self._emit(
            TurnEvent(index=index, node_id=node_id, delta=first, token_ids=chunk.token_ids, logprobs=chunk.logprobs)
        )
        self._emit_deltas(deltas[1:])

    def _emit_deltas(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._emit(TurnEvent(index=self._choice.index, node_id=self._choice.node_id, delta=delta))

    def finish(self) -> tuple[Parsed, Message]:
        rest, parsed = _parse(self._parser.finish)
        self._emit_deltas([seen for delta in rest if (seen := self._shown.feed(delta))])
        choice = self._choice
        missing, served = self._shown.finish(serve_message(parsed, choice.node_id, stops=choice.sampling.stop))
        self._emit_deltas(missing)
        return parsed, served


def _parse(parse: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    # Sampled ids that the tokenizer does not know are the engine's error, not the client's.
    try:
        return parse(*args, **kwargs)
    except (RenderError, TokenContractError) as error:
        raise EngineContractError(f"the engine's answer cannot be read: {error}") from error


def check_completion(completion: Completion, prompt: Prompt) -> None:
    """Raises unless the engine's report agrees with what it was sent and can be recorded."""
    if completion.prompt_tokens is not None and completion.prompt_tokens != len(prompt.ids):
        raise EngineContractError(
            f"the engine counted {completion.prompt_tokens} prompt tokens of the {len(prompt.ids)} that were sent"
        )
    if not completion.token_ids:
        raise EngineContractError("the engine sampled no token; raise max_tokens or shorten the prompt")
    for span in completion.versions:
        _check_version(span.version)


def _check_version(version: int) -> None:
    if not -MAX_INT64 <= version <= MAX_INT64:
        raise EngineContractError(
            f"policy version {version} is not a 64-bit integer; have the engine report a smaller one"
        )


class _Received:
    """At most `limit` tokens; each chunk is checked before it is passed on."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.token_ids = array("i")
        self._logprobs = array("d")
        self._runs: list[tuple[int, int]] = []  # (tokens, policy version) of each chunk
        self._masks: list[SamplingMask | None] = []  # of each chunk

    def add(self, chunk: Chunk) -> Chunk:
        """The chunk, cut at the token limit."""
        if len(chunk.token_ids) != len(chunk.logprobs) or not are_logprobs(chunk.logprobs):
            raise EngineContractError(
                f"{len(chunk.token_ids)} streamed ids came with log-probabilities {list(chunk.logprobs)!r}"
            )
        _check_version(chunk.policy_version)
        if min(chunk.token_ids) < 0 or max(chunk.token_ids) > MAX_INT32:
            TokenIds(chunk.token_ids)  # raises with the position
        room = self._limit - len(self.token_ids)
        if len(chunk.token_ids) > room:
            mask = None if chunk.sampling_mask is None else chunk.sampling_mask.cut(0, room)
            ids, logprobs = chunk.token_ids[:room], chunk.logprobs[:room]
            chunk = replace(chunk, token_ids=ids, logprobs=logprobs, sampling_mask=mask)
        self.token_ids.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        self._runs.append((len(chunk.token_ids), chunk.policy_version))
        self._masks.append(chunk.sampling_mask)
        return chunk

    def is_all_of(self, final: Completion) -> bool:
        is_same = final.token_ids == TokenIds(self.token_ids)
        return is_same and array("d", final.logprobs) == self._logprobs

    def completion(self, prompt_tokens: int) -> Completion | None:
        """Aborted; None if nothing was received."""
        if not len(self.token_ids):
            return None
        versions = spans_from_runs(self._runs)
        return Completion(
            token_ids=TokenIds(self.token_ids),
            logprobs=tuple(self._logprobs),
            finish=Finish.ABORT,
            versions=() if [span.version for span in versions] == [UNVERSIONED] else versions,
            prompt_tokens=prompt_tokens,
            sampling_mask=join_masks_if_whole(self._masks),
        )


@traced("generate")
async def generate_all(choices: Sequence[Choice], provider: Provider, session_id: str) -> None:
    """On failure, raises the first one after cancelling and awaiting the other choices."""
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
                task.exception()  # retrieve the exceptions: the first one is being raised
        raise


_MADE_UP = re.compile(r"call_[0-9a-f]{24}")  # generated by a parser, for a format that carries no ids


def make_call_id(node_id: str, index: int) -> str:
    """The call id, equal in a stream and in the committed turn, and different in two answers to one prompt. An id
    that the model wrote is kept (it is in its tokens), unless it has the form that parsers generate."""
    return f"call_{node_id[:20]}{index:04x}"


def _choose_id(written: str, node_id: str, index: int) -> str:
    return make_call_id(node_id, index) if not written or _MADE_UP.fullmatch(written) else written


def serve_message(parsed: Parsed, node_id: str, *, stops: Sequence[str]) -> Message:
    """The message of a whole turn; visible text ends before the first stop string."""
    message: JsonObject = dict(parsed.message)
    calls = calls_of(message)
    if calls:
        message["tool_calls"] = [_with_id(call, node_id, index) for index, call in enumerate(calls)]
    content = message.get("content")
    if isinstance(content, str) and (at := find_stop(content, stops)) is not None:
        message["content"] = content[:at]
    return message


def _with_id(call: JsonMapping, node_id: str, index: int) -> JsonObject:
    return {**call, "id": _choose_id(str(call.get("id") or ""), node_id, index), "type": call.get("type", "function")}


def chat_finish_reason(reply: Reply) -> str:
    # An aborted turn is incomplete, too; "length" is the protocol's only word for it.
    # An aborted turn is incomplete, too; "length" is the protocol's only word for it.
    if reply.completion.finish is not Finish.STOP:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """The start of the stop string that completes first (the longer of two): the one at which an engine stops."""
    found = [(at + len(stop), at) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


class StreamedMessage:
    """The message as streamed so far; its final state is the served message.

    Text that may begin a stop string is held back until that is decided.
    """

    def __init__(self, node_id: str, stops: Sequence[str]) -> None:
        self._node, self._stops = node_id, [stop for stop in stops if stop]
        self._shown, self._held, self._is_cut = "", "", False
        self._reasoning = ""
        self._calls: list[dict[str, str]] = []

    def feed(self, delta: Delta) -> Delta | None:
        """The delta that the client may see; None if it shows nothing."""
        if delta.call is not None:
            delta = self._feed_call(delta)
        self._reasoning += delta.reasoning
        delta = replace(delta, content=self._release(delta.content)) if delta.content else delta
        return delta if delta.content or delta.reasoning or delta.call is not None else None

    def _feed_call(self, delta: Delta) -> Delta:
        index = delta.call or 0
        while len(self._calls) <= index:
            self._calls.append({"id": "", "name": "", "arguments": ""})
        if delta.name or delta.call_id:
            delta = replace(delta, call_id=_choose_id(delta.call_id, self._node, index))
        call = self._calls[index]
        call["id"], call["name"] = delta.call_id or call["id"], delta.name or call["name"]
        call["arguments"] += delta.arguments
        return delta

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
        self._shown += shown
        return shown

    def finish(self, served: Message) -> tuple[list[Delta], Message]:
        """Returns the deltas still missing from `served`, and the message that the client then has.

        That message is `served`, unless the stream has shown something that the whole parse takes back (a call that
        broke off). The record then keeps what was shown, because the client has it and will replay it.
        """
        deltas: list[Delta] = []
        message = dict(served)
        reasoning, content = str(served.get("reasoning_content") or ""), str(served.get("content") or "")
        for field, have, want in (("reasoning_content", self._reasoning, reasoning), ("content", self._shown, content)):
            if not want.startswith(have):
                message[field] = have
            elif len(want) > len(have):
                deltas.append(
                    Delta(reasoning=want[len(have) :])
                    if field == "reasoning_content"
                    else Delta(content=want[len(have) :])
                )
        calls = [dict(call) for call in calls_of(served)]
        for index in range(max(len(calls), len(self._calls))):
            self._finish_call(index, calls, deltas)
        if calls:
            message["tool_calls"] = calls
        return deltas, message

    def _finish_call(self, index: int, calls: list[JsonObject], deltas: list[Delta]) -> None:
        shown = self._calls[index] if index < len(self._calls) else {"id": "", "name": "", "arguments": ""}
        wanted = calls[index] if index < len(calls) else None
        function: JsonMapping = {} if wanted is None else wanted["function"]
        arguments = str(function.get("arguments") or "")
        if (
            wanted is None
            or (shown["name"] and shown["name"] != function["name"])
            or not arguments.startswith(shown["arguments"])
        ):
            call = {
                "id": shown["id"],
                "type": "function",
                "function": {"name": shown["name"], "arguments": shown["arguments"]},
            }
            calls[index : index + 1] = [call]
            return
        if not shown["name"]:
            deltas.append(Delta(call=index, call_id=str(wanted["id"]), name=str(function["name"])))
        if len(arguments) > len(shown["arguments"]):
            deltas.append(Delta(call=index, arguments=arguments[len(shown["arguments"]) :]))


def deltas_from_message(message: Message) -> Iterator[Delta]:
    yield from StreamedMessage("", ()).finish(message)[0]
