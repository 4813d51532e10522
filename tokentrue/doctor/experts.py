"""Experts: does the engine's router choose what the reference's chooses, layer by layer, and what is left when its
choice is replayed?"""

from __future__ import annotations

import torch

from tokentrue.doctor.exam import Examination, probe
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.doctor.reference import Observation, score
from tokentrue.errors import InputError
from tokentrue.mismatch.routing import from_routed, record_routing, replay_routing, routers
from tokentrue.routing_replay import FREE
from tokentrue.types import RoutedExperts, Sampling

FLIPS = {"float32": 0.002, "float16": 0.02, "bfloat16": 0.15}  # share of choices that rounding alone may flip


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
        (plain,) = score(model, [seen])
    ours = record.experts.index_select(0, rows)
    same = (theirs.sort(dim=-1).values == ours.sort(dim=-1).values).all(dim=-1)
    flips = 1.0 - same.double().mean(dim=0)
    whole = torch.full((len(seen.token_ids), *theirs.shape[1:]), FREE, dtype=torch.int16)
    whole[rows] = theirs
    with replay_routing(model, whole):
        (replayed,) = score(model, [seen])
    engine = torch.tensor(seen.logprobs, dtype=torch.float64)
    without, with_replay = (float((engine - side).abs().mean()) for side in (plain, replayed))
    mean, worst = float(flips.mean()), int(flips.argmax())
    figure = f"{100 * mean:.1f}% of choices differ, most in layer {worst} ({100 * float(flips[worst]):.0f}%)"
    detail = f"mean |δ| {without:.2g}, with the engine's choices replayed {with_replay:.2g}"
    if mean > FLIPS.get(exam.dtype, 0.002):
        return fault("routing", figure, confidence="medium", detail=detail)
    return ok(figure, detail=detail)
