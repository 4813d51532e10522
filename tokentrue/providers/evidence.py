"""What every adapter checks of an engine's answer before it becomes a Completion; nothing is repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, TypeVar, cast

from tokentrue.errors import EngineContractError, EngineError, SamplingError
from tokentrue.types import Chunk, Completion, Finish, RoutedExperts, Sampling, VersionSpan, are_logprobs, is_logprob

T = TypeVar("T")


class Gathering:
    """Collects a generation, whole or streamed, and checks it token by token. `count` is how many there are so far."""

    def __init__(self, engine: str, prompt_tokens: int) -> None:
        self.engine, self.sent, self.count = engine, prompt_tokens, 0
        self.top: list[Mapping[int, float]] = []
        self.raw: list[float] = []
        self.spans: list[VersionSpan] = []
        self._ids: list[tuple[int, ...]] = []  # piece by piece
        self._logprobs: list[tuple[float, ...]] = []

    def add(self, ids: tuple[int, ...], logprobs: tuple[float, ...], *, version: int) -> Chunk:
        if len(ids) != len(logprobs):
            raise EngineContractError(f"{self.engine} returned {len(ids)} ids and {len(logprobs)} log-probabilities")
        start = self.count
        self.count = end = start + len(ids)
        check_logprobs(self.engine, logprobs, start=start)
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(start=self.spans[-1].start, end=end, version=version)
        elif end > start:
            self.spans.append(VersionSpan(start=start, end=end, version=version))
        return Chunk(token_ids=ids, logprobs=logprobs, policy_version=version)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return _in_one(self._ids)

    def completion(
        self,
        finish: Finish,
        *,
        prompt_tokens: int | None,
        stopped_by: int | str | None = None,
        routed_experts: RoutedExperts | None = None,
        versions: Sequence[VersionSpan] | None = None,
    ) -> Completion:
        if prompt_tokens is not None and prompt_tokens != self.sent:
            raise EngineContractError(f"{self.engine} counted {prompt_tokens} prompt tokens where {self.sent} were sent")
        return Completion(
            token_ids=_in_one(self._ids),
            logprobs=_in_one(self._logprobs),
            finish=finish,
            versions=tuple(self.spans if versions is None else versions),
            prompt_tokens=prompt_tokens,
            stopped_by=stopped_by,
            top_logprobs=tuple(self.top) if self.top else None,
            raw_logprobs=tuple(self.raw) if self.raw else None,
            routed_experts=routed_experts,
        )


def together(events: Iterable[Any], take: Callable[[Any], Chunk]) -> tuple[list[Chunk], EngineError | None]:
    """Events that came together as few chunks, and what went wrong behind them: what was sampled before that is not lost."""
    chunks: list[Chunk] = []
    try:
        for event in events:
            chunks.append(take(event))
    except EngineError as error:
        return _merged(chunks), error
    return _merged(chunks), None


def _merged(chunks: list[Chunk]) -> list[Chunk]:
    """Neighbours of one policy version as one chunk."""
    if len(chunks) == 1 and chunks[0].token_ids:
        return chunks
    found: list[Chunk] = []
    for version, group in groupby((chunk for chunk in chunks if chunk.token_ids), key=attrgetter("policy_version")):
        first, *more = group
        if more:
            ids, logprobs = [chunk.token_ids for chunk in (first, *more)], [chunk.logprobs for chunk in (first, *more)]
            first = Chunk(token_ids=_in_one(ids), logprobs=_in_one(logprobs), policy_version=version)
        found.append(first)
    return found


def _in_one(pieces: list[tuple[T, ...]]) -> tuple[T, ...]:
    return pieces[0] if len(pieces) == 1 else tuple(chain.from_iterable(pieces))


def check_logprobs(engine: str, logprobs: Sequence[float | None], *, start: int = 0) -> None:
    """Engines are known to send null, NaN and sentinels; `start` is the place of the first one."""
    try:
        if are_logprobs(cast("Sequence[float]", logprobs)):
            return
    except TypeError:
        pass  # one of them is no number
    for index, value in enumerate(logprobs, start):
        if not isinstance(value, (int, float)) or not is_logprob(value):
            raise EngineContractError(f"{engine} returned {value!r} as log-probability of sampled token {index}")


def refuse_unknown_extra(engine: str, sampling: Sampling, known: frozenset[str]) -> None:
    unknown = sorted(set(sampling.extra) - known)
    if unknown:
        raise SamplingError(f"engine {engine!r} does not know {', '.join(unknown)}; it takes {', '.join(sorted(known)) or 'none'}")
