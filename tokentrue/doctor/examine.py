"""`examine`: the probes, from what would explain everything to what would explain little."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokentrue.doctor.exam import EngineRoutes, Examination
from tokentrue.doctor.findings import DoctorReport, Verdict, settle
from tokentrue.doctor.images import probe_images
from tokentrue.doctor.interface import gather_observations, probe_identity, probe_meaning, probe_stability
from tokentrue.doctor.naming import Evidence
from tokentrue.doctor.reference import Reference
from tokentrue.doctor.samples import probe_samples
from tokentrue.doctor.weights import locate_difference, probe_experts, probe_weights
from tokentrue.errors import EngineError
from tokentrue.protocols import Provider
from tokentrue.renderers import Renderer
from tokentrue.types import Sample


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
    on_progress: Callable[[str], None] = lambda _: None,
) -> DoctorReport:
    """Runs every probe. `dtype`: what the engine should compute in, by default what the model was saved in; with
    `engine_model`, its own module, the first layer that differs is looked for."""
    exam = Examination(
        provider=provider,
        routes=routes or EngineRoutes(),
        renderer=renderer,
        reference=reference,
        dtype=dtype or reference.dtype,
        previous=previous,
        seed=seed,
    )
    reference.expect(exam.dtype)
    reference.on_progress = on_progress
    facts = {"dtype expected": exam.dtype}
    try:
        facts |= {key: str(value) for key, value in (await provider.health()).items()}
    except EngineError as error:
        facts["health"] = str(error)
    on_progress("identity")
    findings = await probe_identity(exam)
    on_progress("contract")
    findings.append(await gather_observations(exam))
    if exam.observations and findings[-1].verdict is not Verdict.FAULT:
        exam.evidence = Evidence(reference, exam.observations, exam.dtype)
        exam.mean_limit, exam.largest_limit = exam.evidence.mean_limit, exam.evidence.largest_limit
        for run in (probe_meaning, probe_stability, probe_weights, probe_experts):
            on_progress(run.__name__.removeprefix("probe_"))
            findings += await run(exam)
        findings += locate_difference(exam, findings, engine_model)
        on_progress("images")
        findings += await probe_images(exam, findings)
    if samples:
        on_progress("samples")
        findings += await probe_samples(exam, samples)
    model = str(reference.source or "")
    return DoctorReport(engine=provider.name, model=model, facts=facts, findings=tuple(settle(findings)))
