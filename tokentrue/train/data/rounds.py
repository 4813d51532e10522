"""Where batches come from. Round j is the batch of step j: sampled live by the current weights, or read from a source
of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Protocol, runtime_checkable

from tokentrue.errors import FileFormatError
from tokentrue.protocols import SampleSource
from tokentrue.types import Sample

Groups = list[list[Sample]]


class Rounds(Protocol):
    """`play(j)` returns the groups of round j, in a fixed order. With a lag, several rounds are in progress at once.

    With several ranks `play` returns this rank's part, and the parts in rank order are the
    round.
    """

    async def play(self, number: int) -> Groups: ...


class NoRounds:
    """Of a rank that plays nothing: another one reads the file, or holds the connections to the engines."""

    async def play(self, number: int) -> Groups:
        return []


@runtime_checkable
class CountingRounds(Protocol):
    """Rounds that can say what became of their rollouts."""

    def counts(self, number: int) -> Mapping[str, float]:
        """Of a round that has ended: rollouts, failures, time-outs. Forgets them."""
        ...


class SourceRounds:
    """Recorded groups in the source's order, `groups_per_step` of them per step. When they run out the next step starts
    again.

    A step never holds a group twice: the last step of a pass, or every step of a small source, has fewer groups.
    Rounds asked for in order are read in one pass; any other is found from the beginning.
    """

    def __init__(self, source: SampleSource, groups_per_step: int) -> None:
        self._source = source
        self._count = groups_per_step
        self._next = 0
        self._left = self._steps()

    async def play(self, number: int) -> Groups:
        if number != self._next:
            self._left = islice(self._steps(), number, None)
        taken = next(self._left, None)
        self._next = number + 1
        if taken is None:
            raise FileFormatError("the source holds no group of samples with rewards")
        return taken

    def _steps(self) -> Iterator[Groups]:
        while True:
            groups = iter(self._source.groups())
            empty = True
            while taken := list(islice(groups, self._count)):
                empty = False
                yield taken
            if empty:
                return
