"""Weights and arithmetic: the engine's log-probabilities against the reference forward, and which known fault explains
the difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from tokentrue.doctor.context import Examination
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.doctor.fit import (
    BAND,
    Explanation,
    best,
    explained_share,
    grows_with_position,
    shift,
    spread_of,
    until_certain,
)
from tokentrue.doctor.observations import Observation
from tokentrue.doctor.reference import Reference, variants_of
from tokentrue.errors import EngineContractError, EngineRejected
from tokentrue.protocols import Scoring

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
GROWTH = 4.0
UNRELATED = 0.3  # correlation of the two sides' log-probabilities below which they score different things


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The engine's numbers beside the reference's. `e` = engine - reference."""

    observations: tuple[Observation, ...]
    engine: Tensor
    reference: Tensor
    e: Tensor

    @staticmethod
    def of(reference: Reference, observations: Sequence[Observation]) -> Difference:
        engine = torch.tensor([value for seen in observations for value in seen.logprobs], dtype=torch.float64)
        truth = reference.logprobs(observations)
        return Difference(observations=tuple(observations), engine=engine, reference=truth, e=engine - truth)

    @property
    def lengths(self) -> list[int]:
        return [len(seen.positions) for seen in self.observations]

    @property
    def positions(self) -> Tensor:
        return torch.tensor([position for seen in self.observations for position in seen.positions])


async def probe_weights(exam: Examination) -> list[Finding]:
    name = "weights: log-probabilities against the model directory"
    if not exam.observations:
        return [cannot_tell(name, "the engine gave no log-probabilities")]
    found = [judge_difference(exam, name, Difference.of(exam.reference, exam.observations))]
    prompt = exam.long_prompt()
    label = "weights: log-probabilities of a prompt"
    if not isinstance(exam.provider, Scoring):
        return [*found, cannot_tell(label, "the engine gives no prompt log-probabilities")]
    try:
        seen = Observation.from_prompt(prompt, await exam.provider.score(prompt))
    except (EngineContractError, EngineRejected) as error:
        return [*found, cannot_tell(label, str(error))]
    return [*found, judge_difference(exam, label, Difference.of(exam.reference, [seen]))]


def judge_difference(exam: Examination, name: str, seen: Difference) -> Finding:
    spread, allowed = spread_of(seen.e), exam.spread
    figure = f"mean |δ| {spread.mean:.2g}, max {spread.largest:.2g} over {seen.e.numel()} tokens; {exam.dtype} allows {allowed.limit:.2g}"
    if spread.mean <= allowed.limit:
        return ok(name, figure)
    explanations = list(
        until_certain(chain(explain_alignment(seen), explain_inputs(exam, seen), explain_weights(exam, seen)))
    )
    chosen = best(explanations)
    if chosen is not None:
        detail = f"{chosen.label} explains {100 * chosen.share:.0f}% of the difference"
        return fault(name, chosen.fault, figure, confidence=chosen.confidence, detail=detail)
    return _unexplained(name, figure, seen, explanations, spread.mean)


def _unexplained(name: str, figure: str, seen: Difference, explanations: Sequence[Explanation], mean: float) -> Finding:
    growth = grows_with_position(seen.e, seen.positions)
    if growth >= GROWTH:
        return fault(
            name, "rope", figure, confidence="low", detail=f"the difference grows {growth:.1f}-fold with the position"
        )
    sizes = {one.fault: one.size for one in explanations if one.fault.startswith("dtype_") and one.size}
    near = [known for known, size in sizes.items() if size / BAND <= mean <= size * BAND]
    if near:
        chosen = min(near, key=lambda known: abs(torch.tensor(mean / sizes[known]).log().item()))
        return fault(
            name,
            chosen,
            figure,
            confidence="low",
            detail="the size of the difference is that dtype's; its pattern is not predictable",
        )
    together = float(torch.corrcoef(torch.stack([seen.engine, seen.reference]))[0, 1]) if seen.e.numel() > 2 else 0.0
    detail = f"no known fault explains it; correlation with the reference {together:.2f}"
    return fault(name, "other_weights", figure, confidence="medium" if together > UNRELATED else "low", detail=detail)


def explain_alignment(seen: Difference) -> Iterator[Explanation]:
    """Each log-probability belongs to the token before or after."""
    for by in (-1, 1):
        places, neighbours = shift(seen.reference, seen.lengths, by)
        if places.numel():
            share = explained_share(seen.e[places], neighbours - seen.reference[places])
            yield Explanation(
                fault="off_by_one",
                label=f"the log-probability of the {'next' if by > 0 else 'previous'} token",
                share=share,
            )


def explain_inputs(exam: Examination, seen: Difference) -> Iterator[Explanation]:
    """The engine processed other ids than it was sent, or sampled at another temperature."""
    for temperature, row in zip(TEMPERATURES, exam.reference.logprobs_at(seen.observations, TEMPERATURES), strict=True):
        share = explained_share(seen.e, row - seen.reference)
        yield Explanation(fault="sampled_temperature", label=f"temperature {temperature:g}", share=share)
    bos = getattr(exam.reference.config, "bos_token_id", None)
    if isinstance(bos, int):
        prediction = exam.reference.logprobs([_prefix(one, bos) for one in seen.observations]) - seen.reference
        yield Explanation(
            fault="bos_added", label=f"token {bos} before the prompt", share=explained_share(seen.e, prediction)
        )
    yield from _explain_truncation(exam, seen)


def _explain_truncation(exam: Examination, seen: Difference) -> Iterator[Explanation]:
    """Only prompts that are longer than what the engine keeps change."""
    if any(one.positions[0] < one.prompt_tokens for one in seen.observations):
        return  # log-probabilities of a prompt: nothing was cut off
    longest = max(one.prompt_tokens for one in seen.observations)
    for kept in sorted({*(2**power for power in range(5, 14)), longest // 2, longest // 4, longest - 1}):
        if 8 <= kept < longest:
            rows = seen.reference.split(seen.lengths)
            pairs = zip(seen.observations, rows, strict=True)
            cut = [
                exam.reference.logprobs([_cut(one, kept)]) if one.prompt_tokens > kept else row for one, row in pairs
            ]
            share = explained_share(seen.e, torch.cat(cut) - seen.reference)
            yield Explanation(fault="context_truncated", label=f"the last {kept} prompt tokens only", share=share)


def explain_weights(exam: Examination, seen: Difference) -> Iterator[Explanation]:
    for variant in variants_of(exam.reference, previous=exam.previous):
        prediction = exam.reference.predict(variant, seen.observations) - seen.reference
        size = float(prediction.abs().mean())
        yield Explanation(
            fault=variant.fault, label=variant.label, share=explained_share(seen.e, prediction), size=size
        )


def _prefix(seen: Observation, token: int) -> Observation:
    return replace(
        seen,
        token_ids=(token, *seen.token_ids),
        positions=tuple(position + 1 for position in seen.positions),
        prompt_tokens=seen.prompt_tokens + 1,
    )


def _cut(seen: Observation, kept: int) -> Observation:
    """The observation as an engine sees it that keeps the last `kept` prompt tokens."""
    gone = max(0, seen.prompt_tokens - kept)
    return replace(
        seen,
        token_ids=seen.token_ids[gone:],
        positions=tuple(position - gone for position in seen.positions),
        prompt_tokens=seen.prompt_tokens - gone,
    )
