"""Loads of what people train, on random weights, the exact engine and others side by side on one machine.

Every row has its own number of differing log-probabilities: the exact engine's against a trainer's forward under `exact`
(with the adapter, if any), another engine's as `peers` says. Rows are printed as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import Report
from benchmarks.gpu.peers import Peer, PeerResult, is_agents, is_available
from benchmarks.gpu.random_models import (
    AGENT_LENGTH,
    AGENT_TOKENS,
    ALPHA,
    GIVEN,
    GROUPS,
    OPENING,
    PROMPT,
    RANK,
    SAMPLED,
    SESSIONS,
    TURNS,
    adapter_state,
    counts_of,
    model_of,
    prompts_of,
)
from benchmarks.gpu.runs import Run, count_differing, engine_of, generate, plain

if TYPE_CHECKING:
    from tokentrue.engine import ExactEngine
    from tokentrue.types import Completion

REPEATS = 3
PEER_GIB = 125
"""Memory that engines which start together may take."""
# Load -> shape -> kind of its rows.
LOADS: dict[str, dict[str, str]] = {
    "lora": {"8B": "lora"},
    "gpt-oss": {"gpt-oss-20b": "plain"},
    "hybrid": {"Qwen3.5-4B": "plain", "Qwen3-Next": "plain", "4B": "plain"},
    "agents": {"8B": "agents", "30B-A3B": "agents"},
    "lora-agents": {"8B": "lora agents"},
    "plain": {"8B": "plain", "0.6B": "plain", "30B-A3B": "plain"},
}
Row = tuple[str, int, float, int, int, str]  # kind, sequences, tokens per second, differing, tokens, GB of a step


def measure_loads(loads: Sequence[str], shapes: Sequence[str], peers: Sequence[str]) -> Report:
    jobs: dict[str, list[str]] = {}
    for shape, kind in itertools.chain.from_iterable(LOADS[load].items() for load in loads):
        if not shapes or shape in shapes:
            jobs.setdefault(shape, []).append(kind)
    peers = [name for name in peers if is_available(name)]
    rows, others = [], dict[tuple[str, str, str, int], PeerResult]()
    for wave in waves(jobs):
        for name in peers:
            others |= measure_peer(name, wave)
        for shape in [shape for shape, kinds in wave if kinds == separate(jobs[shape])[-1]]:
            for kind, count, rate, wrong, total, size in measure_exact(shape, jobs[shape]):
                print(f"exact {shape}, {kind}, {count}: {rate:.0f} tok/s, {wrong} of {total} differ", file=sys.stderr)
                cells = [c for name in peers for c in cells_of(others.get((name, shape, kind, count)), rate)]
                rows.append((f"{shape}, {kind}", count, size, f"{rate:.0f}", f"{wrong} of {total}", *cells))
            gc.collect()
            torch.cuda.empty_cache()
    columns = ["load", "sequences", "GB a step", "exact tok/s", "bits differ"]
    for name in peers:
        columns += [f"{name} tok/s", f"exact ÷ {name}", f"bits differ, {name}", "mean difference"]
    notes = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; random weights, bf16, temperature 1 (vexact: greedy)",
        f"prompt {PROMPT}, output 128 (0.6B: 256); median of {REPEATS} rounds after one that warms up; agents: one round each",
        "GB a step: weights, keys and values at the middle of the output, recurrent states read and written",
        "bits of vLLM: of the first 16 sequences, against a forward of transformers over the same tokens",
    ]
    return Report(title="What people train", columns=tuple(columns), rows=rows, notes=notes)


def waves(jobs: Mapping[str, Sequence[str]]) -> Iterator[list[tuple[str, list[str]]]]:
    """Shapes, each with the kinds of one process, that fit into memory at once: they start, and compile, at the same
    time."""
    wave, free = list[tuple[str, list[str]]](), PEER_GIB
    for shape, kinds in jobs.items():
        # A peer holds the model of transformers, its own copy of it, and its caches.
        weights = sum(p.numel() for p in model_of(shape, device="meta").parameters()) * 2 * 2 / 2**30
        for group in separate(kinds):
            need = weights + (48 if any(is_agents(kind) for kind in group) else 14)
            if wave and need > free:
                yield wave
                wave, free = [], PEER_GIB
            wave.append((shape, group))
            free -= need
    if wave:
        yield wave


def separate(kinds: Sequence[str]) -> list[list[str]]:
    """The kinds for each process of a peer: adapters cost its other requests something, so they get their own."""
    groups = [[kind for kind in kinds if "lora" not in kind], [kind for kind in kinds if "lora" in kind]]
    return [group for group in groups if group]


def measure_peer(name: str, wave: Sequence[tuple[str, list[str]]]) -> dict[tuple[str, str, str, int], PeerResult]:
    """Results by name, shape, kind and count. All start together and then run one after the other."""
    started = [Peer(name, shape, kinds) for shape, kinds in wave]
    for peer in started:
        peer.wait_until_ready()
    found = {}
    for peer in started:
        for result in peer.results():
            print(f"{peer.name} {peer.shape}: {result}", file=sys.stderr, flush=True)
            found[peer.name, peer.shape, result.kind, result.count] = result
    return found


def cells_of(found: PeerResult | None, exact_rate: float) -> tuple[str, str, str, str]:
    if found is None:
        return "not run", "", "", ""
    differing = (f"{found.wrong} of {found.total}", f"{found.distance:.3f}") if found.total else ("not compared", "")
    return f"{found.rate:.0f}", f"{exact_rate / found.rate:.2f}", *differing


def measure_exact(shape: str, kinds: Sequence[str]) -> Iterator[Row]:
    counts, output = counts_of(shape)
    tokens = max(counts) * (PROMPT + output + 256)
    options = {}
    if any(is_agents(kind) for kind in kinds):
        options = {"max_len": AGENT_LENGTH, "kv_tokens": max(tokens, AGENT_TOKENS)}
    model = model_of(shape)
    with engine_of(model, **{"kv_tokens": tokens, **options}) as engine:
        if "plain" in kinds:
            for count in counts:
                yield row("plain", model, engine, count, output, [None])
        names = [f"a{i}" for i in range(4)]

        def load(most: int) -> list[str]:
            for i, name in enumerate(names[:most]):
                engine.load_adapter(name, adapter_state(model, i), config={"lora_alpha": ALPHA, "r": RANK})
            return names[:most]

        if "lora" in kinds:
            for kind, most in (("lora", 1), ("4 adapters", 4)):
                loaded = load(most)
                for count in counts if len(loaded) == 1 else counts[1:]:
                    yield row(kind, model, engine, count, output, loaded)
        if "agents" in kinds:
            yield from agents("agents", model, engine, None)
        if "lora agents" in kinds:
            yield from agents("lora agents", model, engine, load(1)[0])


def row(kind: str, model: Any, engine: ExactEngine, count: int, output: int, adapters: Sequence[str | None]) -> Row:
    runs = []
    for i in range(REPEATS + 1):
        chosen = list(itertools.islice(itertools.cycle(adapters), count))
        samplings = [plain(output if i else 20, seed=s) for s in range(count)]
        runs.append(generate(engine, prompts_of(count, PROMPT, seed=100 * count + i), samplings, chosen))
    run = sorted(runs[1:], key=lambda r: r.rate)[REPEATS // 2]
    return kind, count, run.rate, *differing(model, engine, run), step_gigabytes(engine, count, PROMPT + output // 2)


def step_gigabytes(engine: ExactEngine, count: int, context: int) -> str:
    """What a decode step must move; nothing for a mixture, whose experts depend on the tokens."""
    from tokentrue.engine.decoder import Attention, Dense
    from tokentrue.numerics.delta import GatedDelta

    decoder = engine.core.local.forward.decoder
    if not all(isinstance(layer.mlp, Dense) for layer in decoder.layers):
        return ""
    total, (_, key_heads, size) = sum(weight.nbytes for weight in decoder.weights()), decoder.heads
    for mixer in (layer.mixer for layer in decoder.layers):
        if isinstance(mixer, Attention):
            total += count * context * 2 * key_heads * size * decoder.dtype.itemsize
        elif isinstance(mixer, GatedDelta):
            total += mixer.module.out_proj.weight.nbytes
            total += count * 2 * 4 * mixer.value_heads * mixer.key_size * mixer.value_size
    return f"{total / 1e9:.1f}"


def differing(model: Any, engine: ExactEngine, run: Run) -> tuple[int, int]:
    """`count_differing` for each adapter, attached to the model's own forward as `exact(peft_model)` computes it."""
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


