"""The exact engine on a CUDA device: speed and bits in one job, never one without the other.

Random weights in the shapes of Qwen3 models, bf16. Every recorded log-probability of every run is compared, as an
integer, with a plain trainer forward over its sequence. With `--loads`, one table of these loads beside other engines:
vLLM where TOKENTRUE_VLLM names a folder that holds it, VeXact where TOKENTRUE_VEXACT names a checkout. Without, the 0.6B
shape beside the same engine with exactness off, prefix sharing, random schedules, and a pipeline of two processes.

    python -m benchmarks.engine_gpu [--quick]
    python -m benchmarks.engine_gpu --loads plain agents lora gpt-oss hybrid [--shapes 8B] [--peers vllm vllm-invariant vexact]
    python -m benchmarks.engine_gpu --leaves 8B
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import Report
from benchmarks.gpu.loads import LOADS, measure_loads
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.random_models import FAMILIES, PROMPT, SHAPES, model_of, prompts_of
from benchmarks.gpu.runs import Run, count_differing, engine_of, generate, plain
from benchmarks.shaken import compare, shake
from tokentrue.engine import ExactEngine
from tokentrue.engine.schedule import ScheduleLimits

OUTPUT = 256
COUNTS = (1, 32, 256)
STORM = 640
"""Requests of the random schedule, about 150 tokens each."""


def measure_median(engine: ExactEngine, count: int, repeats: int, output: int = OUTPUT) -> Run:
    """The median of `repeats` runs after one that warms up."""
    runs = []
    for i in range(repeats + 1):
        prompts = prompts_of(count, PROMPT, seed=100 * count + i)
        runs.append(generate(engine, prompts, [plain(output if i else 20, seed=s) for s in range(count)]))
    return sorted(runs[1:], key=lambda r: r.rate)[repeats // 2]


def bandwidth_limit(model: Any) -> float:
    """Tokens per second of one sequence if every weight is read once a token at the bandwidth of a device-to-device
    copy."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return 2 * source.numel() / statistics.median(times) / weights


def measure_speed(quick: bool) -> list[Report]:
    counts = (1, 8) if quick else COUNTS
    repeats = 1 if quick else 3
    model = model_of("0.6B")
    limit = bandwidth_limit(model)
    with engine_of(model) as engine:
        ours = {count: measure_median(engine, count, repeats) for count in counts}
        shared = measure_sharing(engine, quick)
    bits = {count: count_differing(model, run) for count, run in ours.items()}
    with engine_of(model, inexact=True) as engine:
        off = {count: measure_median(engine, count, repeats) for count in counts}
    off_bits = {count: count_differing(model, run.first(32)) for count, run in off.items()}
    rows = []
    for count in counts:
        rate, wrong, total = ours[count].rate, *bits[count]
        price = f"{100 * (off[count].rate / rate - 1):+.1f}%"
        moved = f"{off_bits[count][0]} of {off_bits[count][1]}"
        rows.append((count, f"{rate:.0f}", f"{wrong} of {total}", f"{off[count].rate:.0f}", price, moved))
    notes = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; random Qwen3-0.6B, bf16, prompt {PROMPT}, output {OUTPUT}",
        f"memory bandwidth limits one sequence to {limit:.0f} tok/s"
        + (f"; reached: {100 * ours[1].rate / limit:.0f}%" if 1 in ours else ""),
        "bits: tokens whose recorded log-probability differs from one plain trainer forward, compared as integers",
    ]
    columns = ("sequences", "tok/s", "bits differ", "exactness off tok/s", "price", "bits differ when off")
    report = Report(title="Exact engine, speed and bits", columns=columns, rows=rows, notes=notes)
    return [report, replace_bits(shared, model)]


@dataclass(frozen=True, slots=True)
class Shared:
    groups: Run
    distinct: Run
    hits: float


