from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.train import test_loop


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], test_loop.Runs]:
    """By lag; tests that resume one do so in a copy."""

    @cache
    def play(lag: int) -> test_loop.Runs:
        folder = tmp_path_factory.mktemp("runs")
        whole, broken = folder / "whole", folder / "broken"
        trainer, _, reports = test_loop.run(whole, steps=6, lag=lag)
        test_loop.run(broken, steps=6, lag=lag, dies_after=4)
        return test_loop.Runs(whole, broken, trainer, reports)

    return play
