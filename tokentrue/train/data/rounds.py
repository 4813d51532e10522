"""Where batches come from: round j is the batch of step j."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Protocol, runtime_checkable

from tokentrue.errors import FileFormatError
from tokentrue.protocols import SampleSource
from tokentrue.types import Sample

Groups = list[list[Sample]]


class Rounds(Protocol):
    """`play(j)` returns the groups of round j in a fixed order; with several ranks, this rank's part."""

    async def play(self, number: int) -> Groups: ...


class NoRounds:
    """Of a rank that plays nothing."""

    async def play(self, number: int) -> Groups:
        return []


@runtime_checkable
class CountingRounds(Protocol):
    def counts(self, number: int) -> Mapping[str, float]:
        """Rollouts, failures and time-outs of a round that has ended; forgets them."""
        ...


class SourceRounds:
    """Recorded groups, `groups_per_step` per step; when they run out the next step starts again.

    A step never holds a group twice. Rounds asked for in order are read in one pass.
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
