"""Interruption: a generation that is paused in the middle, or whose keys and values are dropped and computed again,
must not change.

These probes hold up every generation of the engine for a moment, so they run on request only.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tokentrue.doctor.context import Examination
from tokentrue.doctor.findings import Finding, cannot_tell
from tokentrue.doctor.probes.stability import compare_runs
from tokentrue.errors import EngineError, InputError, TokenContractError
from tokentrue.types import Completion, Sampling

PAUSE_S = 0.3
AFTER_TOKENS = 4  # of a generation, before it is interrupted


async def probe_interruption(exam: Examination) -> list[Finding]:
    return [
        await _interrupt(exam, "stability: paused and resumed", "pause", preempt=False),
        await _interrupt(exam, "stability: preempted", "preemption", preempt=True),
    ]


async def _interrupt(exam: Examination, name: str, known: str, *, preempt: bool) -> Finding:
    prompt, sampling = exam.prompts()[1], Sampling(temperature=1.0, max_tokens=48, seed=exam.seed)
    try:
        whole = await exam.provider.generate(prompt, sampling)
        found = await _interrupted(exam, prompt, sampling, preempt=preempt)
        return cannot_tell(name, found) if isinstance(found, str) else compare_runs(exam, name, known, whole, found)
    except (EngineError, InputError, TokenContractError) as error:
        return cannot_tell(name, str(error))


async def _interrupted(
    exam: Examination, prompt: tuple[int, ...], sampling: Sampling, *, preempt: bool
) -> Completion | str:
    """The completion, or why it was not interrupted."""
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
                return "the engine has no route that pauses it (vLLM: VLLM_SERVER_DEV_MODE=1)"
            try:
                if preempt and not await exam.routes.preempt():
                    return "the engine has no route that drops the keys and values of running requests"
                await asyncio.sleep(PAUSE_S)
            finally:
                await exam.routes.resume()
    return final if done and final is not None else "the generation ended before it could be interrupted"
