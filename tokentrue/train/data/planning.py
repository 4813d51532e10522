"""Minibatches, ranks and forward passes of one step, from sessions, row lengths and advantages alone.

Invariants: the rows of a session are in one minibatch; every row of a minibatch belongs to exactly one rank; every rank
makes the same number of forward passes; which rows share a pass changes no result but rounding.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokentrue.train.data.rows import Row, list_sessions


def pack(lengths: Sequence[int], budget: int, *, padded: bool = False) -> list[list[int]]:
    """Bins of row numbers that cost at most `budget` tokens: longest first, into the first bin with room.

    A bin costs the sum of its rows or, `padded`, their number times the longest. A longer row is a bin by itself.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[int] = []
    for row in order:
        for place, left in enumerate(room):
            cost = lengths[bins[place][0]] if padded else lengths[row]  # the first row of a bin is its longest
            if cost <= left:
                bins[place].append(row)
                room[place] -= cost
                break
        else:
            bins.append([row])
            room.append(budget - lengths[row])
    return [sorted(found) for found in bins]


def share(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows for each rank, balanced by tokens: longest first, to the rank that has least."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(row)
        loads[rank] += lengths[row]
    return [sorted(rows) for rows in shares]


def split_even(count: int, parts: int) -> list[range]:
    """`count` rows in `parts` runs whose sizes differ by at most one; empty runs are left out."""
    bounds = [count * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds) if b > a]


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimiser update. `rows` are those of all ranks, the rest is this rank's.

    `idle` rows give no gradient: they are scored, corrected and counted, but not trained on.
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
    """How rows become forward passes."""

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
    """Sessions are dealt whole, in their order or in one drawn with the seed."""
    sessions = list_sessions(rows)
    order = range(len(sessions)) if shuffle_seed is None else shuffle(len(sessions), *shuffle_seed)
    made: list[Minibatch] = []
    for part in split_even(len(sessions), parts):
        numbers = sorted(number for place in part for number in sessions[order[place]])
        active = packing.bins(rows, [i for i in numbers if is_trained[i]])
        idle = packing.bins(rows, [i for i in numbers if not is_trained[i]])
        made.append(Minibatch(rows=tuple(numbers), active=active, idle=idle))
    return made


def shuffle(count: int, *seed: object) -> list[int]:
    order = list(range(count))
    random.Random(repr(seed)).shuffle(order)
    return order
