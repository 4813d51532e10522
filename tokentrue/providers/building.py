"""Builds a completion from an engine's reports, checking every piece; refuses settings that an engine does not know."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

from tokentrue.errors import EngineContractError, EngineRejected, SamplingError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.routing_replay import join_masks_if_whole
from tokentrue.types import (
    MAX_INT32,
    Chunk,
    Completion,
    Finish,
    PromptImage,
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
COLLAPSIBLE = "Qwen2VLImageProcessor "
"""Processors that write an image as nothing but repetitions of one placeholder."""
KeptRows = Sequence[Sequence[int]]  # the ids that filters kept, one row per token


class CompletionBuilder:
    """One generation for the sent `prompt_ids`."""

    def __init__(
        self, engine: str, prompt_ids: TokenIds, *, version: int | None = None, must_count: bool = False
    ) -> None:
        """`version`: of the adapter that samples. `must_count`: the engine expands images itself, so it must report
        how many tokens the prompt had."""
        self.engine, self.prompt_ids, self._version, self._must_count = engine, prompt_ids, version, must_count
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Mapping[int, float]] = []
        self.raw: list[float] = []
        # Of each piece: its tokens, their policy version, and what filters kept (if reported).
        self._pieces: list[tuple[int, int, SamplingMask | None]] = []
        self._taken = 0  # tokens
        self._new = 0  # the first piece that was not taken yet

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float | None], *, version: int, kept: KeptRows | None = None
    ) -> Chunk:
        self.append(ids, logprobs, version=version, kept=kept)
        return next(self.take(), Chunk())

    def append(
        self, ids: Sequence[int], logprobs: Sequence[float | None], *, version: int, kept: KeptRows | None = None
    ) -> None:
        """Tokens of one policy version, all or none."""
        if len(ids) != len(logprobs):
            raise EngineContractError(f"{self.engine} returned {len(ids)} ids and {len(logprobs)} log-probabilities")
        if not ids:
            return
        # Engines are known to send null, NaN and sentinels.
        if None in logprobs or not are_logprobs(cast("Sequence[float]", logprobs)):
            pairs = enumerate(logprobs, len(self.ids))
            place, wrong = next((at, value) for at, value in pairs if value is None or not is_logprob(value))
            raise EngineContractError(f"{self.engine} returned {wrong!r} as log-probability of sampled token {place}")
        mask = None
        try:
            if min(ids) < 0 or max(ids) > MAX_INT32:
                TokenIds(ids)  # raises with the position
            if kept is not None:
                mask = SamplingMask.from_rows([sorted(row) for row in kept])
                require_mask(mask, ids)
        except TokenContractError as error:
            raise EngineContractError(f"{self.engine}: {error}") from error
        self.ids += ids
        self.logprobs += cast("Sequence[float]", logprobs)
        self._pieces.append((len(ids), version if self._version is None else self._version, mask))

    def take(self) -> Iterator[Chunk]:
        """What was appended since the last call, as one chunk per policy version."""
        new, self._new = self._pieces[self._new :], len(self._pieces)
        for (version, _), group in groupby(new, key=lambda piece: (piece[1], piece[2] is None)):
            pieces = list(group)
            start, self._taken = self._taken, self._taken + sum(piece[0] for piece in pieces)
            yield Chunk(
                token_ids=tuple(self.ids[start : self._taken]),
                logprobs=tuple(self.logprobs[start : self._taken]),
                policy_version=version,
                sampling_mask=join_masks_if_whole([mask for _, _, mask in pieces]),
            )

    def take_read(self, events: Iterable[bytes], add: Callable[[bytes], None]) -> Iterator[Chunk]:
        """If `add` refuses an event, yields the tokens of earlier events first."""
        try:
            for event in events:
                add(event)
        finally:
            yield from self.take()

    def check_prompt(self, seen: Sequence[int]) -> None:
        """`seen`: the prompt's ids as the engine expanded them."""
        if seen != (ours := self.prompt_ids.tolist()):
            place = next((at for at, pair in enumerate(zip(seen, ours, strict=False)) if pair[0] != pair[1]), None)
            where = "" if place is None else f" and differ first at {place}"
            raise EngineContractError(
                f"{self.engine} made {len(seen)} tokens of a prompt with images, which are {len(ours)} here{where}"
            )

    def complete(
        self,
        finish: str | None,
        *,
        prompt_tokens: int | None,
        stopped_by: int | str | None = None,
        routed_experts: RoutedExperts | None = None,
        versions: Sequence[VersionSpan] | None = None,
    ) -> Completion:
        """`finish` is the engine's word, `prompt_tokens` its count."""
        if finish not in set(Finish):
            reason = "without a finish reason" if finish is None else f"with an unknown finish reason {finish!r}"
            raise EngineContractError(f"{self.engine} ended its answer {reason}")
        if prompt_tokens is None and self._must_count:
            raise EngineContractError(f"{self.engine} did not count the tokens of a prompt with images")
        if prompt_tokens is not None and prompt_tokens != len(self.prompt_ids):
            raise EngineContractError(
                f"{self.engine} counted {prompt_tokens} prompt tokens where {len(self.prompt_ids)} were sent"
            )
        runs = ((tokens, version) for tokens, version, _ in self._pieces)
        try:
            return Completion(
                token_ids=TokenIds(self.ids),
                logprobs=tuple(self.logprobs),
                finish=Finish(finish),
                versions=spans_from_runs(runs) if versions is None or self._version is not None else tuple(versions),
                prompt_tokens=prompt_tokens,
                stopped_by=stopped_by,
                top_logprobs=tuple(self.top) if self.top else None,
                raw_logprobs=tuple(self.raw) if self.raw else None,
                routed_experts=routed_experts,
                sampling_mask=join_masks_if_whole([mask for _, _, mask in self._pieces]),
                prompt_digest=self.prompt_ids.sha256(),
            )
        except TokenContractError as error:  # the engine's version spans do not fit its tokens
            raise EngineContractError(f"{self.engine}: {error}") from error


def collapse_images(engine: str, ids: TokenIds, images: Sequence[PromptImage]) -> TokenIds:
    """The ids with one placeholder for each image, for engines that expand them."""
    pieces: list[TokenIds] = []
    done = 0
    for run in (image.run for image in images):
        if not run.processor.startswith(COLLAPSIBLE):
            name = run.processor.partition(" ")[0]
            raise EngineRejected(f"{engine}: how it expands images of a {name} is not proven; serve the model with hf")
        pad, end = ids[run.start : run.start + 1], run.start + run.count
        if run.start < done or ids[run.start : end] != pad.tolist() * run.count:
            raise EngineContractError(f"the prompt has no image at token {run.start}")
        pieces += (ids[done : run.start], pad)
        done = end
    out = TokenIds.concat([*pieces, ids[done:]])
    if images and out.count(pad := ids[images[0].run.start]) != len(images):
        raise EngineContractError(f"the prompt has placeholders ({pad}) without an image; one was sampled or injected")
    return out


def refuse_unknown_extra(engine: str, sampling: Sampling, known: frozenset[str]) -> None:
    if unknown := sorted(set(sampling.extra) - known):
        supported = ", ".join(sorted(known)) or "none"
        raise SamplingError(
            f"engine {engine!r} does not support {', '.join(unknown)}; supported extra settings: {supported}"
        )


def refuse_constraints(engine: str, extra: JsonMapping) -> None:
    for name in sorted(CONSTRAINTS & extra.keys()):
        cure = "leave it out, or serve the model with sglang or vllm"
        raise SamplingError(f"{name}: engine {engine!r} cannot force its output into a format; {cure}")
