"""`examine`: the series of probes, from what would explain everything to what would explain little."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tokentrue.doctor.context import Examination
from tokentrue.doctor.findings import DoctorReport, Finding, Verdict, cannot_tell
from tokentrue.doctor.fit import Spread, spread_of
from tokentrue.doctor.layers import locate_difference
from tokentrue.doctor.observations import Observation
from tokentrue.doctor.probes.experts import probe_experts
from tokentrue.doctor.probes.identity import probe_identity
from tokentrue.doctor.probes.interruption import probe_interruption
from tokentrue.doctor.probes.meaning import gather_observations, probe_meaning
from tokentrue.doctor.probes.samples import probe_samples
from tokentrue.doctor.probes.stability import probe_stability
from tokentrue.doctor.probes.weights import probe_weights
from tokentrue.doctor.reference import Reference, dtype_variant
from tokentrue.doctor.routes import EngineRoutes, NoRoutes
from tokentrue.errors import EngineError
from tokentrue.protocols import Provider
from tokentrue.renderers import Renderer
from tokentrue.types import Sample

Progress: TypeAlias = Callable[[str], None]


def measure_spread(reference: Reference, dtype: str, observations: Sequence[Observation]) -> Spread:
    """How far the dtype alone moves log-probabilities from float32, on these tokens."""
    if dtype == "float32":
        return Spread(mean=0.0, largest=0.0)
    return spread_of(reference.predict(dtype_variant(dtype), observations) - reference.logprobs(observations))


async def examine(
    provider: Provider,
    renderer: Renderer,
    reference: Reference,
    *,
    routes: EngineRoutes | None = None,
    dtype: str | None = None,
    previous: str | Path | None = None,
    engine_model: Any = None,
    seed: int = 7,
    samples: Sequence[Sample] = (),
    interrupt: bool = False,
    on_progress: Progress = lambda _: None,
) -> DoctorReport:
    """Runs every probe. `dtype` is what the engine should compute in (the dtype that the model was saved in by
    default).

    `engine_model` is the engine's torch module where it runs in this process: then the first layer that differs is
    looked for. `interrupt` pauses and preempts a running generation too, which holds up the engine's other clients for
    a moment.
    """
    exam = Examination(
        provider=provider,
        routes=NoRoutes() if routes is None else routes,
        renderer=renderer,
        reference=reference,
        dtype=dtype or reference.dtype,
        spread=Spread(mean=0.0, largest=0.0),
        previous=previous,
        seed=seed,
    )
    facts = {"dtype expected": exam.dtype, **await _facts(exam)}
    on_progress("identity")
    findings = await probe_identity(exam)
    on_progress("contract")
    findings.append(await gather_observations(exam))
    if exam.observations and findings[-1].verdict is not Verdict.FAULT:
        exam.spread = measure_spread(reference, exam.dtype, exam.observations[:2])
        probes: dict[str, Callable[[Examination], Awaitable[list[Finding]]]] = {
            "meaning": probe_meaning, "stability": probe_stability, "weights": probe_weights, "experts": probe_experts,
        }  # fmt: skip
        if interrupt:
            probes["interruption"] = probe_interruption
        for name, probe in probes.items():
            on_progress(name)
            findings += await probe(exam)
        findings += locate_difference(exam, findings, engine_model)
    if samples:
        on_progress("samples")
        findings += probe_samples(exam, samples)
    return DoctorReport(
        engine=provider.name, model=str(reference.source or ""), facts=facts, findings=tuple(settle(findings))
    )


async def _facts(exam: Examination) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in (await exam.provider.health()).items()}
    except EngineError as error:
        return {"health": str(error)}


def settle(findings: Sequence[Finding]) -> list[Finding]:
    """One fault shows in several probes: a later one that the first explains is no second accusation."""
    faults = [finding for finding in findings if finding.verdict is Verdict.FAULT]
    kept: list[Finding] = []
    for finding in findings:
        earlier = next(
            (one.fault for one in faults if finding.fault in FOLLOWS.get(one.fault, ()) and one is not finding), None
        )
        if finding.verdict is Verdict.FAULT and earlier is not None:
            kept.append(cannot_tell(finding.probe, f"{finding.figure}; follows from {earlier}"))
        else:
            kept.append(finding)
    return kept


DTYPES = ("dtype_bfloat16", "dtype_float16")
NUMBERS = ("other_weights", "rope", "int8_weights", "fp8_weights", "fp8_kv_cache", "routing")
REPEATS = ("batch_variant", "prefix_cache", "prefill_decode", "pause", "preemption")
FOLLOWS: dict[str, tuple[str, ...]] = {
    "tokenizer": ("special_tokens", "template"),
    "special_tokens": ("template",),
    "off_by_one": (*NUMBERS, *DTYPES, "sampled_temperature", "greedy_logprobs", "prefill_decode"),
    "raw_logprobs": ("sampled_temperature",),
    "temperature_ignored": ("raw_logprobs",),
    "wire_precision": (*NUMBERS, *DTYPES, "prefill_decode", "batch_variant"),
    "unstable": (*REPEATS, *NUMBERS, *DTYPES),
    "dtype_bfloat16": REPEATS,  # a coarser dtype rounds differently in every batch
    "dtype_float16": REPEATS,
    "batch_variant": (*NUMBERS, "prefill_decode"),
    "prefix_cache": (*NUMBERS, "prefill_decode"),
    "pause": ("preemption",),
    "sampled_temperature": ("greedy_logprobs",),
    "context_truncated": ("prefill_decode",),
}
"""What each fault explains: findings of these names beside it are its consequences."""
