"""What the start-up checks of all devices share."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tokentrue.numerics.ops import AttentionSpec, Ops, PagedBatch, same_bits


def differing_cuts(
    function: Callable[[Tensor], Tensor], x: Tensor, cuts: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Those (start, count) of the rows whose results differ from the same rows of the whole."""
    whole = function(x)
    for start, count in cuts:
        if not same_bits(function(x[start : start + count].clone()), whole[start : start + count]):
            yield start, count


Pages = tuple[Tensor, Tensor, Tensor]  # keys, values, table [1, W]


def fill_pages(ops: Ops, k: Tensor, v: Tensor, random: torch.Generator) -> Pages:
    """Keys and values [T, J, D] of one sequence on shuffled pages."""
    (tokens, heads, size), block = k.shape, ops.block_size
    pages = -(-tokens // block)
    table = torch.randperm(pages, device=k.device, generator=random).to(torch.int32) + 1
    at = torch.arange(tokens, device=k.device)
    k_cache, v_cache = (ops.new_cache(pages + 1, heads, size, k.dtype, k.device) for _ in range(2))
    ops.store_kv(k, v, k_cache, v_cache, table[at // block].long() * block + at % block)
    return k_cache, v_cache, table[None]


def paged_batch(first: int, count: int, table: Tensor, copies: int = 1) -> PagedBatch:
    """The queries from position `first` on of `copies` sequences on the same pages."""

    def full(size: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=table.device)

    return PagedBatch(
        positions=torch.arange(first, first + count, device=table.device).repeat(copies), slots=full(count * copies, 0),
        cu_q=torch.arange(copies + 1, dtype=torch.int32, device=table.device) * count,
        context_lens=full(copies, first + count, torch.int32), block_tables=table.expand(copies, -1).contiguous(),
        q_lens=(count,) * copies, contexts=(first + count,) * copies, num_decodes=copies if count == 1 else 0,
    )  # fmt: skip


def differing_runs(
    ops: Ops, q: Tensor, whole: Tensor, pages: Pages, spec: AttentionSpec, runs: Iterable[tuple[int, int]], copies: int
) -> list[int]:
    """First positions of those `runs` (first, count) of the queries where attention over pages is not `whole`."""
    differing = []
    for first, count in runs:
        queries, wanted = (x[first : first + count].repeat(copies, 1, 1) for x in (q, whole))
        if not same_bits(
            ops.paged_attention(queries, *pages[:2], paged_batch(first, count, pages[2], copies), spec), wanted
        ):
            differing.append(first)
    return differing
