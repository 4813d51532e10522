from __future__ import annotations

from typing import Any

import pytest

import tokentrue as tt
from tokentrue.errors import InputError
from tokentrue.types import Completion, Finish


def completion(ids: list[int], logprobs: list[float]) -> Completion:
    return Completion(token_ids=tuple(ids), logprobs=tuple(logprobs), finish=Finish.LENGTH)


async def test_same_model_twice_is_bit_identical(tiny_model: Any, prompt: list[int]) -> None:
    a, b = (tt.providers.load("hf", model=tiny_model) for _ in range(2))
    result = await tt.check_logprobs_close(a, b, prompt)
    assert result.exact and result.close and "bit-identical" in result.verdict


async def test_differences_are_measured_up_to_the_fork() -> None:
    result = await tt.check_logprobs_close(
        completion([1, 2, 3], [-1.0, -2.0, -3.0]), completion([1, 2, 9], [-1.0, -2.5, -3.0])
    )
    assert (result.compared, result.first_difference, result.max_difference) == (2, 2, 0.5)
    assert not result.close and not result.exact
    assert "token 2" in result.verdict


async def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(InputError):
        await tt.check_logprobs_close(completion([], []), completion([1], [-1.0]))
