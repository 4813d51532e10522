"""RMS norm with one fixed order of its sum, alone, with the residual added first, and as the head norm inside
`rope.py`.

One row is one program; its block and warps depend on the row's width alone, so that the order of the sum does too.
Rounding is that of the Hugging Face modules, as `NormForm` names it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokentrue.numerics.ops import NormForm
from tokentrue.numerics.triton.launch import (
    align_rows,
    cdiv,
    launch,
    let_next_start,
    power_of_two,
    rows_of,
    wait_for_inputs,
)


@triton.jit
def reciprocal_rms(x, D: tl.constexpr, eps):
    """1/rms of one row held as float32; positions past D hold zeros."""
    return tl.rsqrt(tl.sum(x * x, 0) / D + eps)


@triton.jit
def scale_row(x, rstd, w, FORM: tl.constexpr, kind: tl.constexpr):
    """The normed row in the model's dtype; x is float32, w the weight as stored."""
    if FORM == 1:
        return (x * rstd * (1.0 + w.to(tl.float32))).to(kind)
    if FORM == 2:
        return (x * rstd * w.to(tl.float32)).to(kind)
    return ((x * rstd).to(kind).to(tl.float32) * w.to(tl.float32)).to(kind)


@triton.jit
def _norm_kernel(x_ptr, res_ptr, w_ptr, y_ptr, sum_ptr, rstd_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
                 FORM: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    kind = y_ptr.dtype.element_ty
    if BLOCK == D:
        x = tl.load(x_ptr + row * D + at)
        w = tl.load(w_ptr + at)
    else:
        x = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0)
        w = tl.load(w_ptr + at, mask=at < D, other=0.0)
    if RESIDUAL:
        if BLOCK == D:  # noqa: SIM108
            r = tl.load(res_ptr + row * D + at)
        else:
            r = tl.load(res_ptr + row * D + at, mask=at < D, other=0.0)
        x = (r.to(tl.float32) + x.to(tl.float32)).to(kind)
        tl.store(sum_ptr + row * D + at, x, mask=at < D)
    x = x.to(tl.float32)
    rstd = reciprocal_rms(x, D, eps)
    if SAVE:
        tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * D + at, scale_row(x, rstd, w, FORM, kind), mask=at < D)


def warps_for(width: int) -> int:
    """Eight elements a thread for 16-bit rows: one warp up to 256 elements, at most eight."""
    return min(max(power_of_two(width) // 256, 1), 8)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, form: NormForm, save: bool
) -> tuple[torch.Tensor, ...]:
    rows, width = x.shape
    y = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x
    rstd = torch.empty(rows if save else 1, dtype=torch.float32, device=x.device)
    if rows:
        launch(
            _norm_kernel, (rows,), x, residual if residual is not None else x, align_rows(weight), y, total, rstd, eps,
            D=width, BLOCK=power_of_two(width), RESIDUAL=residual is not None, FORM=int(form), SAVE=save,
            num_warps=warps_for(width),
        )  # fmt: skip
    return y, total, rstd


@triton.jit(do_not_specialize=["rows", "per"])
def _norm_grad_kernel(x_ptr, w_ptr, rstd_ptr, dy_ptr, dx_ptr, dw_ptr, rows, per, D: tl.constexpr, BLOCK: tl.constexpr,
                      FORM: tl.constexpr):  # fmt: skip
    """Program p computes dx of rows [p·per, (p+1)·per) and, row after row, their share of dw."""
    wait_for_inputs()
    p = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    if FORM == 1:
        w += 1.0
    share = tl.zeros((BLOCK,), tl.float32)
    for row in range(p * per, tl.minimum((p + 1) * per, rows)):
        rstd = tl.load(rstd_ptr + row)
        z = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
        dz = dy * w
        dx = (dz - z * (tl.sum(dz * z, 0) / D)) * rstd
        tl.store(dx_ptr + row * D + at, dx.to(dx_ptr.dtype.element_ty), mask=at < D)
        share += dy * z
    let_next_start()
    tl.store(dw_ptr + p * D + at, share, mask=at < D)


PROGRAMS = 2112
"""Programs of a backward pass: sixteen a multiprocessor of an H200. Fixed, so that the order of dw's sum depends on the
rows alone."""


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, form: NormForm
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    dx, per = torch.empty_like(x), cdiv(rows, PROGRAMS)
    programs = cdiv(rows, per)
    dw = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    launch(
        _norm_grad_kernel, (programs,), x, align_rows(weight), rstd, rows_of(dy), dx, dw, rows, per, D=width, BLOCK=power_of_two(width),
        FORM=int(form), num_warps=warps_for(width),
    )  # fmt: skip
    return dx, dw.sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm) -> torch.Tensor:
        y, _, rstd = _launch(x, None, weight, eps, form, True)
        ctx.save_for_backward(x, weight, rstd)
        ctx.form = form
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        if x.shape[0] == 0:
            return torch.zeros_like(x), torch.zeros_like(weight), None, None
        dx, dw = _gradients(x, weight, rstd, grads[0], ctx.form)
        return dx, dw.to(weight.dtype), None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, form: NormForm = NormForm.PLAIN) -> torch.Tensor:
    """RMS norm over the last dimension; differentiable."""
    flat = rows_of(x)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RMSNorm.apply(flat, weight, eps, form).reshape(x.shape)  # type: ignore[union-attr]
    return _launch(flat, None, weight, eps, form, False)[0].reshape(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, form: NormForm = NormForm.PLAIN
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(residual + x), residual + x), both rounded as apart; for inference."""
    y, total, _ = _launch(rows_of(x), rows_of(residual), weight, eps, form, False)
    return y.reshape(x.shape), total.reshape(x.shape)
