"""One decode step's end on the device: Gumbel-max choice, its log-probability, and the inputs of the next step; no host
in between.

The noise is a hash of (seed, position, token) in float64, that of `engine/sample.py`; `engine/graphs.py` passes the
seed half of the hash as `keys`. Scores in float32 name the chunks of the vocabulary that can hold the winner; among
those it is found in float64, so the choice is that of float64 scores throughout. Log-probabilities are those of
`logsoftmax.py`. Legend: R rows, V vocabulary.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from tokentrue.numerics.triton.kernels.logsoftmax import row_stats
from tokentrue.numerics.triton.launch import cdiv, launch, let_next_start, power_of_two, wait_for_inputs

CHUNK = 1024
SLACK, SLACK_OF_SCORE = 1e-3, 1e-6
"""How far below the best quick score a chunk may hold the true winner: a quick score is within 3e-5 + 2e-7·|score| of
the true one."""


@triton.jit
def _mix(z):
    """The finaliser of splitmix64 on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _noise_bits(key, context, token):
    """The 53 random bits of each token of one row."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    stream = _mix(key.to(tl.uint64) + context.to(tl.uint64) * golden)
    return _mix(stream + (token + 1).to(tl.uint64) * golden) >> 11


@triton.jit
def _uniform(bits):
    return (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def _gumbel(bits):
    """-log(-log(u)) in float64."""
    return -tl.log(-tl.log(_uniform(bits)))


@triton.jit
def _quick_gumbel(bits):
    """The same in float32 within 3e-5: from 1 - u where u is near 1, because there the first logarithm is all
    rounding."""
    u = _uniform(bits)
    v = (1.0 - u).to(tl.float32)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    return -libdevice.fast_logf(tl.where(v < 0.0625, series, -libdevice.fast_logf(u.to(tl.float32))))


@triton.jit
def _quick_kernel(
    logit_ptr, temperature_ptr, key_ptr, noisy_ptr, context_ptr, z_ptr, top_ptr, V, chunks, CHUNK: tl.constexpr
):
    """float32 logits over temperature of one chunk, and the best quick score in it."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    logit = tl.load(logit_ptr + row * V + token, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    score = logit
    if temperature != 1.0:  # x / 1 is x, at no cost
        score = tl.div_rn(logit, tl.zeros_like(logit) + temperature)
    tl.store(z_ptr + row * V + token, score, mask=inside)
    if tl.load(noisy_ptr + row) != 0:
        score += _quick_gumbel(_noise_bits(tl.load(key_ptr + row), tl.load(context_ptr + row), token))
    tl.store(top_ptr + row * chunks + chunk, tl.max(score, 0))


@triton.jit
def _advance_kernel(z_ptr, stats_ptr, top_ptr, key_ptr, noisy_ptr, ids_ptr, position_ptr, slot_ptr, context_ptr, table_ptr, start_ptr,
                    out_id_ptr, out_logprob_ptr, V, chunks, R, stride_table, slack, slack_of_score, PAGE: tl.constexpr,
                    BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Scores in float64 the chunks that may hold the winner, writes it at its step of the burst, moves the row to its
    next position."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tops = tl.load(top_ptr + row * chunks + at, mask=at < chunks, other=float("-inf"))
    limit = tl.max(tops, 0)
    limit -= slack + slack_of_score * tl.abs(limit)
    key, context, noisy = tl.load(key_ptr + row), tl.load(context_ptr + row), tl.load(noisy_ptr + row)
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), 2147483647, tl.int32)
    chunk = tl.min(tl.where(tops >= limit, at, BLOCK), 0)
    while chunk < BLOCK:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        score = tl.load(z_ptr + row * V + token, mask=token < V, other=float("-inf")).to(tl.float64)
        if noisy != 0:
            score += _gumbel(_noise_bits(key, context, token))
        top = tl.max(score, 0)
        if top > best:  # chunks come in ascending order: on a tie the first token stays
            best = top
            winner = tl.min(tl.where(score == top, token, 2147483647), 0)
        chunk = tl.min(tl.where((tops >= limit) & (at > chunk), at, BLOCK), 0)
    token = tl.minimum(winner, V - 1).to(tl.int64)
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
    """The state of R decoding rows on the device, read by the next step and moved by `advance`."""

    order: torch.Tensor  # int32 [R+1]: 0, 1, …: each row is a sequence with one query
    ids: torch.Tensor  # int64 [R]: newest token
    positions: torch.Tensor  # int64 [R]: its position
    slots: torch.Tensor  # int64 [R]: its place in the pages
    adapters: torch.Tensor  # int64 [R]: the slot of its adapter; the number of slots where it has none
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
    count, vocabulary = logits.shape
    chunks = cdiv(vocabulary, CHUNK)
    scaled = torch.empty((count, vocabulary), dtype=torch.float32, device=logits.device)
    tops = torch.empty((count, chunks), dtype=torch.float32, device=logits.device)
    launch(
        _quick_kernel, (count, chunks), logits, rows.temperatures, rows.keys, rows.noisy, rows.contexts, scaled, tops, vocabulary, chunks,
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    launch(
        _advance_kernel, (count,), scaled, row_stats(scaled), tops, rows.keys, rows.noisy, rows.ids, rows.positions, rows.slots,
        rows.contexts, rows.tables, rows.starts, rows.out_ids, rows.out_logprobs, vocabulary, chunks, count, rows.tables.stride(0), SLACK,
        SLACK_OF_SCORE, PAGE=page, BLOCK=power_of_two(chunks), CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
