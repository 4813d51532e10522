"""An engine without a model, for testing harnesses: answers come from a JSON-lines script, in order.

One line per generation: `{"text": …}` or `{"token_ids": […]}`, optional `logprobs`, `finish_reason` (stop, length,
abort), `delay_s` (before the first token), `status` (an HTTP status to fail with). A text that ends with "stop" gets
the model's stop token appended, as a model would sample it. Missing log-probabilities are derived reproducibly from id
and position.
The whole script is checked and encoded on construction; errors name the line.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from tokentrue.errors import (
    ConfigError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    FileFormatError,
    TokenContractError,
)
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonValue
from tokentrue.plain_json import read_numbered_lines
from tokentrue.protocols import Streaming
from tokentrue.types import FILTERS, UNVERSIONED, Chunk, Completion, Finish, Ids, Sampling, VersionSpan, is_logprob

KEYS = frozenset({"text", "token_ids", "logprobs", "finish_reason", "delay_s", "status"})
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    token_ids: TokenIds
    logprobs: tuple[float, ...]
    finish: Finish
    delay_s: float
    status: int


class ScriptedProvider(Streaming):
    """`encode` turns script texts into ids (a renderer's `encode_sampled`); `stop_id` is appended to them.

    `seen` keeps the received prompts. With `loop=True` the script restarts at its end.
    """

    name = "scripted"
    truthful_filters = FILTERS

    def __init__(
        self,
        script: str | Path | Iterable[JsonMapping],
        *,
        encode: Encode | None = None,
        stop_id: int | None = None,
        version: int = UNVERSIONED,
        loop: bool = False,
    ) -> None:
        lines = (
            read_script(script)
            if isinstance(script, str | Path)
            else ((f"turn {i}", turn) for i, turn in enumerate(script))
        )
        self._turns = [turn_from_line(line, where, encode=encode, stop_id=stop_id) for where, line in lines]
        self._left, self._loop = deque(self._turns), loop
        self.version = version
        self.seen: list[Ids] = []

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        turn = self._next(prompt_ids)
        await self._before(turn)
        completion = self._completion(turn, TokenIds(prompt_ids), sampling)
        step = max(1, len(completion.token_ids)) if whole else 1
        for at in range(0, len(completion.token_ids), step):
            ids, logprobs = completion.token_ids[at : at + step], completion.logprobs[at : at + step]
            yield Chunk(token_ids=ids, logprobs=logprobs, policy_version=self.version)
            await asyncio.sleep(0)
        yield Chunk(final=completion)

    async def health(self) -> JsonMapping:
        return {"engine": self.name, "model": "scripted", "version": self.version, "left": len(self._left)}

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass

    def _next(self, prompt_ids: Ids) -> ScriptedTurn:
        if not self._left and self._loop:
            self._left.extend(self._turns)
        if not self._left:
            raise EngineRejected(f"the script is exhausted after {len(self._turns)} generations; add lines to it")
        self.seen.append(prompt_ids)
        return self._left.popleft()

    async def _before(self, turn: ScriptedTurn) -> None:
        await asyncio.sleep(turn.delay_s)
        if turn.status in {408, 504}:
            raise EngineTimeout(f"scripted status {turn.status}")
        if turn.status in {502, 503}:
            raise EngineUnreachable(f"scripted status {turn.status}")
        if turn.status >= 400:
            raise EngineRejected(f"scripted status {turn.status}")

    def _completion(self, turn: ScriptedTurn, prompt_ids: TokenIds, sampling: Sampling) -> Completion:
        ids, logprobs, finish = turn.token_ids, turn.logprobs, turn.finish
        if sampling.max_tokens is not None and len(ids) > sampling.max_tokens:
            ids, logprobs, finish = ids[: sampling.max_tokens], logprobs[: sampling.max_tokens], Finish.LENGTH
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish=finish,
            versions=(VersionSpan(start=0, end=len(ids), version=self.version),),
            prompt_tokens=len(prompt_ids),
            prompt_digest=prompt_ids.sha256(),
            stopped_by=ids[-1] if finish is Finish.STOP and ids else None,
        )


def invent_logprob(position: int, token_id: int) -> float:
    return -(1 + zlib.crc32(f"{position}:{token_id}".encode()) % 4096) / 2048


def read_script(path: str | Path) -> Iterator[tuple[str, JsonValue]]:
    try:
        lines = list(read_numbered_lines(path))
    except OSError as error:
        raise FileFormatError(f"cannot read script {path}: {error.strerror}") from error
    for number, line in lines:
        try:
            yield f"{path}:{number}", orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FileFormatError(f"{path}:{number}: not JSON: {error}") from error


def turn_from_line(line: JsonValue, where: str, *, encode: Encode | None, stop_id: int | None) -> ScriptedTurn:
    if not isinstance(line, Mapping):
        raise FileFormatError(f"{where}: a turn is an object, not {type(line).__name__}")
    line = cast("JsonMapping", line)
    if unknown := set(line) - KEYS:
        raise FileFormatError(
            f"{where}: unknown key {sorted(map(str, unknown))[0]!r}; known: {', '.join(sorted(KEYS))}"
        )
    delay_s, status, finish = line.get("delay_s", 0), line.get("status", 200), line.get("finish_reason", "stop")
    if not _is_number(delay_s) or not 0 <= delay_s < math.inf:
        raise FileFormatError(f"{where}: delay_s must be a number of seconds, got {delay_s!r}")
    if not isinstance(status, int) or not 100 <= status <= 599:
        raise FileFormatError(f"{where}: status must be an HTTP status, got {status!r}")
    if ("text" in line) == ("token_ids" in line) and status < 400:
        raise FileFormatError(f"{where}: give either text or token_ids")
    if finish not in list(Finish):
        raise FileFormatError(f"{where}: finish_reason must be one of {', '.join(Finish)}")
    if "text" in line:
        ids = _ids_from_text(line["text"], where, encode, stop_id if finish == Finish.STOP else None)
    else:
        ids = _read_ids(line.get("token_ids", ()), where)
    logprobs = [invent_logprob(place, token_id) for place, token_id in enumerate(ids)]
    if "logprobs" in line:
        logprobs = _read_logprobs(line["logprobs"], len(ids), where)
    return ScriptedTurn(token_ids=ids, logprobs=tuple(logprobs), finish=Finish(finish), delay_s=delay_s, status=status)


def _ids_from_text(text: JsonValue, where: str, encode: Encode | None, stop_id: int | None) -> TokenIds:
    if encode is None:
        raise ConfigError(
            "a script with texts needs a tokenizer: pass encode= (a renderer's encode_sampled), or write token_ids"
        )
    if not isinstance(text, str):
        raise FileFormatError(f"{where}: text must be a string, got {type(text).__name__}")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise FileFormatError(f"{where}: text holds a lone surrogate, which no tokenizer can encode")
    ids = tuple(encode(text))
    return TokenIds(ids if stop_id is None or ids[-1:] == (stop_id,) else (*ids, stop_id))


def _read_ids(token_ids: JsonValue, where: str) -> TokenIds:
    values = _read_list(token_ids, f"{where}: token_ids must be a list of integers")
    if any(isinstance(value, bool) for value in values):
        raise FileFormatError(f"{where}: token_ids must be a list of integers, got a boolean")
    try:
        return TokenIds(values)
    except TokenContractError as error:
        raise FileFormatError(f"{where}: {error}") from None


def _read_logprobs(logprobs: JsonValue, num_ids: int, where: str) -> list[float]:
    values = _read_list(logprobs, f"{where}: logprobs must be a list of numbers")
    if len(values) != num_ids:
        raise FileFormatError(
            f"{where}: {num_ids} token ids (with the stop token that follows a text), {len(values)} logprobs"
        )
    for place, value in enumerate(values):
        if not _is_number(value) or not is_logprob(value):
            raise FileFormatError(f"{where}: logprobs[{place}] must be a log-probability, got {value!r}")
    return [float(value) for value in values]


def _read_list(value: JsonValue, rule: str) -> Sequence[JsonValue]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise FileFormatError(f"{rule}, got {value!r:.60}")
    return cast("Sequence[JsonValue]", value)


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
