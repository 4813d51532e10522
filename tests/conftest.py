"""What all tests of a process share: one PostgreSQL server, one thread for arithmetic, the number of examples.

`make test` runs three processes on two cores. Where each of them, and each program that it starts, takes a thread per
core for every small product, the threads wait for one another: a random schedule of the engine took 35 s instead of 4.6
s. Tests, and commands that they call, set their own number where they need several; it ends with the test.
"""

from __future__ import annotations

import gc
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

# `make test-slow` sets `thorough`. No deadline: a busy machine is no defect.
settings.register_profile("fast", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=100, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


ROOT = Path(__file__).resolve().parent.parent
AT_START = pytest.StashKey[set[str]]()


def list_names() -> set[str]:
    """Of the repository's folder, without what building makes there (.gitignore)."""
    made = {"build", "dist", "site", "tokentrue.egg-info"}
    return {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - made


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[AT_START] = list_names()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that writes into the repository's folder fails the run: one that starts a program there gives it a
    directory of its own."""
    if not hasattr(session.config, "workerinput") and (new := list_names() - session.config.stash[AT_START]):
        print(f"\nThe tests have left files in {ROOT}: {', '.join(sorted(new))}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection() -> None:
    """The garbage collector need not look again and again at the millions of objects that imports make."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


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
