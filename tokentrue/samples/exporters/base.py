"""What an exporter is: a trainer's own row for a sample, and the way back. One file per trainer; the table is in
`__init__`.

Every exported row also carries `tokentrue`: the sample's fields that the trainer has no place for. So any file can be
audited, and what is audited is the trainer's own row, not a copy beside it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokentrue.errors import TokenContractError
from tokentrue.samples.shape import MaskBit, SpanRow
from tokentrue.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSample:
    """A sample as it stands in a file. `differences` are the fields of a trainer's row that contradict the sample."""

    sample: Sample
    where: str
    differences: tuple[str, ...] = ()


class Exporter(Protocol):
    """Writes samples to a file and reads them back. `follows` names the release whose fields it writes."""

    @property
    def name(self) -> str: ...

    @property
    def suffix(self) -> str: ...

    @property
    def follows(self) -> str: ...

    def write(self, samples: Iterable[Sample], path: Path) -> int:
        """How many were written."""
        ...

    def read(self, path: Path) -> Iterator[ExportedSample]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A sample as prompt and response: the prompt ends where the first token was sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]  # 0.0 where nothing was sampled, as trainers want it; the mask says where


def split(sample: Sample) -> Split:
    at = first_sampled(sample)
    return Split(
        prompt_ids=list(sample.token_ids[:at]),
        response_ids=list(sample.token_ids[at:]),
        response_mask=list(sample.loss_mask[at:]),
        response_logprobs=fill_logprobs(sample.rollout_logprobs[at:]),
    )


def first_sampled(sample: Sample) -> int:
    found = next((span.start for span in sample.spans if span.kind == "sampled"), None)
    if found is None:
        raise TokenContractError(f"sample {sample.sample_id} has no sampled token")
    if found > len(sample.token_ids):
        raise TokenContractError(
            f"sample {sample.sample_id}: a span starts at token {found} of {len(sample.token_ids)}"
        )
    return found


def fill_logprobs(logprobs: Iterable[float | None]) -> list[float]:
    return [0.0 if value is None else value for value in logprobs]


def unfill_logprobs(logprobs: Sequence[float], spans: Sequence[SpanRow], *, length: int) -> list[float | None]:
    """The way back: None where the spans say that nothing was sampled. `logprobs` may leave out a given prefix."""
    whole: list[float | None] = [*([None] * (length - len(logprobs))), *logprobs]
    for span in spans:
        if span.kind == "given":
            for index in range(span.start, min(span.end, len(whole))):
                whole[index] = None
    return whole


def zero_mask(length: int) -> list[MaskBit]:
    """The mask of a prompt."""
    return [0] * length


def versions_of(sample: Sample) -> list[int]:
    """Policy versions of the sampled spans, in order, each once in a row."""
    found: list[int] = []
    for span in sample.spans:
        if span.kind == "sampled" and span.policy_version is not None and found[-1:] != [span.policy_version]:
            found.append(span.policy_version)
    return found


def token_versions(sample: Sample, *, start: int = 0) -> list[int]:
    """The policy version of each token from `start` on; -1 where nothing was sampled."""
    found = [-1] * len(sample.token_ids)
    for span in sample.spans:
        if span.kind == "sampled" and span.policy_version is not None:
            end = min(span.end, len(found))  # a span of a damaged file may reach further
            found[span.start : end] = [span.policy_version] * (end - span.start)
    return found[start:]


def experts_of(sample: Sample) -> list[list[list[int]]] | None:
    """[positions, layers, top_k] of all inputs, from position 0; -1 where the engine did not say."""
    routed = sample.routed_experts
    if routed is None:
        return None
    positions, layers, top_k = routed.shape
    flat = array("h", routed.data)
    if sys.byteorder != "little":
        flat.byteswap()
    slots = [flat[at : at + top_k].tolist() for at in range(0, len(flat), top_k)]
    return [slots[at : at + layers] for at in range(0, positions * layers, layers)]


def turns_of(sample: Sample) -> int:
    return 1 + max((span.turn for span in sample.spans), default=-1)
