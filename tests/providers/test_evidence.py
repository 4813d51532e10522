"""Events that came together: few chunks, every token in them, and nothing lost to what went wrong behind them."""

from __future__ import annotations

from typing import Any

from tokentrue.errors import EngineRejected
from tokentrue.providers.evidence import together
from tokentrue.types import Chunk


def take(event: Any) -> Chunk:
    if event == "wrong":
        raise EngineRejected("made to fail")
    token, version = event
    return Chunk(token_ids=(token,), logprobs=(-token / 8,), policy_version=version) if token else Chunk()


def test_neighbours_of_one_version_become_one_chunk() -> None:
    chunks, wrong = together([(1, 7), (0, 7), (2, 7), (3, 8), (4, 7)], take)
    assert wrong is None
    assert [(chunk.token_ids, chunk.policy_version) for chunk in chunks] == [((1, 2), 7), ((3,), 8), ((4,), 7)]
    assert chunks[0].logprobs == (-0.125, -0.25)


def test_one_that_came_alone_goes_on_as_it_is_and_an_empty_one_not_at_all() -> None:
    alone = Chunk(token_ids=(1,), logprobs=(-1.0,))
    assert together(["x"], lambda _: alone)[0][0] is alone
    assert together([(0, 7)], take) == ([], None) and together([], take) == ([], None)


def test_what_was_sampled_before_an_error_is_kept() -> None:
    chunks, wrong = together([(1, 7), (2, 7), "wrong", (3, 7)], take)
    assert isinstance(wrong, EngineRejected) and [chunk.token_ids for chunk in chunks] == [(1, 2)]
