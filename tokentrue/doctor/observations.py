"""What was seen of an engine: token sequences with the log-probabilities that it reported for some of their positions.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokentrue.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`logprobs[k]` is the engine's log-probability of `token_ids[positions[k]]`, given everything before it."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int = 0  # of `token_ids`, how many were sent rather than sampled
    temperatures: tuple[float, ...] = ()  # that each position was sampled at, where it is known; else 1
    kept: tuple[
        tuple[int, ...], ...
    ] = ()  # the ids that filters kept at each position, where they are known; an empty one keeps all

    @staticmethod
    def from_completion(prompt_ids: Sequence[int], completion: Completion) -> Observation:
        ids = (*prompt_ids, *completion.token_ids)
        positions = tuple(range(len(prompt_ids), len(ids)))
        return Observation(
            token_ids=ids, positions=positions, logprobs=completion.logprobs, prompt_tokens=len(prompt_ids)
        )

    @staticmethod
    def from_prompt(prompt_ids: Sequence[int], logprobs: Sequence[float]) -> Observation:
        """`logprobs` are of `prompt_ids[1:]`."""
        positions = tuple(range(1, len(prompt_ids)))
        return Observation(
            token_ids=tuple(prompt_ids), positions=positions, logprobs=tuple(logprobs), prompt_tokens=len(prompt_ids)
        )
