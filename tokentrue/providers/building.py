"""Builds a completion from an engine's reports, checking every piece; refuses settings that an engine does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tokentrue.errors import EngineContractError, SamplingError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.routing_replay import join_masks_if_whole
from tokentrue.types import (
    MAX_INT32,
    Chunk,
    Completion,
    Finish,
    RoutedExperts,
    Sampling,
    SamplingMask,
    VersionSpan,
    are_logprobs,
    is_logprob,
    require_mask,
    spans_from_runs,
)

CONSTRAINTS = frozenset({"response_format", "tool_choice"})
"""Names in `Sampling.extra` with the same meaning for every engine: `response_format` as in Chat Completions, and
`tool_choice`, a structural tag (`Renderer.call_tag`)."""


@dataclass(slots=True)
class _Run:
    tokens: int
    version: int
    masks: list[SamplingMask]  # what filters kept; empty if the engine does not report it


class CompletionBuilder:
    """Collects one generation for the sent `prompt_ids`. `take` returns the appended tokens as one chunk per policy
    version, regardless of the number of events."""

    def __init__(self, engine: str, prompt_ids: TokenIds) -> None:
        self.engine, self.prompt_ids = engine, prompt_ids
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Mapping[int, float]] = []
        self.raw: list[float] = []
        self._masks: list[SamplingMask | None] = []  # of each chunk taken
        self._runs: list[tuple[int, int]] = []  # (tokens, policy version) of each
        self._new: list[_Run] = []  # not taken yet
        self._taken = 0

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        *,
        version: int,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> Chunk:
        self.append(ids, logprobs, version=version, kept=kept)
        return next(self.take(), Chunk())

    def append(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        *,
        version: int,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Appends tokens of one policy version, all or none. `kept`: the ids that filters kept, one row per token,
        if the engine reports them."""
        if len(ids) != len(logprobs):
            raise EngineContractError(f"{self.engine} returned {len(ids)} ids and {len(logprobs)} log-probabilities")
        if not ids:
            return
        checked = self._check_logprobs(logprobs)
        masks: list[SamplingMask] = []
        try:
            if min(ids) < 0 or max(ids) > MAX_INT32:
                TokenIds(ids)  # raises with the position
            if kept is not None:
                masks = [SamplingMask.from_rows([sorted(row) for row in kept])]
                require_mask(masks[0], ids)
        except TokenContractError as error:
            raise EngineContractError(f"{self.engine}: {error}") from error
        last = self._new[-1] if self._new else None
        if last is None or last.version != version or bool(last.masks) != bool(masks):
            self._new.append(_Run(tokens=len(ids), version=version, masks=masks))
        else:
            last.tokens += len(ids)
            last.masks += masks
        self.ids += ids
        self.logprobs += checked

    def _check_logprobs(self, logprobs: Sequence[float | None]) -> Sequence[float]:
        # Engines are known to send null, NaN and sentinels.
        if None not in logprobs and are_logprobs(cast("Sequence[float]", logprobs)):
            return cast("Sequence[float]", logprobs)
        place, wrong = next(
            (index, value)
            for index, value in enumerate(logprobs, len(self.ids))
            if value is None or not is_logprob(value)
        )
        raise EngineContractError(f"{self.engine} returned {wrong!r} as log-probability of sampled token {place}")

    def take(self) -> Iterator[Chunk]:
        runs, self._new = self._new, []
        for run in runs:
            start, self._taken = self._taken, self._taken + run.tokens
            mask = join_masks_if_whole(run.masks)
            self._runs.append((run.tokens, run.version))
            self._masks.append(mask)
            yield Chunk(
                token_ids=tuple(self.ids[start : self._taken]),
                logprobs=tuple(self.logprobs[start : self._taken]),
                policy_version=run.version,
                sampling_mask=mask,
            )

    def take_read(self, events: Iterable[bytes], add: Callable[[bytes], None]) -> Iterator[Chunk]:
        """The chunks of one read from the engine. If `add` refuses an event, yields the tokens of earlier events
        first."""
        try:
            for event in events:
                add(event)
        finally:
            yield from self.take()

    def complete(
        self,
        finish: Finish,
        *,
        prompt_tokens: int | None,
        stopped_by: int | str | None = None,
        routed_experts: RoutedExperts | None = None,
        versions: Sequence[VersionSpan] | None = None,
    ) -> Completion:
        """`prompt_tokens` is the engine's count, which must equal ours."""
        if prompt_tokens is not None and prompt_tokens != len(self.prompt_ids):
            raise EngineContractError(
                f"{self.engine} counted {prompt_tokens} prompt tokens where {len(self.prompt_ids)} were sent"
            )
        try:
            return Completion(
                token_ids=TokenIds(self.ids),
                logprobs=tuple(self.logprobs),
                finish=finish,
                versions=spans_from_runs(self._runs) if versions is None else tuple(versions),
                prompt_tokens=prompt_tokens,
                stopped_by=stopped_by,
                top_logprobs=tuple(self.top) if self.top else None,
                raw_logprobs=tuple(self.raw) if self.raw else None,
                routed_experts=routed_experts,
                sampling_mask=join_masks_if_whole(self._masks),
                prompt_digest=self.prompt_ids.sha256(),
            )
        except TokenContractError as error:  # the engine's version spans do not fit its tokens
            raise EngineContractError(f"{self.engine}: {error}") from error


def refuse_unknown_extra(engine: str, sampling: Sampling, known: frozenset[str]) -> None:
    unknown = sorted(set(sampling.extra) - known)
    if unknown:
        supported = ", ".join(sorted(known)) or "none"
        raise SamplingError(
            f"engine {engine!r} does not support {', '.join(unknown)}; supported extra settings: {supported}"
        )


def refuse_constraints(engine: str, extra: JsonMapping) -> None:
    """For engines that sample without a mask."""
    for name in sorted(CONSTRAINTS & extra.keys()):
        cure = "leave it out, or serve the model with sglang or vllm"
        raise SamplingError(f"{name}: engine {engine!r} cannot force its output into a format; {cure}")
