"""The fuzz as tests: a slice of half a minute in `make test`, the long run in `make test-fuzz` (FUZZ_TURNS,
FUZZ_SEED)."""

from __future__ import annotations

import ast
import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.run import Settings, run
from tests.parts import shared

SLICE: dict[str, Any] = {"seconds": 10.0, "turns": 350}  # on a slow machine the first cases of the same sequence


def play(settings: Settings) -> None:
    outcome = asyncio.run(run(settings))
    print(outcome.report())
    assert not outcome.found, outcome.report()
    assert outcome.generations > 0 and outcome.tokens > 0


def test_the_oracle_and_its_driver_import_nothing_of_the_package() -> None:
    """Except the suite of `tokentrue conformance`, which is as independent (tests/test_house_rules.py)."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("tokentrue") and ".conformance" not in name for name in names), path


def test_a_slice_on_our_own_tokenizer() -> None:
    play(Settings(seed=1, **SLICE))


def test_a_slice_on_qwen3() -> None:
    """Qwen3's real tokenizer and template where the machine has them; our own with another seed elsewhere."""
    play(Settings(seed=2, **SLICE, model="qwen3" if shared() is not None else "own"))


@pytest.mark.fuzz
@pytest.mark.timeout(4 * 3600)
def test_a_long_run() -> None:
    seed = int(os.environ.get("FUZZ_SEED", time.time_ns() // 10**9 % 10**6))
    play(Settings(turns=int(os.environ.get("FUZZ_TURNS", "50000")), seed=seed))
