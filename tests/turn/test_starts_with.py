"""Ids are compared bit for bit, with the C library's help and without it."""

from __future__ import annotations

from array import array

import pytest

import tokentrue.types
from tokentrue.types import starts_with


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
