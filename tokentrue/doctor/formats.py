"""Number formats as roundings of a tensor: integers, float8 and 4-bit codes, by what shares a scale."""

from collections.abc import Callable, Mapping
from functools import partial
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Rounding = Callable[[Tensor], Tensor]
Codec = Callable[..., Tensor]  # of a value, and the dimensions that share a scale
# Rows of a cache are one head's of one token, its matrices one head's, its columns channels.
SCOPES: Mapping[str, Any] = {"row": -1, "matrix": (-2, -1), "column": -2, "token": (-3, -1), "tensor": (-3, -2, -1)}
NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)  # fmt: skip
FP4 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return value.clamp(-top, top).to(dtype).to(value.dtype)


def _nearest(value: Tensor, codes: Tensor) -> Tensor:
    return codes[torch.bucketize(value.contiguous(), (codes[1:] + codes[:-1]) / 2)]


def _two_scales(largest: Tensor, top: float) -> Tensor:
    """As NVFP4 has them: a float8 for each group, a float32 for all."""
    outer = largest.max() / (top * 448)
    return _cast(largest / top / outer, torch.float8_e4m3fn).clamp(min=2**-9) * outer


TWO, EXPONENTS = ", scales powers of 2", ", scales powers of 2 by exponents"
FLOAT16, FLOAT8 = ", scales float16", ", scales float8"
# A scale, by the largest value and the format's own largest.
SCALES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "": lambda largest, top: largest / top,
    TWO: lambda largest, top: (largest / top).log2().ceil().exp2(),
    EXPONENTS: lambda largest, top: (largest.log2().floor() - int(log2(top))).exp2(),
    FLOAT16: lambda largest, top: (largest / top).half().float(),
    FLOAT8: _two_scales,
}


def _scaled(value: Tensor, dims: Any, *, top: float, code: Rounding, scales: str = "") -> Tensor:
    if dims is None:
        return code(value)
    scale = SCALES[scales](value.abs().amax(dim=dims, keepdim=True).clamp(min=1e-12), top).to(value.dtype)
    return code(value / scale) * scale


def _with_zero(value: Tensor, dims: Any, *, levels: int, is_whole: bool) -> Tensor:
    """From the least to the largest value; `is_whole`: 0 is a level."""
    low, high = value.amin(dim=dims, keepdim=True), value.amax(dim=dims, keepdim=True)
    if is_whole:
        low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / levels).clamp(min=1e-12)
    zero = (-low / step).round() if is_whole else -low / step
    return ((value / step + zero).round().clamp(0, levels) - zero) * step


def to_float8(value: Tensor, scaled_as: Tensor) -> Tensor:
    """With the scale of another matrix."""
    scale = scaled_as.abs().max().clamp(min=1e-12) / 448
    return _cast(value / scale, torch.float8_e4m3fn) * scale


def _in_blocks(value: Tensor, rows: int, columns: int, codec: Codec) -> Tensor:
    """With a scale for each block; those at the edges may be smaller."""
    shape = value.shape[-2:]
    padded = pad(value, (0, -shape[1] % columns, 0, -shape[0] % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return codec(blocks, (-3, -1)).flatten(-4, -3).flatten(-2)[..., : shape[0], : shape[1]]


def _scoped(name: str, codec: Codec, *scopes: str | int, scales: str = "") -> dict[str, Rounding]:
    """`scopes`: names of `SCOPES`, sizes of groups in a row, "block" and "64block"; "" is no scale."""
    found: dict[str, Rounding] = {}
    codec = partial(codec, scales=scales) if scales else codec
    for scope in scopes:
        if isinstance(scope, int):
            found[f"{name} in groups of {scope}{scales}"] = partial(_in_blocks, rows=1, columns=scope, codec=codec)
        elif scope.endswith("block"):
            size = int(scope.removesuffix("block") or 128)
            found[f"{name} per {scope}{scales}"] = partial(_in_blocks, rows=size, columns=size, codec=codec)
        else:
            label = f"{name} per {scope}{scales}" if scope else f"{name} without scale"
            found[label] = partial(codec, dims=SCOPES.get(scope))
    return found


def _integer_formats(bits: int) -> dict[str, Rounding]:
    top = 2 ** (bits - 1) - 1
    plain: Codec = partial(_scaled, top=top, code=lambda value: value.round().clamp(-top - 1, top))
    real, whole = (partial(_with_zero, levels=2 * top + 1, is_whole=is_whole) for is_whole in (False, True))
    return {
        **_scoped(f"int{bits}", plain, *SCOPES, 8, 16, 32, 64, 128),
        **_scoped(f"int{bits}", plain, "row", 32, 128, scales=FLOAT16),
        **_scoped(f"int{bits} with zero points", real, "row", "column", 16, 32, 64, 128),
        **_scoped(f"int{bits} with whole zero points", whole, "row", 32, 64, 128),
    }


def _float8(dtype: torch.dtype) -> Codec:
    return partial(_scaled, top=torch.finfo(dtype).max, code=partial(_cast, dtype=dtype))


_e4m3, _e5m2, _fnuz = map(_float8, (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz))
_nf4, _fp4 = (partial(_scaled, top=each[-1], code=partial(_nearest, codes=torch.tensor(each))) for each in (NF4, FP4))
FORMATS: Mapping[str, Mapping[str, Rounding]] = {
    "int8": _integer_formats(8),
    "fp8": {
        **_scoped("float8_e4m3fn", _e4m3, "row", "", "matrix", "tensor", "column", "block", "64block", 32, 64, 128),
        # Scales that are powers of 2 round alike in any scope: the one that engines have is tried first.
        **_scoped("float8_e4m3fn", _e4m3, "block", "row", 128, scales=TWO),
        **_scoped("float8_e4m3fn", _e4m3, 32, scales=EXPONENTS),
        **_scoped("float8_e5m2", _e5m2, "row", "", "matrix", "tensor"),
        **_scoped("float8_e4m3fnuz", _fnuz, "row", "", "matrix", "tensor"),
    },
    "int4": {
        **_integer_formats(4),
        **_scoped("nf4", _nf4, 64, "row"),
        **_scoped("fp4", _fp4, 16, 32, "row"),
        **_scoped("fp4", _fp4, 16, scales=FLOAT8),
        **_scoped("fp4", _fp4, 32, scales=EXPONENTS),
        **_scoped("fp4", _fp4, 32, scales=TWO),
    },
}
NARROW: Mapping[str, Rounding] = {"bfloat16": lambda s: s.bfloat16().float(), "float16": lambda s: s.half().float()}


def tf32(value: Tensor) -> Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
