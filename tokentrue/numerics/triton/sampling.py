"""Log-softmax over a vocabulary, and the end of a decode step on the device.

A row is cut into chunks of fixed size; each gives its maximum and its sum of exponentials, and one program folds them.
All else is elementwise, so `log_softmax`, `token_logprobs` and `advance` have equal bits. The Gumbel noise is that of
`engine/sample.py`. float32 scores select the chunks that can contain the winner; among those it is found in float64.

Legend: R rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from tokentrue.numerics.triton.launch import cdiv, launch, let_next_start, power_of_two, rows_of, wait_for_inputs
from tokentrue.records import record

CHUNK = 4096


@triton.jit
def _chunk_kernel(z_ptr, top_ptr, total_ptr, V, stride, chunks, CHUNK: tl.constexpr):
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(z_ptr + row * stride + at, mask=at < V, other=float("-inf"))
    top = tl.max(z, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(top_ptr + row * chunks + chunk, top)
    tl.store(total_ptr + row * chunks + chunk, tl.sum(tl.exp(z - safe), 0))


@triton.jit
def _fold_kernel(top_ptr, total_ptr, out_ptr, chunks, BLOCK: tl.constexpr):
    """out[row] = (maximum, log of the sum of exponentials under it)."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tops = tl.load(top_ptr + row * chunks + at, mask=at < chunks, other=float("-inf"))
    totals = tl.load(total_ptr + row * chunks + at, mask=at < chunks, other=0.0)
    top = tl.max(tops, 0)
    tl.store(out_ptr + row * 2, top)
    tl.store(out_ptr + row * 2 + 1, tl.log(tl.sum(totals * tl.exp(tops - top), 0)))


@triton.jit
def _whole_kernel(
    z_ptr, stats_ptr, token_ptr, g_ptr, out_ptr, V, stride, stride_g, GRADIENT: tl.constexpr, CHUNK: tl.constexpr
):
    """Log-softmax of z; GRADIENT: ((1 at the token, else 0) - softmax(z)) times the row's gradient."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    top = tl.load(stats_ptr + row * 2)
    log_total = tl.load(stats_ptr + row * 2 + 1)
    z = tl.load(z_ptr + row * stride + at, mask=at < V, other=0.0).to(tl.float32)
    out = (z - top) - log_total
    if GRADIENT:
        out = (tl.where(at == tl.load(token_ptr + row), 1.0, 0.0) - tl.exp(out)) * tl.load(g_ptr + row * stride_g)
    tl.store(out_ptr + row * V + at, out.to(out_ptr.dtype.element_ty), mask=at < V)


def row_stats(z: Tensor) -> Tensor:
    """[R, 2]: maximum and log-sum of each row."""
    rows, vocabulary = z.shape
    chunks = cdiv(vocabulary, CHUNK)
    top, total = torch.empty((2, rows, chunks), dtype=torch.float32, device=z.device)
    stats = torch.empty((rows, 2), dtype=torch.float32, device=z.device)
    if rows:
        launch(_chunk_kernel, (rows, chunks), z, top, total, vocabulary, z.stride(0), chunks, CHUNK=CHUNK, num_warps=4)
        launch(_fold_kernel, (rows,), top, total, stats, chunks, BLOCK=power_of_two(chunks), num_warps=1)
    return stats


def whole_rows(z: Tensor, tokens: Tensor | None = None, grads: Tensor | None = None) -> Tensor:
    """Log-softmax of z [R, V], or the gradient of Σ_r grads[r] · log_softmax(z)[r, tokens[r]], in z's dtype.

    A row's sums are computed from float32 in both: 16-bit rows would have another layout, and so another order of sums.
    """
    (rows, vocabulary), out, stats = z.shape, torch.empty_like(z), row_stats(z.float())
    if rows:
        more = (stats, stats, 0) if grads is None else (tokens, grads, grads.stride(0))
        launch(
            _whole_kernel, (rows, cdiv(vocabulary, CHUNK)), z, stats, *more[:2], out, vocabulary, z.stride(0), more[2],
            GRADIENT=grads is not None, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    return out


def log_softmax(logits: Tensor) -> Tensor:
    return whole_rows(rows_of(logits.float())).reshape(logits.shape)


def logits_gradient(logits: Tensor, tokens: Tensor, grads: Tensor) -> Tensor:
    return whole_rows(rows_of(logits), tokens, grads)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    z = rows_of(logits.float())
    top, log_total = row_stats(z).unbind(-1)
    return ((z.gather(-1, tokens.reshape(-1, 1))[:, 0] - top) - log_total).reshape(tokens.shape)


SAMPLING_CHUNK = 1024
# How far below the best quick score a chunk may hold the winner: a quick score is within 3e-5 + 2e-7·|score|.
SLACK, SLACK_OF_SCORE = 1e-3, 1e-6


@triton.jit
def _mix(z):
    """The finaliser of splitmix64 on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(key, context, token):
    """Of each token of one row; `key`: hash of the seed."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    stream = _mix(key.to(tl.uint64) + context.to(tl.uint64) * golden)
    bits = _mix(stream + (token + 1).to(tl.uint64) * golden) >> 11
    return (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def _quick_gumbel(u):
    """-log(-log(u)) in float32 within 3e-5: from 1 - u where u is near 1, because there the first logarithm is all
    rounding."""
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
        score += _quick_gumbel(_uniform(tl.load(key_ptr + row), tl.load(context_ptr + row), token))
    tl.store(top_ptr + row * chunks + chunk, tl.max(score, 0))


@triton.jit
def _advance_kernel(z_ptr, stats_ptr, top_ptr, key_ptr, noisy_ptr, ids_ptr, position_ptr, slot_ptr, context_ptr, table_ptr, start_ptr,
                    out_id_ptr, out_logprob_ptr, V, chunks, R, stride_table, slack, slack_of_score, PAGE: tl.constexpr,
                    BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Writes the winner at its step of the burst, and moves the row to its next position."""
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
            score += -tl.log(-tl.log(_uniform(key, context, token)))
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


