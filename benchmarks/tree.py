"""Shared prefixes once in training: tokens and time of a pass over rows that share them, as a tree and apart, with the
number of log-probabilities that differ; and how far either's gradients are from those of a wider dtype.

The shipped model on the CPU; random weights in the shapes of Qwen3 models with `--device cuda`.

    python -m benchmarks.tree [--quick] [--device cuda --shapes 0.6B 4B]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import Report, parser_for, print_reports
from tokentrue.numerics import exact, same_bits
from tokentrue.train.rows import Packing, ScoredRow
from tokentrue.train.scoring import ExactScorer, lay_out

Rows = list[ScoredRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    prompt: int
    answer: int
    groups: int
    given: int  # of a turn of a forked session, and sampled
    sampled: int
    turns: int
    sessions: int
    repeats: int


CPU = Sizes(prompt=3000, answer=256, groups=1, given=200, sampled=80, turns=4, sessions=1, repeats=1)
CUDA = Sizes(prompt=3000, answer=512, groups=2, given=400, sampled=160, turns=5, sessions=2, repeats=3)
GRADIENT = Sizes(prompt=500, answer=64, groups=1, given=1, sampled=1, turns=1, sessions=1, repeats=1)
QUICK = Sizes(prompt=150, answer=20, groups=1, given=20, sampled=10, turns=3, sessions=1, repeats=1)


LOADS = ("groups", "forks")


def draw(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    return [chance.randrange(vocabulary) for _ in range(count)]


def groups_of(sizes: Sizes, vocabulary: int) -> list[list[int]]:
    chance, made = random.Random(1), list[list[int]]()
    for _ in range(sizes.groups):
        prompt = draw(chance, sizes.prompt, vocabulary)
        made += [[*prompt, *draw(chance, sizes.answer, vocabulary)] for _ in range(8)]
    return made


def forks_of(sizes: Sizes, vocabulary: int) -> list[list[int]]:
    """A session goes on to its last turn, and again from every earlier one."""
    chance, made, turn = random.Random(2), list[list[int]](), sizes.given + sizes.sampled
    for _ in range(sizes.sessions):
        first = draw(chance, sizes.prompt + sizes.turns * turn, vocabulary)
        made.append(first)
        for left in range(1, sizes.turns):
            known = first[: sizes.prompt + left * turn]
            made.append([*known, *draw(chance, (sizes.turns - left) * turn, vocabulary)])
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Rows of a load through the trainer's own packing and scorer."""

    model: Any
    rows: Rows
    weights: Sequence[Tensor]
    tree: bool
    budget: int

    @property
    def bins(self) -> tuple[tuple[int, ...], ...]:
        packing = Packing(budget=self.budget, padded=False, tree=self.tree)
        return packing.bins(self.rows, range(len(self.rows)))  # type: ignore[arg-type]

    def tokens(self) -> int:
        return sum(len(lay_out([self.rows[i] for i in found], tree=self.tree).source) for found in self.bins)

    def score(self) -> dict[int, Tensor]:
        scorer, found = ExactScorer(tree=self.tree), dict[int, Tensor]()
        with torch.no_grad():
            for numbers in self.bins:
                found |= zip(numbers, scorer(self.model, [self.rows[i] for i in numbers]).logprobs, strict=True)
        return found

    def train(self) -> None:
        scorer = ExactScorer(tree=self.tree)
        self.model.zero_grad(set_to_none=True)
        for numbers in self.bins:
            values = scorer(self.model, [self.rows[i] for i in numbers]).logprobs
            torch.stack([(x * self.weights[i]).sum() for i, x in zip(numbers, values, strict=True)]).sum().backward()

    def gradient(self) -> list[Tensor]:
        self.train()
        return [p.grad.double() for p in self.model.parameters() if p.grad is not None]


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    size = sum(float(y.square().sum()) for y in b)
    return (sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True)) / size) ** 0.5


def passes_of(model: Any, ids: list[list[int]], *, tree: bool, budget: int, device: str) -> Passes:
    generator = torch.Generator().manual_seed(0)
    rows = [ScoredRow(ids=torch.tensor(each), temperatures=torch.ones(len(each))) for each in ids]
    weights = [torch.randn(row.length, generator=generator).to(device) for row in rows]
    return Passes(model=model, rows=rows, weights=weights, tree=tree, budget=budget)


