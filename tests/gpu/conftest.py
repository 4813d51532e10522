"""Every test here needs a CUDA device and fails, never skips, without one: `make test-gpu` is the only way they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark is set here, so that the tests themselves need no pytest (see job.py)."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.fail("tests/gpu needs a CUDA device and found none")
