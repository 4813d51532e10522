"""`Request`: one generation in the engine (its tokens, and where their keys and values are); `StepInputs`: one
step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tokentrue.ids import TokenIds
from tokentrue.types import Completion, Finish, RoutedExperts, Sampling, SamplingMask, VersionSpan, spans_from_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The newest `counts[i]` tokens of each sequence, from position `starts[i]`; `ids` are back to back."""

    ids: list[int]
    starts: list[int]
    counts: list[int]
    blocks: list[list[int]]  # cache blocks of each sequence
    adapters: list[str | None]
    state_slots: list[int]  # recurrent-state slots of a hybrid model; else empty
    state_copies: list[tuple[int, int]]  # between state slots, in order, before the step

    @property
    def rows(self) -> int:
        return len(self.ids)


_numbers = itertools.count()


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts of consecutive positions, [count, layers, top_k]: little-endian int16, and their float32 weights."""

    shape: tuple[int, int, int]
    data: bytes
    weights: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    token_id: int
    logprob: float
    raw_logprob: float
    top: dict[int, float] | None = None
    kept: bytes = b""  # the ids that filters kept, little-endian int32


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable, owned by the engine's thread. `tokens[:computed]` have their keys and values in `blocks`.

    Columns of numbers instead of one object per token: many objects would slow down garbage collection.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    listener: Callable[[Request], None] | None = None  # called in the engine's thread for new tokens, and at the end
    adapter: str | None = None
    prefix: bytes = b""  # seed of its cache block names, different for different weights
    wants_prompt: bool = False
    wants_routes: bool = False
    number: int = field(default_factory=lambda: next(_numbers))
    arrived_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list[int])
    computed: int = 0
    state_slot: int | None = None  # recurrent-state slot of a hybrid model
    blocks: list[int] = field(default_factory=list[int])
    hashes: list[bytes] = field(default_factory=list[bytes])
    logprobs: list[float] = field(default_factory=list[float])
    raw_logprobs: list[float] = field(default_factory=list[float])  # if `shaped`; else they equal `logprobs`
    tops: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    routes: list[Routes] = field(default_factory=list[Routes])
    num_routed: int = 0  # positions whose experts are kept, from the pass that computed them first
    kept: list[bytes] = field(default_factory=list[bytes])  # if `shaped`: the ids that filters kept for each token
    versions: list[int] = field(default_factory=list[int])  # updated last: other threads may read this many tokens
    prompt_logprobs: list[float] = field(default_factory=list[float])
    finish: Finish | None = None
    stopped_by: int | str | None = None
    error: Exception | None = None
    shaped: bool = field(init=False)  # filters apply: the distribution is not softmax(logits / temperature)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.shaped = bool(self.sampling.filters)

    @property
    def remaining(self) -> int:
        """Tokens whose keys are not cached yet; 1 in plain decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_sampled(self) -> int:
        return len(self.versions)

    @property
    def sampled_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    def add_routes(self, run: Routes) -> None:
        self.routes.append(run)
        self.num_routed += run.shape[0]

    def take(self, sampled: Sampled, version: int) -> None:
        if self.shaped:
            self.raw_logprobs.append(sampled.raw_logprob)
            self.kept.append(sampled.kept)
        if self.sampling.top_logprobs:
            self.tops.append(sampled.top or {})
        self.take_run((sampled.token_id,), (sampled.logprob,), version)

    def take_run(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self.tokens.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()

    def completion(self, fingerprint: str) -> Completion:
        assert self.finish is not None
        return Completion(
            token_ids=TokenIds(self.sampled_ids),
            logprobs=tuple(self.logprobs),
            finish=self.finish,
            versions=spans_of(self.versions),
            prompt_tokens=len(self.prompt_ids),
            stopped_by=self.stopped_by,
            top_logprobs=tuple(self.tops) if self.sampling.top_logprobs else None,
            raw_logprobs=tuple(self.raw_logprobs) if self.shaped else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.wants_prompt else None,
            routed_experts=join_routes(self.routes) if self.wants_routes else None,
            sampling_mask=mask_of(self.kept) if self.sampling.truncates else None,
            fingerprint=fingerprint,
        )


def join_routes(runs: Sequence[Routes]) -> RoutedExperts | None:
    if not runs:
        return None
    shape = (sum(run.shape[0] for run in runs), *runs[0].shape[1:])
    return RoutedExperts(
        shape=shape, data=b"".join(run.data for run in runs), weights=b"".join(run.weights for run in runs)
    )


def mask_of(rows: Sequence[bytes]) -> SamplingMask:
    offsets = [0, *itertools.accumulate(len(row) // 4 for row in rows)]
    return SamplingMask(token_ids=TokenIds.from_bytes(b"".join(rows)), offsets=TokenIds(offsets))


def spans_of(versions: list[int]) -> tuple[VersionSpan, ...]:
    if versions and versions.count(versions[0]) == len(versions):
        return spans_from_runs([(len(versions), versions[0])])
    return spans_from_runs((1, version) for version in versions)