def measure_sharing(engine: ExactEngine, quick: bool) -> Shared:
    """32 prompts × 8 samples of 1,024 prompt tokens, against as many distinct prompts."""
    prompts, samples, output = (4, 4, 16) if quick else (32, 8, 128)
    count = prompts * samples
    generate(engine, prompts_of(4, 1024, seed=6), [plain(4, seed=0)] * 4)  # warms up
    base = prompts_of(prompts, 1024, seed=7)
    before = engine.core.scheduler.prefix_hits
    groups = generate(engine, [p for p in base for _ in range(samples)], [plain(output, seed=i) for i in range(count)])
    hits = engine.core.scheduler.prefix_hits - before
    distinct = generate(engine, prompts_of(count, 1024, seed=8), [plain(output, seed=i) for i in range(count)])
    return Shared(groups, distinct, hits / (count * 1024))


def replace_bits(shared: Shared, model: Any) -> Report:
    rows = []
    for name, run in (("32 prompts × 8 samples", shared.groups), ("256 distinct prompts", shared.distinct)):
        wrong, total = count_differing(model, run)
        rows.append((name, f"{run.rate:.0f}", f"{run.seconds:.2f}", f"{wrong} of {total}"))
    gain = shared.groups.rate / shared.distinct.rate
    notes = [
        f"prompt 1,024 tokens; sharing gains {gain:.2f}x; {100 * shared.hits:.0f}% of prompt tokens came from the cache"
    ]
    return Report(title="Prefix sharing", columns=("load", "tok/s", "seconds", "bits differ"), rows=rows, notes=notes)


def measure_pipeline(quick: bool) -> list[Report]:
    """One process against two on the same GPU, hidden states through host memory."""
    counts, output, repeats = ((1,), 16, 1) if quick else ((1, 32), 128, 3)
    model = (
        model_of("0.6B").bfloat16()
    )  # as the engines' copies will be: rotary frequencies are then computed again, on the host, on every side
    rows = []
    for stages in (1, 2):
        gc.collect()
        torch.cuda.empty_cache()
        with engine_of(copy.deepcopy(model), pipeline=stages, kv_tokens=24_000) as engine:
            runs = [measure_median(engine, count, repeats, output) for count in counts]
        for run in runs:
            wrong, total = count_differing(model, run)
            rows.append((stages, len(run.prompts), f"{run.rate:.0f}", f"{wrong} of {total}"))
    columns = ("processes", "sequences", "tok/s", "bits differ")
    notes = [
        f"random Qwen3-0.6B, bf16, prompt {PROMPT}, output {output}; two processes share the GPU and replay no graphs"
    ]
    return [Report(title="Pipeline on one GPU", columns=columns, rows=rows, notes=notes)]


