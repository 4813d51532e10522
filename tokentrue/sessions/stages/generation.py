"""Generates the n choices of a turn, whole or streamed, and checks and parses their tokens. Writes nothing.

A choice keeps the tokens received so far, so that a turn that ends early (the client left, the engine failed, the
session was deleted) can still be recorded.
"""

from __future__ import annotations

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
from tokentrue.sessions.limits import INLINE_IDS, run_inline_or_thread
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
    """One of the n answers to one request, to be recorded as node `node_id`: what the engine sampled (`completion`)
    and the message that the client gets (`served`). A streamed turn emits it as it is sampled."""

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
        self._placeholders: frozenset[int] = frozenset(getattr(renderer, "placeholder_ids", ()))
        self._emit = turn.emit if turn.streamed else None
        self._limit = MOST_SAMPLED if sampling.max_tokens is None else sampling.max_tokens
        self._received = _Received(self._limit)
        self._is_complete = self._is_parsed = False

    async def generate(self, provider: Provider, session_id: str) -> None:
        if self._emit is None:
            return await self._read(provider, session_id, None)
        parser = self._renderer.parser(prompt_ids=self._prompt_ids, tools=self._tools)
        shown = StreamedMessage(self.node_id, self.sampling.stop)
        self._show()

        def feed(chunk: Chunk) -> None:
            deltas = shown.feed(_parse(parser.feed, chunk.token_ids))
            first = deltas[0] if deltas else None
            self._show(delta=first, token_ids=chunk.token_ids, logprobs=chunk.logprobs)
            self._show_deltas(deltas[1:])

        await self._read(provider, session_id, feed)
        rest, self.parsed = _parse(parser.finish)
        self._show_deltas(shown.feed(rest))
        served = serve_message(self.parsed, self.node_id, stops=self.sampling.stop)
        missing, self.served = shown.finish(served)
        self._show_deltas(missing)
        self._is_parsed = True

    def _show(self, **fields: Any) -> None:
        if self._emit is not None:
            self._emit(TurnEvent(index=self.index, node_id=self.node_id, **fields))

    def _show_deltas(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._show(delta=delta)

    async def _read(self, provider: Provider, session_id: str, feed: Callable[[Chunk], None] | None) -> None:
        # Keep chunks as they arrive, in case the stream breaks off.
        final: Completion | None = None
        sampling = self.sampling
        if self._placeholders and getattr(provider, "bans_tokens", False):
            sampling = ban_tokens(sampling, self._placeholders)
        stream = provider.stream(self._prompt_ids, sampling, session=session_id, whole=feed is None, **self._images)
        try:
            async with aclosing(cast("AsyncGenerator[Chunk, None]", stream)) as chunks:
                async for chunk in chunks:
                    final = chunk.final or final
                    if chunk.token_ids:
                        fitting = self._received.add(chunk)
                        if found := self._placeholders.intersection(fitting.token_ids):
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
        self._check(final)
        self.completion, self._is_complete = final, True

    def _check(self, completion: Completion) -> None:
        """Raises unless the engine's report agrees with what it was sent and can be recorded."""
        sent = len(self._prompt_ids)
        if completion.prompt_tokens not in (None, sent):
            raise EngineContractError(
                f"the engine counted {completion.prompt_tokens} prompt tokens of the {sent} that were sent"
            )
        if not completion.token_ids:
            raise EngineContractError("the engine sampled no token; raise max_tokens or shorten the prompt")
        for span in completion.versions:
            _check_version(span.version)

    @traced("parse")
    async def parse(self) -> None:
        if not self._is_parsed:
            ids = self.completion.token_ids
            self.parsed = await run_inline_or_thread(
                _parse, len(ids) < INLINE_IDS, self._renderer.parse, ids, prompt_ids=self._prompt_ids, tools=self._tools
            )
            self.served = serve_message(self.parsed, self.node_id, stops=self.sampling.stop)

    async def parse_partial(self, outcome: Outcome) -> bool:
        """Parses the tokens received so far, labelled with why they are not served; False if there are none."""
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
    # Sampled ids that the tokenizer does not know are the engine's error, not the client's.
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
    """At most `limit` tokens; each chunk is checked before it is passed on."""

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
        """Aborted; None if nothing was received."""
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
    """On failure, raises the first one after cancelling and awaiting the other choices."""
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
    """Equal in a stream and in the committed turn, and different in two answers to one prompt. An id that the model
    wrote is kept (it is in its tokens), unless it has the form that parsers generate."""
    return f"call_{node_id[:20]}{index:04x}" if not written or _MADE_UP.fullmatch(written) else written


def serve_message(parsed: Parsed, node_id: str, *, stops: Sequence[str]) -> Message:
    """The message of a whole turn; visible text ends before the first stop string."""
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


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """The start of the stop string that completes first (the longer of two): the one at which an engine stops."""
    found = [(at + len(stop), at) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def ban_tokens(sampling: Sampling, ids: Iterable[int]) -> Sampling:
    """For engines that take a logit bias. The record keeps the settings of the request."""
    bias: JsonObject = {**(sampling.extra.get("logit_bias") or {}), **{str(token): -100.0 for token in sorted(ids)}}
    return replace(sampling, extra={**sampling.extra, "logit_bias": bias})


class StreamedMessage:
    """The message as streamed so far; its final state is the served message.

    Text that may begin a stop string is held back until that is decided.
    """

    def __init__(self, node_id: str, stops: Sequence[str]) -> None:
        self._node, self._stops = node_id, [stop for stop in stops if stop]
        self._shown, self._held, self._is_cut = "", "", False
        self._reasoning = ""
        self._calls: list[dict[str, str]] = []

    def feed(self, deltas: Iterable[Delta]) -> list[Delta]:
        """The deltas that the client may see."""
        seen: list[Delta] = []
        for delta in deltas:
            if delta.call is not None:
                delta = self._feed_call(delta, delta.call)
            self._reasoning += delta.reasoning
            if delta.content:
                delta = structs.replace(delta, content=self._release(delta.content))
            if delta.content or delta.reasoning or delta.call is not None:
                seen.append(delta)
        return seen

    def _feed_call(self, delta: Delta, index: int) -> Delta:
        while len(self._calls) <= index:
            self._calls.append({"id": "", "name": "", "arguments": ""})
        if delta.name or delta.call_id:
            delta = structs.replace(delta, call_id=choose_call_id(delta.call_id, self._node, index))
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
        for field, have in (("reasoning_content", self._reasoning), ("content", self._shown)):
            want = str(served.get(field) or "")
            if not want.startswith(have):
                message[field] = have
            elif more := want[len(have) :]:
                deltas.append(Delta(content=more) if field == "content" else Delta(reasoning=more))
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
        is_taken_back = shown["name"] not in ("", function.get("name")) or not arguments.startswith(shown["arguments"])
        if wanted is None or is_taken_back:
            call = {"name": shown["name"], "arguments": shown["arguments"]}
            calls[index : index + 1] = [{"id": shown["id"], "type": "function", "function": call}]
            return
        if not shown["name"]:
            deltas.append(Delta(call=index, call_id=str(wanted["id"]), name=str(function["name"])))
        if more := arguments[len(shown["arguments"]) :]:
            deltas.append(Delta(call=index, arguments=more))


def deltas_from_message(message: Message) -> list[Delta]:
    return StreamedMessage("", ()).finish(message)[0]
