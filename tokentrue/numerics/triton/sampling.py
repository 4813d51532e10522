"""One decode step's end on the device: Gumbel-max choice, its log-probability, and the inputs of the next step; no host in between.

The noise is a hash of (seed, position, token) in float64, that of `engine/sample.py`; `engine/graphs.py` passes the seed half of the
hash as `keys`. Log-probabilities are those of `logsoftmax.py`. Legend: R rows, V vocabulary.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokentrue.numerics.logprob import scaled_logits
from tokentrue.numerics.triton.launch import STRICT, power_of_two
from tokentrue.numerics.triton.logsoftmax import row_stats

CHUNK = 1024


@triton.jit
def _mixed(z):
    """The finaliser of splitmix64 on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _choose_kernel(z_ptr, key_ptr, noisy_ptr, context_ptr, value_ptr, index_ptr, V, chunks, CHUNK: tl.constexpr):
    """The best noisy score of one chunk, and the first token that has it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    score = tl.load(z_ptr + row * V + token, mask=inside, other=float("-inf")).to(tl.float64)
    if tl.load(noisy_ptr + row) != 0:
        stream = _mixed(tl.load(key_ptr + row).to(tl.uint64) + tl.load(context_ptr + row).to(tl.uint64) * golden)
        hashed = _mixed(stream + (token + 1).to(tl.uint64) * golden)
        uniform = ((hashed >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
        score += -tl.log(-tl.log(uniform))
    best = tl.max(score, 0)
    tl.store(value_ptr + row * chunks + chunk, best)
    tl.store(index_ptr + row * chunks + chunk, tl.min(tl.where(score == best, token, 2147483647), 0))


@triton.jit
def _advance_kernel(z_ptr, stats_ptr, value_ptr, index_ptr, ids_ptr, position_ptr, slot_ptr, context_ptr, table_ptr, start_ptr, out_id_ptr,
                    out_logprob_ptr, V, chunks, R, stride_table, PAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Folds the chunks of one row, writes the result at its step of the burst, and moves the row to its next position."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(value_ptr + row * chunks + at, mask=at < chunks, other=float("-inf"))
    indices = tl.load(index_ptr + row * chunks + at, mask=at < chunks, other=2147483647)
    best = tl.max(values, 0)
    token = tl.minimum(tl.min(tl.where(values == best, indices, 2147483647), 0), V - 1).to(tl.int64)
    z = tl.load(z_ptr + row * V + token)
    logprob = (z - tl.load(stats_ptr + row * 2)) - tl.load(stats_ptr + row * 2 + 1)
    position = tl.load(position_ptr + row)
    step = position - tl.load(start_ptr + row)
    tl.store(out_id_ptr + step * R + row, token)
    tl.store(out_logprob_ptr + step * R + row, logprob)
    position += 1
    tl.store(ids_ptr + row, token)
    tl.store(position_ptr + row, position)
    tl.store(context_ptr + row, (position + 1).to(tl.int32))
    block = tl.load(table_ptr + row * stride_table + tl.minimum(position // PAGE, stride_table - 1)).to(tl.int64)
    tl.store(slot_ptr + row, block * PAGE + position % PAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The state of R decoding rows on the device; every tensor is read by the next step and moved by `advance`."""

    ids: torch.Tensor  # int64 [R]: newest token
    positions: torch.Tensor  # int64 [R]: its position
    slots: torch.Tensor  # int64 [R]: its place in the pages
    contexts: torch.Tensor  # int32 [R]: position + 1
    tables: torch.Tensor  # int32 [R, W]
    starts: torch.Tensor  # int64 [R]: position at the start of the burst
    keys: torch.Tensor  # int64 [R]: hash of the seed
    noisy: torch.Tensor  # int32 [R]: 0 takes the largest logit
    temperatures: torch.Tensor  # float32 [R]
    out_ids: torch.Tensor  # int64 [steps, R]
    out_logprobs: torch.Tensor  # float32 [steps, R]


def advance(logits: torch.Tensor, rows: Rows, page: int) -> None:
    """Sample one token a row from logits [R, V] and make it the row's newest."""
    scaled = scaled_logits(logits, rows.temperatures)
    count, vocabulary = scaled.shape
    stats = row_stats(scaled)
    chunks = triton.cdiv(vocabulary, CHUNK)
    values = torch.empty((count, chunks), dtype=torch.float64, device=scaled.device)
    indices = torch.empty((count, chunks), dtype=torch.int32, device=scaled.device)
    _choose_kernel[(count, chunks)](
        scaled, rows.keys, rows.noisy, rows.contexts, values, indices, vocabulary, chunks, CHUNK=CHUNK, num_warps=4, **STRICT
    )
    _advance_kernel[(count,)](
        scaled, stats, values, indices, rows.ids, rows.positions, rows.slots, rows.contexts, rows.tables, rows.starts, rows.out_ids,
        rows.out_logprobs, vocabulary, chunks, count, rows.tables.stride(0), PAGE=page, BLOCK=power_of_two(chunks), num_warps=1, **STRICT,
    )  # fmt: skip
