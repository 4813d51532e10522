"""One PostgreSQL server for the tests of a process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    from tests.sessions.postgres_server import find_programs, run_server

    if find_programs() is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")
    with run_server() as server:
        yield server


@pytest.fixture
def database(postgres_server: Any) -> str:
    """The URL of an empty database."""
    return postgres_server.new_database(f"t{uuid.uuid4().hex[:12]}")
