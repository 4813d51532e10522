"""The CUDA operators: rows do not depend on the batch, fused equals apart, values are right, gradients repeat; compared
as integers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tokentrue.numerics.cpu import CpuOps
from tokentrue.numerics.ops import AttentionSpec, ClampedSwiglu, ExpertWeights, HeadNorm, NormForm, Packed, PagedBatch
from tokentrue.numerics.selftest import fill_pages, paged_batch

GENERATOR_SEED = 5
LINEARS = (
    (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 2000), (2048, 6144), (6144, 2048), (1000, 200), (1024, 128), (256, 20000)
)  # fmt: skip
ROWS = (1, 2, 3, 7, 16, 17, 31, 32, 33, 48, 64, 65, 128, 200, 256, 257, 512, 513, 1000)


def ops() -> Any:
    from tokentrue.numerics.triton import TritonOps

    return TritonOps()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = GENERATOR_SEED) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return randn(outputs, inputs, dtype=dtype, seed=9) * inputs**-0.5


def test_linear_rows_do_not_depend_on_the_batch() -> None:
    o = ops()
    for dtype, tolerance in ((torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 2e-5)):
        for k, n in LINEARS:
            x, w, b = randn(1100, k, dtype=dtype), weight(n, k, dtype), randn(n, dtype=dtype)
            whole = o.linear(x, w, b)
            assert relative_error(whole, F.linear(x.double(), w.double(), b.double())) < tolerance
            wrong = [m for m in ROWS if not same(o.linear(x[:m], w, b), whole[:m])]
            wrong += [-m for m in ROWS if not same(o.linear(x[-m:], w, b), whole[-m:])]
            assert not wrong, f"{dtype} {k}x{n}: rows differ at {wrong}"
            assert same(o.linear(x[:40], w[64:128], b[64:128]), whole[:40, 64:128]), (
                f"{dtype} {k}x{n}: columns depend on N"
            )


def test_every_tile_gives_the_same_bits() -> None:
    from tokentrue.numerics.triton.matmul import Tile, product

    for k, n in ((1024, 4096), (3072, 1024), (1024, 2000)):
        x, w = randn(130, k), weight(n, k, torch.bfloat16)
        whole = product(x, w)
        for m, bn, bk, warps in (
            (16, 8, 512, 2),
            (16, 16, 256, 4),
            (16, 32, 128, 2),
            (16, 64, 64, 4),
            (32, 32, 128, 4),
            (64, 64, 64, 4),
            (128, 64, 64, 4),
            (128, 128, 64, 8),
        ):
            assert same(product(x, w, tile=Tile(m=m, n=bn, k=bk, warps=warps, stages=3)), whole), (
                f"tile {m}x{bn}x{bk}/{warps} differs at {k}x{n}"
            )


def test_cublas_rows_do_depend_on_the_batch() -> None:
    """The negative control: the same check finds differences where the operator is not exact."""
    differing = 0
    for dtype in (torch.bfloat16, torch.float32):
        for k, n in LINEARS:
            x, w = randn(1100, k, dtype=dtype), weight(n, k, dtype)
            whole = F.linear(x, w)
            differing += sum(not same(F.linear(x[:m], w), whole[:m]) for m in ROWS)
    assert differing > 0


def test_gated_linear_equals_its_parts() -> None:
    o = ops()
    cases = (
        (1024, 6144, "silu"),
        (1024, 6144, "gelu_pytorch_tanh"),
        (1024, 6144, "gelu"),
        (1024, 6144, "relu"),
        (256, 24576, "silu"),
        (256, 2, "silu"),
    )
    for dtype in (torch.bfloat16, torch.float32):
        for k, n, kind in cases:
            x, w = randn(300, k, dtype=dtype), weight(n, k, dtype)
            gate, up = o.linear(x, w).chunk(2, dim=-1)
            apart = o.activation(gate, kind) * up
            assert same(o.act_mul(gate, up, kind), apart), kind
            for m in (1, 5, 16, 32, 64, 100, 200, 300):
                assert same(o.gated_linear(x[:m], w, kind), apart[:m]), (n, kind, m)


def test_activation_gradients() -> None:
    from tokentrue.numerics.triton.elementwise import activation_grad

    wanted = {
        "silu": F.silu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu": F.gelu,
        "relu": F.relu,
    }
    for dtype, tolerance in ((torch.bfloat16, 5e-3), (torch.float32, 1e-6)):
        for kind, function in wanted.items():
            x, seed = (3 * randn(300, 1000, dtype=dtype)).requires_grad_(), randn(300, 1000, dtype=dtype, seed=5)
            found = torch.autograd.grad(ops().activation(x, kind), x, seed)[0]
            wide = x.detach().double().requires_grad_()
            reference = torch.autograd.grad(function(wide), wide, seed.double())[0]
            assert relative_error(found, reference) < tolerance, (kind, dtype)
            acted, slope = activation_grad(x.detach(), kind)
            assert same(acted, ops().activation(x.detach(), kind)), kind
            assert same(found, seed * slope), kind


def test_norms_do_not_depend_on_the_batch_and_fuse() -> None:
    o = ops()
    for dtype in (torch.bfloat16, torch.float32):
        for width in (64, 128, 1000, 1024, 2048, 4096, 5120):
            for unit in NormForm:
                x, r, w = (
                    randn(70, width, dtype=dtype),
                    randn(70, width, dtype=dtype, seed=3),
                    randn(width, dtype=dtype),
                )
                whole = o.rms_norm(x + r, w, 1e-6, form=unit)
                y, total = o.add_rms_norm(x, r, w, 1e-6, form=unit)
                assert same(total, x + r)
                assert same(y, whole), (dtype, width, unit)
                wide = (x + r).double()
                scale = w.double() + 1 if unit is NormForm.UNIT_OFFSET else w.double()
                assert relative_error(whole, wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * scale) < 8e-3
                assert same(o.rms_norm((x + r)[3:4], w, 1e-6, form=unit), whole[3:4])
                grown = torch.zeros(71, width + 1, dtype=dtype, device="cuda")  # rows that start at odd addresses
                grown[1:, 1:] = x + r
                assert same(o.rms_norm(grown[1:, 1:], w, 1e-6, form=unit), whole), (dtype, width, "unaligned")


def test_prepare_qkv_equals_its_parts() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for h, j, d in ((16, 8, 128), (14, 2, 64), (9, 3, 64), (4, 4, 96)):
            for norm in (
                HeadNorm(q_weight=randn(d, dtype=dtype), k_weight=randn(d, dtype=dtype, seed=2), eps=1e-6),
                None,
            ):
                qkv, cos, sin = (
                    randn(70, (h + 2 * j) * d, dtype=dtype),
                    randn(70, d, dtype=dtype),
                    randn(70, d, dtype=dtype, seed=2),
                )
                slots = torch.randperm(300, device="cuda")[:70]
                table = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
                batch = dataclasses.replace(paged_batch(0, 1, table), slots=slots)
                found = []
                for fused in (True, False):
                    o = ops()
                    o.fused = fused
                    caches = torch.zeros((2, 5, j, o.block_size, d), dtype=dtype, device="cuda")
                    found.append((o.prepare_qkv(qkv, (h, j, d), norm, cos, sin, caches[0], caches[1], batch), caches))
                assert same(found[0][0], found[1][0]), (dtype, h, j, d)
                assert same(found[0][1], found[1][1]), (dtype, h, j, d)


def test_log_softmax() -> None:
    o = ops()
    for width in (1000, 32000, 151936):
        z = randn(50, width, dtype=torch.float32) * 4
        whole = o.log_softmax(z)
        assert relative_error(whole, torch.log_softmax(z.double(), -1)) < 1e-6
        ids = torch.randint(0, width, (50,), device="cuda")
        assert same(o.token_logprobs(z, ids), whole[torch.arange(50), ids])
        for m in (1, 3, 17):
            assert same(o.log_softmax(z[:m]), whole[:m])
            assert same(o.token_logprobs(z[:m], ids[:m]), whole[torch.arange(m), ids[:m]])


# ---- attention --------------------------------------------------------------------------------------------------------------------
SHAPES = ((16, 8, 128), (16, 16, 64), (14, 2, 64), (32, 4, 128), (9, 3, 64), (8, 4, 256))
SPECS = ({}, {"window": 100}, {"softcap": 20.0})


def attention_cases(dtype: torch.dtype) -> Iterator[tuple[tuple[int, int, int], AttentionSpec, list[torch.Tensor]]]:
    for shape in SHAPES if dtype == torch.bfloat16 else SHAPES[:3:2]:
        h, j, d = shape
        for extra in SPECS if shape == SHAPES[0] else SPECS[:1]:
            yield (
                shape,
                AttentionSpec(scale=d**-0.5, **extra),
                [randn(700, n, d, dtype=dtype, seed=i) for i, n in enumerate((h, j, j))],
            )


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    at = torch.arange(q.shape[0], device=q.device)
    allowed = at[None] <= at[:, None]
    if spec.window:
        allowed &= at[None] > at[:, None] - spec.window
    return torch.einsum("hqk,khd->qhd", s.masked_fill(~allowed, -math.inf).softmax(-1), v)


def mixed_batch(lengths: list[int], contexts: list[int], decodes: int, table: torch.Tensor) -> PagedBatch:
    tokens = sum(lengths)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    zeros = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    return PagedBatch(
        positions=zeros, slots=zeros, cu_q=ends, context_lens=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        block_tables=table.expand(len(lengths), -1).contiguous(), q_lens=tuple(lengths), contexts=tuple(contexts), num_decodes=decodes,
    )  # fmt: skip


def test_attention_rows_do_not_depend_on_the_batch() -> None:
    random = torch.Generator(device="cuda").manual_seed(0)
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float32, 2e-5)):
        for shape, spec, (q, k, v) in attention_cases(dtype):
            o, case = ops(), (dtype, shape, spec)
            whole = o.attention(q, k, v, Packed.of((700,), "cuda"), spec)
            assert relative_error(whole, reference_attention(q, k, v, spec)) < tolerance, case
            packed = o.attention(
                torch.cat((q[:90], q)),
                torch.cat((k[:90], k)),
                torch.cat((v[:90], v)),
                Packed.of((90, 700), "cuda"),
                spec,
            )
            assert same(packed, torch.cat((whole[:90], whole))), case
            k_cache, v_cache, table = fill_pages(o, k, v, random)
            k_cache[0], v_cache[0] = float("nan"), float("nan")
            for split in (True, False):
                o.split_decode = split
                for position in (0, 1, 31, 32, 63, 64, 65, 127, 300, 511, 699):
                    for copies in (1, 3, 600 // shape[1] + 1):
                        found = o.paged_attention(
                            q[position].expand(copies, -1, -1).contiguous(),
                            k_cache,
                            v_cache,
                            paged_batch(position, 1, table, copies),
                            spec,
                        )
                        assert all(same(row, whole[position]) for row in found), (
                            *case,
                            "decode",
                            position,
                            split,
                            copies,
                        )
            for cut in (1, 37, 64, 400):  # chunked prefill beside a decode
                batch = mixed_batch([1, cut, 700 - cut], [301, cut, 700], 1, table)
                found = o.paged_attention(torch.cat((q[300:301], q)), k_cache, v_cache, batch, spec)
                assert same(found, torch.cat((whole[300:301], whole))), (*case, "chunk", cut)


def test_attention_gradients() -> None:
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 2e-4)):
        for shape, spec, tensors in attention_cases(dtype):
            lengths = (500, 1, 199)
            for t in tensors:
                t.requires_grad_()
            seed = randn(700, shape[0], shape[2], dtype=dtype, seed=77)
            runs = [
                torch.autograd.grad(ops().attention(*tensors, Packed.of(lengths, "cuda"), spec), tensors, seed)
                for _ in range(2)
            ]
            assert all(same(a, b) for a, b in zip(*runs, strict=True)), "gradients differ from run to run"
            pieces = zip(*(t.split(lengths) for t in tensors), strict=True)
            reference = torch.autograd.grad(
                torch.cat([reference_attention(*piece, spec) for piece in pieces]), tensors, seed.double()
            )
            for name, found, wanted in zip("qkv", runs[0], reference, strict=True):
                assert relative_error(found, wanted) < tolerance, (dtype, shape, spec, name)


def test_too_few_rows_a_warp_are_caught() -> None:
    """The negative control: a decode tile of 16 rows over four warps spreads a row's sum, and its bits change."""
    from tokentrue.numerics.triton import attention

    q, k, v = (randn(700, n, 128, seed=i) for i, n in enumerate((16, 8, 8)))
    spec, packed = AttentionSpec(scale=128**-0.5), Packed.of((700,), "cuda")
    whole = ops().attention(q, k, v, packed, spec)
    tile, keys = attention.tile_of, attention.key_block
    try:
        attention.tile_of = lambda *_, **__: attention.QueryTile(rows=16, warps=4, stages=2)
        assert not same(ops().attention(q, k, v, packed, spec), whole)
        attention.tile_of = tile
        attention.key_block = lambda dtype: 32
        assert not same(ops().attention(q, k, v, packed, spec), whole), "the key block must be part of the bits"
    finally:
        attention.tile_of, attention.key_block = tile, keys


