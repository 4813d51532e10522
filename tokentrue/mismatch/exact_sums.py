"""Sums of doubles without rounding: a total is a Python integer in units of 2**-1074, the smallest double."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tokentrue.errors import InputError

UNIT_BITS = 1074  # 2**-1074 is the smallest double: every finite double is a whole number of these
NOT_FINITE = "metrics: a sum is not finite in float64; check the size of the advantages and log-probabilities"


def exact_total(values: Iterable[float]) -> int:
    """The sum of finite doubles, exactly, in units of 2**-1074."""
    total = 0
    for value in values:
        if value:
            if not math.isfinite(value):
                raise InputError(NOT_FINITE)
            top, bottom = value.as_integer_ratio()
            total += top << (UNIT_BITS - bottom.bit_length() + 1)
    return total


def exact_totals(values: Tensor) -> list[int]:
    """`exact_total` of each row of a `[M, n]` tensor of doubles, for many of them.

    A double is h·2^(e-27) + l·2^(e-53) with whole h and l below 2^27. Those of one row and exponent add up exactly in a
    double for any n below 2^26; what is left to Python's integers is one addition per exponent.
    """
    values = values.detach().cpu()
    fraction, exponent = torch.frexp(values)
    if not values.numel():
        return [0] * values.shape[0]
    if not math.isfinite(float(fraction.sum())):
        raise InputError(NOT_FINITE)
    scaled = fraction * 2.0**27
    high = scaled.trunc()
    low = (scaled - high) * 2.0**26
    least = int(exponent.min())
    width = int(exponent.max()) - least + 1
    keys = (exponent - least + torch.arange(values.shape[0], dtype=torch.int32).unsqueeze(1) * width).view(-1)
    tables = [torch.bincount(keys, weights=part.view(-1), minlength=values.shape[0] * width) for part in (high, low)]
    totals = [0] * values.shape[0]
    found = (tables[0] != 0).logical_or(tables[1] != 0).nonzero().squeeze(1)
    for key, top, rest in zip(found.tolist(), tables[0][found].tolist(), tables[1][found].tolist(), strict=True):
        whole = (int(top) << 26) + int(rest)
        shift = key % width + least - 53 + UNIT_BITS
        totals[key // width] += whole << shift if shift >= 0 else whole >> -shift  # subnormals end in as many zero bits
    return totals


def as_float(total: int) -> float:
    """The double nearest to an exact total."""
    try:
        return total / (1 << UNIT_BITS)
    except OverflowError:
        return math.copysign(math.inf, total)
