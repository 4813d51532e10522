"""Log-softmax over a vocabulary, and the log-probability of one token a row, from the same two numbers a row.

A row is cut into chunks of fixed size; each gives its maximum and its sum of exponentials, and one program folds them.
All after that is elementwise, so the whole row (`log_softmax`) and one gathered element (`token_logprobs`) have equal
bits. Arithmetic is float32, always.
Legend: R rows, V vocabulary.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokentrue.numerics.triton.launch import cdiv, launch, let_next_start, power_of_two, rows_of, wait_for_inputs

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
def _whole_kernel(z_ptr, stats_ptr, out_ptr, V, stride, CHUNK: tl.constexpr):
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    top = tl.load(stats_ptr + row * 2)
    log_total = tl.load(stats_ptr + row * 2 + 1)
    z = tl.load(z_ptr + row * stride + at, mask=at < V, other=0.0)
    tl.store(out_ptr + row * V + at, (z - top) - log_total, mask=at < V)


@triton.jit(do_not_specialize=["R"])
def _gather_kernel(z_ptr, stats_ptr, token_ptr, out_ptr, R, stride, BLOCK: tl.constexpr):
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = row < R
    token = tl.load(token_ptr + row, mask=ok, other=0)
    z = tl.load(z_ptr + row * stride + token, mask=ok, other=0.0)
    top = tl.load(stats_ptr + row * 2, mask=ok, other=0.0)
    log_total = tl.load(stats_ptr + row * 2 + 1, mask=ok, other=0.0)
    tl.store(out_ptr + row, (z - top) - log_total, mask=ok)


@triton.jit
def _gradient_kernel(z_ptr, stats_ptr, token_ptr, g_ptr, out_ptr, V, stride, stride_g, CHUNK: tl.constexpr):
    """out = (1 at the token, else 0) - softmax(z), times the row's gradient."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    top = tl.load(stats_ptr + row * 2)
    log_total = tl.load(stats_ptr + row * 2 + 1)
    g = tl.load(g_ptr + row * stride_g)
    token = tl.load(token_ptr + row)
    z = tl.load(z_ptr + row * stride + at, mask=at < V, other=0.0).to(tl.float32)
    d = (tl.where(at == token, 1.0, 0.0) - tl.exp((z - top) - log_total)) * g
    tl.store(out_ptr + row * V + at, d.to(out_ptr.dtype.element_ty), mask=at < V)


def logits_gradient(logits: torch.Tensor, tokens: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """Of Σ_r grads[r] · log_softmax(logits)[r, token]: [R, V] in the logits' dtype.

    The sums of a row are taken from float32, as in the forward pass: 16-bit rows would be laid out, and so summed, in
    another order.
    """
    z = rows_of(logits)
    out = torch.empty_like(z)
    if z.shape[0]:
        grid = (z.shape[0], cdiv(z.shape[1], CHUNK))
        stats = row_stats(z.float())
        launch(
            _gradient_kernel,
            grid,
            z,
            stats,
            tokens,
            grads,
            out,
            z.shape[1],
            z.stride(0),
            grads.stride(0),
            CHUNK=CHUNK,
            num_warps=4,
        )
    return out


def row_stats(z: torch.Tensor) -> torch.Tensor:
    """[R, 2]: maximum and log-sum of each row of z [R, V] float32."""
    rows, vocabulary = z.shape
    chunks = cdiv(vocabulary, CHUNK)
    top, total = torch.empty((2, rows, chunks), dtype=torch.float32, device=z.device)
    stats = torch.empty((rows, 2), dtype=torch.float32, device=z.device)
    if rows:
        launch(_chunk_kernel, (rows, chunks), z, top, total, vocabulary, z.stride(0), chunks, CHUNK=CHUNK, num_warps=4)
        launch(_fold_kernel, (rows,), top, total, stats, chunks, BLOCK=power_of_two(chunks), num_warps=1)
    return stats


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        rows, vocabulary = z.shape
        out = torch.empty_like(z)
        stats = row_stats(z)
        if rows:
            grid = (rows, cdiv(vocabulary, CHUNK))
            launch(_whole_kernel, grid, z, stats, out, vocabulary, z.stride(0), CHUNK=CHUNK, num_warps=4)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] - out.exp() * grads[0].sum(-1, keepdim=True)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        stats = row_stats(z)
        out = torch.empty(z.shape[0], dtype=torch.float32, device=z.device)
        if z.shape[0]:
            grid = (cdiv(z.shape[0], 128),)
            launch(_gather_kernel, grid, z, stats, tokens, out, z.shape[0], z.stride(0), BLOCK=128, num_warps=4)
        ctx.save_for_backward(z, tokens)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        z, tokens = ctx.saved_tensors
        return logits_gradient(z, tokens, grads[0].contiguous()), None


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, float32 in and out; differentiable."""
    return _LogSoftmax.apply(rows_of(logits.float())).reshape(logits.shape)  # type: ignore[union-attr]


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits)[..., token] without writing the rest; logits [..., V], tokens [...]; float32,
    differentiable."""
    return _TokenLogprobs.apply(rows_of(logits.float()), tokens.reshape(-1)).reshape(tokens.shape)  # type: ignore[union-attr]
