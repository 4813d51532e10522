"""Two id sequences in, graded and aligned differences out.

Both are cut into segments: every structural token, and every run of other tokens between them. The segments are
aligned, so that one extra segment is one difference and hides nothing after it.

* `special_token_count`: a structural token is missing or extra (hard);
* `special_token_type`: another structural token in its place (hard);
* `non_assistant_text`: other text of the prompt, the user or a tool, or the same from other ids (hard);
* `assistant_text`: other text inside an assistant's turn (soft); sampled tokens are never canonical."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tokentrue.records import record

Ids = Sequence[int]
Kind = Literal["special_token_count", "special_token_type", "non_assistant_text", "assistant_text"]


class Structure(Protocol):
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
    @property
    def structure(self) -> Structure: ...

    def decode(self, token_ids: Ids) -> str: ...


@record
class ComparedSpan:
    start: int
    end: int
    text: str


@record
class Mismatch:
    """One difference. `message` and `turn` (of the assistant) count from 0 and are -1 before the first."""

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


Pair = tuple[_Segment | None, _Segment | None]


def compare(expected_ids: Ids, actual_ids: Ids, *, renderer: Reader) -> list[Mismatch]:
    found: list[Mismatch] = []
    expected, actual = _segments(expected_ids, renderer), _segments(actual_ids, renderer)
    for mine, theirs in _pairs(expected, actual, expected_ids, actual_ids):
        one = theirs or mine
        assert one is not None
        before, after = _span(mine, expected_ids, renderer, one), _span(theirs, actual_ids, renderer, one)
        kind, detail = _grade(mine, theirs, before.text, after.text)
        if kind is not None:
            found.append(
                Mismatch(
                    kind=kind, expected=before, actual=after, turn=one.turn, message=one.message, token=after.start,
                    detail=detail,
                )
            )  # fmt: skip
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


def _pairs(expected: list[_Segment], actual: list[_Segment], expected_ids: Ids, actual_ids: Ids) -> list[Pair]:
    """First by their exact ids, then, inside what differs, by kind alone."""

    def keys(segments: list[_Segment], ids: Ids) -> list[tuple[int, ...]]:
        return [(s.key, *(ids[s.start : s.end] if s.key < 0 else ())) for s in segments]

    pairs: list[Pair] = []
    for start, end, other, other_end in find_gaps(keys(expected, expected_ids), keys(actual, actual_ids)):
        left, right = expected[start:end], actual[other:other_end]
        for a, b, c, d in find_gaps([s.key for s in left], [s.key for s in right]):
            # Structure that faces structure is of another type; what faces nothing is missing or extra.
            while a < b and c < d and (left[a].key < 0) == (right[c].key < 0):
                pairs.append((left[a], right[c]))
                a, c = a + 1, c + 1
            pairs += [(segment, None) for segment in left[a:b]] + [(None, segment) for segment in right[c:d]]
            pairs += zip(left[b : b + 1], right[d : d + 1], strict=True)  # the next pair of one kind, if there is one
    return pairs


def find_gaps(left: Sequence[Hashable], right: Sequence[Hashable]) -> Iterator[tuple[int, int, int, int]]:
    """The ranges `left[a:b]` and `right[c:d]` before each equal pair, and after the last; either may be empty."""
    a = c = 0
    for b, d in [*align(left, right), (len(left), len(right))]:
        yield a, b, c, d
        a, c = b + 1, d + 1


def _grade(mine: _Segment | None, theirs: _Segment | None, expected: str, actual: str) -> tuple[Kind | None, str]:
    if mine is None or theirs is None:
        one, what = (theirs, "extra") if mine is None else (mine, "missing")
        assert one is not None
        if one.key >= 0:
            return "special_token_count", f"{what}: {(expected or actual)!r}"
        return ("assistant_text" if one.assistant else "non_assistant_text"), f"{what} text"
    if mine.key >= 0:
        is_same = mine.key == theirs.key
        return (None, "") if is_same else ("special_token_type", f"{actual!r} instead of {expected!r}")
    if mine.assistant and theirs.assistant:
        return ("assistant_text" if expected != actual else None), ""
    return "non_assistant_text", ("the same text from other ids" if expected == actual else "")


def _span(segment: _Segment | None, ids: Ids, renderer: Reader, near: _Segment) -> ComparedSpan:
    if segment is None:
        return ComparedSpan(start=min(near.start, len(ids)), end=min(near.start, len(ids)), text="")
    return ComparedSpan(start=segment.start, end=segment.end, text=renderer.decode(ids[segment.start : segment.end]))


# Past so many differences everything between the first and the last counts as replaced.
LIMIT = 500


def align(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The index pairs of the entries that the shortest edit script keeps (Myers' greedy algorithm)."""
    head = 0
    while head < min(len(left), len(right)) and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < min(len(left), len(right)) - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    ends = len(left) - tail, len(right) - tail
    pairs = [(n, n) for n in range(head)]
    pairs += [(a + head, b + head) for a, b in _align_middle(left[head : ends[0]], right[head : ends[1]])]
    return pairs + [(ends[0] + n, ends[1] + n) for n in range(tail)]


def _align_middle(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    trace = _search(left, right) if left and right else None
    if trace is None:
        return []
    pairs: list[tuple[int, int]] = []
    x, y = len(left), len(right)
    for edits in range(len(trace) - 1, -1, -1):
        reach, diagonal = trace[edits], x - y
        before = diagonal + 1 if _goes_down(reach, diagonal, edits) else diagonal - 1
        start_x = reach.get(before, 0)
        start_y = start_x - before
        while x > start_x and y > start_y and x > 0 and y > 0:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start_x, start_y
    return pairs[::-1]


def _search(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[dict[int, int]] | None:
    """The furthest reach on every diagonal, per number of edits; None past the limit."""
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    for edits in range(min(len(left) + len(right), LIMIT) + 1):
        trace.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            x = reach[diagonal + 1] if _goes_down(reach, diagonal, edits) else reach[diagonal - 1] + 1
            y = x - diagonal
            while x < len(left) and y < len(right) and left[x] == right[y]:
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if x >= len(left) and y >= len(right):
                return trace
    return None


def _goes_down(reach: dict[int, int], diagonal: int, edits: int) -> bool:
    return diagonal == -edits or (diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1))