def agents(kind: str, model: Any, engine: ExactEngine, adapter: str | None) -> Iterator[Row]:
    """One round without, one with the openings in the prefix cache."""
    generate(
        engine,
        prompts_of(SESSIONS, 600, seed=5),
        [plain(20, seed=s) for s in range(SESSIONS)],
        [adapter] * SESSIONS,
    )
    for at, state in enumerate(("cold", "warm")):
        start = time.perf_counter()
        turns = asyncio.run(run_sessions(engine, at, adapter))
        rate = sum(len(completion.token_ids) for _, completion in turns) / (time.perf_counter() - start)
        last = sorted(turns, key=lambda turn: -len(turn[0]))[:SESSIONS]  # each holds its session's earlier turns
        run = Run([p for p, _ in last], [c for _, c in last], 1.0, [1.0] * len(last), [adapter] * len(last))
        yield f"{kind}, {state}", SESSIONS, rate, *differing(model, engine, run), ""


async def run_sessions(engine: ExactEngine, at: int, adapter: str | None) -> list[tuple[list[int], Completion]]:
    """The prompt and the completion of every turn. Each round samples other tokens: only openings are shared."""
    openings, turns = prompts_of(GROUPS, OPENING, seed=6), list[tuple[list[int], Any]]()

    async def run_session(i: int) -> None:
        history = list(openings[i % GROUPS])
        for turn in range(TURNS):
            history += prompts_of(1, GIVEN, seed=1000 * i + turn)[0]
            sampling = plain(SAMPLED, seed=10_000 * at + 100 * i + turn)
            completion = await engine.generate(history, sampling, adapter=adapter)
            turns.append((list(history), completion))
            history += completion.token_ids

    await asyncio.gather(*(run_session(i) for i in range(SESSIONS)))
    return turns