# ---- experts ----------------------------------------------------------------------------------------------------------------------
def test_experts_rows_do_not_depend_on_the_batch() -> None:
    o = ops()
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        t, k, e, i, slots = 600, 256, 16, 192, 4
        x, gate_up, down = (
            randn(t, k, dtype=dtype),
            randn(e, 2 * i, k, dtype=dtype) / 16,
            randn(e, k, i, dtype=dtype) / 14,
        )
        scores = randn(t, e, dtype=torch.float32).softmax(-1)
        weight_, index = scores.topk(slots, dim=-1)
        weight_ = weight_.to(dtype)
        experts = ExpertWeights(gate_up=gate_up, down=down, act="silu")
        whole = o.experts(x, index, weight_, experts)
        reference = torch.zeros(t, k, dtype=torch.float64, device="cuda")
        for s in range(slots):
            gate, up = torch.einsum("tk,tik->ti", x.double(), gate_up.double()[index[:, s]]).chunk(2, -1)
            reference += (
                torch.einsum("ti,tki->tk", F.silu(gate) * up, down.double()[index[:, s]]) * weight_[:, s, None].double()
            )
        assert relative_error(whole, reference) < tolerance
        for m in (1, 2, 17, 100, 300, 599):
            assert same(o.experts(x[:m], index[:m], weight_[:m], experts), whole[:m]), (dtype, m)
            assert same(o.experts(x[-m:], index[-m:], weight_[-m:], experts), whole[-m:]), (dtype, -m)


