"""Which sequences of a step share their attention products on the CPU, and which keys each does not see: plain
bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tokentrue.numerics.cpu.attention import KEYS
from tokentrue.numerics.ops import PagedBatch


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sequences that decode together: their rows, their pages, and which keys (of `keys`, padding included) they do not
    see."""

    rows: slice | Tensor
    pages: Tensor
    keys: int
    hidden: Tensor | None


def decode_buckets(contexts: tuple[int, ...]) -> list[list[int]]:
    """Sequences whose padded lengths are within a factor of two share a product; the rest would pay for the longest."""
    buckets: dict[int, list[int]] = {}
    for i, context in enumerate(contexts):
        buckets.setdefault(((context - 1) // KEYS).bit_length(), []).append(i)
    return list(buckets.values())


def prefill_buckets(batch: PagedBatch) -> list[list[int]]:
    """Runs of queries at equal positions share their products."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for i in range(batch.num_decodes, len(batch.q_lens)):
        buckets.setdefault((batch.q_lens[i], batch.contexts[i]), []).append(i)
    return list(buckets.values())


@lru_cache(maxsize=1)
def past_the_end() -> Tensor:
    """Row c: which keys of a block lie past its first c. Read only."""
    return torch.arange(KEYS)[None, :] >= torch.arange(KEYS + 1)[:, None]


def hidden_decode(contexts: list[int], keys: int, window: int | None) -> Tensor | None:
    """[S,1,N]: keys that the query of each sequence does not see; N the last block alone where that is all."""
    first = keys - KEYS
    if window is None and all(context == keys for context in contexts):
        return None
    if window is None and min(contexts) > first:
        table = past_the_end()
        return (
            table[contexts[0] - first].view(1, 1, -1)
            if len(contexts) == 1
            else table[[c - first for c in contexts]].unsqueeze(1)
        )
    ends = torch.tensor(contexts).view(-1, 1, 1)
    at = torch.arange(keys).view(1, 1, -1)
    hidden = at >= ends
    if window is not None:
        hidden |= at < ends - window
    return hidden
