"""A frame as ids: what a template writes around contents that it only passes on, encoded once, so that only contents are left to encode.

Proof that the ids are those of the whole text: texts are cut at literals before anything else, and each stretch between two is encoded by
itself. With a clean content (`Codec.clean`, asked each time) no literal lies inside it; none can lie across its edges, because no part of
the frame ends with the beginning of one or begins with the end of one; and no literal eats blanks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tokentrue.renderers.encoding import Codec
from tokentrue.renderers.spans import spans_around
from tokentrue.types import Ids, PromptSpan

_HOLE = "\ufdd0"  # a noncharacter: no template writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stencil:
    """`given` are the ids before, between and behind the contents, `around` the frame's text that shares a stretch with each of them."""

    codec: Codec
    given: tuple[array[int], ...]
    around: tuple[tuple[str, str], ...]

    def ids(self, contents: Sequence[str]) -> tuple[array[int], list[int]] | None:
        """Of the frame with these clean contents, and how many of them each stretch has; None where one of them has no fast way."""
        ids, counts = self.given[0][:], list[int]()
        for content, (before, behind), following in zip(contents, self.around, self.given[1:], strict=True):
            found = self.codec.quick_ids(before + content + behind)
            if found is None:
                return None
            ids += found
            ids += following
            counts.append(len(found))
        return ids, counts

    def spans(self, ids: Ids, counts: Sequence[int], contents: Sequence[str], roles: Sequence[str]) -> tuple[PromptSpan, ...] | None:
        """As `spans_of` finds them, from the edges of the stretches alone; None where the vocabulary tells no sizes."""
        found: list[tuple[int, int]] = []
        start = len(self.given[0])
        for count, (before, behind), following, content in zip(counts, self.around, self.given[1:], contents, strict=True):
            end = start + count
            lead = self._fitting(ids[start : start + len(before)], len(before))
            trail = self._fitting(ids[max(start, end - len(behind)) : end][::-1], len(behind))
            if lead is None or trail is None:
                return None
            found.append((start + lead, end - trail if content else start + lead))
            start = end + len(following)
        return spans_around(found, roles, len(ids))

    def _fitting(self, ids: Ids, room: int) -> int | None:
        """How many of these tokens stand wholly in the first `room` bytes."""
        sizes = self.codec.sizes(ids)
        return None if sizes is None else sum(end <= room for end in accumulate(sizes))


def stencil_of(codec: Codec, frame: Sequence[str]) -> Stencil | None:
    open_ends = map(codec.may_go_on, frame[:-1]), map(codec.may_have_begun, frame[1:])
    if not codec.has_plain_literals or any(map(any, open_ends)) or _HOLE in "".join(frame):
        return None
    given: list[array[int]] = []
    around: list[tuple[str, str]] = []
    ids = array("i")
    for stretch, literal, _ in codec.pieces(_HOLE.join(frame)):
        before, hole, behind = stretch.partition(_HOLE)
        found = array("i") if hole or not stretch else codec.quick_ids(stretch)
        if found is None or _HOLE in behind:
            return None
        ids += found
        if hole:
            around.append((before, behind))
            given.append(ids)
            ids = array("i")
        if literal:
            ids.append(codec.literals[literal])
    return Stencil(codec=codec, given=(*given, ids), around=tuple(around))
