"""Tests that take minutes on some processors go to `make test-slow` there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tokentrue.numerics.cpu.arithmetic import has_products

MARKS: Sequence[pytest.MarkDecorator] = [] if has_products(torch.bfloat16) else [pytest.mark.slow]
"""Of what multiplies bfloat16 by torch's own products, which have no hardware on some processors."""
BFLOAT16 = pytest.param(torch.bfloat16, marks=MARKS)
