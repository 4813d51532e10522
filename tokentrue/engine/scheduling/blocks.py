"""Which cache block belongs to whom: reference counts, and sharing of equal prefixes. Pure bookkeeping, no tensors.

A full block is named by the hash of its tokens and of the block before it, so equal names mean equal prefixes from
position 0, and (keys and values being bit-identical whoever computes them) equal contents. Freed blocks keep their name
until they are needed for something else, oldest first. Block 0 is the null block and never handed out.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, *, shuffle: random.Random | None = None) -> None:
        """`shuffle` hands blocks out in random order: for tests, because no bit may depend on where a page lies."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        order = list(range(1, num_blocks))
        if shuffle is not None:
            shuffle.shuffle(order)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(order)
        self._references = [0] * num_blocks
        self._named: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def take(self) -> int:
        """A block with rubbish in it; the caller has checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        name = self._name.pop(block, None)
        if name is not None:
            del self._named[name]
        self._references[block] = 1
        return block

    def share(self, name: bytes) -> int | None:
        """The block of that name with one more reference, or None."""
        block = self._named.get(name)
        if block is None:
            return None
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1
        return block

    def has(self, name: bytes) -> bool:
        return name in self._named

    def name(self, block: int, name: bytes) -> None:
        """`block` is full and computed. If an equal one has the name already, this one stays private."""
        if name not in self._named and block not in self._name:
            self._named[name] = block
            self._name[block] = name

    def release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if block not in self._name:  # nothing to remember: use it first
                self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """All contents are stale (new weights): no name survives."""
        self._named.clear()
        self._name.clear()
