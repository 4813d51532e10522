"""Which rows share a forward pass: pure arithmetic on lengths, the same answer for the same lengths.

With batch-invariant operators the packing changes no log-probability; it only changes how fast they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int, *, padded: bool = False) -> list[list[int]]:
    """Bins of row numbers that cost at most `budget` tokens: longest first, into the first bin with room.

    A bin costs the sum of its rows or, `padded`, their number times the longest. A row longer than the budget gets a
    bin of its own:
    it cannot be cut.
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