def measure_leaves(shapes: Sequence[str]) -> Report:
    """What the leaves of tensor parallelism cost in one process: rounds of both in turn, so that both see one machine."""
    rows = []
    for shape in shapes:
        model = model_of(shape).bfloat16()
        found: dict[tuple[int, int], list[Run]] = {}
        for leaves in (1, 8, 1, 8):
            gc.collect()
            torch.cuda.empty_cache()
            with engine_of(model, leaves=leaves, kv_tokens=64_000) as engine:
                for count in (1, 32, 128):
                    found.setdefault((count, leaves), []).append(measure_median(engine, count, 1, 128))
        for count in (1, 32, 128):
            rates = [statistics.mean(run.rate for run in found[count, leaves]) for leaves in (1, 8)]
            bits = [count_differing(model, found[count, leaves][0].first(16), leaves) for leaves in (1, 8)]
            rows.append(
                (
                    shape,
                    count,
                    *(f"{rate:.0f}" for rate in rates),
                    f"{rates[1] / rates[0]:.3f}",
                    f"{bits[0][0]}, {bits[1][0]} of {bits[1][1]}",
                )
            )
        del model
    columns = ("shape", "sequences", "tok/s", "with 8 leaves", "ratio", "bits differ")
    return Report(
        title="Leaves in one process", columns=columns, rows=rows, notes=[f"bf16, prompt {PROMPT}, output 128"]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """What came of a random schedule: log-probabilities that differ, of `tokens`; requests that differ alone, of
    `asked`."""

    wrong: int
    tokens: int
    moved: int
    asked: int
    preemptions: int
    prefix_hits: int
    first: str = ""


def storm(model: Any, count: int, seed: int) -> ScheduleRun:
    """Random lengths, temperatures, chunks, pages and preemptions."""
    chance = random.Random(seed)
    prefix = prompts_of(1, 300, seed)[0]
    prompts = [
        [*prefix[: chance.choice((0, 64, 200, 300))], *prompts_of(1, chance.randint(1, 700), seed + i)[0]]
        for i in range(count)
    ]
    samplings = [
        plain(chance.randint(1, 300), seed=i, temperature=chance.choice((0.6, 1.0, 1.0, 1.3))) for i in range(count)
    ]
    small = ScheduleLimits(max_requests=128, step_tokens=2048, chunk_tokens=1024)
    with engine_of(model, limits=small, kv_tokens=max(12_000, 75 * count)) as engine:
        shake(engine, random.Random(seed + 1))
        run = generate(engine, prompts, samplings)
        scheduler = engine.core.scheduler
        preemptions, hits = scheduler.preemptions, scheduler.prefix_hits
        wrong, total = count_differing(model, run)
        first = where_they_part(engine, model, run) if wrong else ""
        alone = range(0, count, max(1, count // 8))
        moved = 0
        for i in alone:
            again = generate(engine, [prompts[i]], [replace(samplings[i])]).completions[0]
            moved += again.token_ids != run.completions[i].token_ids or again.logprobs != run.completions[i].logprobs
    return ScheduleRun(
        wrong=wrong, tokens=total, moved=moved, asked=len(alone), preemptions=preemptions, prefix_hits=hits, first=first
    )


def where_they_part(engine: ExactEngine, model: Any, run: Run) -> str:
    """The first token, layer and operator that differ in the first completion that has a differing log-probability."""
    for prompt, completion, temperature in zip(run.prompts, run.completions, run.temperatures, strict=True):
        if count_differing(model, Run([prompt], [completion], run.seconds, [temperature]))[0]:
            return str(
                compare(engine.core, [*prompt, *completion.token_ids])
                or "the operators agree in a plain step: look at the decode graphs"
            )
    return ""


def bits(quick: bool) -> list[Report]:
    rows = []
    for shape in ("0.6B",) if quick else ("0.6B", "1.7B", "MoE"):
        model = model_of(shape, seed=3)
        found = storm(model, 24 if quick else STORM, seed=11)
        rows.append((
            shape, f"{found.wrong} of {found.tokens}", f"{found.moved} of {found.asked}", found.preemptions, found.prefix_hits
        ))  # fmt: skip
        print(
            f"{shape}: {found.wrong} of {found.tokens} log-probabilities differ. {found.first}",
            file=sys.stderr,
            flush=True,
        )
        del model
        torch.cuda.empty_cache()
    columns = ("shape", "log-probabilities differ", "requests that differ alone", "preemptions", "prompt tokens shared")
    notes = [
        "random lengths, temperatures, chunk sizes, page order, shared prefixes and preemptions in one run per shape"
    ]
    return [Report(title="Bits under a random schedule, bf16", columns=columns, rows=rows, notes=notes)]


PARTS = (measure_speed, bits, measure_pipeline)


def run(*, quick: bool) -> list[Report]:
    if not torch.cuda.is_available():
        raise RuntimeError("this benchmark needs a CUDA device")
    return [report for part in PARTS for report in part(quick)]


def main() -> None:
    parser = argparse.ArgumentParser(description="The exact engine on a CUDA device: speed and bits in one job.")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument(
        "--leaves", nargs="+", choices=list(SHAPES), default=(), help="the price of leaves, these shapes"
    )
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=(), help="one table of these loads")
    parser.add_argument(
        "--shapes", nargs="+", choices=[*SHAPES, *FAMILIES], default=(), help="of the loads, these shapes"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=list(PEERS), default=["vllm"], help="other engines, where their place is given"
    )
    options = parser.parse_args()
    if options.leaves:
        print(measure_leaves(options.leaves).as_text(), flush=True)
        return
    if options.loads:
        print(measure_loads(options.loads, options.shapes, options.peers).as_text(), flush=True)
        return
    for measure in PARTS:
        for report in measure(options.quick):
            print(report.as_text(), flush=True)


if __name__ == "__main__":
    main()
