"""`make test-frameworks` ends with a table: each framework with its version and how many of its rows equal the record,
or why it did not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tables import show_table

COLUMNS = ("framework", "rows", "equal", "note")


@pytest.fixture
def add_row(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """`add_row(name_and_version, rows, equal, note)`."""

    def add(*cells: Any) -> None:
        for column, cell in zip(COLUMNS, cells, strict=True):
            record_property(column, cell)

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    show_table(terminalreporter, "tests/integrations", COLUMNS)
