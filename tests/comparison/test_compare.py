"""compare: nothing hidden, nothing trimmed, each difference once and graded."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import isfunction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokentrue as tt
from tests import parts
from tests.marks import examples
from tokentrue.comparison.compare import LIMIT, align, find_gaps

START, END, THINK, CALL = 100, 101, 102, 103  # <|im_start|> <|im_end|> <think> <tool_call>
USER, ASSISTANT = 200, 201


@dataclass(frozen=True)
class Shape:
    special: frozenset[int] = frozenset({START, END, THINK, CALL})
    openers: frozenset[int] = frozenset({START})
    stops: frozenset[int] = frozenset({END})
    assistant: int | None = START
    word: str = "assistant"


@dataclass(frozen=True)
class Toy:
    """Ids spell themselves; 7 and 8 spell the same text."""

    structure: Shape = field(default_factory=Shape)

    def decode(self, token_ids: object) -> str:
        return "".join({USER: "user ", ASSISTANT: "assistant ", 8: "<7>"}.get(id_, f"<{id_}>") for id_ in token_ids)  # type: ignore[attr-defined]


TOY = Toy()
CHAT = [START, USER, 1, 2, END, START, ASSISTANT, 3, 7, END, START, USER, 4, END, START, ASSISTANT]


def kinds(expected: list[int], actual: list[int]) -> list[tuple[str, str]]:
    return [(found.kind, found.severity) for found in tt.compare(expected, actual, renderer=TOY)]


def test_equal_sequences_do_not_differ() -> None:
    assert tt.compare(CHAT, CHAT, renderer=TOY) == []


def test_sampled_splits_are_no_difference_but_given_ones_are() -> None:
    assert kinds(CHAT, [*CHAT[:8], 8, *CHAT[9:]]) == []
    given_7 = [START, USER, 7, END]
    found = tt.compare(given_7, [START, USER, 8, END], renderer=TOY)
    assert [(one.kind, one.severity, one.detail) for one in found] == [
        ("non_assistant_text", "hard", "the same text from other ids")
    ]


def test_assistant_text_is_soft_and_given_text_hard() -> None:
    assert kinds(CHAT, [*CHAT[:8], 9, *CHAT[9:]]) == [("assistant_text", "soft")]
    assert kinds(CHAT, [*CHAT[:2], 9, *CHAT[3:]]) == [("non_assistant_text", "hard")]


def test_another_special_token_in_its_place() -> None:
    found = tt.compare(CHAT, [*CHAT[:9], CALL, *CHAT[10:]], renderer=TOY)
    assert [one.kind for one in found] == ["special_token_type"]
    assert (found[0].expected.text, found[0].actual.text) == ("<101>", "<103>")


def test_one_extra_segment_hides_nothing_after_it() -> None:
    actual = [*CHAT[:4], THINK, *CHAT[4:12], 9, *CHAT[13:]]
    found = tt.compare(CHAT, actual, renderer=TOY)
    assert [(one.kind, one.token, one.message, one.turn) for one in found] == [
        ("special_token_count", 4, 0, -1),
        ("non_assistant_text", 12, 2, 0),
    ]


def test_nothing_is_trimmed_at_either_end() -> None:
    assert kinds(CHAT, CHAT[:-1]) == [("assistant_text", "soft")]  # the opener's own word is missing
    assert kinds(CHAT, [*CHAT, 5, END]) == [("assistant_text", "soft"), ("special_token_count", "hard")]
    assert kinds(CHAT, CHAT[1:])[0] == ("special_token_count", "hard")


def test_coordinates_count_messages_and_turns() -> None:
    found = tt.compare(CHAT, [*CHAT[:12], 9, *CHAT[13:]], renderer=TOY)
    assert (found[0].turn, found[0].message, found[0].token) == (0, 2, 11)
    assert (found[0].expected.start, found[0].expected.end) == (11, 13)


def test_compare_is_a_function_whatever_was_imported_before() -> None:
    import tokentrue.comparison

    assert tt.compare is tokentrue.comparison.compare and isfunction(tt.compare)
    assert tt.Mismatch is tokentrue.comparison.Mismatch


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), max_size=30))
def test_alignment_is_a_shortest_edit_script(left: list[int], right: list[int]) -> None:
    pairs = align(left, right)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert all(left[a] == right[b] for a, b in pairs)
    assert len(pairs) == _longest_common(left, right)
    gaps = list(find_gaps(left, right))
    assert [n for a, b, _, _ in gaps for n in range(a, b)] == sorted(set(range(len(left))) - {a for a, _ in pairs})
    assert [n for _, _, c, d in gaps for n in range(c, d)] == sorted(set(range(len(right))) - {b for _, b in pairs})


def _longest_common(left: list[int], right: list[int]) -> int:
    row = [0] * (len(right) + 1)
    for one in left:
        previous = row
        row = [0]
        for place, other in enumerate(right):
            row.append(previous[place] + 1 if one == other else max(previous[place + 1], row[place]))
    return row[-1]


def test_too_many_differences_are_all_reported() -> None:
    left, right = list(range(LIMIT)), list(range(LIMIT, 2 * LIMIT + 2))
    assert align(left, right) == [] and list(find_gaps(left, right)) == [(0, len(left), 0, len(right))]


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_every_change_to_a_record_is_found(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(CHAT) - 1))
    id_ = data.draw(st.sampled_from([START, END, THINK, CALL, 50]))
    edit = data.draw(st.sampled_from(["drop", "insert", "replace"]))
    changed = {"drop": CHAT[:place] + CHAT[place + 1 :], "insert": [*CHAT[:place], id_, *CHAT[place:]],
               "replace": [*CHAT[:place], id_, *CHAT[place + 1 :]]}[edit]  # fmt: skip
    if changed != CHAT:
        found = tt.compare(CHAT, changed, renderer=TOY)
        assert found
        assert len(found) <= 3, "one change is few differences"


@pytest.mark.parametrize("name", ["qwen3-like", "k2v3-like"])
def test_on_a_real_renderer(name: str) -> None:
    renderer = tt.load_renderer(str(parts.own_dir(name)))
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "It is four.", "reasoning_content": "add"},
    ]
    follow = [{"role": "user", "content": "and one?"}]
    ids = list(renderer.render([*chat, *follow]).token_ids)
    other = list(renderer.render([chat[0], {**chat[1], "content": "It is for."}, *follow]).token_ids)
    assert [(one.kind, one.turn, one.message) for one in tt.compare(ids, other, renderer=renderer)] == [
        ("assistant_text", 0, 1)
    ]
    newline = ids.index(renderer.stop_token_ids[0]) + 1
    lost = tt.compare(ids, ids[:newline] + ids[newline + 1 :], renderer=renderer)
    assert [(one.kind, one.severity, one.expected.text) for one in lost] == [("non_assistant_text", "hard", "\n")]
