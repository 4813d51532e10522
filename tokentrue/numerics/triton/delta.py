"""Recurrence of the gated delta rule: one program runs one sequence's tokens in order, for one head and a block of its
values. The state [K, BLOCK] stays in registers; the order of sums over K depends only on K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.numerics.triton.launch import cdiv, launch, let_next_start, power_of_two, wait_for_inputs

BLOCK = 32


@triton.jit
def _scan_kernel(q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, out_ptr, start_ptr, scale, H: tl.constexpr, K: tl.constexpr,
                 KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    s = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    ks = tl.arange(0, KP)
    vs = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (ks < K)[:, None] & (vs < V)[None, :]
    at = state_ptr + ((s * H + h) * K + ks[:, None]) * V + vs[None, :]
    state = tl.load(at, mask=inside, other=0.0)
    for t in range(tl.load(start_ptr + s), tl.load(start_ptr + s + 1)):
        row = t.to(tl.int64) * H + h
        key = tl.load(k_ptr + row * K + ks, mask=ks < K, other=0.0)
        query = tl.load(q_ptr + row * K + ks, mask=ks < K, other=0.0) * scale
        value = tl.load(v_ptr + row * V + vs, mask=vs < V, other=0.0)
        state = state * tl.exp(tl.load(decay_ptr + row))
        delta = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta_ptr + row)
        state = state + key[:, None] * delta[None, :]
        tl.store(out_ptr + row * V + vs, tl.sum(state * query[:, None], 0), mask=vs < V)
    let_next_start()
    tl.store(at, state, mask=inside)


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: Sequence[int],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, decay, beta = (x.contiguous() for x in (q, k, v, decay, beta))
    (_, heads, key_size), value_size = q.shape, v.shape[2]
    last = q.new_zeros(len(lengths), heads, key_size, value_size) if state is None else state.clone()
    starts = torch.tensor([0, *lengths]).cumsum(0).to(dtype=torch.int32, device=q.device)
    out = torch.empty_like(v)
    launch(
        _scan_kernel, (len(lengths), heads, cdiv(value_size, BLOCK)), q, k, v, decay, beta, last, out, starts, key_size**-0.5,
        H=heads, K=key_size, KP=power_of_two(key_size), V=value_size, BV=BLOCK, num_warps=4,
    )  # fmt: skip
    return out, last
