"""A public engine without a model: answers come from a JSON-lines script, in order, so that users can test their harness.

One line per generation: `{"text": …}` or `{"token_ids": […]}`, optional `logprobs`, `finish_reason` (stop, length, abort),
`delay_s` (before the first token), `status` (an HTTP status to fail with). A text that ends with "stop" gets the model's stop token
behind it, as a model would sample it. Log-probabilities that the script leaves out are made up, reproducibly, from id and position.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import orjson

from tokentrue.errors import ConfigError, EngineRejected, EngineTimeout, EngineUnreachable, FileFormatError
from tokentrue.ids import TokenIds
from tokentrue.types import UNVERSIONED, Chunk, Completion, Finish, Ids, Sampling, VersionSpan

KEYS = frozenset({"text", "token_ids", "logprobs", "finish_reason", "delay_s", "status"})
Encode = Callable[[str], Sequence[int]]


class ScriptedProvider:
    """`encode` turns script texts into ids (a renderer's `encode_sampled`); `stop_id` is the token put behind them.

    `seen` keeps the prompts that were asked for. With `loop=True` the script starts again at its end.
    """

    name = "scripted"
    truthful_filters = frozenset({"top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})

    def __init__(
        self,
        script: str | Path | Iterable[Mapping[str, Any]],
        *,
        encode: Encode | None = None,
        stop_id: int | None = None,
        version: int = UNVERSIONED,
        loop: bool = False,
    ) -> None:
        turns = read_script(script) if isinstance(script, str | Path) else [check_turn(turn, f"turn {i}") for i, turn in enumerate(script)]
        if encode is None and any("text" in turn for turn in turns):
            raise ConfigError("a script with texts needs a tokenizer: pass encode= (a renderer's encode_sampled), or write token_ids")
        self._turns, self._left = turns, deque(turns)
        self._encode, self._stop_id, self._loop = encode, stop_id, loop
        self.version = version
        self.seen: list[Ids] = []

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        turn = self._next(prompt_ids)
        await self._before(turn)
        return self._completion(turn, TokenIds(prompt_ids), sampling)

    async def stream(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> AsyncIterator[Chunk]:
        turn = self._next(prompt_ids)
        await self._before(turn)
        completion = self._completion(turn, TokenIds(prompt_ids), sampling)
        for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            yield Chunk(token_ids=TokenIds((token_id,)), logprobs=(logprob,), policy_version=self.version)
            await asyncio.sleep(0)
        yield Chunk(final=completion)

    async def health(self) -> Mapping[str, Any]:
        return {"engine": self.name, "model": "scripted", "version": self.version, "left": len(self._left)}

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass

    def _next(self, prompt_ids: Ids) -> Mapping[str, Any]:
        if not self._left and self._loop:
            self._left.extend(self._turns)
        if not self._left:
            raise EngineRejected(f"the script is exhausted after {len(self._turns)} generations; add lines to it")
        self.seen.append(prompt_ids)
        return self._left.popleft()

    async def _before(self, turn: Mapping[str, Any]) -> None:
        await asyncio.sleep(turn.get("delay_s", 0))
        status = turn.get("status", 200)
        if status in {408, 504}:
            raise EngineTimeout(f"scripted status {status}")
        if status in {502, 503}:
            raise EngineUnreachable(f"scripted status {status}")
        if status >= 400:
            raise EngineRejected(f"scripted status {status}")

    def _completion(self, turn: Mapping[str, Any], prompt_ids: TokenIds, sampling: Sampling) -> Completion:
        finish = Finish(turn.get("finish_reason", "stop"))
        if "token_ids" in turn:
            ids = tuple(turn["token_ids"])
        else:
            assert self._encode is not None
            ids = tuple(self._encode(turn["text"]))
            if finish is Finish.STOP and self._stop_id is not None and ids[-1:] != (self._stop_id,):
                ids = (*ids, self._stop_id)
        logprobs = tuple(turn["logprobs"]) if "logprobs" in turn else tuple(invent_logprob(i, token) for i, token in enumerate(ids))
        if sampling.max_tokens is not None and len(ids) > sampling.max_tokens:
            ids, logprobs, finish = ids[: sampling.max_tokens], logprobs[: sampling.max_tokens], Finish.LENGTH
        return Completion(
            token_ids=TokenIds(ids),
            logprobs=logprobs,
            finish=finish,
            versions=(VersionSpan(start=0, end=len(ids), version=self.version),),
            prompt_tokens=len(prompt_ids),
            prompt_digest=prompt_ids.sha256(),
            stopped_by=ids[-1] if finish is Finish.STOP and ids else None,
        )


def invent_logprob(position: int, token_id: int) -> float:
    return -(1 + zlib.crc32(f"{position}:{token_id}".encode()) % 4096) / 2048


def read_script(path: str | Path) -> list[Mapping[str, Any]]:
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise FileFormatError(f"cannot read script {path}: {error.strerror}") from error
    turns: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            turn = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FileFormatError(f"{path}:{number}: not JSON: {error}") from error
        turns.append(check_turn(turn, f"{path}:{number}"))
    return turns


def check_turn(turn: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(turn, Mapping):
        raise FileFormatError(f"{where}: a turn is an object, not {type(turn).__name__}")
    turn = cast("Mapping[str, Any]", turn)
    if unknown := set(turn) - KEYS:
        raise FileFormatError(f"{where}: unknown key {sorted(unknown)[0]!r}; known: {', '.join(sorted(KEYS))}")
    if ("text" in turn) == ("token_ids" in turn) and turn.get("status", 200) < 400:
        raise FileFormatError(f"{where}: give either text or token_ids")
    if turn.get("finish_reason", "stop") not in set(Finish):
        raise FileFormatError(f"{where}: finish_reason must be one of {', '.join(Finish)}")
    return turn
