"""The shortest edit script between two sequences (Myers' greedy algorithm).

Past `LIMIT` differences the middle is no longer searched for matches: everything in it counts as replaced.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

Pair: TypeAlias = tuple[int | None, int | None]

LIMIT = 500


def align(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[Pair]:
    """Index pairs in order: `(i, j)` equal, `(i, None)` only left, `(None, j)` only right."""
    head = 0
    while head < min(len(left), len(right)) and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < min(len(left), len(right)) - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    ends = len(left) - tail, len(right) - tail
    middle = _script(left[head : ends[0]], right[head : ends[1]])
    pairs: list[Pair] = [(n, n) for n in range(head)]
    pairs += [(None if a is None else a + head, None if b is None else b + head) for a, b in middle]
    return pairs + [(ends[0] + n, ends[1] + n) for n in range(tail)]


def _script(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[Pair]:
    trace = _search(left, right) if left and right else None
    if trace is not None:
        return _backtrack(trace, len(left), len(right))
    replaced: list[Pair] = [(n, None) for n in range(len(left))]
    return replaced + [(None, n) for n in range(len(right))]


def _search(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[dict[int, int]] | None:
    """The furthest reach on every diagonal, per number of edits; None past the limit."""
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    for edits in range(min(len(left) + len(right), LIMIT) + 1):
        trace.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
            )
            x = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            y = x - diagonal
            while x < len(left) and y < len(right) and left[x] == right[y]:
                x, y = x + 1, y + 1
            reach[diagonal] = x
            if x >= len(left) and y >= len(right):
                return trace
    return None


def _backtrack(trace: list[dict[int, int]], x: int, y: int) -> list[Pair]:
    pairs: list[Pair] = []
    for edits in range(len(trace) - 1, -1, -1):
        reach, diagonal = trace[edits], x - y
        down = diagonal == -edits or (diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1))
        before = diagonal + 1 if down else diagonal - 1
        start_x = reach.get(before, 0)
        start_y = start_x - before
        while x > start_x and y > start_y and x > 0 and y > 0:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if edits:
            pairs.append((None, start_y) if down else (start_x, None))
        x, y = start_x, start_y
    return pairs[::-1]
