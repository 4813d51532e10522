"""Weights and arithmetic: the engine's log-probabilities against the reference forward, and which known fault explains
the difference.

`e` is engine - reference, one value per observed token. A hypothesis predicts `h`; its share explained is
1 - Σ|e - h| / Σ|e|.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.doctor.exam import BAND, Examination, Spread, probe
from tokentrue.doctor.findings import Finding, Verdict, cannot_tell, fault, ok
from tokentrue.doctor.reference import Observation, Reference, list_variants, score
from tokentrue.protocols import Scoring
from tokentrue.records import record

CERTAIN, CLEAR, LIKELY = 0.95, 0.8, 0.45  # shares explained
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
GROWTH = 4.0
UNRELATED = 0.3  # correlation of the two sides' log-probabilities below which they score different things
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}  # relative, of a layer's output


@record
class Difference:
    """The engine's numbers beside the reference's."""

    observations: tuple[Observation, ...]
    engine: Tensor
    reference: Tensor

    @staticmethod
    def of(reference: Reference, observations: Sequence[Observation]) -> Difference:
        engine = torch.tensor([value for seen in observations for value in seen.logprobs], dtype=torch.float64)
        truth = reference.logprobs(observations)
        return Difference(observations=tuple(observations), engine=engine, reference=truth)

    @property
    def e(self) -> Tensor:
        return self.engine - self.reference

    def explain(self, fault: str, label: str, logprobs: Tensor) -> Explanation:
        """`logprobs` are what an engine with this fault would report."""
        predicted = logprobs - self.reference
        share, size = explained_share(self.e, predicted), float(predicted.abs().mean())
        return Explanation(fault=fault, label=label, share=share, size=size)

    @property
    def lengths(self) -> list[int]:
        return [len(seen.positions) for seen in self.observations]

    @property
    def positions(self) -> Tensor:
        return torch.tensor([position for seen in self.observations for position in seen.positions])


@record
class Explanation:
    """A known fault and the share of the difference that it explains."""

    fault: str
    label: str
    share: float
    size: float = 0.0  # mean size of the predicted difference


async def probe_weights(exam: Examination) -> list[Finding]:
    return [await _sampled(exam), await _prompt(exam)]


@probe("weights: log-probabilities against the model directory")
async def _sampled(exam: Examination) -> Finding:
    return judge_difference(exam, Difference.of(exam.reference, exam.observations))


@probe("weights: log-probabilities of a prompt")
async def _prompt(exam: Examination) -> Finding:
    if not isinstance(exam.provider, Scoring):
        return cannot_tell("the engine gives no prompt log-probabilities")
    prompt = exam.long_prompt()
    seen = Observation.from_prompt(prompt, await exam.provider.score(prompt))
    return judge_difference(exam, Difference.of(exam.reference, [seen]))


def judge_difference(exam: Examination, seen: Difference) -> Finding:
    spread, limit = spread_of(seen.e), exam.spread.limit
    figure = (
        f"mean |δ| {spread.mean:.2g}, max {spread.largest:.2g} over {seen.e.numel()} tokens; "
        f"{exam.dtype} allows {limit:.2g}"
    )
    if spread.mean <= limit:
        return ok(figure)
    explanations: list[Explanation] = []
    for one in chain(explain_alignment(seen), explain_inputs(exam, seen), explain_weights(exam, seen)):
        explanations.append(one)
        if one.share >= CERTAIN:  # nothing is left to explain: the rest need not be computed
            break
    chosen = max(explanations, key=lambda one: one.share)
    if chosen.share >= LIKELY:
        detail = f"{chosen.label} explains {100 * chosen.share:.0f}% of the difference"
        confidence = "high" if chosen.share >= CLEAR else "medium"
        return fault(chosen.fault, figure, confidence=confidence, detail=detail)
    return _unexplained(figure, seen, explanations, spread.mean)


def _unexplained(figure: str, seen: Difference, explanations: Sequence[Explanation], mean: float) -> Finding:
    growth = grows_with_position(seen.e, seen.positions)
    if growth >= GROWTH:
        detail = f"the difference grows {growth:.1f}-fold with the position"
        return fault("rope", figure, confidence="low", detail=detail)
    sizes = {one.fault: one.size for one in explanations if one.fault.startswith("dtype_") and one.size}
    near = [known for known, size in sizes.items() if size / BAND <= mean <= size * BAND]
    if near:
        chosen = min(near, key=lambda known: abs(math.log(mean / sizes[known])))
        detail = "the size of the difference is that dtype's; its pattern is not predictable"
        return fault(chosen, figure, confidence="low", detail=detail)
    together = float(torch.corrcoef(torch.stack([seen.engine, seen.reference]))[0, 1]) if seen.e.numel() > 2 else 0.0
    detail = f"no known fault explains it; correlation with the reference {together:.2f}"
    return fault("other_weights", figure, confidence="medium" if together > UNRELATED else "low", detail=detail)


def explain_alignment(seen: Difference) -> Iterator[Explanation]:
    """Each log-probability belongs to the token before or after."""
    for by, which in ((-1, "previous"), (1, "next")):
        places, neighbours = shift(seen.reference, seen.lengths, by)
        if places.numel():
            share = explained_share(seen.e[places], neighbours - seen.reference[places])
            yield Explanation(fault="off_by_one", label=f"the log-probability of the {which} token", share=share)


def explain_inputs(exam: Examination, seen: Difference) -> Iterator[Explanation]:
    """The engine processed other ids than it was sent, or sampled at another temperature."""
    for temperature, row in zip(
        TEMPERATURES, score(exam.reference.model, seen.observations, TEMPERATURES), strict=True
    ):
        yield seen.explain("sampled_temperature", f"temperature {temperature:g}", row)
    bos = getattr(exam.reference.config, "bos_token_id", None)
    if isinstance(bos, int):
        prediction = exam.reference.logprobs([move_prompt(one, (bos,)) for one in seen.observations])
        yield seen.explain("bos_added", f"token {bos} before the prompt", prediction)
    if any(one.positions[0] < one.prompt_tokens for one in seen.observations):
        return  # log-probabilities of a prompt: nothing was cut off
    longest = max(one.prompt_tokens for one in seen.observations)
    rows = seen.reference.split(seen.lengths)
    for kept in sorted({*(2**power for power in range(5, 14)), longest // 2, longest // 4, longest - 1}):
        if 8 <= kept < longest:  # only prompts that are longer than what the engine keeps change
            cut = [
                exam.reference.logprobs([move_prompt(one, cut=one.prompt_tokens - kept)])
                if one.prompt_tokens > kept
                else row
                for one, row in zip(seen.observations, rows, strict=True)
            ]
            yield seen.explain("context_truncated", f"the last {kept} prompt tokens only", torch.cat(cut))


def explain_weights(exam: Examination, seen: Difference) -> Iterator[Explanation]:
    for variant in list_variants(exam.reference, previous=exam.previous):
        yield seen.explain(variant.fault, variant.label, exam.reference.predict(variant, seen.observations))


def move_prompt(seen: Observation, before: tuple[int, ...] = (), *, cut: int = 0) -> Observation:
    """The same observation with ids put before the prompt, or the prompt's first `cut` ids cut off."""
    by = len(before) - cut
    return replace(
        seen,
        token_ids=(*before, *seen.token_ids[cut:]),
        positions=tuple(position + by for position in seen.positions),
        prompt_tokens=seen.prompt_tokens + by,
    )


