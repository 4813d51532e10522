"""Which recurrent-state slot belongs to whom (hybrid models): one per running request, the rest snapshots of prefixes.
No tensors.

A snapshot holds the state of every linear-attention layer after a whole number of cache blocks, under the name of the
last of them, so a request may start there if its blocks are cached, too. Copies between slots are queued here and done,
in order, before the next step. Slot 0 stays zero: the state before the first token.
"""

from __future__ import annotations

from collections import OrderedDict

ZERO = 0


class StatePool:
    def __init__(self, num_slots: int) -> None:
        """`num_slots` counts the zero slot; the caller leaves room for every request that may run."""
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._snapshots)

    def take(self) -> int:
        """A slot in the zero state; the oldest snapshot gives way."""
        slot = self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
        self._copies.append((ZERO, slot))
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def has(self, name: bytes) -> bool:
        return name in self._snapshots

    def restore(self, name: bytes) -> int:
        """A slot in the state of that snapshot."""
        self._snapshots.move_to_end(name)  # so that taking a slot does not evict it
        slot = self.take()
        self._copies.append((self._snapshots[name], slot))
        return slot

    def snapshot(self, name: bytes, slot: int) -> None:
        """Keep a copy of `slot` under `name`; nothing happens where there is one, or no slot to spare."""
        if name in self._snapshots or not (self._free or self._snapshots):
            return
        kept = self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
        self._copies.append((slot, kept))
        self._snapshots[name] = kept

    def forget(self) -> None:
        """All snapshots are stale (new weights)."""
        self._free.extend(self._snapshots.values())
        self._snapshots.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to), in order; the caller does them now."""
        copies, self._copies = self._copies, []
        return copies
