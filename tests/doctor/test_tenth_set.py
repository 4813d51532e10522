"""The tenth set's faults change what an engine reports, and its healthy engines change nothing but rounding. The judge is
a plain forward pass of transformers; the doctor is not asked."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.doctor.engines import CALCULATOR
from tests.doctor.reported import mixture
from tests.doctor.tenth_set import FAULTS, FLOAT32_ONLY, HEALTHY, MIXTURE, MIXTURE_HEALTHY
from tests.doctor.test_eighth_set import CONVERSATIONS, report_error
from tokentrue.doctor.reference import load_model, merge_adapter
from tokentrue.renderers import load_renderer
from tokentrue.types import Sampling

SAMPLINGS = (
    Sampling(temperature=0.0, max_tokens=8, top_logprobs=5),
    Sampling(temperature=1.0, max_tokens=16, seed=7),
    Sampling(temperature=1.5, top_p=0.8, max_tokens=8, seed=5),
)


def test_the_sizes_of_the_set() -> None:
    assert [len(one) for one in (FAULTS, HEALTHY, MIXTURE, MIXTURE_HEALTHY)] == [24, 20, 6, 2]
    assert {*FAULTS, *MIXTURE} >= FLOAT32_ONLY


@pytest.fixture(scope="module")
def plain() -> Any:
    torch.set_num_threads(1)
    return load_model(CALCULATOR)


@pytest.fixture(scope="module")
def plain_mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("mixture")
    yield load_model(mixture(folder, CALCULATOR))


def prompts() -> list[list[int]]:
    """Two conversations, and one whose words are split into letters, as a model may have sampled them."""
    renderer = load_renderer(str(CALCULATOR))
    whole = [list(renderer.render(one).token_ids) for one in CONVERSATIONS]
    tokenizer = Tokenizer.from_file(str(CALCULATOR / "tokenizer.json"))
    letters = [id_ for letter in "Add one and two" for id_ in tokenizer.encode(letter).ids]
    return [*whole, [*whole[0][:3], *letters, *whole[0][3:]]]


async def error_of(plain: Any, makers: Any, name: str, dtype: str = "float32") -> float:
    """The mean error of the requests with the settings that show most."""
    case = makers[name](copy.deepcopy(plain), dtype, random.Random(f"1 {name}"))
    reference = copy.deepcopy(plain)
    if case.adapter is not None:
        reference = merge_adapter(reference, case.adapter)
    means = []
    for sampling in SAMPLINGS:
        errors = []
        for prompt in prompts() * 2:  # the second time from a prefix cache, if there is one
            errors.append(report_error(reference, prompt, await case.engine.generate(prompt, sampling), sampling))
        means.append(sum(errors) / len(errors))
    if case.folder is not None:
        case.folder.cleanup()
    return max(means)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_has_an_effect(plain: Any, name: str) -> None:
    assert await error_of(plain, FAULTS, name) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
async def test_a_healthy_engine_differs_by_rounding(plain: Any, name: str) -> None:
    assert await error_of(plain, HEALTHY, name) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURE)
async def test_a_fault_of_a_mixture_has_an_effect(plain_mixture: Any, name: str) -> None:
    assert await error_of(plain_mixture, MIXTURE, name) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURE_HEALTHY)
async def test_a_healthy_mixture_differs_by_rounding(plain_mixture: Any, name: str) -> None:
    assert await error_of(plain_mixture, MIXTURE_HEALTHY, name) < 2e-5
