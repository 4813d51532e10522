"""The checks of `make check` on words and containers: spelling, banned phrases, Dockerfile, compose file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CHECKS = [
    ["codespell"],
    ["python", "scripts/check_prose.py"],
    ["hadolint", "Dockerfile"],
    ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check[0])
def test_make_check_finds_nothing(check: list[str]) -> None:
    assert f"$(BIN)/{' '.join(check)}" in (ROOT / "Makefile").read_text(), "make check runs it, too"
    done = subprocess.run([BIN / check[0], *check[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_prose", ROOT / "scripts" / "check_prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the noise hangs on the seed", ["hangs on"]),
        ("the run that\nwas there is gone on\nwith", ["gone on with"]),
        ("```text\nit hears\n```\nA line that\nis Robust.", ["Robust"]),
        ("changes one rehearsal; `robustness` is a word of its own", []),
    ],
)
def test_phrases_are_found_over_line_breaks_and_not_in_code(prose: ModuleType, text: str, found: list[str]) -> None:
    assert [phrase for _, phrase, _ in prose.findings(text, prose.banned())] == found


def test_the_line_is_named(prose: ModuleType) -> None:
    assert next(prose.findings("one\n\n```text\nx\n```\nit hears", prose.banned()))[0] == 6


def test_patterns_are_in_lower_case(prose: ModuleType) -> None:
    assert [pattern for pattern, _ in prose.banned() if pattern != pattern.lower()] == []
    assert [phrase for _, phrase, _ in prose.findings("It Hears.", prose.banned())] == ["Hears"]
