"""Gated delta rule: one kernel for training, prefill and decode, so a token's bits do not depend on where a pass starts.

A program of one warp runs one sequence's tokens in order, for one value head and BLOCK of its values: convolution of
the head's query, key and values, gates, update of the state [K, BLOCK] in registers. Sums over K stay inside the warp,
and loads are not specialised on alignment: their order depends only on K.

Legend: T tokens, S sequences, J key heads, G value heads for each, H = J·G, K key size, V value size, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import DeltaInputs, DeltaStates, Packed
from tokentrue.numerics.triton.elementwise import activate, reciprocal_rms, scale_row, warps_for
from tokentrue.numerics.triton.launch import (
    align_rows,
    cdiv,
    launch,
    let_next_start,
    power_of_two,
    wait_for_inputs,
)

BLOCK = 16
TAPS = 4


@triton.jit
def _load_taps(w_ptr, channel, inside):
    """The four weights of each channel."""
    at = w_ptr + channel * 4
    return (
        tl.load(at, mask=inside, other=0.0).to(tl.float32),
        tl.load(at + 1, mask=inside, other=0.0).to(tl.float32),
        tl.load(at + 2, mask=inside, other=0.0).to(tl.float32),
        tl.load(at + 3, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _load_history(history_ptr, slot, channel, inside, C):
    at = history_ptr + slot * 3 * C + channel
    return (
        tl.load(at, mask=inside, other=0.0).to(tl.float32),
        tl.load(at + C, mask=inside, other=0.0).to(tl.float32),
        tl.load(at + 2 * C, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _convolve(x0, x1, x2, x3, w0, w1, w2, w3, kind: tl.constexpr):
    """SiLU of the taps' sum, in order; rounded after the sum and after the function."""
    total = x0 * w0 + x1 * w1
    total = total + x2 * w2
    total = total + x3 * w3
    return activate(total.to(kind), 0).to(tl.float32)


@triton.jit
def _softplus(x):
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log(1 + e) without the rounding of 1 + e.
    log = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0 + tl.where(u == 1.0, 1.0, 0.0))))
    return tl.maximum(x, 0.0) + log


STRIDES = ["stride_t", "stride_b", "stride_a", "step_q", "step_k", "step_v", "step_b", "step_a"]