def test_interleaved_experts_with_biases() -> None:
    """gpt-oss: rows do not depend on the batch, and values and gradients are those of plain torch."""
    o, t, k, e, i, slots = ops(), 400, 256, 8, 192, 4
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float32, 1e-4)):
        gate_up, down = randn(e, k, 2 * i, dtype=dtype) / 8, randn(e, i, k, dtype=dtype) / 14
        biases = randn(e, 2 * i, dtype=dtype), randn(e, k, dtype=dtype)
        x, (weight_, index) = randn(t, k, dtype=dtype), randn(t, e, dtype=torch.float32).softmax(-1).topk(slots, dim=-1)
        leaves = [tensor.requires_grad_() for tensor in (x, weight_.to(dtype), gate_up, down, *biases)]

        def run(tensors: Any, rows: slice, of: Any, index: torch.Tensor = index) -> torch.Tensor:
            x, weight_, gate_up, down, first, second = tensors
            act = ClampedSwiglu(alpha=1.702, limit=7.0)
            weights = ExpertWeights(
                gate_up=gate_up, down=down, act=act, interleaved=True, gate_up_bias=first, down_bias=second
            )
            return of(x[rows], index[rows], weight_[rows], weights)

        whole = run(leaves, slice(None), o.experts)
        with torch.no_grad():
            for rows in (slice(0, 1), slice(0, 17), slice(3, 120), slice(399, 400)):
                assert same(run(leaves, rows, o.experts), whole[rows]), (dtype, rows)
        wide = [tensor.detach().double().cpu().requires_grad_() for tensor in leaves]
        wanted = run(wide, slice(None), CpuOps().experts, index.cpu())
        assert relative_error(whole.cpu(), wanted) < tolerance
        mine, theirs = torch.autograd.grad(whole.float().sum(), leaves), torch.autograd.grad(wanted.sum(), wide)
        for found, gradient in zip(mine, theirs, strict=True):
            assert relative_error(found.cpu(), gradient) < tolerance, dtype


