"""Penalties, pause and preemption: a healthy engine passes, one that changes its numbers is named, one without the
route cannot be told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.doctor import engines as e
from tokentrue.doctor import DoctorReport, Reference, examine
from tokentrue.doctor.exam import EngineRoutes
from tokentrue.doctor.findings import Verdict
from tokentrue.providers.exact import ExactProvider
from tokentrue.providers.hf import HFProvider
from tokentrue.renderers import load_renderer
from tokentrue.types import Chunk, Completion, Ids, Sampling


class PausableRoutes(EngineRoutes):
    """Notes what it is asked; a provider may look at it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def pause(self) -> bool:
        self.calls.append("pause")
        return True

    async def preempt(self) -> bool:
        self.calls.append("preempt")
        return True

    async def resume(self) -> bool:
        self.calls.append("resume")
        return True


class Forgetful(HFProvider):
    """After one of `calls` named `breaks`, a running generation goes on with other numbers."""

    def __init__(self, calls: list[str], breaks: str) -> None:
        super().__init__(e.calculator())
        self.calls, self.breaks = calls, breaks

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        self.calls.clear()
        sound = 0
        async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole):
            if chunk.final is None:
                sound += self.breaks not in self.calls
                yield chunk
            else:
                values = chunk.final.logprobs
                yield Chunk(
                    final=replace(chunk.final, logprobs=(*values[:sound], *(1.3 * value for value in values[sound:])))
                )


class RawUnderPenalties(ExactProvider):
    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling, session=session)
        return (
            replace(found, logprobs=found.raw_logprobs) if sampling.presence_penalty and found.raw_logprobs else found
        )


async def verdicts(provider: Any, **options: Any) -> tuple[DoctorReport, dict[str, Verdict]]:
    torch.set_num_threads(1)
    report = await examine(
        provider, load_renderer(str(e.CALCULATOR)), Reference.load(e.CALCULATOR), dtype="float32", **options
    )
    return report, {finding.probe: finding.verdict for finding in report.findings}


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        pytest.param("nothing", (), marks=pytest.mark.slow),
        ("resume", ("pause",)),
        pytest.param("preempt", ("preemption",), marks=pytest.mark.slow),
    ],
)
async def test_an_interrupted_generation_must_not_change(breaks: str, named: tuple[str, ...]) -> None:
    calls: list[str] = []
    provider = Forgetful(calls, breaks)
    report, found = await verdicts(provider, routes=PausableRoutes(calls), interrupt=True)
    assert tuple(finding.fault for finding in report.faults) == named
    assert calls == ["pause", "preempt", "resume"], "the engine is resumed whatever happens"
    assert found["stability: paused and resumed"] is (Verdict.FAULT if breaks == "resume" else Verdict.OK)


@pytest.mark.slow
async def test_without_a_route_or_the_wish_nothing_is_interrupted() -> None:
    _, found = await verdicts(HFProvider(e.calculator()), interrupt=True)
    assert found["stability: paused and resumed"] is found["stability: preempted"] is Verdict.CANNOT_TELL
    _, found = await verdicts(HFProvider(e.calculator()))
    assert "stability: preempted" not in found and found["meaning: penalties"] is Verdict.CANNOT_TELL


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "named"), [(ExactProvider, ()), (RawUnderPenalties, ("penalties_ignored",))])
async def test_penalties_are_in_the_log_probabilities_or_named(kind: Any, named: tuple[str, ...]) -> None:
    provider = kind(e.calculator())
    try:
        report, found = await verdicts(provider)
    finally:
        await provider.close()
    assert tuple(finding.fault for finding in report.faults) == named
    assert found["meaning: penalties"] is (Verdict.FAULT if named else Verdict.OK)
