"""Stability: the same request again, in a batch, with a warm prefix cache, by prefill instead of decode; and paused or
preempted in the middle, on request only, because that holds up the engine's other clients."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tokentrue.doctor.exam import Examination, probe
from tokentrue.doctor.findings import Finding, cannot_tell, fault, ok
from tokentrue.providers.closeness import compare_completions
from tokentrue.types import Completion, Sampling

BATCH = 6
PAUSE_S = 0.3
AFTER_TOKENS = 4  # of a generation, before it is interrupted


async def probe_stability(exam: Examination) -> list[Finding]:
    return [await ask(exam) for ask in (_repeat, _batch, _prefix_cache, _prefill)]


async def probe_interruption(exam: Examination) -> list[Finding]:
    paused, preempted = probe("stability: paused and resumed")(_interrupt), probe("stability: preempted")(_interrupt)
    return [await paused(exam, "pause", preempt=False), await preempted(exam, "preemption", preempt=True)]


@probe("stability: same request twice")
async def _repeat(exam: Examination) -> Finding:
    prompt, sampling = exam.prompts()[0], Sampling(temperature=1.0, max_tokens=16, seed=exam.seed)
    first, second = [await exam.provider.generate(prompt, sampling) for _ in range(2)]
    return compare_runs(exam, "unstable", first, second)


@probe("stability: alone and in a batch")
async def _batch(exam: Examination) -> Finding:
    """The same greedy request alone, and beside others of other lengths."""
    sampling = Sampling(temperature=0.0, max_tokens=12)
    prompts = exam.prompts()
    alone = await exam.provider.generate(prompts[1], sampling)
    others = [prompt[: len(prompt) - shorter] for shorter, prompt in enumerate(prompts * 2)][: BATCH - 1]
    together = await exam.generate([prompts[1], *others], sampling)
    return compare_runs(exam, "batch_variant", alone, together[0])


@probe("stability: prefix cache cold and warm")
async def _prefix_cache(exam: Examination) -> Finding:
    """A prompt that was never sent, then again: the second time its prefix may come from the cache."""
    prompt, sampling = exam.fresh_prompt(160, 0), Sampling(temperature=0.0, max_tokens=12)
    cold, warm = [await exam.provider.generate(prompt, sampling) for _ in range(2)]
    return compare_runs(exam, "prefix_cache", cold, warm)


@probe("stability: prefill and decode")
async def _prefill(exam: Examination) -> Finding:
    """The k-th token by decoding, and as the first one after a longer prompt."""
    prompt, sampling = exam.fresh_prompt(60, 1), Sampling(temperature=0.0, max_tokens=12)
    decoded = await exam.provider.generate(prompt, sampling)
    cut = len(decoded.token_ids) // 2
    if not cut:
        return cannot_tell("the model ended its turn at once")
    longer = (*prompt, *decoded.token_ids[:cut])
    filled = await exam.provider.generate(longer, Sampling(temperature=0.0, max_tokens=len(decoded.token_ids) - cut))
    rest = Completion(token_ids=decoded.token_ids[cut:], logprobs=decoded.logprobs[cut:], finish=decoded.finish)
    return compare_runs(exam, "prefill_decode", rest, filled)


async def _interrupt(exam: Examination, known: str, *, preempt: bool) -> Finding:
    prompt, sampling = exam.prompts()[1], Sampling(temperature=1.0, max_tokens=48, seed=exam.seed)
    whole = await exam.provider.generate(prompt, sampling)
    seen, done = 0, False
    final: Completion | None = None
    async with aclosing(exam.provider.stream(prompt, sampling)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            final = chunk.final or final
            seen += len(chunk.token_ids)
            if done or final is not None or seen < AFTER_TOKENS:
                continue
            done = True
            if not await exam.routes.pause():
                return cannot_tell("the engine has no route that pauses it (vLLM: VLLM_SERVER_DEV_MODE=1)")
            try:
                if preempt and not await exam.routes.preempt():
                    return cannot_tell("the engine has no route that drops the keys and values of running requests")
                await asyncio.sleep(PAUSE_S)
            finally:
                await exam.routes.resume()
    if not done or final is None:
        return cannot_tell("the generation ended before it could be interrupted")
    return compare_runs(exam, known, whole, final)


def compare_runs(exam: Examination, known: str, first: Completion, second: Completion) -> Finding:
    """Up to where tokens part at a near tie, log-probabilities must agree: within rounding or, for the exact engine,
    in bits."""
    limit = 0.0 if exam.provider.name == "exact" else exam.spread.largest_limit
    found = compare_completions(first, second, tolerance=limit)
    if found.compared == 0:
        if abs(first.logprobs[0] - second.logprobs[0]) <= limit:
            return cannot_tell("the first tokens differ at a near tie")
        return fault(known, "other tokens from the first on", confidence="medium")
    worst = found.max_difference
    if not found.close:
        return fault(known, f"max |δ| {worst:.3g} over {found.compared} tokens, expected at most {limit:.2g}")
    grade = "equal in bits" if worst == 0 else f"max |δ| {worst:.2g}, expected at most {limit:.2g}"
    return ok(f"{grade} over {found.compared} tokens")