@triton.jit(
    do_not_specialize=STRIDES,
    do_not_specialize_on_alignment=["q_ptr", "k_ptr", "v_ptr", "b_ptr", "a_ptr"],
)
def _rule_kernel(q_ptr, k_ptr, v_ptr, b_ptr, a_ptr, w_ptr, log_ptr, bias_ptr, history_ptr, state_ptr, slot_ptr, start_ptr, out_ptr, scale,
                 stride_t, stride_b, stride_a, step_q, step_k, step_v, step_b, step_a, J: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
                 KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Grid (S, H, V / BV). `stride_*`: from token to token; `step_*`: from key head to key head."""
    wait_for_inputs()
    s = tl.program_id(0)
    h = tl.program_id(1)
    j = h // G
    C: tl.constexpr = 2 * J * K + J * G * V
    kind = out_ptr.dtype.element_ty
    ks = tl.arange(0, KP)
    vs = tl.program_id(2) * BV + tl.arange(0, BV)
    in_k = ks < K
    in_v = vs < V
    slot = tl.load(slot_ptr + s).to(tl.int64)
    at_q = j * K + ks
    at_k = J * K + at_q
    at_v = 2 * J * K + h * V + vs
    wq0, wq1, wq2, wq3 = _load_taps(w_ptr, at_q, in_k)
    wk0, wk1, wk2, wk3 = _load_taps(w_ptr, at_k, in_k)
    wv0, wv1, wv2, wv3 = _load_taps(w_ptr, at_v, in_v)
    q0, q1, q2 = _load_history(history_ptr, slot, at_q, in_k, C)
    k0, k1, k2 = _load_history(history_ptr, slot, at_k, in_k, C)
    v0, v1, v2 = _load_history(history_ptr, slot, at_v, in_v, C)
    inside = in_k[:, None] & in_v[None, :]
    at_state = state_ptr + ((slot * (J * G) + h) * K + ks[:, None]) * V + vs[None, :]
    state = tl.load(at_state, mask=inside, other=0.0)
    rate = tl.exp(tl.load(log_ptr + h).to(tl.float32))
    bias = tl.load(bias_ptr + h).to(tl.float32)
    first = tl.load(start_ptr + s)
    last = tl.load(start_ptr + s + 1)
    q_row = q_ptr + j * step_q + ks
    k_row = k_ptr + j * step_k + ks
    v_row = v_ptr + j * step_v + (h % G) * V + vs
    b_row = b_ptr + j * step_b + h % G
    a_row = a_ptr + j * step_a + h % G
    t = first.to(tl.int64)
    some = first < last
    q3 = tl.load(q_row + t * stride_t, mask=in_k & some, other=0.0).to(tl.float32)
    k3 = tl.load(k_row + t * stride_t, mask=in_k & some, other=0.0).to(tl.float32)
    v3 = tl.load(v_row + t * stride_t, mask=in_v & some, other=0.0).to(tl.float32)
    b = tl.load(b_row + t * stride_b, mask=some, other=0.0)
    a = tl.load(a_row + t * stride_a, mask=some, other=0.0)
    for _ in range(first, last):
        # The next token's inputs are on their way while this one is computed.
        n = t + 1
        more = n < last
        q4 = tl.load(q_row + n * stride_t, mask=in_k & more, other=0.0).to(tl.float32)
        k4 = tl.load(k_row + n * stride_t, mask=in_k & more, other=0.0).to(tl.float32)
        v4 = tl.load(v_row + n * stride_t, mask=in_v & more, other=0.0).to(tl.float32)
        next_b = tl.load(b_row + n * stride_b, mask=more, other=0.0)
        next_a = tl.load(a_row + n * stride_a, mask=more, other=0.0)
        query = _convolve(q0, q1, q2, q3, wq0, wq1, wq2, wq3, kind)
        key = _convolve(k0, k1, k2, k3, wk0, wk1, wk2, wk3, kind)
        value = _convolve(v0, v1, v2, v3, wv0, wv1, wv2, wv3, kind)
        query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6) * scale
        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        beta = activate(b, 5).to(tl.float32)
        decay = -rate * _softplus(a.to(tl.float32) + bias)
        state = state * tl.exp(decay)
        delta = (value - tl.sum(state * key[:, None], 0)) * beta
        state = state + key[:, None] * delta[None, :]
        out = tl.sum(state * query[:, None], 0)
        tl.store(out_ptr + (t * (J * G) + h) * V + vs, out.to(kind), mask=in_v)
        q0, q1, q2, q3 = q1, q2, q3, q4
        k0, k1, k2, k3 = k1, k2, k3, k4
        v0, v1, v2, v3 = v1, v2, v3, v4
        b = next_b
        a = next_a
        t = n
    let_next_start()
    tl.store(at_state, state, mask=inside)


@triton.jit
def _keep_inputs(x_row, history_ptr, inside, count, last, stride_t, C):
    """Replaces three rows of history by the last three of history and new tokens."""
    old = tl.load(history_ptr + count * C, mask=inside & (count < 3), other=0.0)
    new = tl.load(x_row + (last - 3) * stride_t, mask=inside & (count >= 3), other=0.0)
    first = tl.where(count < 3, old, new)
    old = tl.load(history_ptr + (count + 1) * C, mask=inside & (count < 2), other=0.0)
    new = tl.load(x_row + (last - 2) * stride_t, mask=inside & (count >= 2), other=0.0)
    second = tl.where(count < 2, old, new)
    old = tl.load(history_ptr + (count + 2) * C, mask=inside & (count < 1), other=0.0)
    new = tl.load(x_row + (last - 1) * stride_t, mask=inside & (count >= 1), other=0.0)
    third = tl.where(count < 1, old, new)
    tl.store(history_ptr, first, mask=inside)
    tl.store(history_ptr + C, second, mask=inside)
    tl.store(history_ptr + 2 * C, third, mask=inside)


@triton.jit(do_not_specialize=["stride_t", "step_q", "step_k", "step_v"])
def _history_kernel(q_ptr, k_ptr, v_ptr, history_ptr, slot_ptr, start_ptr, stride_t, step_q, step_k, step_v, J: tl.constexpr, G: tl.constexpr,
                    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):  # fmt: skip
    """Grid (S, H), after `_rule_kernel`, whose programs all read the old history."""
    wait_for_inputs()
    let_next_start()
    s = tl.program_id(0)
    h = tl.program_id(1)
    j = h // G
    C: tl.constexpr = 2 * J * K + J * G * V
    own = history_ptr + tl.load(slot_ptr + s).to(tl.int64) * 3 * C
    first = tl.load(start_ptr + s).to(tl.int64)
    last = tl.load(start_ptr + s + 1).to(tl.int64)
    count = last - first
    vs = tl.arange(0, VP)
    _keep_inputs(v_ptr + j * step_v + (h % G) * V + vs, own + 2 * J * K + h * V + vs, vs < V, count, last, stride_t, C)
    if h % G == 0:
        ks = tl.arange(0, KP)
        _keep_inputs(q_ptr + j * step_q + ks, own + j * K + ks, ks < K, count, last, stride_t, C)
        _keep_inputs(k_ptr + j * step_k + ks, own + J * K + j * K + ks, ks < K, count, last, stride_t, C)


def delta_rule(inputs: DeltaInputs, sequences: Packed, states: DeltaStates | None, *, padded: bool = False) -> Tensor:
    """`padded`: rows that belong to no sequence are zero."""
    (tokens, key_heads, key_size), group = inputs.q.shape, inputs.b.shape[2]
    heads, size, taps = inputs.value_heads, inputs.value_size, inputs.convolution.shape[1]
    if taps != TAPS:
        raise ExactnessError(f"a gated delta rule with {taps} taps has no exact form on CUDA; known: {TAPS}")
    q, k, v, b, a = (dense(x) for x in (inputs.q, inputs.k, inputs.v, inputs.b, inputs.a))
    assert tokens <= 1 or q.stride(0) == k.stride(0) == v.stride(0), "parts of one row"
    count, device = len(sequences.lengths), q.device
    fresh = states is None
    if states is None:  # the same kernel, so that training has the order of the engine
        states = DeltaStates(
            history=q.new_zeros(count, TAPS - 1, inputs.convolution.shape[0]),
            state=q.new_zeros(count, heads, key_size, size, dtype=torch.float32),
            slots=torch.arange(count, device=device),
        )
    out = (torch.zeros if padded else torch.empty)((tokens, heads, size), dtype=q.dtype, device=device)
    if tokens == 0:
        return out
    steps = (q.stride(1), k.stride(1), v.stride(1))
    shape = {"J": key_heads, "G": group, "K": key_size, "KP": power_of_two(key_size), "V": size}
    launch(
        _rule_kernel, (count, heads, cdiv(size, BLOCK)), q, k, v, b, a, align_rows(inputs.convolution), inputs.a_log, inputs.dt_bias,
        states.history, states.state, states.slots, sequences.cu_seqlens, out, key_size**-0.5, q.stride(0), b.stride(0), a.stride(0),
        *steps, b.stride(1), a.stride(1), **shape, BV=BLOCK, num_warps=1,
    )  # fmt: skip
    if not fresh:
        launch(
            _history_kernel, (count, heads), q, k, v, states.history, states.slots, sequences.cu_seqlens, q.stride(0), *steps, **shape,
            VP=power_of_two(size), num_warps=1,
        )  # fmt: skip
    return out


def dense(x: Tensor) -> Tensor:
    """Values of a key head side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit(do_not_specialize=["stride_t", "step_z"])
def _gated_norm_kernel(x_ptr, z_ptr, w_ptr, y_ptr, eps, stride_t, step_z, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Grid (T, H). The sum of `_norm_kernel`: same block, same warps, so same order."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    kind = y_ptr.dtype.element_ty
    inside = None if BLOCK == V else at < V
    zero = None if BLOCK == V else 0.0
    x = tl.load(x_ptr + (row * H + h) * V + at, mask=inside, other=zero).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside, other=zero)
    y = scale_row(x, reciprocal_rms(x, V, eps), w, 0, kind)
    z = tl.load(z_ptr + row * stride_t + (h // G) * step_z + (h % G) * V + at, mask=at < V, other=0.0).to(tl.float32)
    tl.store(y_ptr + (row * H + h) * V + at, (y.to(tl.float32) * activate(z, 0)).to(kind), mask=at < V)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    (tokens, heads, size), gate = x.shape, dense(gate)
    y = torch.empty_like(x)
    if tokens:
        launch(
            _gated_norm_kernel, (tokens, heads), align_rows(x), gate, align_rows(weight), y, eps, gate.stride(0), gate.stride(1),
            H=heads, G=heads // gate.shape[1], V=size, BLOCK=power_of_two(size), num_warps=warps_for(size),
        )  # fmt: skip
    return y
