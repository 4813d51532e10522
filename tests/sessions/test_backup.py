"""The commands of docs/operating.md: a backup of a store that is being written opens, is whole, and continues."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.sessions.test_journal import append, created, row
from tokentrue.sessions import Journal


async def fill(journal: Journal, count: int) -> None:
    await created(journal, *(f"s{number}" for number in range(4)))
    for number in range(count):
        await append(journal, f"s{number % 4}", row(f"n{number}", number // 4))


async def test_sqlite_backup_while_the_store_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "live.db")
    await fill(journal, 40)
    writing = asyncio.create_task(_write_more(journal))
    await asyncio.to_thread(_backup, tmp_path / "live.db", tmp_path / "copy.db")
    await writing
    copy = Journal(tmp_path / "copy.db")  # checks the whole file
    for number in range(4):
        live = journal.rows(f"s{number}")
        saved = copy.rows(f"s{number}")
        assert len(saved) >= 10 and live[: len(saved)] == saved
    await append(copy, "s0", row("later", len(copy.rows("s0"))))
    copy.close()
    journal.close()


async def _write_more(journal: Journal) -> None:
    for number in range(40, 400):
        await append(journal, f"s{number % 4}", row(f"n{number}", number // 4))


def _backup(live: Path, copy: Path) -> None:
    """What `sqlite3 live.db ".backup copy.db"` does."""
    with sqlite3.connect(live) as source, sqlite3.connect(copy) as target:
        source.backup(target, pages=8, sleep=0.001)
    source.close()
    target.close()


@pytest.mark.postgres
async def test_pg_dump_and_restore(postgres_server: Any, database: str) -> None:
    from tests.sessions.postgres_server import find_programs
    from tokentrue.sessions.journal.postgres import PostgresJournal

    programs = find_programs()
    assert programs is not None
    journal = PostgresJournal(database, name="a")
    await fill(journal, 20)
    dump = subprocess.run([programs / "pg_dump", "--format=custom", database], check=True, capture_output=True).stdout
    other = postgres_server.new_database("restored")
    subprocess.run([programs / "pg_restore", "--dbname", other], input=dump, check=True)
    restored = PostgresJournal(other, name="b")
    assert [restored.rows(f"s{number}") for number in range(4)] == [journal.rows(f"s{number}") for number in range(4)]
    journal.close()
    with pytest.raises(Exception, match="owned by gateway 'a'"):
        restored.acquire("s0")  # the lease was restored, too: it expires
    restored.close()
