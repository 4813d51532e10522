"""What every adapter checks of an engine's answer before it becomes a Completion; nothing is repaired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from tokentrue.errors import EngineContractError, SamplingError
from tokentrue.types import Chunk, Completion, Finish, RoutedExperts, Sampling, VersionSpan, are_logprobs, is_logprob


class Gathering:
    """Collects a streamed generation and checks it token by token."""

    def __init__(self, engine: str, prompt_tokens: int) -> None:
        self.engine, self.sent = engine, prompt_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Mapping[int, float]] = []
        self.raw: list[float] = []
        self.spans: list[VersionSpan] = []

    def add(self, ids: Sequence[int], logprobs: Sequence[float | None], *, version: int) -> Chunk:
        if len(ids) != len(logprobs):
            raise EngineContractError(f"{self.engine} returned {len(ids)} ids and {len(logprobs)} log-probabilities")
        start = len(self.token_ids)
        if None in logprobs or not are_logprobs(cast("Sequence[float]", logprobs)):
            for offset, value in enumerate(logprobs):
                checked_logprob(self.engine, start + offset, value)
        self.token_ids += ids
        self.logprobs += logprobs  # type: ignore[arg-type]  # None was refused above
        end = len(self.token_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(start=self.spans[-1].start, end=end, version=version)
        elif end > start:
            self.spans.append(VersionSpan(start=start, end=end, version=version))
        return Chunk(token_ids=tuple(ids), logprobs=tuple(self.logprobs[start:]), policy_version=version)

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
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish=finish,
            versions=tuple(self.spans if versions is None else versions),
            prompt_tokens=prompt_tokens,
            stopped_by=stopped_by,
            top_logprobs=tuple(self.top) if self.top else None,
            raw_logprobs=tuple(self.raw) if self.raw else None,
            routed_experts=routed_experts,
        )


def checked_logprob(engine: str, index: int, value: float | None) -> None:
    if value is None or not is_logprob(value):
        raise EngineContractError(f"{engine} returned {value!r} as log-probability of sampled token {index}")


def refuse_unknown_extra(engine: str, sampling: Sampling, known: frozenset[str]) -> None:
    unknown = sorted(set(sampling.extra) - known)
    if unknown:
        raise SamplingError(f"engine {engine!r} does not know {', '.join(unknown)}; it takes {', '.join(sorted(known)) or 'none'}")
