"""One token's residual sum, norm and product in one launch: decoding a single sequence is a chain of launches, and this
makes it shorter.

Every program norms the row for itself with the sum of `norm.py` (same block, same warps, so same order) and rounds as
the modules apart do; the product is that of `matmul.py`. One row only; shapes that the tile does not divide go through
the modules apart.
Legend: N outputs, K inputs.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokentrue.numerics.ops import NormForm
from tokentrue.numerics.triton.kernels.activation import activate, branch_of
from tokentrue.numerics.triton.kernels.matmul import precision_of
from tokentrue.numerics.triton.kernels.norm import reciprocal_rms, scale_row, warps_for
from tokentrue.numerics.triton.launch import align_rows, launch, let_next_start, power_of_two, wait_for_inputs
from tokentrue.numerics.triton.tiles import VOCABULARY

WIDE, DEEP, STAGES = 32, 256, 4


@triton.jit
def _norm_product_kernel(h_ptr, res_ptr, norm_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, N, eps, K: tl.constexpr, KP: tl.constexpr,
                         BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
                         FORM: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    w_cols = w_ptr + cols.to(tl.int64) * K
    up_cols = w_cols + N.to(tl.int64) * K
    kind = y_ptr.dtype.element_ty
    at = tl.arange(0, KP)
    if KP == K:
        h = tl.load(h_ptr + at)
        r = tl.load(res_ptr + at)
    else:
        h = tl.load(h_ptr + at, mask=at < K, other=0.0)
        r = tl.load(res_ptr + at, mask=at < K, other=0.0)
    total = (r.to(tl.float32) + h.to(tl.float32)).to(kind)
    if tl.program_id(0) == 0:
        tl.store(sum_ptr + at, total, mask=at < K)
    rstd = reciprocal_rms(total.to(tl.float32), K, eps)
    first = (tl.arange(0, 16) == 0)[:, None]
    ks = tl.arange(0, BK)
    acc = tl.zeros((16, BN), tl.float32)
    up = tl.zeros((16, BN), tl.float32)
    for k in range(0, K, BK):
        x = (tl.load(res_ptr + k + ks).to(tl.float32) + tl.load(h_ptr + k + ks).to(tl.float32)).to(kind)
        x = scale_row(x.to(tl.float32), rstd, tl.load(norm_ptr + k + ks), FORM, kind)
        row = tl.where(first, x[None, :], 0.0).to(kind)
        acc = tl.dot(row, tl.load(w_cols[None, :] + k + ks[:, None]), acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(row, tl.load(up_cols[None, :] + k + ks[:, None]), up, input_precision=PRECISION)
    let_next_start()
    if BIAS:
        acc += tl.load(b_ptr + cols).to(tl.float32)[None, :]
    y = acc.to(kind)
    if GATED:
        y = (activate(y, ACT).to(tl.float32) * up.to(kind).to(tl.float32)).to(kind)
    out = y_ptr + cols[None, :] + tl.zeros((16, 1), tl.int32)
    tl.store(out, y, mask=first & (cols >= 0)[None, :])


def fits(h: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> bool:
    outputs, inputs = weight.shape
    if h.shape[0] != 1 or h.dtype == torch.float32 or outputs > VOCABULARY:  # a large head would norm the row too often
        return False
    return inputs % DEEP == 0 and outputs % (2 * WIDE if gated else WIDE) == 0


def norm_product(
    h: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None,
    *, form: NormForm = NormForm.PLAIN, act: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(product of the normed residual + h, residual + h) for one row; with `act` the product is gated, weight = [gate;
    up]."""
    h, residual, weight, norm = align_rows(h), align_rows(residual), align_rows(weight), align_rows(norm)
    inputs = weight.shape[1]
    outputs = weight.shape[0] // (1 if act is None else 2)
    y = torch.empty((1, outputs), dtype=h.dtype, device=h.device)
    total = torch.empty_like(h)
    launch(
        _norm_product_kernel, (outputs // WIDE,), h, residual, norm, weight, bias if bias is not None else h, y, total, outputs, eps,
        K=inputs, KP=power_of_two(inputs), BN=WIDE, BK=DEEP, BIAS=bias is not None, GATED=act is not None,
        ACT=branch_of(act) if act is not None else 0, FORM=int(form), PRECISION=precision_of(h.dtype),
        num_warps=warps_for(inputs), num_stages=STAGES,
    )  # fmt: skip
    return y, total
