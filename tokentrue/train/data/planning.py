"""Who trains what, where: minibatches, ranks and forward passes of one step, from sessions, row lengths and advantages
alone.

Invariants: the rows of a session are in one minibatch; every row of a minibatch belongs to exactly one rank; every rank
makes the same number of forward passes; which rows share a pass changes no result but rounding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokentrue.train.data.batch import Row, sessions_of
from tokentrue.train.data.packing import pack, share, split_even


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimiser update. `rows` are all rows that its loss is a mean over, on all ranks; the rest is this rank's.

    `idle` are rows that give no gradient: they are scored, corrected and counted, but not trained on.
    """

    rows: tuple[int, ...]
    active: tuple[tuple[int, ...], ...]  # forward passes; empty ones keep the ranks in step
    idle: tuple[tuple[int, ...], ...]

    @property
    def bins(self) -> tuple[tuple[int, ...], ...]:
        return (*self.active, *self.idle)

    @property
    def mine(self) -> list[int]:
        return [row for bin_ in self.bins for row in bin_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How rows become forward passes: a budget of tokens, padded or not, this rank's number and how many there are."""

    budget: int
    padded: bool
    rank: int = 0
    world: int = 1

    def bins(self, rows: Sequence[Row], numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """This rank's forward passes over `numbers`; every rank has as many, some perhaps empty."""
        if not numbers:
            return ()
        shares = share([rows[i].length for i in numbers], self.world)
        packed = [pack([rows[numbers[k]].length for k in found], self.budget, padded=self.padded) for found in shares]
        most = max(len(bins) for bins in packed)
        mine = [tuple(numbers[shares[self.rank][k]] for k in found) for found in packed[self.rank]]
        return (*mine, *(() for _ in range(most - len(mine))))


def plan_minibatches(
    rows: Sequence[Row],
    is_trained: Sequence[bool],
    packing: Packing,
    *,
    parts: int,
    shuffle_seed: tuple[object, ...] | None = None,
) -> list[Minibatch]:
    """Sessions are dealt whole, in their order or in one drawn with the seed: how many updates there are, and what a
    session weighs in its update, does not depend on how many rows it has."""
    sessions = sessions_of(rows)
    order = range(len(sessions)) if shuffle_seed is None else shuffle(len(sessions), *shuffle_seed)
    made: list[Minibatch] = []
    for part in split_even(len(sessions), parts):
        numbers = sorted(number for place in part for number in sessions[order[place]])
        active = packing.bins(rows, [i for i in numbers if is_trained[i]])
        idle = packing.bins(rows, [i for i in numbers if not is_trained[i]])
        made.append(Minibatch(rows=tuple(numbers), active=active, idle=idle))
    return made


def shuffle(count: int, *seed: object) -> list[int]:
    """An order of `count` sessions that depends on the seed alone."""
    order = list(range(count))
    random.Random(repr(seed)).shuffle(order)
    return order
