"""Ids are compared bit for bit, with the C library's help and without it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokentrue.types
from tokentrue.types import JoinedIds, starts_with


@pytest.mark.parametrize("helped", [True, False])
def test_starts_with(monkeypatch: pytest.MonkeyPatch, helped: bool) -> None:
    if not helped:
        monkeypatch.setattr(tokentrue.types, "_memcmp", lambda: None)
    ids = array("i", range(1000))
    assert starts_with(ids, ids) and starts_with(ids, array("i")) and starts_with(array("i"), array("i"))
    assert all(starts_with(ids, ids[:size]) for size in range(0, 1000, 7))
    assert not starts_with(ids[:10], ids)
    for place in (0, 1, 499, 998):
        other = ids[:999]
        other[place] ^= 1
        assert not starts_with(ids, other)
    assert not starts_with(ids, array("q", [0, 1]))


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=6), st.lists(st.integers(0, 2**31 - 1), max_size=6), st.slices(12), st.integers(-12, 11)
)
def test_joined_ids_are_what_one_array_would_be(before: list[int], added: list[int], part: slice, index: int) -> None:
    joined, whole = JoinedIds(array("i", before), array("i", added)), array("i", before + added)
    assert len(joined) == len(whole) and list(joined) == whole.tolist()
    assert joined[part] == whole[part]
    if -len(whole) <= index < len(whole):
        assert joined[index] == whole[index]
    assert joined.whole == whole and joined[part] == whole[part]
