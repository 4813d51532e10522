"""Every test here needs a CUDA device and fails, never skips, without one: `make test-gpu` is the only way they run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.fail("tests/gpu needs a CUDA device and found none")