def spread_of(e: Tensor) -> Spread:
    return Spread(mean=float(e.abs().mean()), largest=float(e.abs().amax())) if e.numel() else Spread()


def explained_share(e: Tensor, prediction: Tensor) -> float:
    total = float(e.abs().sum())
    return 1.0 - float((e - prediction).abs().sum()) / total if total else 0.0


def grows_with_position(e: Tensor, positions: Tensor) -> float:
    """Mean |e| of the last third of the positions ÷ that of the first third; wrong position settings make it large."""
    order = positions.argsort()
    third = max(1, e.numel() // 3)
    first, last = e[order[:third]].abs().mean(), e[order[-third:]].abs().mean()
    return float(last / first.clamp(min=1e-12))


def shift(values: Tensor, lengths: Sequence[int], by: int) -> tuple[Tensor, Tensor]:
    """Which entries have a neighbour `by` places on in the same sequence, and that neighbour's value."""
    inside = torch.zeros(values.shape, dtype=torch.bool)
    start = 0
    for length in lengths:
        inside[start + max(0, -by) : start + length - max(0, by)] = True
        start += length
    places = inside.nonzero().squeeze(1)
    return places, values[places + by]


def locate_difference(exam: Examination, findings: Sequence[Finding], engine_model: Any) -> list[Finding]:
    """The first layer whose output differs, where the weights probe found a fault."""
    if not any(finding.verdict is Verdict.FAULT and finding.probe.startswith("weights") for finding in findings):
        return []
    figure, why = "-", "the engine's layers cannot be reached from here; --engine hf can be looked into"
    if engine_model is not None:
        ids, tolerance = exam.observations[0].token_ids, TOLERANCES.get(exam.dtype, 1e-4)
        place, size = first_difference(exam.reference.model, engine_model, ids, tolerance)
        figure = f"{size:.2g} relative" if place else "-"
        why = (
            f"first in {place}" if place else "no single layer differs: the difference is in what surrounds the layers"
        )
    return [cannot_tell(why, figure=figure, probe="weights: first layer that differs")]


def first_difference(reference: nn.Module, other: nn.Module, ids: Sequence[int], tolerance: float) -> tuple[str, float]:
    """The first operator, in the order of execution, whose output differs by more than `tolerance`; "" if none does."""
    found = record_outputs(other, ids)
    for name, value in record_outputs(reference, ids).items():
        theirs = found.get(name)
        if theirs is None or theirs.shape != value.shape:
            return name, float("inf")
        size = float((theirs - value).norm() / value.norm().clamp(min=1e-12))
        if size > tolerance:
            return name, size
    return "", 0.0


@torch.no_grad()
def record_outputs(model: nn.Module, ids: Sequence[int]) -> dict[str, Tensor]:
    """The output of every module without children, in the order of execution."""
    outputs: dict[str, Tensor] = {}

    def record(module: nn.Module, inputs: Any, output: Any, *, name: str) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor) and value.is_floating_point():
            outputs.setdefault(name, value.detach().float().cpu())

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(record, name=name)))
        model(torch.tensor([list(ids)], device=next(model.parameters()).device))
    return outputs
