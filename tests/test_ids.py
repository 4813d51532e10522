"""TokenIds: immutable, compared and cut by bytes."""

from __future__ import annotations

import pickle
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentrue.errors import TokenContractError
from tokentrue.ids import EMPTY, TokenIds
from tokentrue.types import spans_from_runs

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(IDS, st.slices(40))
def test_it_behaves_as_a_tuple_of_the_same_integers(plain: list[int], cut: slice) -> None:
    ids = TokenIds(plain)
    assert ids == plain and ids == tuple(plain) and list(ids) == plain and len(ids) == len(plain)
    assert ids[cut] == plain[cut] and list(reversed(ids)) == plain[::-1]
    assert ids[cut][::2] == plain[cut][::2]  # a view of a view, and of one with steps


@given(IDS, IDS)
def test_prefix_join_equality_and_hash_are_those_of_the_integers(first: list[int], second: list[int]) -> None:
    a, b = TokenIds(first), TokenIds(second)
    assert a + b == first + second and a + second == first + second and first + b == first + second
    assert TokenIds.concat([a, b, a]) == first + second + first
    assert (a + b).startswith(a) and (a + b).startswith(first) and (a == b) == (first == second)
    assert b.startswith(a) == (second[: len(first)] == first)
    assert hash((a + b)[: len(a)]) == hash(a) and (a + b)[len(a) :] == b


@given(IDS)
def test_bytes_pickle_and_numpy_give_the_same_ids_back(plain: list[int]) -> None:
    ids = TokenIds(plain)
    assert TokenIds.from_bytes(ids.tobytes()) == ids == pickle.loads(pickle.dumps(ids))
    assert TokenIds.from_bytes(ids[1:].tobytes()) == plain[1:]
    assert np.asarray(ids).tolist() == plain and np.frombuffer(ids.view, np.int32).tolist() == plain
    assert TokenIds(np.asarray(ids)) == ids and TokenIds(iter(plain)) == ids
    assert ids.tobytes() == np.asarray(plain, "<i4").tobytes()


def test_the_digest_is_that_of_the_content() -> None:
    ids = TokenIds(range(10))
    assert ids[3:].sha256() == TokenIds(range(3, 10)).sha256() != ids.sha256()


@pytest.mark.parametrize("bad", [[-1], [2**31], [1, 2.5], [None], ["3"], [1, 2, -7]])
def test_what_is_not_a_token_id_is_refused_with_its_place(bad: list[object]) -> None:
    with pytest.raises(TokenContractError, match=f"at {len(bad) - 1} is not an integer"):
        TokenIds(bad)  # pyright: ignore[reportArgumentType]


def test_nothing_can_change_them() -> None:
    source = [1, 2, 3]
    ids = TokenIds(source)
    source[0] = 9
    assert ids == (1, 2, 3) and ids.view.readonly and np.asarray(ids).flags.writeable is False
    with pytest.raises(AttributeError):
        ids._view = EMPTY.view
    with pytest.raises(TypeError):
        ids[0] = 5  # pyright: ignore[reportIndexIssue]


def test_half_an_id_is_refused() -> None:
    with pytest.raises(TokenContractError, match="5 bytes"):
        TokenIds.from_bytes(b"12345")


def test_runs_of_tokens_become_spans_without_gaps() -> None:
    runs = [(0, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 1)]
    assert [(span.start, span.end, span.version) for span in spans_from_runs(runs)] == [(0, 5, 1), (5, 6, 2), (6, 8, 1)]
    assert spans_from_runs([(0, 7)]) == ()


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=5), st.sets(st.integers(0, 5)))
def test_the_digest_goes_on_where_ids_are_appended(parts: list[list[int]], asked: set[int]) -> None:
    """Whether or not the digest of a beginning was asked for, that of the whole is over the whole."""
    ids = TokenIds()
    for number, part in enumerate(parts):
        if number in asked:
            ids.sha256()
        ids = ids + part
        assert TokenIds.concat([ids, ids]).sha256() == sha256(ids.tobytes() * 2).digest()
    assert ids.sha256() == sha256(ids.tobytes()).digest() == TokenIds(ids.tolist()).sha256()
