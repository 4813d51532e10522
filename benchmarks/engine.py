"""The price of exactness on the CPU, in one run: the exact engine against Hugging Face `generate`, exact training
against sdpa, a pipeline of processes against one.

Rounds of both sides alternate, and a ratio is the median over rounds. Every speed is printed beside the bit check of the
same tokens.
"""

from __future__ import annotations

import asyncio
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import Report, main
from tokentrue.environments import SMALL_MODEL
from tokentrue.hub import load_causal_model

PROMPT, OUTPUT = 64, 64


def run(*, quick: bool) -> list[Report]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    reports = [generation(quick), measure_training(quick), measure_pipeline(quick)]
    if torch.cuda.is_available():
        from benchmarks.engine_gpu import run as run_gpu

        reports += run_gpu(quick=quick)
    return reports


def models(quick: bool) -> list[tuple[str, Any]]:
    """The shipped small model (its shape with random weights where it is missing), and one of 100M parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shipped = SMALL_MODEL
    torch.manual_seed(0)
    plain = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "max_position_embeddings": 1024}
    if (shipped / "model.safetensors").exists():
        small = load_causal_model(shipped, dtype="float32")
    else:
        shape = {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        }
        small = Qwen3ForCausalLM(Qwen3Config(vocab_size=768, intermediate_size=384, **shape, **plain))
    found = [("shipped (0.7M)", small)]
    if not quick:
        shape = {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
        }
        large = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=32000, intermediate_size=2048, tie_word_embeddings=True, **shape, **plain)
        )
        found.append(("random (100M)", large))
    for _, model in found:
        model.eval().config._attn_implementation = "sdpa"
    return found


def alternate(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Seconds of each side, round by round; the first round warms up and is dropped."""
    found: list[list[float]] = [[] for _ in sides]
    for index in range(rounds + 1):
        for times, side in zip(found, sides, strict=True):
            seconds = side()
            if index:
                times.append(seconds)
    return found


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


# ---- generation ----------------------------------------------------------------------------------------------------
def generation(quick: bool) -> Report:
    from tokentrue.engine import ExactEngine

    rows = []
    for name, model in models(quick):
        engine = ExactEngine(copy.deepcopy(model), max_len=1024)
        output = OUTPUT if not quick and "100M" not in name else OUTPUT // 2
        rounds = 2 if quick else 3 if "100M" in name else 5
        for count, shared in ((1, False), (16, False), (16, True)):
            label = f"{count} x {'one prompt' if shared else 'own prompt'}"
            rows.append((name, label, *race(model, engine, count, shared, output, rounds)))
        engine.close()
    return Report(
        title=f"Generation on the CPU, float32: prompt {PROMPT}, sampled at temperature 1",
        columns=(
            "model",
            "requests",
            "generate tok/s",
            "exact tok/s",
            "exact / generate",
            "first token ms",
            "bits equal",
        ),
        rows=rows,
        notes=(
            "generate: transformers' own loop, sdpa, one batch of equal lengths; it reports no log-probabilities, the exact engine does.",
            "bits equal: sampled tokens whose recorded log-probability equals one trainer forward (score), as integers.",
        ),
    )


def race(model: Any, engine: Any, count: int, shared: bool, output: int, rounds: int) -> tuple[Any, ...]:
    import torch

    prompts = torch.randint(0, model.config.vocab_size, (count, PROMPT), generator=torch.Generator().manual_seed(count))
    if shared:
        prompts = prompts[:1].expand(count, PROMPT)
    last: list[Any] = []

    def plain() -> float:
        start = time.perf_counter()
        length = {"max_new_tokens": output, "min_new_tokens": output}
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, pad_token_id=0, **length
        )
        assert out.shape == (count, PROMPT + output)
        return time.perf_counter() - start

    def exact_side() -> float:
        start = time.perf_counter()
        last[:] = asyncio.run(ask(engine, prompts.tolist(), output))
        return time.perf_counter() - start

    theirs, ours = alternate(rounds, plain, exact_side)
    tokens = count * output
    equal, compared = check(engine, prompts.tolist(), last)
    first = engine.metrics()["first_token_seconds_p50"] * 1000
    return tokens / min(theirs), tokens / min(ours), median_ratio(theirs, ours), first, f"{equal} of {compared}"


async def ask(engine: Any, prompts: list[list[int]], output: int) -> list[Any]:
    from tokentrue.types import Sampling

    engine.core.pool.forget()  # no round profits from the one before
    engine.core.meter.first_token_s.clear()
    asked = (
        engine.generate(prompt, Sampling(max_tokens=output, seed=i, extra={"ignore_eos": True}))
        for i, prompt in enumerate(prompts)
    )
    return await asyncio.gather(*asked)


