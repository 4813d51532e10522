"""Gated delta rule: the same two kernels for training, prefill and decode.

The first computes convolution, lengths and gates of every token and key head; the second runs a sequence's tokens in
order, for one value head and BLOCK of its values, with the state [K, BLOCK] in registers (a head's state is stored
block by block). Programs are one warp: sums over K stay inside it, and loads of views are not specialised on
alignment, so that their order depends only on K.

Legend: T tokens, S sequences, J key heads, G value heads for each, H = J·G, K key size, V value size, C channels.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import DeltaInputs, DeltaStates, Packed
from tokentrue.numerics.triton.elementwise import activate, scale_row, warps_for
from tokentrue.numerics.triton.launch import align_rows, cdiv, launch, let_next_start, power_of_two, wait_for_inputs

BLOCK = 16
TAPS = 4
# Ends of sequences compared at a time.
ENDS = 128
# Tokens from which a program has several: starting it costs more than its work.
MANY, EACH = 1024, 8


@triton.jit
def _tap(x_row, history, inside, back, t, first, stride_t, C):
    """The input `back` tokens before token t: a new one, or one of the three in history, oldest first."""
    is_new = t - back >= first
    new = tl.load(x_row + (t - back) * stride_t, mask=inside & is_new, other=0.0)
    old = tl.load(history + (t - back - first + 3) * C, mask=inside & (t - back < first), other=0.0)
    return tl.where(is_new, new, old).to(tl.float32)


@triton.jit
def _convolve(x_row, history, weight, inside, t, first, stride_t, C, kind: tl.constexpr):
    """SiLU of the taps' sum, in order; rounded after the sum and after the function."""
    total = _tap(x_row, history, inside, 3, t, first, stride_t, C) * tl.load(weight, mask=inside, other=0.0).to(
        tl.float32
    )
    for i in tl.static_range(1, 4):
        w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        total = total + _tap(x_row, history, inside, 3 - i, t, first, stride_t, C) * w
    return activate(total.to(kind), 0)


@triton.jit
def _softplus(x):
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    # log(1 + e) without the rounding of 1 + e.
    log = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0 + tl.where(u == 1.0, 1.0, 0.0))))
    return tl.maximum(x, 0.0) + log


@triton.jit(
    do_not_specialize=["S", "stride_t", "stride_b", "stride_a", "step_q", "step_k", "step_v", "step_b", "step_a"],
    do_not_specialize_on_alignment=["q_ptr", "k_ptr", "v_ptr", "b_ptr", "a_ptr"],
)
def _inputs_kernel(q_ptr, k_ptr, v_ptr, b_ptr, a_ptr, w_ptr, log_ptr, bias_ptr, history_ptr, slot_ptr, start_ptr, mixed_ptr, norm_ptr, gate_ptr,
                   T, S, stride_t, stride_b, stride_a, step_q, step_k, step_v, step_b, step_a, J: tl.constexpr, G: tl.constexpr,
                   K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, ENDS: tl.constexpr,
                   EACH: tl.constexpr):  # fmt: skip
    """Grid (T / EACH, J, 2 + G): what the recurrence reads, of a query, a key or the values of a head. mixed [T, C] after the
    convolution; 1 / length of query and key [2, T, J]; factor of the state and beta [2, T, H]. `stride_*`: from token to
    token; `step_*`: from key head to key head. EACH: tokens of a program; 0: one, and every sequence has one."""
    wait_for_inputs()
    let_next_start()
    if EACH == 0:
        _token_inputs(q_ptr, k_ptr, v_ptr, b_ptr, a_ptr, w_ptr, log_ptr, bias_ptr, history_ptr, slot_ptr, start_ptr, mixed_ptr,
                      norm_ptr, gate_ptr, T, tl.program_id(0), tl.program_id(0), stride_t, stride_b, stride_a, step_q, step_k,
                      step_v, step_b, step_a, J, G, K, KP, V, VP)  # fmt: skip
    ends = tl.arange(0, ENDS)
    for i in range(EACH):
        t = tl.program_id(0) * EACH + i
        s = 0
        for chunk in range(0, S, ENDS):  # sequences that end before this token
            end = tl.load(start_ptr + 1 + chunk + ends, mask=chunk + ends < S, other=2147483647)
            s += tl.sum((end <= t).to(tl.int32), 0)
        if (s < S) & (t < T):  # else padding
            _token_inputs(q_ptr, k_ptr, v_ptr, b_ptr, a_ptr, w_ptr, log_ptr, bias_ptr, history_ptr, slot_ptr, start_ptr, mixed_ptr,
                          norm_ptr, gate_ptr, T, t, s, stride_t, stride_b, stride_a, step_q, step_k, step_v, step_b, step_a,
                          J, G, K, KP, V, VP)  # fmt: skip


