"""What all tests of a process share: one PostgreSQL server, and one thread for arithmetic.

`make test` runs a process per core. Where each of them, and each program that it starts, takes a thread per core for every small product,
the threads wait for one another: a random schedule of the engine took 35 s instead of 4.6 s. Tests of several threads set their own number.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


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
