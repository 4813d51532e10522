"""Row sums in float64, in an order that depends on the row alone: chunk by chunk, then over the row's chunks."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_sums(slots: Tensor) -> Tensor:
    """The sum of each chunk, in float64. torch's own sum on a GPU orders its terms by the number of chunks; pairs do
    not."""
    return slots.sum(dim=1, dtype=torch.float64) if slots.device.type == "cpu" else _sum_pairs(slots.double())


def chunk_counts(flags: Tensor) -> Tensor:
    """How many of each chunk's flags are set, adding eight bytes at a time: a chunk's count fits one byte."""
    if flags.storage_offset() % 8:
        flags = flags.clone()
    words = flags.view(torch.uint8).view(torch.int64).sum(dim=1)
    return (words * 0x0101010101010101 >> 56) & 0xFF


def row_sums(sums: Tensor, chunks: Tensor) -> Tensor:
    """From the sums of chunks to those of rows, which have `chunks` of them each."""
    if sums.device.type == "cpu":
        return torch.segment_reduce(sums, "sum", lengths=chunks, unsafe=True, initial=0)
    return sum_padded_rows(sums, chunks)


def row_maxima(best: Tensor, chunks: Tensor, initial: float) -> Tensor:
    """The same for the largest value of each chunk; `initial` for rows without any."""
    return torch.segment_reduce(best, "max", lengths=chunks, unsafe=True, initial=initial)


def sum_padded_rows(sums: Tensor, chunks: Tensor) -> Tensor:
    """`row_sums` by pairs of neighbours: the zeros that fill up the shorter rows change no bit."""
    width = int(chunks.max()) if chunks.numel() else 0
    if not width:
        return sums.new_zeros(chunks.shape[0]) + sums.sum()  # 0, and still of the graph
    row = torch.arange(chunks.shape[0], device=sums.device).repeat_interleave(chunks)
    place = torch.arange(sums.shape[0], device=sums.device) - (chunks.cumsum(0) - chunks)[row] + row * width
    grid = sums.new_zeros(chunks.shape[0] * width).index_copy(0, place, sums)
    return _sum_pairs(grid.view(-1, width))


def _sum_pairs(values: Tensor) -> Tensor:
    """Sums over the last dimension, neighbours first, by elementwise additions only."""
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = torch.nn.functional.pad(values, (0, 1))
        values = values[:, 0::2] + values[:, 1::2]
    return values[:, 0]
