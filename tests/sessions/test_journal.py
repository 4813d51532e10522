"""The durable store: group commit, compare-and-swap, migration, deletion, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokentrue.errors import JournalError, SessionConflict, SessionNotFound
from tokentrue.sessions import Journal, SessionRecord, StoreLock
from tokentrue.sessions.journal.database import read_statements
from tokentrue.sessions.journal.rows import Row
from tokentrue.sessions.journal.sqlite import STEPS, VERSION


def row(name: str, seq: int, parent: str | None = None) -> Row:
    return Row(id=name, seq=seq, parent=parent, given_ids=b"1234", sampled_ids=b"", logprobs=b"", chain=b"c", body=b"{}",
               routed_experts=None, created=time.time())  # fmt: skip


def record(name: str, **fields: Any) -> SessionRecord:
    return SessionRecord(id=name, created=time.time(), **fields)


@pytest.fixture(params=["memory", "file", pytest.param("postgres", marks=pytest.mark.postgres)])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "postgres":
        from tokentrue.sessions.journal.postgres import PostgresJournal

        journal: Journal = PostgresJournal(request.getfixturevalue("database"), name="one")
        yield journal
        journal.close()
        return
    journal = Journal("memory" if request.param == "memory" else f"sqlite:{tmp_path / 'deep' / 'j.db'}")
    yield journal
    journal.close()


async def created(journal: Journal, *names: str, **fields: Any) -> None:
    for name in names:
        await asyncio.wrap_future(journal.create(record(name, **fields)))


async def append(journal: Journal, session_id: str, row: Row) -> None:
    await journal.append_nodes(session_id, [row])


async def test_records_come_back_as_they_were(journal: Journal) -> None:
    whole = SessionRecord(
        id="s", group="g", metadata={"a": [1, "ü\ud800"]}, sampling={"temperature": 0.1}, history="template", training=False,
        template="t", tokenizer="k", key_hash="h", created=1.5,
    )  # fmt: skip
    await asyncio.wrap_future(journal.create(whole))
    assert journal.get("s") == whole
    changed = await journal.update("s", lambda old: replace(old, state="ended", ended=2.5))
    assert journal.get("s") == changed and changed.ended == 2.5


async def test_a_commit_is_compare_and_swap(journal: Journal) -> None:
    await created(journal, "s")
    await append(journal, "s", row("a", 0))
    with pytest.raises(SessionConflict, match="parent"):
        await append(journal, "s", row("b", 1, parent="nobody"))
    with pytest.raises(SessionConflict, match="sequence number 0 is taken"):
        await append(journal, "s", row("b", 0, parent="a"))
    with pytest.raises(SessionConflict):
        await append(journal, "s", row("a", 1))
    with pytest.raises(SessionNotFound):
        await append(journal, "t", row("x", 0))
    await append(journal, "s", row("b", 1, parent="a"))
    assert [item.id for item in journal.rows("s")] == ["a", "b"]
    await journal.update("s", lambda old: replace(old, state="ended"))
    with pytest.raises(SessionConflict, match="ended"):
        await append(journal, "s", row("c", 2))


async def test_the_choices_of_one_request_are_written_together_or_not_at_all(journal: Journal) -> None:
    await created(journal, "s")
    with pytest.raises(SessionConflict):
        await journal.append_nodes("s", [row("a", 0), row("b", 1), row("c", 1)])
    assert journal.rows("s") == []


async def test_one_bad_write_in_a_group_takes_no_other_with_it(journal: Journal) -> None:
    await created(journal, *(f"s{i}" for i in range(50)))
    work = [append(journal, f"s{i}" if i % 10 else "nobody", row("a", 0)) for i in range(50)]
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    assert [isinstance(outcome, SessionNotFound) for outcome in outcomes] == [i % 10 == 0 for i in range(50)]
    assert sum(len(journal.rows(f"s{i}")) for i in range(50)) == 45


async def test_writes_that_wait_together_share_a_transaction(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    commits: list[str] = []
    await journal.write(lambda db: db.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None))
    await created(journal, *(f"s{i}" for i in range(3)))
    before = len(commits)
    await asyncio.gather(*(append(journal, f"s{i % 3}", row(f"n{i}", i)) for i in range(60)))
    assert 0 < len(commits) - before < 30
    journal.close()


async def test_a_failing_disk_acknowledges_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await created(journal, "s")
    pages = await journal.write(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await journal.write(lambda db: db.execute(f"PRAGMA max_page_count={pages}").fetchall())
    big = row("a", 0)._replace(body=b"x" * 1_000_000)
    with pytest.raises(JournalError, match="full"):
        await append(journal, "s", big)
    assert not journal.rows("s")
    await journal.write(lambda db: db.execute("PRAGMA max_page_count=1000000").fetchall())
    await append(journal, "s", big)
    assert len(journal.rows("s")) == 1
    journal.close()


async def test_sessions_are_listed_paged_and_removed(journal: Journal) -> None:
    for i in range(7):
        await asyncio.wrap_future(
            journal.create(SessionRecord(id=f"s{i}", group="even" if i % 2 == 0 else "odd", created=100.0 + i))
        )
    assert [item.id for item in journal.sessions(limit=3)] == ["s6", "s5", "s4"]
    assert [item.id for item in journal.sessions(offset=5, limit=9)] == ["s1", "s0"]
    assert [item.id for item in journal.sessions(group="odd")] == ["s5", "s3", "s1"]
    assert [item.id for item in journal.all_sessions(group="even")] == ["s0", "s2", "s4", "s6"]
    assert journal.count() == 7
    await append(journal, "s1", row("a", 0))
    await journal.delete("s1")
    assert journal.rows("s1") == []
    with pytest.raises(SessionNotFound):
        journal.get("s1")
    with pytest.raises(SessionNotFound):
        await journal.delete("s1")


async def test_sessions_end_by_age(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    await asyncio.wrap_future(journal.create(SessionRecord(id="old", created=100.0, state="ended", ended=150.0)))
    await asyncio.wrap_future(journal.create(SessionRecord(id="fresh", created=100.0, state="ended", ended=990.0)))
    await asyncio.wrap_future(journal.create(SessionRecord(id="open", created=100.0)))
    await asyncio.wrap_future(journal.create(SessionRecord(id="busy", created=100.0)))
    await append(journal, "busy", row("a", 0)._replace(created=995.0))
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert await journal.purge(older_than_s=100) == ["old"]
    assert {item.id for item in journal.sessions()} == {"fresh", "open", "busy"}


def write_first_version(path: Path) -> None:
    old = sqlite3.connect(path)
    for statement in read_statements("sqlite-1"):
        old.execute(statement)
    old.execute("PRAGMA user_version=1")
    rewards = b'{"session":1.0,"leaves":{},"metadata":{}}'
    body = (
        b'{"metadata":{},"sampling":{},"history":"keep","training":true,"template":"","tokenizer":"","rewards":%s}'
        % rewards
    )
    old.execute("INSERT INTO sessions VALUES ('s', NULL, 'open', NULL, 1.0, NULL, ?)", (body,))
    old.execute("INSERT INTO nodes VALUES ('s', 0, 'old', NULL, x'01000000', x'', x'', x'00', x'7b7d', NULL, 2.0)")
    old.commit()
    old.close()


def test_a_reader_leaves_an_older_journal_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    write_first_version(path)
    before = path.read_bytes()
    reader = Journal(path, read_only=True)
    assert reader.get("s").rewards.session == 1.0 and [item.id for item in reader.rows("s")] == ["old"]
    reader.close()
    assert path.read_bytes() == before and sorted(tmp_path.iterdir()) == [path]


async def test_an_older_journal_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    write_first_version(path)
    journal = Journal(path)
    assert journal.get("s").rewards.session == 1.0
    assert [item.id for item in journal.rows("s")] == ["old"]
    await append(journal, "s", row("a", 1))
    assert [item.id for item in journal.rows("s")] == ["old", "a"]
    assert journal.read(lambda db: db.execute("PRAGMA user_version").fetchone()[0]) == VERSION == len(STEPS)
    names = journal.read(
        lambda db: {item[0] for item in db.execute("SELECT name FROM sqlite_master WHERE type='index'")}
    )
    assert "sessions_by_key" in names
    journal.close()


def test_a_journal_from_the_future_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j.db").close()
    with sqlite3.connect(tmp_path / "j.db") as db:
        db.execute(f"PRAGMA user_version={VERSION + 1}")
    db.close()
    with pytest.raises(JournalError, match="newer tokentrue"):
        Journal(tmp_path / "j.db")


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j.db").write_bytes(b"not a database, surely" * 100)
    with pytest.raises(JournalError, match="cannot open"):
        Journal(tmp_path / "j.db")


async def test_one_process_owns_a_store_and_readers_need_no_lock(tmp_path: Path) -> None:
    one = Journal(tmp_path / "j.db")
    await created(one, "s")
    await append(one, "s", row("a", 0))
    with pytest.raises(JournalError, match=rf"in use by process {os.getpid()}.*stop that server"):
        Journal(tmp_path / "j.db")
    reader = Journal(tmp_path / "j.db", read_only=True)
    assert [item.id for item in reader.rows("s")] == ["a"]
    with pytest.raises(JournalError, match="opened for reading"):
        await append(reader, "s", row("b", 1))
    await append(one, "s", row("b", 1, parent="a"))
    assert len(reader.rows("s")) == 2
    reader.close()
    one.close()
    Journal(tmp_path / "j.db").close()  # freed when it was closed
    with pytest.raises(JournalError, match="no journal at"):
        Journal(tmp_path / "nothing.db", read_only=True)


async def test_workers_that_share_a_lock_cannot_both_write_one_place(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "j.db")
    one, other = Journal(tmp_path / "j.db", lock=False), Journal(tmp_path / "j.db", lock=False)
    await created(one, "s")
    await append(one, "s", row("a", 0))
    with pytest.raises(SessionConflict, match="another process"):
        await append(other, "s", row("b", 0))
    one.close()
    other.close()
    lock.release()


async def test_a_closed_journal_says_so(journal: Journal) -> None:
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        await append(journal, "s", row("a", 0))
