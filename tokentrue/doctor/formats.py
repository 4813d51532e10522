"""Number formats as roundings of a tensor: integers, float8 and 4-bit codes, by what shares a scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

Rounding: TypeAlias = Callable[[Tensor], Tensor]
# Rows of a cache are one head's of one token, its matrices one head's, its columns channels.
SCOPES: Mapping[str, Any] = {"row": -1, "matrix": (-2, -1), "column": -2, "token": (-3, -1), "tensor": (-3, -2, -1)}
NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)  # fmt: skip
FP4 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _largest(value: Tensor, dims: Any) -> Tensor:
    return (value.abs().max() if dims is None else value.abs().amax(dim=dims, keepdim=True)).clamp(min=1e-12)


def _integers(value: Tensor, dims: Any, *, top: int) -> Tensor:
    step = _largest(value, dims) / top
    return (value / step).round().clamp(-top - 1, top) * step


def _with_zero(value: Tensor, dims: Any, *, levels: int, is_whole: bool) -> Tensor:
    """From the least to the largest value; `is_whole`: 0 is a level."""
    low, high = value.amin(dim=dims, keepdim=True), value.amax(dim=dims, keepdim=True)
    if is_whole:
        low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / levels).clamp(min=1e-12)
    zero = (-low / step).round() if is_whole else -low / step
    return ((value / step + zero).round().clamp(0, levels) - zero) * step


def _float8(value: Tensor, dims: Any, *, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    scale = 1.0 if dims is None else _largest(value, dims) / top
    return (value / scale).clamp(-top, top).to(dtype).to(value.dtype) * scale


def to_float8(value: Tensor, scaled_as: Tensor) -> Tensor:
    """With the scale of another matrix."""
    scale = _largest(scaled_as, None) / 448
    return (value / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(value.dtype) * scale


def _coded(value: Tensor, dims: Any, *, codes: tuple[float, ...]) -> Tensor:
    scale, points = _largest(value, dims) / codes[-1], torch.tensor(codes)
    return points[torch.bucketize((value / scale).contiguous(), (points[1:] + points[:-1]) / 2)] * scale


def _microscaled(value: Tensor, dims: Any) -> Tensor:
    """MX formats: scales are powers of 2, by the largest value's exponent."""
    scale, points = torch.exp2(_largest(value, dims).log2().floor() - 2), torch.tensor(FP4)
    return points[torch.bucketize((value / scale).contiguous(), (points[1:] + points[:-1]) / 2)] * scale


def _in_blocks(value: Tensor, rows: int, columns: int, codec: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """With a scale for each block; those at the edges may be smaller."""
    shape = value.shape[-2:]
    padded = pad(value, (0, -shape[1] % columns, 0, -shape[0] % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return codec(blocks, (-3, -1)).flatten(-4, -3).flatten(-2)[..., : shape[0], : shape[1]]


def _scoped(name: str, codec: Callable[[Tensor, Any], Tensor], *scopes: str | int) -> dict[str, Rounding]:
    found: dict[str, Rounding] = {}
    for scope in scopes:
        if isinstance(scope, int):
            found[f"{name} in groups of {scope}"] = partial(_in_blocks, rows=1, columns=scope, codec=codec)
        elif scope.endswith("block"):
            size = int(scope.removesuffix("block") or 128)
            found[f"{name} per {scope}"] = partial(_in_blocks, rows=size, columns=size, codec=codec)
        else:
            found[f"{name} per {scope}" if scope else f"{name} without scale"] = partial(codec, dims=SCOPES.get(scope))
    return found


def _integer_formats(bits: int) -> dict[str, Rounding]:
    top = 2 ** (bits - 1) - 1
    real, whole = (partial(_with_zero, levels=2 * top + 1, is_whole=is_whole) for is_whole in (False, True))
    return {
        **_scoped(f"int{bits}", partial(_integers, top=top), *SCOPES, 8, 16, 32, 64, 128),
        **_scoped(f"int{bits} with zero points", real, "row", "column", 16, 32, 64),
        **_scoped(f"int{bits} with whole zero points", whole, "row", 32, 64, 128),
    }


_e4m3, _e5m2 = (partial(_float8, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
FORMATS: Mapping[str, Mapping[str, Rounding]] = {
    "int8": _integer_formats(8),
    "fp8": {
        **_scoped("float8_e4m3fn", _e4m3, "row", "", "matrix", "tensor", "column", "block", "64block", 32, 64, 128),
        **_scoped("float8_e5m2", _e5m2, "row", "", "matrix", "tensor"),
    },
    "int4": {
        **_integer_formats(4),
        **_scoped("nf4", partial(_coded, codes=NF4), 64, "row"),
        **_scoped("fp4", partial(_coded, codes=FP4), 16, 32, "row"),
        **_scoped("mxfp4", _microscaled, 32),
    },
}
NARROW: Mapping[str, Rounding] = {"bfloat16": lambda s: s.bfloat16().float(), "float16": lambda s: s.half().float()}


def tf32(value: Tensor) -> Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
