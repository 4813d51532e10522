"""A completion is built from what an engine reports, piece by piece, and every piece is checked when it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from tokentrue.errors import EngineContractError, SamplingError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.replay import join_masks_if_whole
from tokentrue.types import (
    Chunk,
    Completion,
    Finish,
    RoutedExperts,
    Sampling,
    SamplingMask,
    VersionSpan,
    are_logprobs,
    is_logprob,
    spans_from_runs,
)

ANSWER_BYTES = 64 << 20
POSITION_BYTES = 4096  # of a token's log-probabilities, sampling mask and routing, in JSON
UNBOUNDED_TOKENS = 16_384  # assumed of a request without max_tokens
MOST_TOKENS = 65_536


def answer_limit(prompt_ids: TokenIds, sampling: Sampling) -> int:
    """Bytes that an engine's answer, or one event of it, may take."""
    tokens = min(sampling.max_tokens or UNBOUNDED_TOKENS, MOST_TOKENS)
    return ANSWER_BYTES + POSITION_BYTES * (len(prompt_ids) + tokens)


class CompletionBuilder:
    """One generation, whole or streamed. `prompt_ids` are those that the request to the engine was built from."""

    def __init__(self, engine: str, prompt_ids: TokenIds) -> None:
        self.engine, self.prompt_ids = engine, prompt_ids
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Mapping[int, float]] = []
        self.raw: list[float] = []
        self._masks: list[SamplingMask | None] = []  # of each piece
        self.runs: list[tuple[int, int]] = []  # (tokens, policy version) as they came

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        *,
        version: int,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> Chunk:
        """Append tokens of one policy version. `kept`: the ids that filters kept, a row for each token, where the
        engine reports them."""
        if len(ids) != len(logprobs):
            raise EngineContractError(f"{self.engine} returned {len(ids)} ids and {len(logprobs)} log-probabilities")
        start = len(self.ids)
        checked = check_logprobs(self.engine, logprobs, start=start)
        try:
            mask = None if kept is None else SamplingMask.from_rows([sorted(row) for row in kept])
            chunk = Chunk(token_ids=TokenIds(ids), logprobs=checked, policy_version=version, sampling_mask=mask)
        except TokenContractError as error:
            raise EngineContractError(f"{self.engine}: {error}") from error
        self.ids += ids
        self.logprobs += checked
        self.runs.append((len(ids), version))
        self._masks.append(mask)
        return chunk

    def complete(
        self,
        finish: Finish,
        *,
        prompt_tokens: int | None,
        stopped_by: int | str | None = None,
        routed_experts: RoutedExperts | None = None,
        versions: Sequence[VersionSpan] | None = None,
    ) -> Completion:
        """The whole generation. `prompt_tokens` is the engine's own count, which must be ours."""
        if prompt_tokens is not None and prompt_tokens != len(self.prompt_ids):
            raise EngineContractError(
                f"{self.engine} counted {prompt_tokens} prompt tokens where {len(self.prompt_ids)} were sent"
            )
        try:
            return Completion(
                token_ids=TokenIds(self.ids),
                logprobs=tuple(self.logprobs),
                finish=finish,
                versions=spans_from_runs(self.runs) if versions is None else tuple(versions),
                prompt_tokens=prompt_tokens,
                stopped_by=stopped_by,
                top_logprobs=tuple(self.top) if self.top else None,
                raw_logprobs=tuple(self.raw) if self.raw else None,
                routed_experts=routed_experts,
                sampling_mask=join_masks_if_whole(self._masks),
                prompt_digest=self.prompt_ids.sha256(),
            )
        except TokenContractError as error:  # version spans of the engine's own that do not fit its tokens
            raise EngineContractError(f"{self.engine}: {error}") from error


def check_logprobs(engine: str, logprobs: Sequence[float | None], *, start: int = 0) -> tuple[float, ...]:
    """Engines are known to send null, NaN and sentinels; `start` is the place of the first one."""
    if None not in logprobs and are_logprobs(checked := tuple(cast("Sequence[float]", logprobs))):
        return checked
    place, wrong = next(
        (index, value) for index, value in enumerate(logprobs, start) if value is None or not is_logprob(value)
    )
    raise EngineContractError(f"{engine} returned {wrong!r} as log-probability of sampled token {place}")


def refuse_unknown_extra(engine: str, sampling: Sampling, known: frozenset[str]) -> None:
    unknown = sorted(set(sampling.extra) - known)
    if unknown:
        supported = ", ".join(sorted(known)) or "none"
        raise SamplingError(
            f"engine {engine!r} does not support {', '.join(unknown)}; supported extra settings: {supported}"
        )
