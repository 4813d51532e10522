"""What the engine's log-probabilities mean: temperature and filters in or out, greedy, precision on the wire.

These probes compare the engine with itself, so that they hold whatever weights it has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from tokentrue.doctor.exam import Examination, probe
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.doctor.hypotheses import penalise
from tokentrue.doctor.reference import Observation, compute_logits, read_entries
from tokentrue.errors import (
    EngineContractError,
    EngineError,
    EngineUnreachable,
    InputError,
    SamplingError,
    TokenContractError,
)
from tokentrue.types import Completion, Sampling

CLEAR_GAP = 0.3  # nats between the two likeliest tokens: at temperature 0.02 the second is e^-15 times as likely
DECIMALS = 5
ENOUGH = 20


async def gather_observations(exam: Examination) -> Finding:
    """Samples at temperature 1; what the engine's answers break is a finding."""
    try:
        found = await _observe(exam)
    except EngineUnreachable:
        raise  # nothing can be probed
    except (EngineContractError, TokenContractError) as error:
        counted = re.search(r"counted (\d+) prompt tokens where (\d+) were sent", str(error))
        if counted is None:
            found = fault("bad_logprobs", "refused", detail=str(error))
        else:
            theirs, sent = int(counted[1]), int(counted[2])
            known = "bos_added" if theirs == sent + 1 else "context_truncated" if theirs < sent else "prompt_changed"
            found = fault(known, f"{theirs} prompt tokens of {sent}", detail=str(error))
    except (EngineError, InputError) as error:
        found = fault("engine_refused", "no answer", detail=str(error))
    return replace(found, probe="contract: ids and log-probabilities")


