"""The record of many gateways: owners, fencing tokens, leases, takeover, and a server that restarts."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.sessions.crash_child import fingerprint
from tests.sessions.test_crash import kill_again_and_again
from tests.sessions.test_journal import created, row
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.errors import ConfigError, JournalError, SessionElsewhere
from tokentrue.sessions.journal.journal import load_tree

psycopg = pytest.importorskip("psycopg")
pytestmark = pytest.mark.postgres


def open_journal(url: str, name: str, *, lease_s: float = 15.0) -> Any:
    from tokentrue.sessions.journal.postgres import PostgresJournal

    return PostgresJournal(url, name=name, address=f"http://{name}:8000", lease_s=lease_s)


@pytest.fixture
def two(database: str) -> Any:
    journals = open_journal(database, "a", lease_s=1.5), open_journal(database, "b")
    yield journals
    for journal in journals:
        journal.close()


async def test_a_session_has_one_owner(two: Any) -> None:
    a, b = two
    await created(a, "s")
    with pytest.raises(SessionElsewhere, match="'a'") as caught:
        b.acquire("s")
    assert caught.value.url == "http://a:8000"
    assert a.acquire("s") == 2


async def test_a_late_writer_is_fenced_off(two: Any) -> None:
    """The first owner is still alive and still connected; its successor has not written yet."""
    a, b = two
    await created(a, "s")
    claim = a.claim("s", ())
    await a.append_nodes("s", [row("x", 0)], claim)
    release(a)
    token = b.acquire("s")
    assert token == 2
    with pytest.raises(SessionElsewhere, match="'b'"):
        await a.append_nodes("s", [row("y", 1, "x")], claim)
    with pytest.raises(SessionElsewhere):
        await a.update("s", lambda record: record, claim)
    await b.append_nodes("s", [row("z", 1, "x")], b.claim("s", (), token))
    assert [item.id for item in b.rows("s")] == ["x", "z"]


async def test_the_same_gateway_started_again_fences_its_former_self(database: str) -> None:
    before, after = open_journal(database, "a"), open_journal(database, "a")
    await created(before, "s")
    claim = before.claim("s", ())
    token = after.acquire("s")
    with pytest.raises(SessionElsewhere):
        await before.append_nodes("s", [row("x", 0)], claim)
    await after.append_nodes("s", [row("x", 0)], after.claim("s", (), token))
    before.close()
    after.close()


async def test_a_write_and_a_takeover_do_not_interleave(two: Any) -> None:
    """A transaction that has passed the check holds the session's row: the takeover waits for it, and then reads its
    node."""
    a, b = two
    await created(a, "s")
    claim = a.claim("s", ())
    release(a)
    entered, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    whole = a.check_owner

    def check_slowly(*arguments: Any) -> None:
        whole(*arguments)
        loop.call_soon_threadsafe(entered.set)
        assert may_go_on.wait(10)

    a.check_owner = check_slowly
    writing = asyncio.create_task(a.append_nodes("s", [row("x", 0)], claim))
    await entered.wait()
    taking = asyncio.create_task(asyncio.to_thread(b.acquire, "s"))
    await asyncio.sleep(0.3)
    assert not taking.done()
    may_go_on.set()
    await writing
    assert await taking == 2
    assert [item.id for item in b.rows("s")] == ["x"]


async def test_a_lease_that_was_lost_is_noticed(two: Any) -> None:
    a, _ = two
    number = a.lease_number
    release(a)
    await asyncio.sleep(1.0)  # it is renewed every half second
    assert a.lease_number == number + 1


async def test_another_gateway_goes_on_bit_for_bit(two: Any) -> None:
    a, b = two
    engine = Engine([sampled("r1", "c1"), sampled("r2", "c2")])
    session = tt.Session(renderer=Letters(), provider=engine, journal=a)
    asked: list[Any] = [{"role": "user", "content": "u1"}]
    reply = await session.chat(asked)
    release(a)
    taken = await tt.Session.open(b, session.id, renderer=Letters(), provider=engine)
    node = session.tree.get(reply.node)
    assert fingerprint(taken.tree.get(reply.node), taken.tree.prompt_ids(node)) == fingerprint(
        node, session.tree.prompt_ids(node)
    )
    more = [*asked, reply.message, {"role": "user", "content": "u2"}]
    second = await taken.chat(more)
    with pytest.raises(SessionElsewhere):
        engine.answers.append(sampled("r3", "c3"))
        await session.chat(more)
    _, tree = load_tree(b, session.id)
    assert [one.id for one in tree.in_order()] == [reply.node, second.node]
    assert taken.coverage().ratio == 1.0


async def test_a_server_that_restarts_costs_no_acknowledged_write(postgres_server: Any, database: str) -> None:
    journal = open_journal(database, "a", lease_s=2.0)
    await created(journal, "s")
    claim = journal.claim("s", ())
    await journal.append_nodes("s", [row("n0", 0)], claim)
    postgres_server.stop(signal.SIGQUIT)
    with pytest.raises(JournalError):
        await journal.append_nodes("s", [row("n1", 1, "n0")], claim)
    await asyncio.sleep(2.1)
    with pytest.raises(JournalError, match="lease"):
        _ = journal.lease_number
    postgres_server.start()
    await asyncio.sleep(1.5)
    assert journal.lease_number >= 1
    await journal.append_nodes("s", [row("n1", 1, "n0")], claim)
    assert [item.id for item in journal.rows("s")] == ["n0", "n1"]
    journal.close()


def release(journal: Any) -> None:
    """Its lease ends, as the server sees it; it does not know."""
    with psycopg.connect(journal._url, autocommit=True) as connection:
        connection.execute("UPDATE gateways SET expires = now() - interval '1 second' WHERE name = 'a'")


def test_killed_a_few_times(database: str, tmp_path: Path) -> None:
    acknowledged, nodes = kill_again_and_again(tmp_path, 4, lambda _: database)
    assert acknowledged > 20 and nodes >= acknowledged * 0.9, (acknowledged, nodes)


@pytest.mark.load
@pytest.mark.timeout(1500)
def test_killed_a_hundred_times(postgres_server: Any, tmp_path: Path) -> None:
    url = [postgres_server.new_database(f"kill{number}") for number in range(5)]
    acknowledged, _ = kill_again_and_again(tmp_path, 100, lambda number: url[number // 20])
    print(f"100 kills, {acknowledged} acknowledged turns, none missing")
    assert acknowledged > 500


def test_errors_are_one_line_without_the_password() -> None:
    with pytest.raises(JournalError) as caught:
        open_journal("postgresql://me:geheim@127.0.0.1:1/none", "a")
    assert "geheim" not in str(caught.value) and "start the server" in str(caught.value)


def test_parameters_in_the_url_replace_ours(database: str) -> None:
    from tokentrue.sessions.journal.postgres import Connection

    def show(url: str, name: str) -> str:
        connection = Connection(url)
        found = connection.execute(f"SHOW {name}").fetchone()
        connection.close()
        assert found is not None
        return found[0]

    assert show(database, "statement_timeout") == "30s"
    assert show(f"{database}&options=-c%20statement_timeout%3D7s", "statement_timeout") == "7s"


def test_the_store_is_named_where_it_is_unknown() -> None:
    from tokentrue.sessions.journal import open_journal

    with pytest.raises(ConfigError, match="postgresql://"):
        open_journal("mysql://x")
