"""What exactness costs a trainer on a CUDA device: forward and backward with activation checkpointing, beside sdpa with
a table of logits; and how far either's gradients are from those of float32.

Random weights in the shapes of Qwen3 models, bf16, log-probabilities of every token.

    python -m benchmarks.engine_train [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import Report
from benchmarks.gpu.random_models import model_of
from tokentrue.numerics import exact, score

POINTS = (("0.6B", 8, 2048), ("0.6B", 1, 16384), ("4B", 2, 2048))
GRADIENT_POINTS = (("0.6B", 4, 1024), ("4B", 2, 512))
LONG = ("0.6B", 1, 65536)
"""Only without a table of logits: 65,536 rows of 151,936 float32 logits alone take 37 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    step_ms: float
    forward_ms: float
    peak_gib: float
    entering_ms: float = 0.0  # a step that enters `exact` itself
    first_ms: float = 0.0  # entering a model for the first time, and again
    again_ms: float = 0.0


def exact_scores(model: Any, ids: Tensor) -> Tensor:
    return score(model, ids)


def table_scores(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")


def cost_of(shape: str, batch: int, tokens: int, *, exactly: bool, repeats: int) -> Cost:
    cost = measure(shape, batch, tokens, exactly=exactly, repeats=repeats)
    gc.collect()
    torch.cuda.empty_cache()
    print(
        f"{shape} {batch} × {tokens:,} {'exact' if exactly else 'sdpa'}: {cost.step_ms:.0f} ms",
        file=sys.stderr,
        flush=True,
    )
    return cost


def measure(shape: str, batch: int, tokens: int, *, exactly: bool, repeats: int) -> Cost:
    model = model_of(shape).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config._attn_implementation = "sdpa"
    ids = torch.randint(1000, 100_000, (batch, tokens), device="cuda")
    scores = exact_scores if exactly else table_scores

    def step() -> None:
        model.zero_grad(set_to_none=True)
        scores(model, ids).sum().backward()

    def forward() -> None:
        with torch.no_grad():
            scores(model, ids)

    def enter() -> None:
        with exact(model):
            pass

    def enter_and_step() -> None:
        with exact(model):
            step()

    found: dict[str, float] = {}
    if exactly:
        with exact(copy.copy(model)):  # self-tests of this machine, once a process
            pass
        found["first_ms"] = milliseconds(enter, 1)
        found["again_ms"] = milliseconds(enter, 20)
    with exact(model) if exactly else contextlib.nullcontext():
        step()
        torch.cuda.reset_peak_memory_stats()
        found["step_ms"] = milliseconds(step, repeats)
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        forward()
        found["forward_ms"] = milliseconds(forward, repeats)
    if exactly:
        found["entering_ms"] = milliseconds(enter_and_step, repeats)
    return Cost(**found)


def gradient_errors(shape: str, batch: int, tokens: int) -> dict[str, float]:
    """Relative distance of each way's gradients, over all weights, from those of float32: what one step of rounding
    costs either way. Both sdpa runs compute the same sum; the second has the sequences in another order, as two runs of
    a trainer would."""
    torch.manual_seed(0)
    model = model_of(shape).train()
    model.config._attn_implementation = "sdpa"
    ids = torch.randint(1000, 100_000, (batch, tokens), device="cuda")
    with exact(model):
        found = {"exact": gradients_of(model, exact_scores, ids)}
    found |= {
        "sdpa": gradients_of(model, table_scores, ids),
        "sdpa, other order": gradients_of(model, table_scores, ids.flip(0)),
    }
    reference = gradients_of(model.float(), table_scores, ids)
    size = norm_of(reference)
    errors = {
        name: norm_of([a.float() - b for a, b in zip(grads, reference, strict=True)]) / size
        for name, grads in found.items()
    }
    pair = zip(found["sdpa"], found["sdpa, other order"], strict=True)
    return {**errors, "between the two": norm_of([a.float() - b.float() for a, b in pair]) / size}


def gradients_of(model: Any, scores: Callable[[Any, Tensor], Tensor], ids: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    scores(model, ids).sum().backward()
    return [weight.grad.clone() for weight in model.parameters()]


def norm_of(tensors: list[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def report_gradients(shape: str, batch: int, tokens: int) -> Report:
    errors = gradient_errors(shape, batch, tokens)
    rows = [tuple(f"{value:.5f}" for value in errors.values())]
    title = f"Gradients against float32, {shape} {batch} × {tokens:,}: relative distance over all weights"
    return Report(title=title, columns=tuple(errors), rows=rows)


def milliseconds(call: Callable[[], None], repeats: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1000


def run(*, quick: bool) -> list[Report]:
    if not torch.cuda.is_available():
        raise RuntimeError("this benchmark needs a CUDA device")
    rows: list[tuple[str, ...]] = []
    for shape, batch, tokens in POINTS[:1] if quick else POINTS:
        ours, theirs = (cost_of(shape, batch, tokens, exactly=e, repeats=4) for e in (True, False))
        rows.append((
            f"{shape} {batch} × {tokens:,}", f"{ours.step_ms:.0f}", f"{theirs.step_ms:.0f}", f"{ours.step_ms / theirs.step_ms:.2f}",
            f"{ours.forward_ms:.0f}", f"{theirs.forward_ms:.0f}", f"{ours.peak_gib:.1f}", f"{theirs.peak_gib:.1f}",
            f"{ours.entering_ms:.0f}", f"{ours.first_ms:.0f}", f"{ours.again_ms:.1f}",
        ))  # fmt: skip
    if not quick:
        shape, batch, tokens = LONG
        ours = cost_of(shape, batch, tokens, exactly=True, repeats=1)
        none = "not run"
        rows.append((
            f"{shape} {batch} × {tokens:,}", f"{ours.step_ms:.0f}", none, none, f"{ours.forward_ms:.0f}", none, f"{ours.peak_gib:.1f}", none,
            f"{ours.entering_ms:.0f}", f"{ours.first_ms:.0f}", f"{ours.again_ms:.1f}",
        ))  # fmt: skip
    columns = (
        "tokens",
        "exact ms",
        "sdpa ms",
        "ratio",
        "exact forward ms",
        "sdpa forward ms",
        "exact peak GiB",
        "sdpa peak GiB",
        "exact entered in each step ms",
        "first entry ms",
        "later entry ms",
    )
    notes = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16, forward and backward with activation checkpointing"
    ]
    prices = Report(title="Price of exactness in training", columns=columns, rows=rows, notes=notes)
    return [prices, *(report_gradients(*point) for point in GRADIENT_POINTS[: 1 if quick else None])]


def main() -> None:
    parser = argparse.ArgumentParser(description="What exactness costs a trainer on a CUDA device.")
    parser.add_argument("--quick", action="store_true", help="one point alone")
    for report in run(quick=parser.parse_args().quick):
        print(report.as_text())


if __name__ == "__main__":
    main()
