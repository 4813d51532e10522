"""Where batches come from. Round j is the batch of step j: played live by the current weights, or read from a source of samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from tokentrue.errors import FileFormatError
from tokentrue.protocols import SampleSource
from tokentrue.types import Sample

Groups = list[list[Sample]]


class Rounds(Protocol):
    """`play(j)` returns the groups of round j, in a fixed order. With a lag, several rounds are in play at once."""

    async def play(self, number: int) -> Groups: ...


class SourceRounds:
    """Recorded groups, a fixed number per step, in the source's order; starts again when they run out.

    Rounds asked for in order are read in one pass; any other is found from the beginning.
    """

    def __init__(self, source: SampleSource, groups_per_step: int) -> None:
        self._source = source
        self._count = groups_per_step
        self._next = 0
        self._left: Iterator[list[Sample]] = self._endless()

    async def play(self, number: int) -> Groups:
        if number != self._next:
            self._left = islice(self._endless(), number * self._count, None)
        taken = list(islice(self._left, self._count))
        self._next = number + 1
        if not taken:
            raise FileFormatError("the source holds no group of samples with rewards")
        return taken

    def _endless(self) -> Iterator[list[Sample]]:
        while True:
            empty = True
            for group in self._source.groups():
                empty = False
                yield group
            if empty:
                return