def check(engine: Any, prompts: list[list[int]], completions: list[Any]) -> tuple[int, int]:
    import torch

    from tokentrue.numerics import score

    equal = compared = 0
    with torch.no_grad():
        for prompt, completion in zip(prompts, completions, strict=True):
            wanted = score(engine.model, torch.tensor([[*prompt, *completion.token_ids]]))[0, len(prompt) - 1 :]
            recorded = torch.tensor(completion.logprobs)
            equal += int((wanted.view(torch.int32) == recorded.view(torch.int32)).sum())
            compared += len(completion.token_ids)
    return equal, compared


# ---- training ----------------------------------------------------------------------------------------------------
def measure_training(quick: bool) -> Report:
    rows = []
    for name, model in models(quick):
        shapes = ((8, 256), (2, 128)) if "100M" not in name else ((2, 256),)
        for batch, length in shapes:
            rows.append(
                (
                    name,
                    f"{batch} x {length}",
                    *train_race(model, batch, length, rounds=3 if quick or "100M" in name else 7),
                )
            )
    return Report(
        title="Training on the CPU, float32: forward and backward of -log p",
        columns=("model", "batch", "sdpa ms", "exact ms", "exact / sdpa", "largest |log p| difference"),
        rows=rows,
        notes=("exact / sdpa above 1 is the price of exactness.",),
    )


def train_race(model: Any, batch: int, length: int, rounds: int) -> tuple[Any, ...]:
    import torch

    from tokentrue.numerics import exact, score

    model.train().requires_grad_(True)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
    found: dict[str, torch.Tensor] = {}

    def plain() -> float:
        start = time.perf_counter()
        logits = model(input_ids=ids, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        (-logprobs.mean()).backward()
        model.zero_grad()
        found["plain"] = logprobs.detach()
        return time.perf_counter() - start

    with exact(model):
        pass  # the self-test belongs to the start, not to a step

    def exact_side() -> float:
        with exact(model):
            start = time.perf_counter()
            logprobs = score(model, ids)
            (-logprobs.mean()).backward()
            model.zero_grad()
            seconds = time.perf_counter() - start
        found["exact"] = logprobs.detach()
        return seconds

    theirs, ours = alternate(rounds, plain, exact_side)
    model.eval()
    difference = (found["plain"] - found["exact"]).abs().max().item()
    return min(theirs) * 1000, min(ours) * 1000, median_ratio(ours, theirs), difference


# ---- pipeline ----------------------------------------------------------------------------------------------------
def measure_pipeline(quick: bool) -> Report:
    """Each number of stages has an engine of its own, and rounds alternate between them. One thread in each process:
    with more threads than cores, processes wait for each other's."""
    import torch

    from tokentrue.engine import ExactEngine

    name, model = models(quick)[-1]
    output, rounds = (OUTPUT // 4, 1) if quick else (OUTPUT // 2, 3)
    rows: list[tuple[Any, ...]] = []
    engines: dict[int, ExactEngine] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for stages in (1, 2) if quick else (1, 2, 4):
            engines[stages] = ExactEngine(copy.deepcopy(model), pipeline=stages, max_len=1024, kv_tokens=4096)
        for count in (1, 16):
            rows += [(name, count, *row) for row in pipeline_race(engines, count, output, rounds)]
    finally:
        torch.set_num_threads(threads)
        for engine in engines.values():
            engine.close()
    return Report(
        title=f"Pipeline on the CPU, float32: prompt {PROMPT}, output {output}, one thread in each process",
        columns=("model", "requests", "processes", "tok/s", "of one process", "bits equal"),
        rows=rows,
        notes=(f"of one process: the median over rounds; the processes share {os.cpu_count()} cores.",),
    )


def pipeline_race(engines: dict[int, Any], count: int, output: int, rounds: int) -> list[tuple[Any, ...]]:
    import torch

    vocabulary = engines[1].core.runner.sizes.vocabulary
    prompts = torch.randint(0, vocabulary, (count, PROMPT), generator=torch.Generator().manual_seed(count)).tolist()
    last: dict[int, list[Any]] = {}

    def side_of(stages: int) -> Callable[[], float]:
        def side() -> float:
            start = time.perf_counter()
            last[stages] = asyncio.run(ask(engines[stages], prompts, output))
            return time.perf_counter() - start

        return side

    times = dict(zip(engines, alternate(rounds, *map(side_of, engines)), strict=True))
    rows: list[tuple[Any, ...]] = []
    for stages, seconds in times.items():
        equal = sum(
            a == b
            for one, other in zip(last[1], last[stages], strict=True)
            for a, b in zip(one.logprobs, other.logprobs, strict=True)
        )
        rows.append(
            (stages, count * output / min(seconds), median_ratio(times[1], seconds), f"{equal} of {count * output}")
        )
    return rows


if __name__ == "__main__":
    main("engine", __doc__ or "", run)
