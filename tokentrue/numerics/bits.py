"""Equality of tensors as bits."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits: no tolerance, and -0 is not 0."""
    kind = INTEGERS[a.element_size()]
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )
