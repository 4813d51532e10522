"""Two gateways on one PostgreSQL: any of them takes any request, and a dead one's sessions go on elsewhere, bit for
bit."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_workers import Engine, turn
from tests.gateway.world import Server, model_dir, wait_until

pytest.importorskip("psycopg")
pytestmark = pytest.mark.postgres
KEY = "admin-key-0123456789"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    from tests.sessions.postgres_server import find_programs, run_server

    if find_programs() is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")
    engine = Engine(tmp_path)
    with run_server() as database:
        flags = ("--engine", "sglang", "--url", engine.url, "--model", str(model_dir()), "--store", database.url)
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        servers = [Server(*flags, "--set", "server.lease_s=3", folder=folder, admin_key=KEY) for folder in folders]
        yield servers[0], servers[1]
        for server in servers:
            server.stop()
        engine.stop()


def test_any_gateway_takes_any_request_and_a_dead_ones_sessions_go_on(pair: tuple[Server, Server]) -> None:
    a, b = pair
    session = a.session()
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for server in (a, b, a):  # b forwards to a
        message = turn(server, session, messages)
        messages += [message, {"role": "user", "content": "on"}]
    assert b.ask("POST", f"/sessions/{session.session_id}/reward", {"reward": 0.5})[0] == 200
    assert len(a.turns_logged()) == 3 and not b.turns_logged()
    assert not b.turns_logged("turn_failed"), "a request that was passed on has not failed"
    before = a.samples(session.session_id)
    assert b.samples(session.session_id) == before
    a.kill()
    status, answer = b.ask("GET", f"/sessions/{session.session_id}")
    assert (status, answer["error"]["code"]) == (503, "owner_unreachable"), answer
    assert f"owner_unreachable: {a.url}" in b.log.read_text()
    wait_until(lambda: b.ask("GET", f"/sessions/{session.session_id}")[0] == 200)
    assert b.samples(session.session_id) == before
    message = turn(b, session, messages)
    after = b.samples(session.session_id)
    old, new = before["samples"][0], after["samples"][0]
    assert new["token_ids"][: len(old["token_ids"])] == old["token_ids"] and len(after["samples"]) == 1
    assert after["coverage"]["ratio"] == 1.0 and new["reward"] == 0.5
    a.start()
    messages += [message, {"role": "user", "content": "back"}]
    turn(a, session, messages)  # a forwards to b
    assert len(b.turns_logged()) == 2
    assert b.samples(session.session_id)["coverage"]["ratio"] == 1.0
    status, answer = b.ask("GET", "/ready")
    assert status == 200, answer


@pytest.mark.slow
def test_a_new_name_at_two_gateways_at_once_is_one_session(pair: tuple[Server, Server]) -> None:
    def ask(server: Server, name: str) -> tuple[int, bytes]:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request(
            "POST", "/v1/chat/completions", body, {"authorization": f"Bearer {KEY}", "x-session-id": name}
        )
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    with ThreadPoolExecutor(4) as pool:
        for number in range(8):
            name = f"new{number}"
            asked = [pool.submit(ask, server, name) for server in (*pair, *pair)]
            for one in asked:
                assert one.result()[0] == 200, one.result()
            assert pair[0].samples(name)["coverage"]["sampled"] > 0
    assert pair[0].ask("GET", "/sessions")[1]["total"] == 8