def gradient_errors(model: Any, device: str, *, quick: bool) -> tuple[Any, ...]:
    """Relative distances from the gradient of transformers' own forward, row by row, in the wider dtype."""
    ids = groups_of(QUICK if quick else GRADIENT, min(model.config.vocab_size, 100_000))
    with exact(model):
        found = [passes_of(model, ids, tree=tree, budget=10**6, device=device).gradient() for tree in (True, False)]
    wide = model.float() if device == "cuda" else model.double()
    wide.zero_grad(set_to_none=True)
    for row, weight in zip(ids, passes_of(wide, ids, tree=False, budget=1, device=device).weights, strict=True):
        tokens = torch.tensor([row], device=device)
        table = wide(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        (table.gather(-1, tokens[0, 1:, None])[:, 0] * weight[1:].to(table.dtype)).sum().backward()
    right = [p.grad.double() for p in wide.parameters() if p.grad is not None]
    together = distance(found[0], found[1])
    return len(ids), *(f"{value:.2g}" for value in (distance(found[0], right), distance(found[1], right), together))


def measure(model: Any, ids: list[list[int]], budget: int, device: str, repeats: int) -> tuple[Any, ...]:
    joined, apart = (passes_of(model, ids, tree=tree, budget=budget, device=device) for tree in (True, False))
    with exact(model):
        mine, theirs = joined.score(), apart.score()  # also the first calls of every kernel
        wrong = sum(int((mine[i].view(torch.int32) != theirs[i].view(torch.int32)).sum()) for i in mine)
        assert wrong or all(same_bits(mine[i], theirs[i]) for i in mine)
        joined.train()
        apart.train()
        spent: dict[str, list[float]] = {name: [] for name in ("score", "score apart", "train", "train apart")}
        for _ in range(repeats):  # in turn, so that a busy machine is busy for both
            spent["score apart"].append(seconds(apart.score, device))
            spent["score"].append(seconds(joined.score, device))
            spent["train apart"].append(seconds(apart.train, device))
            spent["train"].append(seconds(joined.train, device))
    took = {name: median(values) for name, values in spent.items()}
    tokens = sum(map(len, ids)), joined.tokens()
    return (
        budget, f"{tokens[0]:,}", f"{tokens[1]:,}", tokens[0] / tokens[1],
        *(f"{1000 * took[name]:,.0f}" for name in ("score apart", "score")), took["score apart"] / took["score"],
        *(f"{1000 * took[name]:,.0f}" for name in ("train apart", "train")), took["train apart"] / took["train"],
        f"{wrong} of {tokens[0]:,}",
    )  # fmt: skip


COLUMNS = (
    "load", "micro_tokens", "tokens apart", "as a tree", "÷", "score ms apart", "tree", "÷", "train ms apart", "tree", "÷",
    "bits differ",
)  # fmt: skip


def shipped_model() -> Any:
    from transformers import AutoModelForCausalLM

    from tokentrue.environments import SMALL_MODEL

    return AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)


def random_model(shape: str) -> Any:
    from benchmarks.gpu.random_models import model_of

    model = model_of(shape).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def run(*, quick: bool, device: str = "cpu", shapes: Sequence[str] = (), budgets: Sequence[int] = (), loads: Sequence[str] = LOADS) -> list[Report]:  # fmt: skip
    sizes = QUICK if quick else CUDA if device == "cuda" else CPU
    budgets = budgets or ((400,) if quick else (8192, 32768) if device == "cuda" else (4096, 16384))
    reports = []
    for shape in shapes if device == "cuda" else ("shipped",):
        model = random_model(shape) if device == "cuda" else shipped_model()
        vocabulary, rows = model.config.vocab_size, list[tuple[Any, ...]]()
        known = {
            "groups": (f"{sizes.groups} × 8 rows, prompt {sizes.prompt:,}, answer {sizes.answer}", groups_of),
            "forks": (f"{sizes.sessions} × {sizes.turns} turns, forked after each", forks_of),
        }
        for name, ids in ((known[load][0], known[load][1](sizes, vocabulary)) for load in loads):
            for budget in budgets:
                rows.append((name, *measure(model, ids, budget, device, sizes.repeats)))
                print(rows[-1], file=sys.stderr, flush=True)
        errors = gradient_errors(model, device, quick=quick)
        del model
        notes = ("score: log-probabilities of every token; train: forward and backward; median of the rounds",)
        title = f"Shared prefixes once, {shape}, {'bf16' if device == 'cuda' else 'float32'} on {device}"
        reports.append(Report(title=title, columns=COLUMNS, rows=rows, notes=notes))
        title = f"Gradients, {shape}, one group: distance over all weights, ÷ {'float32' if device == 'cuda' else 'float64'}"
        columns = ("rows", "tree − wide", "apart − wide", "tree − apart")
        reports.append(Report(title=title, columns=columns, rows=[errors]))
    return reports


if __name__ == "__main__":
    parser = parser_for("tree", (__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "4B"])
    parser.add_argument("--budgets", nargs="+", type=int, default=(), help="values of micro_tokens")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    options = parser.parse_args()
    made = run(
        quick=options.quick, device=options.device, shapes=options.shapes, budgets=options.budgets, loads=options.loads
    )
    print_reports(made, as_json=options.json)
