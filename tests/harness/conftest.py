"""`make test-harness` ends with a table: each harness with its version, its samples and its coverage, or why it did not
run."""

from __future__ import annotations

from typing import Any

from tests.tables import show_table


def pytest_terminal_summary(terminalreporter: Any) -> None:
    show_table(terminalreporter, "tests/harness", ("harness", "samples", "coverage", "note"))
