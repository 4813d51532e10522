"""`tokentrue sessions` and `tokentrue samples` over a store and over a running gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.gateway.world import Server, model_dir, scripted_server, write_script
from tests.marks import slow_except
from tokentrue.cli.main import run
from tokentrue.cli.sessions import print_list
from tokentrue.errors import SessionNotFound
from tokentrue.sessions import Journal
from tokentrue.viewer import StoreSource

KEY = "a-long-admin-key"


def play_two_sessions(server: Server) -> None:
    with tt.Client(server.url, KEY) as client:
        for name in ("one", "two"):
            session = client.open(
                session_id=name, group="g", metadata={"task": {"deep": [1]}}, sampling={"temperature": 0.5}
            )
            session.openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "2+2?"}])
            session.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", KEY)
    server = scripted_server(tmp_path, ["It is 4."] * 4, admin_key=KEY)
    try:
        play_two_sessions(server)
        yield server
    finally:
        server.stop()


def test_list_show_and_delete(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"sqlite:{tmp_path / 'journal.sqlite'}"
    told: list[dict[str, Any]] = []
    for source in (server.url, store):
        assert run("sessions", [source, "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["sessions"]
        assert {entry["session_id"] for entry in listed} == {"one", "two"}
        assert all(entry["turns"] == 1 and entry["coverage"]["ratio"] == 1.0 for entry in listed)
        assert run("sessions", [source, "show", "one", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        told.append({key: value for key, value in shown.items() if key != "in_flight"})  # only a gateway knows
        assert shown["session_id"] == "one" and len(shown["nodes"]) == 1 and shown["coverage"]["ratio"] == 1.0
        assert run("sessions", [source]) == run("sessions", [source, "show", "one"]) == 0
        assert "2 sessions" in capsys.readouterr().out
    assert run("sessions", [store, "--limit", "9" * 20]) == 0 and "2 sessions" in capsys.readouterr().out
    assert told[0] == told[1] and told[0]["sampling"] == {"temperature": 0.5} and told[0]["state"] == "open"
    assert run("sessions", [store, "delete", "two"]) == 2, "a server uses the store"
    assert "in use" in capsys.readouterr().err
    assert run("sessions", [server.url, "delete", "two"]) == 0
    assert run("sessions", [server.url, "show", "two"]) == 2
    server.stop()
    assert run("sessions", [store, "delete", "one"]) == 0
    capsys.readouterr()
    assert run("sessions", [store, "--json"]) == 0 and json.loads(capsys.readouterr().out) == {"sessions": []}


@pytest.mark.parametrize(
    "reader",
    slow_except({"samples"}, ["sessions", "samples", "samples of a gateway", "view", "view of a group"]),
)
def test_what_is_purged_while_others_are_read_is_left_out(
    reader: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = f"sqlite:{tmp_path / 'journal.sqlite'}", tmp_path / "samples.jsonl"

    def purge_after(owner: Any, name: str) -> None:
        listing = getattr(owner, name)

        def list_then_purge(self: Any, **settings: Any) -> Any:
            found = list(listing(self, **settings))
            with tt.Client(server.url, KEY) as client, suppress(SessionNotFound):
                client.delete_session("one")
            return found

        monkeypatch.setattr(owner, name, list_then_purge)

    if reader == "sessions":
        purge_after(Journal, "sessions")
        assert run("sessions", [store, "--json"]) == 0
        left = [entry["session_id"] for entry in json.loads(capsys.readouterr().out)["sessions"]]
    elif reader.startswith("samples"):
        of_gateway = reader.endswith("gateway")
        purge_after(tt.Client if of_gateway else Journal, "sessions" if of_gateway else "all_sessions")
        assert run("samples", [server.url if of_gateway else store, "-o", str(out)]) == 0
        left = [json.loads(line)["session_id"] for line in out.read_text().split("\n") if line]
    else:
        purge_after(Journal, "all_sessions" if reader.endswith("group") else "sessions")
        source = StoreSource(Journal(store, read_only=True), name="store")
        views = source.load_group("g") if reader.endswith("group") else []
        left = [view.summary.session_id for view in views] or [source.list_sessions(offset=0, limit=9)[0][0].session_id]
        source.close()
    assert left == ["two"]


def test_ids_are_shown_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    ids = [f"{number:032x}" for number in range(3)]
    print_list([{"session_id": name, "group": "a-long-name-of-a-group", "state": "ended", "turns": 3} for name in ids])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ids), shown


def test_what_is_called_wrong_is_one_line(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = f"sqlite:{tmp_path / 'journal.sqlite'}", str(tmp_path / "x.jsonl")
    wrong = [
        ("sessions", [store, "burn"], "no action 'burn'"),
        ("sessions", [store, "show"], "needs a session id"),
        ("sessions", [store, "list", "x"], "`list` takes no session id; `show ID` has one"),
        ("sessions", [str(tmp_path)], f"is a directory; name the journal in it: {tmp_path / 'journal.sqlite'}"),
        ("samples", [store, "-o", "s.csv"], "no format writes .csv files; name it .jsonl"),
        ("samples", [store, "-o", "nowhere/s.jsonl"], "directory nowhere does not exist"),
        ("sessions", [store, "show", "\udcff"], "the session id: '\\udcff' is not UTF-8 text"),
        ("sessions", [store, "delete", "\udcff"], "the session id: '\\udcff' is not UTF-8 text"),
        ("sessions", [server.url, "show", "\udcff"], "the session id: '\\udcff' is not UTF-8 text"),
        ("samples", [store, "-o", "s.jsonl", "--session", "\udcff"], "--session: '\\udcff' is not UTF-8 text"),
        ("samples", [store, "-o", "s.jsonl", "--group", "\udcff"], "--group: '\\udcff' is not UTF-8 text"),
        ("sessions", [store, "--limit", "-1"], "--limit: -1 must be at least 0"),
        ("sessions", [server.url, "--limit", "9" * 20], "limit: "),
        ("sessions", [str(tmp_path / "none.sqlite")], "no journal"),
        ("samples", [store, "--group", "TYPO", "-o", out], "no session of group 'TYPO'"),
        ("samples", [store, "--group", "g", "--session", "s", "-o", out], "--session and --group: give one of them"),
        ("samples", [server.url, "--group", "TYPO", "-o", out], "no session of group 'TYPO'"),
        ("samples", [server.url, "--session", "nobody", "-o", out], "the gateway answered 404"),
    ]
    for name, arguments, words in wrong:
        assert run(name, arguments) == 2
        said = capsys.readouterr().err.strip()
        assert words in said and len(said.splitlines()) == 1, said
        assert not Path(out).exists()
    assert run("samples", [server.url, "--group", "g", "-o", out]) == 0
    assert "2 samples of 2 sessions" in capsys.readouterr().out


@pytest.mark.postgres
def test_a_store_on_postgresql(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", KEY)
    assert run("sessions", [database]) == 2
    assert "no journal at" in capsys.readouterr().err, "a database without tables"
    script = write_script(tmp_path, ["It is 4."] * 2)
    flags = ("--engine", "scripted", "--script", str(script), "--model", str(model_dir()), "--store", database)
    server = Server(*flags, folder=tmp_path, admin_key=KEY)
    try:
        play_two_sessions(server)
        assert run("sessions", [database, "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["sessions"]
        assert {entry["session_id"] for entry in listed} == {"one", "two"}
        assert all(entry["turns"] == 1 and entry["coverage"]["ratio"] == 1.0 for entry in listed)
        assert run("sessions", [database, "show", "one", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["coverage"]["ratio"] == 1.0
        assert run("samples", [database, "--group", "g", "-o", str(tmp_path / "x.jsonl")]) == 0
        assert "2 samples of 2 sessions" in capsys.readouterr().out
        assert run("view", [database, "--export", str(tmp_path / "x.html")]) == 0
        assert "2 of 2 sessions" in capsys.readouterr().out
        assert run("sessions", [database, "delete", "one"]) == 2, "a gateway that is alive owns it"
        assert "is owned by gateway" in capsys.readouterr().err
    finally:
        server.stop()
    assert run("sessions", [database, "delete", "one"]) == 0
    capsys.readouterr()
    assert run("sessions", [database, "--json"]) == 0
    assert [entry["session_id"] for entry in json.loads(capsys.readouterr().out)["sessions"]] == ["two"]
