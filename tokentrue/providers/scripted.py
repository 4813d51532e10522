"""An engine without a model, for testing harnesses: answers come from a JSON-lines script, in order.

One line per generation: `{"text": …}` or `{"token_ids": […]}`, optional `logprobs`, `finish_reason` (stop, length,
abort), `delay_s` (before the first token), `status` (an HTTP status to fail with). A text that ends with "stop" gets
the model's stop token appended. Missing log-probabilities are derived reproducibly from id and position."""

import asyncio
import math
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
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
from tokentrue.protocols import NamedWeights, Streaming
from tokentrue.providers.building import CompletionBuilder
from tokentrue.records import record
from tokentrue.types import FILTERS, UNVERSIONED, Chunk, Finish, Ids, Sampling, is_logprob

Encode = Callable[[str], Sequence[int]]


class ScriptLine(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text: str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[float] | msgspec.UnsetType = msgspec.UNSET
    finish_reason: Finish = Finish.STOP
    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    status: Annotated[int, msgspec.Meta(ge=100, le=599)] = 200


@record
class ScriptedTurn:
    token_ids: TokenIds
    logprobs: Sequence[float]
    line: ScriptLine


class ScriptedProvider(Streaming):
    """`encode` turns script texts into ids (a renderer's `encode_sampled`); `stop_id` is appended. `seen` keeps the
    prompts. With `loop=True` the script restarts at its end."""

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
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str | None = None,
        whole: bool = False,
        images: object = (),
    ) -> AsyncIterator[Chunk]:
        if not self._left and self._loop:
            self._left.extend(self._turns)
        if not self._left:
            raise EngineRejected(f"the script is exhausted after {len(self._turns)} generations; add lines to it")
        self.seen.append(prompt_ids)
        turn, builder = self._left.popleft(), CompletionBuilder(self.name, TokenIds(prompt_ids))
        finish, status = turn.line.finish_reason, turn.line.status
        await asyncio.sleep(turn.line.delay_s)
        if status >= 400:
            kinds = {408: EngineTimeout, 504: EngineTimeout, 502: EngineUnreachable, 503: EngineUnreachable}
            raise kinds.get(status, EngineRejected)(f"scripted status {status}")
        length = len(turn.token_ids)
        if sampling.max_tokens is not None and length > sampling.max_tokens:
            length, finish = sampling.max_tokens, Finish.LENGTH
        step = max(1, length) if whole else 1
        for at in range(0, length, step):
            ids, logprobs = turn.token_ids[at : at + step], turn.logprobs[at : at + step]
            yield builder.add(ids[: length - at], logprobs[: length - at], version=self.version)
            await asyncio.sleep(0)
        stopped_by = builder.ids[-1] if finish is Finish.STOP and builder.ids else None
        yield Chunk(final=builder.complete(finish, prompt_tokens=len(prompt_ids), stopped_by=stopped_by))

    async def check_images(self) -> None:
        """A script looks at no prompt."""

    async def health(self) -> JsonMapping:
        return {"engine": self.name, "model": "scripted", "version": self.version, "left": len(self._left)}

    async def publish(self, weights: NamedWeights, *, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass


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


def turn_from_line(value: JsonValue, where: str, *, encode: Encode | None, stop_id: int | None) -> ScriptedTurn:
    try:
        line = msgspec.convert(value, ScriptLine)
        if isinstance(line.text, str) == isinstance(line.token_ids, list) and line.status < 400:
            raise FileFormatError("give either text or token_ids")
        ids = _ids_from_text(line, encode, stop_id) if isinstance(line.text, str) else TokenIds(line.token_ids or ())
        logprobs = line.logprobs
        if not isinstance(logprobs, list):
            logprobs = [invent_logprob(place, token_id) for place, token_id in enumerate(ids)]
        if len(logprobs) != len(ids):
            raise FileFormatError(f"{len(ids)} token ids (with the stop token of a text), {len(logprobs)} logprobs")
        for place, logprob in enumerate(logprobs):
            if not is_logprob(logprob):
                raise FileFormatError(f"logprobs[{place}] must be a log-probability, got {logprob!r}")
        if line.delay_s == math.inf:
            raise FileFormatError("delay_s must be a number of seconds, got inf")
    except (msgspec.ValidationError, FileFormatError, TokenContractError) as error:
        raise FileFormatError(f"{where}: {error}") from None
    return ScriptedTurn(token_ids=ids, logprobs=logprobs, line=line)


def _ids_from_text(line: ScriptLine, encode: Encode | None, stop_id: int | None) -> TokenIds:
    text = str(line.text)
    if encode is None:
        raise ConfigError(
            "a script with texts needs a tokenizer: pass encode= (a renderer's encode_sampled), or write token_ids"
        )
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise FileFormatError("text holds a lone surrogate, which no tokenizer can encode")
    ids = list(encode(text))
    if stop_id is not None and line.finish_reason is Finish.STOP and ids[-1:] != [stop_id]:
        ids.append(stop_id)
    return TokenIds(ids)