def test_sinks_take_their_share_on_every_path() -> None:
    """Attention with sinks: packed, paged, split and whole decodes agree in bits; values and gradients are those of
    plain torch."""
    o, heads, keys, size, length = ops(), 8, 2, 64, 300
    for window in (None, 128):
        q, k, v, sinks = (t.requires_grad_() for t in (randn(length, heads, size), randn(length, keys, size), randn(length, keys, size),
                                                       randn(heads)))  # fmt: skip
        spec = AttentionSpec(scale=size**-0.5, window=window, sinks=sinks)
        whole = o.attention(q, k, v, Packed.of((length,), "cuda"), spec)
        wide = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
        wanted = eager_with_sinks(*wide, window=window)
        assert relative_error(whole, wanted) < 2e-2
        mine, theirs = (
            torch.autograd.grad(out.square().sum(), ins)
            for out, ins in ((whole.float(), (q, k, v, sinks)), (wanted, wide))
        )
        for found, gradient in zip(mine, theirs, strict=True):
            assert relative_error(found, gradient) < 4e-2
        with torch.no_grad():
            k_cache, v_cache = (o.new_cache(8, keys, size, torch.bfloat16, torch.device("cuda")) for _ in range(2))
            o.store_kv(k, v, k_cache, v_cache, torch.arange(64, 64 + length, device="cuda"))
            for at in (0, 1, 63, 64, 150, 299):
                for split in (True, False):
                    o.split_decode = split
                    batch = decode_at(at)
                    assert same(o.paged_attention(q[at : at + 1], k_cache, v_cache, batch, spec), whole[at : at + 1]), (
                        window,
                        at,
                        split,
                    )