@triton.jit
def _token_inputs(q_ptr, k_ptr, v_ptr, b_ptr, a_ptr, w_ptr, log_ptr, bias_ptr, history_ptr, slot_ptr, start_ptr, mixed_ptr, norm_ptr, gate_ptr,
                  T, t, s, stride_t, stride_b, stride_a, step_q, step_k, step_v, step_b, step_a, J: tl.constexpr, G: tl.constexpr,
                  K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):  # fmt: skip
    t = t.to(tl.int64)
    j = tl.program_id(1)
    part = tl.program_id(2)
    C: tl.constexpr = 2 * J * K + J * G * V
    kind = mixed_ptr.dtype.element_ty
    first = tl.load(start_ptr + s).to(tl.int64)
    history = history_ptr + tl.load(slot_ptr + s).to(tl.int64) * 3 * C
    row = mixed_ptr + t * C
    if part < 2:
        ks = tl.arange(0, KP)
        at = part * J * K + j * K + ks
        x_row = q_ptr + j * step_q + ks
        if part == 1:
            x_row = k_ptr + j * step_k + ks
        x = _convolve(x_row, history + at, w_ptr + at * 4, ks < K, t, first, stride_t, C, kind)
        tl.store(row + at, x, mask=ks < K)
        x = x.to(tl.float32)
        tl.store(norm_ptr + (part * T + t) * J + j, 1.0 / tl.sqrt(tl.sum(x * x, 0) + 1e-6))
    else:
        vs = tl.arange(0, VP)
        g = part - 2
        h = j * G + g
        at_v = 2 * J * K + h * V + vs
        x_row = v_ptr + j * step_v + g * V + vs
        value = _convolve(x_row, history + at_v, w_ptr + at_v * 4, vs < V, t, first, stride_t, C, kind)
        tl.store(row + at_v, value, mask=vs < V)
        a = tl.load(a_ptr + t * stride_a + j * step_a + g).to(tl.float32) + tl.load(bias_ptr + h).to(tl.float32)
        decay = -tl.exp(tl.load(log_ptr + h).to(tl.float32)) * _softplus(a)
        tl.store(gate_ptr + t * J * G + h, tl.exp(decay))
        b = activate(tl.load(b_ptr + t * stride_b + j * step_b + g), 5)
        tl.store(gate_ptr + (T + t) * J * G + h, b.to(tl.float32))


