"""Weights, arithmetic and sampling: the engine's log-probabilities and routing against the reference."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.doctor.exam import Examination, probe
from tokentrue.doctor.findings import DRAWS, Finding, Verdict, cannot_tell, fault, ok
from tokentrue.doctor.hypotheses import list_hypotheses
from tokentrue.doctor.naming import EDGE, Evidence, judge, judge_draws, reports_the_drawn_temperature
from tokentrue.doctor.reference import Observation
from tokentrue.errors import InputError
from tokentrue.numerics.routing import from_routed, record_routing, replay_routing, routers
from tokentrue.protocols import Scoring
from tokentrue.routing_replay import FREE
from tokentrue.types import RoutedExperts, Sampling

TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}  # relative, of a layer's output
HOT = 2.0  # temperature of draws in which filters show
FLIPS = {"float32": 0.002, "float16": 0.02, "bfloat16": 0.15}  # share of choices that rounding alone may flip


async def probe_weights(exam: Examination) -> list[Finding]:
    """Prompt tokens are judged with the sampled ones where both differ, or neither does."""
    assert exam.evidence is not None
    row = await _score_prompt(exam)
    joined, prompt = exam.evidence, exam.prompt_evidence
    if prompt is not None and prompt.departs == joined.departs:
        joined = Evidence(exam.reference, [*joined.observations, *prompt.observations], exam.dtype)
    elif prompt is not None and prompt.departs:
        joined = prompt
    verdict = await _judge(exam, joined)
    return [verdict, row, await _draws(exam, verdict)]


@probe("weights: log-probabilities against the model directory")
async def _judge(exam: Examination, evidence: Evidence) -> Finding:
    return judge_causes(exam, evidence)


def judge_causes(exam: Examination, evidence: Evidence, *, is_output: bool = False) -> Finding:
    """`is_output`: by the hypotheses about logits and reports alone."""
    hypotheses = list_hypotheses(
        exam.reference,
        previous=exam.previous,
        specials=exam.special_ids(),
        stops=exam.renderer.stop_token_ids,
        rewrites=exam.rewrites(),
        dtype=exam.dtype,
    )
    chosen = (one for one in hypotheses if one.is_output or not is_output)
    return judge(evidence, chosen, advice=advise(exam), prefixes=exam.prefixes())


def advise(exam: Examination) -> str:
    steps = {
        "run again with --previous DIR (the weights before the last update)": exam.previous is None,
        "serve in float32 for the test, where causes are told apart by their digits": exam.dtype != "float32",
        "load the served directory with --engine hf --served DIR, which names the layer": exam.provider.name != "hf",
        "compare the engine's configuration and model class with the directory": True,
    }
    return "; ".join([step for step, is_open in steps.items() if is_open][:3])


@probe("weights: log-probabilities of a prompt")
async def _score_prompt(exam: Examination) -> Finding:
    if not isinstance(exam.provider, Scoring):
        return cannot_tell("the engine gives no prompt log-probabilities")
    prompt = exam.long_prompt()
    seen = Observation.from_prompt(prompt, await exam.provider.score(prompt))
    exam.prompt_evidence = evidence = Evidence(exam.reference, [seen], exam.dtype)
    gaps = evidence.e.abs()
    figure = f"mean |δ| {float(gaps.mean()):.2g}, max {float(gaps.max()):.2g} over {gaps.numel()} tokens"
    if evidence.departs:
        return cannot_tell("differs; the cause is in the row of the model directory", figure=figure)
    return ok(figure)


@probe(DRAWS)
async def _draws(exam: Examination, verdict: Finding) -> Finding:
    if exam.evidence is None or (verdict.verdict is not Verdict.OK and verdict.fault != "sampled_temperature"):
        return cannot_tell("the reference has other probabilities than the engine")

    async def draw(prompts: Sequence[Sequence[int]], temperature: float) -> list[Observation]:
        """Of two seeds; none of an engine that ignores seeds, which repeats its answers."""
        settings = [Sampling(temperature=temperature, max_tokens=exam.max_tokens, seed=exam.seed + by) for by in (1, 2)]
        first, second = [await exam.observe(prompts, sampling) for sampling in settings]
        is_repeated = [seen.token_ids for seen in first] == [seen.token_ids for seen in second]
        return [] if is_repeated else [*first, *second]

    # A filter that cuts little shows in many draws only.
    sampled = [*exam.evidence.observations, *await draw(exam.prompts(), 1.0)]
    if verdict.fault == "sampled_temperature":
        if reports_the_drawn_temperature(exam.reference, sampled):
            return ok("draws and log-probabilities are of one temperature")
        return cannot_tell("draws and log-probabilities are of two temperatures, or cannot be told apart")
    edge = 0.0 if exam.dtype == "float32" else EDGE
    found = judge_draws(exam.reference, sampled, edge=edge)
    # Hot draws often leave a filter's tokens, sure ones never.
    hot = await draw([*exam.prompts(), *exam.open_prompts()], HOT) if exam.follows_temperature else []
    if not hot:
        return found
    heated = judge_draws(exam.reference, hot, temperature=HOT, edge=edge)
    return heated if found.verdict is Verdict.OK or heated.fault not in ("", "unknown") else found


def locate_difference(exam: Examination, findings: Sequence[Finding], engine_model: Any) -> list[Finding]:
    if not any(finding.verdict is Verdict.FAULT and finding.probe.startswith("weights") for finding in findings):
        return []
    figure, why = "-", "the engine's layers cannot be reached from here; --engine hf can be looked into"
    if engine_model is not None:
        ids, tolerance = exam.observations[0].token_ids, TOLERANCES.get(exam.dtype, 1e-4)
        place, size = first_difference(exam.reference.model, engine_model, ids, tolerance)
        figure = f"{size:.2g} relative" if place else "-"
        nowhere = "no single layer differs: the difference is in what surrounds the layers"
        why = f"first in {place}" if place else nowhere
    return [cannot_tell(why, figure=figure, probe="weights: first layer that differs")]


def first_difference(reference: nn.Module, other: nn.Module, ids: Sequence[int], tolerance: float) -> tuple[str, float]:
    """The first operator to run whose output differs by more than `tolerance`; "" if none does."""
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
    """Those of every module without children, in the order of execution."""
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


async def probe_experts(exam: Examination) -> list[Finding]:
    try:
        layers = len(routers(exam.reference.model))
    except InputError:
        return []  # a dense model
    return [await _routing(exam, layers)]


@probe("experts: routing")
async def _routing(exam: Examination, layers: int) -> Finding:
    prompt = exam.prompts()[0]
    extra = {"routed_experts": True} if exam.provider.name == "exact" else {}
    completion = await exam.provider.generate(prompt, Sampling(max_tokens=exam.max_tokens, seed=3, extra=extra))
    if completion.routed_experts is None:
        return cannot_tell("the engine reports no routing; start it so that it returns routed experts")
    return compare_routing(exam, Observation.from_completion(prompt, completion), completion.routed_experts, layers)


def compare_routing(exam: Examination, seen: Observation, routed: RoutedExperts, layers: int) -> Finding:
    theirs = from_routed(routed)
    if theirs.shape[1] != layers:
        return cannot_tell(f"the engine reports {theirs.shape[1]} layers of routing, the model has {layers}")
    model, rows = exam.reference.model, torch.arange(routed.start, routed.end)
    with record_routing(model) as record:
        plain = exam.reference.logprobs([seen])
    ours = record.experts.index_select(0, rows)
    same = (theirs.sort(dim=-1).values == ours.sort(dim=-1).values).all(dim=-1)
    flips = 1.0 - same.double().mean(dim=0)
    whole = torch.full((len(seen.token_ids), *theirs.shape[1:]), FREE, dtype=torch.int16)
    whole[rows] = theirs
    with replay_routing(model, whole):
        replayed = exam.reference.logprobs([seen])
    engine = torch.tensor(seen.logprobs, dtype=torch.float64)
    without, with_replay = (float((engine - side).abs().mean()) for side in (plain, replayed))
    mean, worst = float(flips.mean()), int(flips.argmax())
    figure = f"{100 * mean:.1f}% of choices differ, most in layer {worst} ({100 * float(flips[worst]):.0f}%)"
    detail = f"mean |δ| {without:.2g}, with the engine's choices replayed {with_replay:.2g}"
    if mean <= FLIPS.get(exam.dtype, 0.002):
        return ok(figure, detail=detail)
    # Whatever changes the hidden states moves some choices: the routers are at fault where their choices alone explain
    # the difference, or where most are other ones in each layer.
    if with_replay <= exam.mean_limit or float(flips.min()) > 0.5:
        return fault("routing", figure, confidence="medium", detail=detail)
    return cannot_tell(f"choices differ, which is no cause by itself: {detail}", figure=figure)
