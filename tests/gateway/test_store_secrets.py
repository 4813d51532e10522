"""The password of the record's database, however it is given, is nowhere: not in the greeting, not in errors at start,
not in the log, and no client with a session's key learns where the record is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.gateway.world import Server, model_dir, write_script
from tests.marks import slow_except
from tokentrue.errors import ConfigError
from tokentrue.sessions.journal import open_journal
from tokentrue.sessions.journal.database import describe_store

psycopg = pytest.importorskip("psycopg")
SECRET = "sesame-3f9/c:1"
IN_URL = SECRET.replace("/", "%2F").replace(":", "%3A")
HELLO = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": HELLO},
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1/messages": {"model": "m", "messages": HELLO, "max_tokens": 9},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "hello"}]}]},
}
FORMS = ("user", "parameter", "environment", "passfile", "service")


def give(form: str, folder: Path, port: int) -> tuple[str, dict[str, str]]:
    """A store and an environment that hold the password in one of the ways that libpq knows."""
    place = f"127.0.0.1:{port}/postgres"
    if form == "user":
        return f"postgresql://agent:{IN_URL}@{place}", {}
    if form == "parameter":
        return f"postgresql://agent@{place}?password={IN_URL}", {}
    if form == "environment":
        return f"postgresql://agent@{place}", {"PGPASSWORD": SECRET}
    if form == "passfile":
        secrets = folder / "passfile"
        secrets.write_text(f"*:*:*:*:{SECRET.replace(':', chr(92) + ':')}\n")
        secrets.chmod(0o600)
        return f"postgresql://agent@{place}?passfile={secrets}", {}
    service = folder / "services"
    service.write_text(f"[rec]\nhost=127.0.0.1\nport={port}\ndbname=postgres\nuser=agent\npassword={SECRET}\n")
    return "postgresql:///?service=rec", {"PGSERVICEFILE": str(service)}


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("postgresql://me:geheim@db:5432/rec", "postgresql://me@db:5432/rec"),
        ("postgresql://me@db/rec?password=geheim&sslmode=require", "postgresql://me@db/rec"),
        ("postgresql://db/rec?user=me&password=geheim", "postgresql://me@db/rec"),
        ("postgres://me:ge%40heim@a:1,b:2/rec?sslpassword=geheim", "postgresql://me@a,b:1,2/rec"),
        ("postgresql://me:g@heim@db/rec", "postgresql://…"),
        ("postgresql://me:%zzgeheim@db/rec", "postgresql://…"),
        ("postgresql://me:geheim/db@h:1/x", "postgresql://…"),
        ("postgresql://db/rec?passwrd=geheim", "postgresql://…"),
        ("sqlite:a.sqlite", "sqlite:a.sqlite"),
    ],
)
def test_a_store_is_shown_without_what_is_secret(store: str, shown: str) -> None:
    assert describe_store(store) == shown


@pytest.mark.parametrize("store", ["postgresql://me:g@heim@db/rec", "postgresql://me:%zzheim@db/rec", "pg://me:heim@h"])
def test_a_store_that_cannot_be_read_is_not_quoted(store: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_journal(store)
    assert "heim" not in str(caught.value)


@pytest.mark.parametrize("form", slow_except({"user"}, FORMS))
def test_errors_at_start_do_not_hold_it(form: str, tmp_path: Path) -> None:
    store, env = give(form, tmp_path, 1)
    flags = ["--engine", "scripted", "--script", str(write_script(tmp_path, ["a"])), "--model", str(model_dir())]
    arguments = ["serve", "--port", "0", "--store", store, *flags]
    started = zygote.start("tokentrue", arguments, env={**os.environ, **env}, log=tmp_path / "errors")
    said, code = started.communicate(timeout=120)[0], started.wait()
    errors = (tmp_path / "errors").read_text()
    assert code in (1, 2) and "start the server" in said + errors
    assert "sesame" not in said + errors and len(errors.strip().splitlines()) <= 2


@pytest.fixture(params=slow_except({"environment"}, FORMS))
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Any]]:
    from tests.sessions.postgres_server import find_programs, run_server

    if find_programs() is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")
    with run_server() as database:
        with psycopg.connect(database.url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE agent SUPERUSER LOGIN PASSWORD '{SECRET}'")
            rules = database.folder / "data" / "pg_hba.conf"
            rules.write_text("host all agent 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
            connection.execute("SELECT pg_reload_conf()")
        store, env = give(request.param, tmp_path, database.port)
        script = write_script(tmp_path, ["answer"] * 60)
        flags = ("--engine", "scripted", "--script", str(script), "--model", str(model_dir()), "--store", store)
        server = Server(*flags, "--set", "server.lease_s=2", folder=tmp_path, env=env)
        yield server, database
        server.kill()


@pytest.mark.postgres
def test_a_client_learns_nothing_of_the_record_while_its_database_is_down(served: tuple[Server, Any]) -> None:
    server, database = served
    session = server.session()
    path = "/v1/chat/completions"
    assert server.ask("POST", path, REQUESTS[path], key=session.api_key)[0] == 200
    database.stop(signal.SIGQUIT)
    answers: list[str] = []
    for _ in range(3):
        for path, body in REQUESTS.items():
            for streamed in (False, True) if "beta" not in path else (False,):
                asked = {**body, "stream": True} if streamed else body
                answers.append(json.dumps(server.ask("POST", path, asked, key=session.api_key)))
    assert any("journal" in answer for answer in answers)
    server.process.terminate()
    said = server.greeting + server.process.communicate(timeout=60)[0] + server.log.read_text()
    assert "sesame" not in "".join(answers) + said
    for word in ("postgres", "127.0.0.1", str(database.port), "agent", "passfile", "services"):
        assert not [answer for answer in answers if word in answer], word