@triton.jit(do_not_specialize=["T", "stride_t", "step_q", "step_k", "step_v"])
def _rule_kernel(mixed_ptr, norm_ptr, gate_ptr, state_ptr, slot_ptr, start_ptr, out_ptr, q_ptr, k_ptr, v_ptr, history_ptr, T, scale, stride_t,
                 step_q, step_k, step_v, J: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
                 VP: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Grid (S, H, V / BV). Also replaces the history, which `_inputs_kernel` has read."""
    wait_for_inputs()
    s = tl.program_id(0)
    h = tl.program_id(1)
    j = h // G
    H: tl.constexpr = J * G
    C: tl.constexpr = 2 * J * K + H * V
    ks = tl.arange(0, KP)
    vs = tl.program_id(2) * BV + tl.arange(0, BV)
    in_k = ks < K
    in_v = vs < V
    slot = tl.load(slot_ptr + s).to(tl.int64)
    first = tl.load(start_ptr + s).to(tl.int64)
    last = tl.load(start_ptr + s + 1).to(tl.int64)
    inside = in_k[:, None] & in_v[None, :]
    # A program's part of the state is contiguous.
    start = tl.program_id(2) * BV
    width = BV if V % BV == 0 else tl.minimum(V - start, BV)
    at_state = state_ptr + (slot * H + h) * K * V + start * K + ks[:, None] * width + tl.arange(0, BV)[None, :]
    state = tl.load(at_state, mask=inside, other=0.0)
    q_at = mixed_ptr + j * K + ks
    k_at = mixed_ptr + J * K + j * K + ks
    v_at = mixed_ptr + 2 * J * K + h * V + vs
    t = first
    some = first < last
    query = tl.load(q_at + t * C, mask=in_k & some, other=0.0)
    key = tl.load(k_at + t * C, mask=in_k & some, other=0.0)
    value = tl.load(v_at + t * C, mask=in_v & some, other=0.0)
    q_norm = tl.load(norm_ptr + t * J + j, mask=some, other=0.0)
    k_norm = tl.load(norm_ptr + (T + t) * J + j, mask=some, other=0.0)
    factor = tl.load(gate_ptr + t * H + h, mask=some, other=0.0)
    beta = tl.load(gate_ptr + (T + t) * H + h, mask=some, other=0.0)
    for _ in range(first, last):
        # The next token's inputs are on their way while this one is computed.
        n = t + 1
        more = n < last
        next_query = tl.load(q_at + n * C, mask=in_k & more, other=0.0)
        next_key = tl.load(k_at + n * C, mask=in_k & more, other=0.0)
        next_value = tl.load(v_at + n * C, mask=in_v & more, other=0.0)
        next_q_norm = tl.load(norm_ptr + n * J + j, mask=more, other=0.0)
        next_k_norm = tl.load(norm_ptr + (T + n) * J + j, mask=more, other=0.0)
        next_factor = tl.load(gate_ptr + n * H + h, mask=more, other=0.0)
        next_beta = tl.load(gate_ptr + (T + n) * H + h, mask=more, other=0.0)
        k = (key.to(tl.float32) * k_norm)[:, None]
        q = (query.to(tl.float32) * (q_norm * scale))[:, None]
        state = state * factor
        delta = (value.to(tl.float32) - tl.sum(state * k, 0)) * beta
        state = tl.fma(k + tl.zeros_like(state), delta[None, :] + tl.zeros_like(state), state)
        out = tl.sum(state * q, 0)
        tl.store(out_ptr + (t * H + h) * V + vs, out.to(out_ptr.dtype.element_ty), mask=in_v)
        query, key, value = next_query, next_key, next_value
        q_norm, k_norm, factor, beta = next_q_norm, next_k_norm, next_factor, next_beta
        t = n
    let_next_start()
    tl.store(at_state, state, mask=inside)
    if tl.program_id(2) == 0:
        own = history_ptr + slot * 3 * C
        count = last - first
        at = tl.arange(0, VP)
        x_row = v_ptr + j * step_v + (h % G) * V + at
        _keep_inputs(x_row, own + 2 * J * K + h * V + at, at < V, count, last, stride_t, C)
        if h % G == 0:
            _keep_inputs(q_ptr + j * step_q + ks, own + j * K + ks, in_k, count, last, stride_t, C)
            _keep_inputs(k_ptr + j * step_k + ks, own + J * K + j * K + ks, in_k, count, last, stride_t, C)


@triton.jit
def _keep_inputs(x_row, history, inside, count, last, stride_t, C):
    """Replaces the three rows of history by the last three of history and new tokens."""
    old = tl.load(history + count * C, mask=inside & (count < 3), other=0.0)
    new = tl.load(x_row + (last - 3) * stride_t, mask=inside & (count >= 3), other=0.0)
    first = tl.where(count < 3, old, new)
    old = tl.load(history + (count + 1) * C, mask=inside & (count < 2), other=0.0)
    new = tl.load(x_row + (last - 2) * stride_t, mask=inside & (count >= 2), other=0.0)
    second = tl.where(count < 2, old, new)
    old = tl.load(history + (count + 2) * C, mask=inside & (count < 1), other=0.0)
    new = tl.load(x_row + (last - 1) * stride_t, mask=inside & (count >= 1), other=0.0)
    third = tl.where(count < 1, old, new)
    tl.store(history, first, mask=inside)
    tl.store(history + C, second, mask=inside)
    tl.store(history + 2 * C, third, mask=inside)


def delta_rule(inputs: DeltaInputs, sequences: Packed, states: DeltaStates | None, *, padded: bool = False) -> Tensor:
    """`padded`: rows that belong to no sequence are zero."""
    (tokens, key_heads, key_size), group = inputs.q.shape, inputs.b.shape[2]
    heads, size, (channels, taps) = inputs.value_heads, inputs.value_size, inputs.convolution.shape
    if taps != TAPS:
        raise ExactnessError(f"a gated delta rule with {taps} taps has no exact form on CUDA; known: {TAPS}")
    q, k, v, b, a = (dense(x) for x in (inputs.q, inputs.k, inputs.v, inputs.b, inputs.a))
    assert tokens <= 1 or q.stride(0) == k.stride(0) == v.stride(0), "parts of one row"
    count = len(sequences.lengths)
    if states is None:  # the same kernels, so that training has the order of the engine
        states = DeltaStates(
            history=q.new_zeros(count, TAPS - 1, channels),
            slots=torch.arange(count, device=q.device),
            state=q.new_zeros(count, heads, key_size, size, dtype=torch.float32),
        )
    out = (torch.zeros if padded else torch.empty)((tokens, heads, size), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    mixed = torch.empty((tokens, channels), dtype=q.dtype, device=q.device)
    norms, gates = (torch.empty((2, tokens, n), dtype=torch.float32, device=q.device) for n in (key_heads, heads))
    where, steps = (states.slots, sequences.cu_seqlens), (q.stride(1), k.stride(1), v.stride(1))
    shape = {
        "J": key_heads,
        "G": group,
        "K": key_size,
        "KP": power_of_two(key_size),
        "V": size,
        "VP": power_of_two(size),
    }
    each = 0 if sequences.lengths == (1,) * tokens else 1 if tokens <= MANY else EACH
    launch(
        _inputs_kernel, (cdiv(tokens, each or 1), key_heads, 2 + group), q, k, v, b, a, align_rows(inputs.convolution), inputs.a_log, inputs.dt_bias, states.history,
        *where, mixed, norms, gates, tokens, count, q.stride(0), b.stride(0), a.stride(0), *steps, b.stride(1), a.stride(1), **shape,
        ENDS=ENDS, EACH=each, num_warps=1,
    )  # fmt: skip
    launch(
        _rule_kernel, (count, heads, cdiv(size, BLOCK)), mixed, norms, gates, states.state, *where, out, q, k, v, states.history, tokens,
        key_size**-0.5, q.stride(0), *steps, **shape, BV=BLOCK, num_warps=1,
    )  # fmt: skip
    return out


def dense(x: Tensor) -> Tensor:
    """Values of a key head side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit(do_not_specialize=["stride_t", "step_z"])
def _gated_norm_kernel(x_ptr, z_ptr, w_ptr, y_ptr, eps, stride_t, step_z, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
                       BLOCK: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Grid (T, H / HEADS). A head has the warps of `_norm_kernel`, so that its sum has the same order."""
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    kind = y_ptr.dtype.element_ty
    inside = (at < V) & (h >= 0)
    x = tl.load(x_ptr + (row * H + h) * V + at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    y = scale_row(x, rstd, tl.load(w_ptr + at, mask=at < V, other=0.0), 0, kind)
    z = tl.load(z_ptr + row * stride_t + (h // G) * step_z + (h % G) * V + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + (row * H + h) * V + at, (y.to(tl.float32) * activate(z, 0)).to(kind), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    (tokens, heads, size), gate = x.shape, dense(gate)
    y = torch.empty_like(x)
    if tokens:
        together = math.gcd(heads, 8)
        launch(
            _gated_norm_kernel, (tokens, heads // together), align_rows(x), gate, align_rows(weight), y, eps, gate.stride(0), gate.stride(1),
            H=heads, G=heads // gate.shape[1], V=size, BLOCK=power_of_two(size), HEADS=together, num_warps=together * warps_for(size),
        )  # fmt: skip
    return y
