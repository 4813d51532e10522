"""Two id sequences in, graded and aligned differences out.

Both are cut into segments: every structural token is one, every run of other tokens between them is one. The segments
are aligned (shortest edit script), so that one extra segment is one difference and hides nothing after it. Nothing is
trimmed. Graded:

* `special_token_count`: a structural token is missing or extra (hard);
* `special_token_type`: another structural token stands in its place (hard);
* `non_assistant_text`: text of the prompt, the user or a tool differs, or reads the same from other ids (hard);
* `assistant_text`: text inside an assistant's turn differs (soft). Other ids with the same text are no difference here:
  sampled tokens are never canonical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tokentrue.comparison.alignment import align

Ids = Sequence[int]
Kind = Literal["special_token_count", "special_token_type", "non_assistant_text", "assistant_text"]


class Structure(Protocol):
    """Which ids are structure; see `tokentrue.renderers`."""

    @property
    def special(self) -> frozenset[int]: ...
    @property
    def openers(self) -> frozenset[int]: ...
    @property
    def stops(self) -> frozenset[int]: ...
    @property
    def assistant(self) -> int | None: ...
    @property
    def word(self) -> str: ...


class Reader(Protocol):
    """What is needed of a renderer."""

    @property
    def structure(self) -> Structure: ...

    def decode(self, token_ids: Ids) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSpan:
    """Tokens `[start, end)` of one sequence and their text; empty where the other sequence has something that this one
    lacks."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One difference. `token` is its first token in the actual sequence.

    `message` (by its opener) and `turn` (of the assistant) say where it lies; both count from 0 and are -1 before the
    first.
    """

    kind: Kind
    expected: ComparedSpan
    actual: ComparedSpan
    turn: int
    message: int
    token: int
    detail: str = ""

    @property
    def severity(self) -> Literal["hard", "soft"]:
        return "soft" if self.kind == "assistant_text" else "hard"


@dataclass(frozen=True, slots=True)
class _Segment:
    key: int  # a structural id, or -1 for text
    start: int
    end: int
    turn: int
    message: int
    assistant: bool


def compare(expected_ids: Ids, actual_ids: Ids, *, renderer: Reader) -> list[Mismatch]:
    """Every difference between what a render gives and what a record holds, in order; an empty list where they
    agree."""
    expected, actual = _segments(expected_ids, renderer), _segments(actual_ids, renderer)
    found: list[Mismatch] = []
    for mine, theirs in _pairs(expected, actual, expected_ids, actual_ids):
        mismatch = _difference(mine, theirs, expected_ids, actual_ids, renderer)
        if mismatch is not None:
            found.append(mismatch)
    return found


def _segments(ids: Ids, renderer: Reader) -> list[_Segment]:
    structure = renderer.structure
    found: list[_Segment] = []
    turn, message, assistant, place = -1, -1, False, 0
    while place < len(ids):
        id_ = ids[place]
        end = place + 1
        if id_ in structure.special:
            stops = assistant and id_ in structure.stops
            closing = assistant  # a stop belongs to the turn that it ends
            if id_ in structure.openers:
                message += 1
                assistant = _opens_assistant(ids, place, renderer)
                closing = closing and stops
                turn += assistant
            elif stops:
                assistant = False
            found.append(_Segment(id_, place, end, turn, message, closing or assistant))
        else:
            while end < len(ids) and ids[end] not in structure.special:
                end += 1
            found.append(_Segment(-1, place, end, turn, message, assistant))
        place = end
    return found


def _opens_assistant(ids: Ids, place: int, renderer: Reader) -> bool:
    structure = renderer.structure
    if ids[place] != structure.assistant:
        return False
    if not structure.word:
        return True
    end = place + 1
    while end < len(ids) and end < place + 24 and ids[end] not in structure.special:
        end += 1
    return renderer.decode(ids[place + 1 : end]).lstrip().startswith(structure.word)


def _pairs(
    expected: list[_Segment], actual: list[_Segment], expected_ids: Ids, actual_ids: Ids
) -> list[tuple[_Segment | None, _Segment | None]]:
    """Segments side by side. First by their exact ids, then, inside what differs, by kind alone."""
    mine = [
        (segment.key, *(expected_ids[segment.start : segment.end] if segment.key < 0 else ())) for segment in expected
    ]
    theirs = [
        (segment.key, *(actual_ids[segment.start : segment.end] if segment.key < 0 else ())) for segment in actual
    ]
    pairs: list[tuple[_Segment | None, _Segment | None]] = []
    left: list[_Segment] = []
    right: list[_Segment] = []
    for a, b in align(mine, theirs):
        if a is not None and b is not None:
            pairs += _inner(left, right)
            left, right = [], []
        else:
            left += [expected[a]] if a is not None else []
            right += [actual[b]] if b is not None else []
    return pairs + _inner(left, right)


def _inner(left: list[_Segment], right: list[_Segment]) -> list[tuple[_Segment | None, _Segment | None]]:
    pairs: list[tuple[_Segment | None, _Segment | None]] = []
    lonely_left: list[_Segment] = []
    lonely_right: list[_Segment] = []

    def settle() -> None:
        """Structure that faces structure is of another type; what faces nothing is missing or extra."""
        while lonely_left and lonely_right and (lonely_left[0].key < 0) == (lonely_right[0].key < 0):
            pairs.append((lonely_left.pop(0), lonely_right.pop(0)))
        pairs.extend((segment, None) for segment in lonely_left)
        pairs.extend((None, segment) for segment in lonely_right)
        lonely_left.clear()
        lonely_right.clear()

    for a, b in align([segment.key for segment in left], [segment.key for segment in right]):
        if a is not None and b is not None:
            settle()
            pairs.append((left[a], right[b]))
        else:
            lonely_left.extend([left[a]] if a is not None else [])
            lonely_right.extend([right[b]] if b is not None else [])
    settle()
    return pairs


def _difference(
    mine: _Segment | None, theirs: _Segment | None, expected_ids: Ids, actual_ids: Ids, renderer: Reader
) -> Mismatch | None:
    one = theirs or mine
    assert one is not None
    expected, actual = _part(mine, expected_ids, renderer, one), _part(theirs, actual_ids, renderer, one)
    kind, detail = _grade(mine, theirs, expected, actual)
    if kind is None:
        return None
    return Mismatch(
        kind=kind,
        expected=expected,
        actual=actual,
        turn=one.turn,
        message=one.message,
        token=actual.start,
        detail=detail,
    )


def _grade(
    mine: _Segment | None, theirs: _Segment | None, expected: ComparedSpan, actual: ComparedSpan
) -> tuple[Kind | None, str]:
    if mine is None or theirs is None:
        one, what = (theirs, "extra") if mine is None else (mine, "missing")
        assert one is not None
        if one.key >= 0:
            return "special_token_count", f"{what}: {(expected.text or actual.text)!r}"
        return ("assistant_text" if one.assistant else "non_assistant_text"), f"{what} text"
    if mine.key >= 0:
        return (
            ("special_token_type", f"{actual.text!r} instead of {expected.text!r}")
            if mine.key != theirs.key
            else (None, "")
        )
    if mine.assistant and theirs.assistant:
        return ("assistant_text", "") if expected.text != actual.text else (None, "")
    return "non_assistant_text", ("the same text from other ids" if expected.text == actual.text else "")


def _part(segment: _Segment | None, ids: Ids, renderer: Reader, near: _Segment) -> ComparedSpan:
    if segment is None:
        return ComparedSpan(start=min(near.start, len(ids)), end=min(near.start, len(ids)), text="")
    return ComparedSpan(start=segment.start, end=segment.end, text=renderer.decode(ids[segment.start : segment.end]))