def decode_at(position: int) -> PagedBatch:
    """One sequence in pages 1, 2, …, whose query is at `position`."""

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda")

    return PagedBatch(
        positions=ints(position, dtype=torch.int64), slots=ints(64 + position, dtype=torch.int64), cu_q=ints(0, 1),
        context_lens=ints(position + 1), block_tables=ints(1, 2, 3, 4, 5, 0, 0, 0)[None], q_lens=(1,), contexts=(position + 1,),
        num_decodes=1,
    )  # fmt: skip


def eager_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, *, window: int | None
) -> torch.Tensor:
    length, heads, size = q.shape
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    at = torch.arange(length, device=q.device)
    distance = at[:, None] - at[None, :]
    hidden = (distance < 0) | (distance >= (window or length))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * size**-0.5).masked_fill(hidden, -torch.inf)
    probs = torch.cat((scores, sinks[:, None, None].expand(heads, length, 1)), -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", probs, v)


def test_linear_and_norm_gradients_repeat() -> None:
    o = ops()
    x, w = randn(300, 1024).requires_grad_(), weight(2048, 1024, torch.bfloat16).requires_grad_()
    n = randn(1024).requires_grad_()

    def grads() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o.linear(o.rms_norm(x, n, 1e-6), w).float().square().sum(), (x, w, n))

    first, second = grads(), grads()
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    wide = [t.detach().double().requires_grad_() for t in (x, w, n)]
    reference = torch.autograd.grad(F.linear(F.rms_norm(wide[0], (1024,), wide[2], 1e-6), wide[1]).square().sum(), wide)
    for found, wanted in zip(first, reference, strict=True):
        assert relative_error(found, wanted) < 2e-2


def test_self_test_finds_nothing_to_fall_back_on() -> None:
    linears = {(1024, 4096, False), (2048, 1024, False), (1024, 6144, False), (3072, 1024, False), (1024, 1024, True)}
    for dtype in (torch.bfloat16, torch.float32):
        o = ops()
        assert o.self_test(linears=linears, heads={(16, 8, 128), (14, 2, 64)}, dtype=dtype) == []
        assert o.fused and o.split_decode and not o.pinned