@record
class Rows:
    order: Tensor  # int32 [R+1]: 0, 1, …: each row is a sequence with one query
    ids: Tensor  # int64 [R]: newest token
    positions: Tensor  # int64 [R]: its position
    shifts: Tensor  # int64 [R]: what images add to it in the rotary embedding
    slots: Tensor  # int64 [R]: its place in the pages
    adapters: Tensor  # int64 [R]: the slot of its adapter; the number of slots where it has none
    states: Tensor  # int64 [R]: the slot of its recurrent state
    contexts: Tensor  # int32 [R]: position + 1
    tables: Tensor  # int32 [R, W]
    starts: Tensor  # int64 [R]: position at the start of the burst
    keys: Tensor  # int64 [R]: hash of the seed
    noisy: Tensor  # int32 [R]: 0 takes the largest logit
    temperatures: Tensor  # float32 [R]
    out_ids: Tensor  # int64 [steps, R]
    out_logprobs: Tensor  # float32 [steps, R]


def advance(logits: Tensor, rows: Rows, page: int) -> None:
    """Samples one token per row from logits [R, V] and makes it the row's newest."""
    count, vocabulary = logits.shape
    chunks = cdiv(vocabulary, SAMPLING_CHUNK)
    scaled = torch.empty((count, vocabulary), dtype=torch.float32, device=logits.device)
    tops = torch.empty((count, chunks), dtype=torch.float32, device=logits.device)
    launch(
        _quick_kernel, (count, chunks), logits, rows.temperatures, rows.keys, rows.noisy, rows.contexts, scaled, tops, vocabulary, chunks,
        CHUNK=SAMPLING_CHUNK, num_warps=4,
    )  # fmt: skip
    launch(
        _advance_kernel, (count,), scaled, row_stats(scaled), tops, rows.keys, rows.noisy, rows.ids, rows.positions, rows.slots,
        rows.contexts, rows.tables, rows.starts, rows.out_ids, rows.out_logprobs, vocabulary, chunks, count, rows.tables.stride(0), SLACK,
        SLACK_OF_SCORE, PAGE=page, BLOCK=power_of_two(chunks), CHUNK=SAMPLING_CHUNK, num_warps=8,
    )  # fmt: skip