async def _observe(exam: Examination) -> Finding:
    long = exam.long_prompt()
    # Cut in the middle of a sentence: many tokens are likely there, and those tell more than certain ones.
    prompts = [*exam.prompts(), *(long[:cut] for cut in (48, 96) if cut < len(long) // 2), long]
    sampling = Sampling(temperature=1.0, max_tokens=exam.max_tokens, seed=exam.seed, top_logprobs=4)
    completions = await exam.generate(prompts, sampling)
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion.token_ids:
            exam.observations.append(Observation.from_completion(prompt, completion))
    exam.uncertain = _uncertain(prompts, completions)
    size, sampled = exam.reference.vocab_size, [token for one in completions for token in one.token_ids]
    if max(sampled, default=0) >= size:
        return fault("other_model", f"sampled id {max(sampled)} of {size}")
    return ok(f"{len(sampled)} sampled tokens") if sampled else cannot_tell("the engine sampled nothing")


def _uncertain(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    """Prefixes of what was sampled at which the likeliest token is clear and yet least likely."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        for index, top in enumerate(completion.top_logprobs or ()):
            values = sorted(top.values(), reverse=True)
            if len(values) > 1 and values[0] - values[1] > CLEAR_GAP:
                found.append((values[0], (*prompt, *completion.token_ids[:index])))
    return [prefix for _, prefix in sorted(found)[:4]]


async def probe_meaning(exam: Examination) -> list[Finding]:
    tops = await _read_tops(exam)
    if tops.verdict != "ok":
        return [tops, await _wire(exam)]
    asked = (_temperature, _low_temperature, _filters, _greedy, _penalties, _wire)
    return [await ask(exam) for ask in asked]


@probe("meaning")
async def _read_tops(exam: Examination) -> Finding:
    prompts = exam.open_prompts()
    plain = await exam.generate(prompts, Sampling(temperature=1.0, max_tokens=1, seed=exam.seed, top_logprobs=4))
    exam.tops = [completion.top_logprobs[0] for completion in plain if completion.top_logprobs]
    if len(exam.tops) != len(prompts):
        return cannot_tell("the engine gives no top log-probabilities")
    return ok(f"top log-probabilities of {len(prompts)} prompts")


@probe("meaning: temperature")
async def _temperature(exam: Examination) -> Finding:
    """Gaps between two tokens' log-probabilities double at temperature 0.5."""
    sampling = Sampling(temperature=0.5, max_tokens=1, seed=exam.seed, top_logprobs=4)
    try:
        found = await exam.generate(exam.open_prompts(), sampling)
    except SamplingError as error:
        return fault("raw_logprobs", "refused by the adapter", detail=str(error))
    ratios: list[float] = []
    for warm, completion in zip(exam.tops, found, strict=True):
        cold, first = (completion.top_logprobs or ({},))[0], _likeliest(warm)
        both = [t for t in warm if first in cold and t in cold and warm[first] - warm[t] > CLEAR_GAP]
        ratios += [(cold[first] - cold[t]) / (warm[first] - warm[t]) for t in both]
    if not ratios:
        return cannot_tell("no prompt has two tokens that are told apart")
    middle = median(ratios)
    figure = f"gaps grow {middle:.3f}-fold at T = 0.5, expected 2"
    if sum(abs(ratio / middle - 1) < 0.15 for ratio in ratios) < 0.8 * len(ratios):
        return cannot_tell("gaps between log-probabilities do not grow together", figure=figure)
    if abs(middle - 2.0) < 0.1:
        return ok(figure)
    return fault("raw_logprobs" if abs(middle - 1.0) < 0.1 else "temperature_ignored", figure, confidence="medium")


@probe("meaning: sampling follows the temperature")
async def _low_temperature(exam: Examination) -> Finding:
    """At temperature 0.02 the likeliest token is sampled, where it is clearly likelier."""
    drawn: list[bool] = []
    for n in range(3):
        found = await exam.generate(exam.open_prompts(), Sampling(temperature=0.02, max_tokens=1, seed=exam.seed + n))
        for top, completion in zip(exam.tops, found, strict=True):
            first, second = sorted(top.values(), reverse=True)[:2]
            if completion.token_ids and first - second > CLEAR_GAP:
                drawn.append(completion.token_ids[0] == _likeliest(top))
    if not drawn:
        return cannot_tell("no prompt has a clearly likeliest first token")
    figure = f"{sum(drawn)} of {len(drawn)} samples are the likeliest token at T = 0.02"
    return ok(figure) if all(drawn) else fault("temperature_ignored", figure)


def _likeliest(top: Mapping[int, float]) -> int:
    return max(top, key=lambda token: top[token])


@probe("meaning: filters")
async def _filters(exam: Examination) -> Finding:
    if "top_k" not in (exam.provider.truthful_filters or ()):
        return cannot_tell(
            "this engine reports no renormalised log-probabilities; the gateway refuses filters in training sessions"
        )
    sampling = Sampling(temperature=1.0, top_k=2, max_tokens=1, seed=exam.seed)
    limit = exam.visible
    inside: list[float] = []
    outside: list[float] = []
    for top, completion in zip(exam.tops, await exam.generate(exam.open_prompts(), sampling), strict=True):
        kept, values = sorted(top, key=lambda token: -top[token])[:2], sorted(top.values(), reverse=True)
        if len(values) > 2 and values[1] - values[2] < CLEAR_GAP:
            continue  # which tokens are the two likeliest may depend on rounding
        token = completion.token_ids[0]
        if token not in kept:
            return fault("filters_ignored", f"top_k = 2 sampled token {token}, which is not among the two likeliest")
        mass = math.log(sum(math.exp(top[t]) for t in kept))
        if abs(mass) <= 3 * limit:
            continue  # what the filter drops weighs too little to be seen
        inside.append(abs(completion.logprobs[0] - (top[token] - mass)))
        outside.append(abs(completion.logprobs[0] - top[token]))
    if not inside:
        return cannot_tell("no prompt has two tokens that are clearly the likeliest and leave some mass to the rest")
    return _either("filters_ignored", "renormalised", median(inside), "unfiltered", median(outside), limit)


def _either(name: str, right: str, inside: float, wrong: str, outside: float, limit: float) -> Finding:
    """Which of two readings the numbers are within `limit` of."""
    if inside <= limit:
        return ok(f"{right} within {inside:.2g}")
    if outside <= limit:
        return fault(name, f"equal to the {wrong} within {outside:.2g}")
    return cannot_tell(f"neither {right} ({inside:.2g} off) nor {wrong} ({outside:.2g} off)")


@probe("meaning: penalties")
async def _penalties(exam: Examination) -> Finding:
    """Sampled under a presence penalty: the reference's logits with the penalty, or without it?"""
    if "presence_penalty" not in (exam.provider.truthful_filters or ()):
        return cannot_tell(
            "this engine does not claim to report penalised log-probabilities; training sessions refuse penalties"
        )
    prompt = exam.prompts()[1]
    found = await exam.provider.generate(prompt, Sampling(max_tokens=24, seed=exam.seed, presence_penalty=1.0))
    seen = Observation.from_completion(prompt, found)
    logits = compute_logits(exam.reference.model, seen)
    plain, penalised = (read_entries(seen, z) for z in (logits, penalise(logits, seen, 1.0, name="presence")))
    clear = (plain - penalised).abs() > 3 * exam.visible
    if not bool(clear.any()):
        return cannot_tell("the penalty changes no sampled token's log-probability visibly")
    theirs = torch.tensor(found.logprobs, dtype=torch.float64)
    inside, outside = (float((theirs - side)[clear].abs().median()) for side in (penalised, plain))
    return _either("penalties_ignored", "penalised", inside, "unpenalised", outside, exam.visible)


@probe("meaning: greedy")
async def _greedy(exam: Examination) -> Finding:
    found = await exam.generate(exam.open_prompts(), Sampling(temperature=0.0, max_tokens=1))
    limit = exam.visible
    pairs = [(max(top.values()), completion.logprobs[0]) for top, completion in zip(exam.tops, found, strict=True)]
    pairs = [(ours, theirs) for ours, theirs in pairs if ours < -3 * limit]
    if not pairs:
        return cannot_tell("the likeliest token is certain at every prompt")
    off = median(abs(ours - theirs) for ours, theirs in pairs)
    if off <= limit:
        return ok(f"greedy reports temperature 1 within {off:.2g}")
    if all(theirs > -1e-6 for _, theirs in pairs):
        return fault("greedy_logprobs", "greedy reports 0, the log-probability of certainty")
    return cannot_tell(f"greedy is {off:.2g} away from temperature 1, and not 0 either")


@probe("meaning: precision on the wire")
async def _wire(exam: Examination) -> Finding:
    """Full float32 values have more digits than any rounding leaves."""
    values = [value for seen in exam.observations for value in seen.logprobs if abs(value) > 1e-3]
    if len(values) < ENOUGH:
        return cannot_tell(f"only {len(values)} log-probabilities differ from 0")
    for digits in range(1, DECIMALS + 1):
        if all(round(value, digits) == value for value in values):
            return fault("wire_precision", f"{digits} decimals")
    exact = torch.tensor(values, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        if bool((exact.to(dtype).double() == exact).all()):
            return fault("wire_precision", str(dtype).removeprefix("torch."))
    return ok(f"{len(values)} values in full precision")
