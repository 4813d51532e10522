"""The eighth set's faults change what an engine reports or draws, and its healthy engines change nothing but rounding. The
judge is a plain forward pass of transformers; the doctor is not asked."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
import torch

from tests.doctor.eighth_set import FAULTS, HEALTHY, IN_BFLOAT16
from tests.doctor.engines import CALCULATOR
from tokentrue.doctor.reference import load_model, merge_adapter
from tokentrue.providers.hf import filter_logprobs
from tokentrue.renderers import load_renderer
from tokentrue.types import Completion, Sampling

GREEDY = Sampling(temperature=0.0, max_tokens=8, top_logprobs=5)
FILTERED = Sampling(temperature=1.5, top_p=0.8, max_tokens=8, seed=5)
CONVERSATIONS = (
    [{"role": "user", "content": "What is 12 + 34?"}],
    [
        {"role": "system", "content": "You are a careful calculator. Show no more steps than are needed."},
        {"role": "user", "content": "Add 17 and 25, then multiply by 3. Say whether it is 216, 316 or 126."},
        {"role": "assistant", "content": "The answer is 126."},
        {"role": "user", "content": "And minus 26, in words?"},
    ],
)


def test_the_sizes_of_the_set() -> None:
    assert (len(FAULTS), len(HEALTHY)) == (24, 8)
    assert (len(IN_BFLOAT16 & FAULTS.keys()), len(IN_BFLOAT16 & HEALTHY.keys()), len(IN_BFLOAT16)) == (15, 4, 19)


@pytest.fixture(scope="module")
def plain() -> Any:
    torch.set_num_threads(1)
    return load_model(CALCULATOR)


def distance(one: float, other: float) -> float:
    return 0.0 if one == other else min(abs(one - other), 20.0)


@torch.no_grad()
def report_error(model: Any, prompt: list[int], found: Completion, sampling: Sampling) -> float:
    """Mean difference of all log-probabilities in an answer from those of `model`."""
    ids = list(found.token_ids)
    rows = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(rows / (sampling.temperature or 1.0), -1)
    if sampling.temperature:
        rows = torch.stack([filter_logprobs(row, sampling) for row in rows])
    told = [{token: value} for token, value in zip(ids, found.logprobs, strict=True)] + list(found.top_logprobs or ())
    wanted = [*rows, *(rows if found.top_logprobs else ())]
    errors = [
        distance(float(row[token]), value)
        for row, list_ in zip(wanted, told, strict=True)
        for token, value in list_.items()
    ]
    return sum(errors) / len(errors)


def draw_error(engine: Any) -> float:
    """Total variation between 1,000 draws and the distribution they are drawn from."""
    wanted = torch.tensor([0.5, 0.3, 0.1, 0.07, 0.03])
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(5)
    for _ in range(1000):
        counts[engine.token(wanted.log(), Sampling(), generator)] += 1
    return float((counts / 1000 - wanted).abs().sum() / 2)


async def errors_of(plain: Any, name: str) -> tuple[float, float]:
    """The largest error of a report, and that of the draws."""
    case = {**FAULTS, **HEALTHY}[name](copy.deepcopy(plain), "float32", random.Random(f"1 {name}"))
    assert bool(case.names) == (name in FAULTS)
    reference = copy.deepcopy(plain)
    if case.adapter is not None:
        reference = merge_adapter(reference, case.adapter)
    renderer = load_renderer(str(CALCULATOR))
    prompts = [list(renderer.render(one).token_ids) for one in CONVERSATIONS]
    errors = []
    for sampling in (GREEDY, GREEDY, FILTERED):  # the second time from a prefix cache, if there is one
        for prompt in prompts:
            found = await case.engine.generate(prompt, sampling)
            errors.append(report_error(reference, prompt, found, sampling))
    together = await asyncio.gather(*(case.engine.generate(prompt, GREEDY) for prompt in prompts))
    errors += [report_error(reference, *pair, GREEDY) for pair in zip(prompts, together, strict=True)]
    if case.folder is not None:
        case.folder.cleanup()
    return max(errors), draw_error(case.engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_has_an_effect(plain: Any, name: str) -> None:
    report, draws = await errors_of(plain, name)
    assert report > 0.02 or draws > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
async def test_a_healthy_engine_differs_by_rounding(plain: Any, name: str) -> None:
    report, draws = await errors_of(plain, name)
    assert report < 2e-5 and draws < 0.06
