"""Every benchmark prints its tables; no time is judged. Those that need a GPU are run by tests/gpu."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from benchmarks import ROOT, Report

NAMES = ("agents", "engine", "gateway", "mismatch", "render", "request_path", "samples", "tree")


def test_a_report_is_a_plain_table() -> None:
    report = Report(title="t", columns=("what", "ms"), rows=[("a", 1.23456), ("longer", 2)], notes=("n",))
    assert report.as_text() == "t\nwhat    ms\na       1.235\nlonger  2\n  n\n"


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_imported(name: str) -> None:
    assert import_module(f"benchmarks.{name}").__doc__


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_prints_its_tables(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "measured on: " in done.stdout, done.stderr[-2000:]
