"""Runs of the exact engine on a CUDA device, and the count of their differing bits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.inexact import InexactOps
from benchmarks.gpu.random_models import Prompts
from benchmarks.shaken import UnprovenEngine
from tokentrue.engine import ExactEngine
from tokentrue.numerics import exact, score
from tokentrue.types import Completion, Sampling

TRAINER_BATCH = 8


def plain(tokens: int, seed: int, temperature: float = 1.0) -> Sampling:
    return Sampling(max_tokens=tokens, seed=seed, temperature=temperature, extra={"ignore_eos": True})


@dataclass(frozen=True, slots=True)
class Run:
    prompts: Prompts
    completions: list[Completion]
    seconds: float
    temperatures: list[float]
    adapters: Sequence[str | None] = ()

    @property
    def rate(self) -> float:
        return sum(len(c.token_ids) for c in self.completions) / self.seconds

    def first(self, count: int) -> Run:
        return Run(self.prompts[:count], self.completions[:count], self.seconds, self.temperatures[:count])


def generate(
    engine: ExactEngine, prompts: Prompts, samplings: Sequence[Sampling], adapters: Sequence[str | None] = ()
) -> Run:
    """All at once through the public call."""
    adapters = adapters or [None] * len(prompts)

    async def ask() -> list[Completion]:
        each = zip(prompts, samplings, adapters, strict=True)
        return list(await asyncio.gather(*(engine.generate(p, s, adapter=a) for p, s, a in each)))

    torch.cuda.synchronize()
    start = time.perf_counter()
    completions = asyncio.run(ask())
    return Run(prompts, completions, time.perf_counter() - start, [s.temperature or 1.0 for s in samplings], adapters)


def count_differing(model: Any, run: Run, leaves: int = 1) -> tuple[int, int]:
    """(tokens whose log-probability differs in any bit from a plain trainer forward, tokens)."""
    order = sorted(
        range(len(run.prompts)),
        key=lambda i: (run.temperatures[i], len(run.prompts[i]) + len(run.completions[i].token_ids)),
    )
    wrong = total = 0
    with exact(model, leaves=leaves), torch.no_grad():
        for temperature, group in itertools.groupby(order, key=lambda i: run.temperatures[i]):
            for part in batches(list(group)):
                rows = [[*run.prompts[i], *run.completions[i].token_ids] for i in part]
                width = max(map(len, rows))
                trainer = score(
                    model,
                    torch.tensor([row + [0] * (width - len(row)) for row in rows], device="cuda"),
                    temperature=temperature,
                )
                for i, row, found in zip(part, rows, trainer, strict=True):
                    rollout = torch.tensor(run.completions[i].logprobs, dtype=torch.float32, device="cuda")
                    kept = found[len(run.prompts[i]) - 1 : len(row) - 1]
                    wrong += int((kept.view(torch.int32) != rollout.view(torch.int32)).sum())
                    total += len(rollout)
    return wrong, total


def batches(indices: list[int]) -> list[list[int]]:
    return [indices[at : at + TRAINER_BATCH] for at in range(0, len(indices), TRAINER_BATCH)]


@contextlib.contextmanager
def engine_of(model: Any, *, inexact: bool = False, **options: Any) -> Iterator[ExactEngine]:
    with contextlib.ExitStack() as undo:
        settings = {"max_len": 4096, "kv_tokens": 256 * 1280, "ops": InexactOps() if inexact else None, **options}
        make = UnprovenEngine if inexact else ExactEngine
        yield undo.enter_context(make(model, "cuda", "bfloat16", **settings))
