"""Packing: every row once, no bin over budget unless a single row is, and the same answer every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokentrue.train.rows import pack, share, split_even

LENGTHS = st.lists(st.integers(1, 90), max_size=40)


@given(LENGTHS, st.integers(1, 120))
def test_every_row_is_packed_once_and_within_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(row for found in bins for row in found) == list(range(len(lengths)))
    for found in bins:
        assert len(found) == 1 or sum(lengths[row] for row in found) <= budget


@given(LENGTHS, st.integers(1, 5))
def test_ranks_get_every_row_once_and_like_loads(lengths: list[int], ranks: int) -> None:
    shares = share(lengths, ranks)
    assert sorted(row for found in shares for row in found) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in found) for found in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_minibatches_differ_by_one_row_at_most(count: int, parts: int) -> None:
    runs = split_even(count, parts)
    assert [row for run in runs for row in run] == list(range(count))
    assert not runs or max(map(len, runs)) - min(map(len, runs)) <= 1
