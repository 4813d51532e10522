"""Loads of what people train, on random weights: LoRA adapters, gpt-oss, hybrid models, and agents with shared prompts.

Every row has its own number of differing log-probabilities against a trainer's forward (with the adapter, if any).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import Report
from benchmarks.gpu.random_models import PROMPT, model_of, prompts_of

if TYPE_CHECKING:
    from benchmarks.engine_gpu import Run
    from tokentrue.engine import ExactEngine

COUNTS, OUTPUT, REPEATS = (1, 32, 128), 128, 3
RANK, TARGETS = 16, ("q_proj", "k_proj", "v_proj", "o_proj")
Row = tuple[str, int, float, int, int]  # load, sequences, tokens per second, differing, tokens


def measure_loads(names: Sequence[str]) -> Report:
    rows = []
    for name in names:
        for load, count, rate, wrong, total in LOADS[name]():
            print(f"{load}, {count}: {rate:.0f} tok/s, {wrong} of {total} differ", file=sys.stderr, flush=True)
            rows.append((load, count, f"{rate:.0f}", f"{wrong} of {total}"))
        gc.collect()
        torch.cuda.empty_cache()
    notes = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; random weights, bf16, temperature 1; prompt {PROMPT}, output {OUTPUT}",
        f"median of {REPEATS} rounds after one that warms up; agents: one round without, one with warm prefix caches",
    ]
    columns = ("load", "sequences", "tok/s", "bits differ")
    return Report(title="What people train", columns=columns, rows=rows, notes=notes)


def plain_rows(shape: str, counts: Sequence[int] = COUNTS) -> Iterator[Row]:
    from benchmarks.engine_gpu import engine_of

    model = model_of(shape)
    with engine_of(model, kv_tokens=max(counts) * (PROMPT + OUTPUT + 256)) as engine:
        for count in counts:
            yield row(shape, model, engine, count, [None])


def row(load: str, model: Any, engine: ExactEngine, count: int, adapters: Sequence[str | None]) -> Row:
    from benchmarks.engine_gpu import generate, plain

    runs = []
    for i in range(REPEATS + 1):
        chosen = list(itertools.islice(itertools.cycle(adapters), count))
        samplings = [plain(OUTPUT if i else 20, seed=s) for s in range(count)]
        runs.append(generate(engine, prompts_of(count, PROMPT, seed=100 * count + i), samplings, chosen))
    run = sorted(runs[1:], key=lambda r: r.rate)[REPEATS // 2]
    return load, count, run.rate, *differing(model, engine, run)


def differing(model: Any, engine: ExactEngine, run: Run) -> tuple[int, int]:
    """`count_differing` for each adapter, attached to the model's own forward as `exact(peft_model)` computes it."""
    from benchmarks.engine_gpu import Run, count_differing
    from tokentrue.engine.adapters import attach_adapter
    from tokentrue.numerics.exact import STATE

    wrong = total = 0
    for name in dict.fromkeys(run.adapters):
        at = [i for i, adapter in enumerate(run.adapters) if adapter == name]
        part = Run(
            [run.prompts[i] for i in at],
            [run.completions[i] for i in at],
            run.seconds,
            [run.temperatures[i] for i in at],
        )
        ops = model.__dict__[STATE].ops
        with contextlib.nullcontext() if name is None else attach_adapter(model, ops, engine.core.adapters[name]):
            found = count_differing(model, part)
        wrong, total = wrong + found[0], total + found[1]
    return wrong, total


def adapter_state(model: Any, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    state = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            for part, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                weight = torch.randn(shape, generator=generator, device="cuda") * 0.02
                state[f"base_model.model.{name}.lora_{part}.weight"] = weight.to(dtype)
    return state


def lora() -> Iterator[Row]:
    """The 8B shape without an adapter, with one, and with four in each batch."""
    from benchmarks.engine_gpu import engine_of

    model = model_of("8B")
    with engine_of(model, kv_tokens=max(COUNTS) * (PROMPT + OUTPUT + 256)) as engine:
        for count in COUNTS:
            yield row("8B without adapter", model, engine, count, [None])
        names = [f"a{i}" for i in range(4)]
        for loaded in (names[:1], names):
            for i, name in enumerate(loaded):
                engine.load_adapter(name, adapter_state(model, i, torch.bfloat16), config={"lora_alpha": 32, "r": RANK})
            for count in COUNTS if len(loaded) == 1 else COUNTS[1:]:
                yield row(f"8B, LoRA rank {RANK} on q, k, v, o, {len(loaded)} of them", model, engine, count, loaded)


def hybrid() -> Iterator[Row]:
    yield from plain_rows("4B")
    gc.collect()
    torch.cuda.empty_cache()
    yield from plain_rows("Qwen3.5-4B")
    gc.collect()
    torch.cuda.empty_cache()
    yield from plain_rows("Qwen3-Next")


GROUPS, SESSIONS, TURNS, OPENING, GIVEN, SAMPLED = 8, 32, 10, 3000, 400, 160


async def run_sessions(engine: ExactEngine) -> list[tuple[list[int], Any]]:
    """The prompt and the completion of every turn."""
    from benchmarks.engine_gpu import plain

    openings, turns = prompts_of(GROUPS, OPENING, seed=6), list[tuple[list[int], Any]]()

    async def run_session(i: int) -> None:
        history = list(openings[i % GROUPS])
        for turn in range(TURNS):
            history += prompts_of(1, GIVEN, seed=1000 * i + turn)[0]
            completion = await engine.generate(history, plain(SAMPLED, seed=100 * i + turn))
            turns.append((list(history), completion))
            history += completion.token_ids

    await asyncio.gather(*(run_session(i) for i in range(SESSIONS)))
    return turns


def agents() -> Iterator[Row]:
    """32 sessions in 8 groups that share a prompt of 3,000 tokens: ten turns of 400 given and 160 sampled tokens."""
    from benchmarks.engine_gpu import Run, engine_of, generate, plain

    for shape in ("8B", "30B-A3B"):
        model = model_of(shape)
        with engine_of(model, max_len=12_000, kv_tokens=400_000) as engine:
            generate(engine, prompts_of(SESSIONS, 600, seed=5), [plain(20, seed=s) for s in range(SESSIONS)])
            for state in ("cold", "warm"):
                start = time.perf_counter()
                turns = asyncio.run(run_sessions(engine))
                rate = sum(len(completion.token_ids) for _, completion in turns) / (time.perf_counter() - start)
                last = sorted(turns, key=lambda turn: -len(turn[0]))[
                    :SESSIONS
                ]  # each holds its session's earlier turns
                run = Run([p for p, _ in last], [c for _, c in last], 1.0, [1.0] * len(last), [None] * len(last))
                yield f"agents, {shape}, {state}", SESSIONS, rate, *differing(model, engine, run)
        del model, engine
        gc.collect()
        torch.cuda.empty_cache()


LOADS = {"agents": agents, "lora": lora, "gpt-oss": lambda: plain_rows("gpt-oss-20b"), "hybrid": hybrid}
