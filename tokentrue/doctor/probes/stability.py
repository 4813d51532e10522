"""Stability: the same request again, in a batch, with a warm prefix cache, by prefill instead of decode."""

from __future__ import annotations

import random

from tokentrue.doctor.context import Examination
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.errors import EngineError, InputError, TokenContractError
from tokentrue.providers.closeness import compare_completions
from tokentrue.types import Completion, Sampling

BATCH = 6


async def probe_stability(exam: Examination) -> list[Finding]:
    probes = (_repeat, _batch, _prefix_cache, _prefill)
    found: list[Finding] = []
    for probe in probes:
        try:
            found.append(await probe(exam))
        except (EngineError, InputError, TokenContractError) as error:
            found.append(cannot_tell(f"stability: {probe.__name__.strip('_')}", str(error)))
    return found


async def _repeat(exam: Examination) -> Finding:
    prompt, sampling = exam.prompts()[0], Sampling(temperature=1.0, max_tokens=16, seed=exam.seed)
    first, second = [await exam.provider.generate(prompt, sampling) for _ in range(2)]
    return compare_runs(exam, "stability: same request twice", "unstable", first, second)


async def _batch(exam: Examination) -> Finding:
    """The same greedy request alone, and beside others of other lengths."""
    sampling = Sampling(temperature=0.0, max_tokens=12)
    prompts = exam.prompts()
    alone = await exam.provider.generate(prompts[1], sampling)
    others = [prompt[: len(prompt) - shorter] for shorter, prompt in enumerate(prompts * 2)][: BATCH - 1]
    together = await exam.generate([prompts[1], *others], sampling)
    return compare_runs(exam, "stability: alone and in a batch", "batch_variant", alone, together[0])


async def _prefix_cache(exam: Examination) -> Finding:
    """A prompt that was never sent, then again: the second time its prefix may come from the cache."""
    mixed = list(exam.long_prompt(160))
    middle = mixed[8:-8]
    random.Random(exam.seed).shuffle(middle)
    prompt, sampling = [*mixed[:8], *middle, *mixed[-8:]], Sampling(temperature=0.0, max_tokens=8)
    cold = await exam.provider.generate(prompt, sampling)
    warm = await exam.provider.generate(prompt, sampling)
    return compare_runs(exam, "stability: prefix cache cold and warm", "prefix_cache", cold, warm)


async def _prefill(exam: Examination) -> Finding:
    """The k-th token by decoding, and as the first one after a longer prompt."""
    prompt, sampling = exam.prompts()[2], Sampling(temperature=0.0, max_tokens=12)
    decoded = await exam.provider.generate(prompt, sampling)
    cut = len(decoded.token_ids) // 2
    if not cut:
        return cannot_tell("stability: prefill and decode", "the model ended its turn at once")
    longer = (*prompt, *decoded.token_ids[:cut])
    filled = await exam.provider.generate(longer, Sampling(temperature=0.0, max_tokens=len(decoded.token_ids) - cut))
    rest = Completion(token_ids=decoded.token_ids[cut:], logprobs=decoded.logprobs[cut:], finish=decoded.finish)
    return compare_runs(exam, "stability: prefill and decode", "prefill_decode", rest, filled)


def compare_runs(exam: Examination, name: str, known: str, first: Completion, second: Completion) -> Finding:
    """Tokens may part at a near tie; up to there the log-probabilities must agree, within rounding or, for the exact
    engine, in bits."""
    limit = 0.0 if exam.provider.name == "exact" else exam.spread.largest_limit
    found = compare_completions(first, second, tolerance=limit)
    if found.compared == 0:
        if abs(first.logprobs[0] - second.logprobs[0]) <= limit:
            return cannot_tell(name, "the first tokens differ at a near tie")
        return fault(name, known, "other tokens from the first on", confidence="medium")
    worst = found.max_difference
    if not found.close:
        return fault(name, known, f"max |δ| {worst:.3g} over {found.compared} tokens, expected at most {limit:.2g}")
    grade = "equal in bits" if worst == 0 else f"max |δ| {worst:.2g}, expected at most {limit:.2g}"
    return ok(name, f"{grade} over {found.compared} tokens")
