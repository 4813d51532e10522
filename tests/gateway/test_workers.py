"""Several workers behind one port; an engine of its own process; a client that leaves."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers import standin_settings
from tests import zygote
from tests.gateway.inside import gateway
from tests.gateway.world import Made, Server, model_dir, wait_until
from tokentrue.gateway.serving.forwarding import Peers, find_owner
from tokentrue.gateway.serving.processes import share_admin_state


class Engine:
    """The bench's stand-in: SGLang's wire format in a process of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        path = folder / f"standin-{len(list(folder.iterdir()))}.json"
        path.write_text(json.dumps(standin_settings(str(model_dir()), **settings)))
        self.process = zygote.start("benchmarks.standin", [str(path)], env=os.environ)
        self.url = f"http://{settings.get('host', '127.0.0.1')}:{int(self.process.stdout.readline())}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def serving(folder: Path, *urls: str, workers: int = 1) -> Server:
    flags = [flag for url in urls for flag in ("--url", url)]
    store = f"sqlite:{folder / 'journal.sqlite'}"
    return Server(
        "--engine",
        "sglang",
        *flags,
        "--model",
        str(model_dir()),
        "--store",
        store,
        "--workers",
        str(workers),
        folder=folder,
        admin_key="boss",
    )


def turn(server: Server, session: Made, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, **more}
    status, answer = server.ask("POST", "/v1/chat/completions", body, key=session.api_key)
    assert status == 200, answer
    return answer["choices"][0]["message"]


def play(server: Server, session: Made, turns: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in range(turns):
        message = turn(server, session, messages)
        messages += [message, {"role": "user", "content": "on"}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("workers")
    engine = Engine(folder, token_delay_s=0.002)  # one by one: what comes together is passed on together
    server = serving(folder, engine.url, workers=2)
    yield server
    assert server.stop() == 0
    engine.stop()
    assert "Traceback" not in server.log.read_text(), server.log.read_text()[-3000:]


def worker_pids(server: Server) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return list(map(int, children))


def test_any_worker_takes_any_request(pair: Server) -> None:
    sessions = [pair.session(session_id=f"s{n}") for n in range(8)]
    assert {find_owner(session.session_id, 2) for session in sessions} == {0, 1}
    for session in sessions:
        play(pair, session, 3)
    for session in sessions:
        answer = pair.samples(session.session_id)
        assert (len(answer["samples"]), answer["coverage"]["ratio"]) == (1, 1.0)
    assert pair.ask("POST", "/sessions", {"session_id": "s0"})[0] == 409
    assert pair.ask("GET", "/sessions?limit=100")[1]["total"] >= 8
    assert pair.ask("GET", "/ready")[0] == 200
    assert pair.ask("GET", "/internal/metrics")[0] == 404
    page = pair.ask("GET", "/metrics")[1]
    assert 'tokentrue_turns_total{dialect="openai_chat",streamed="False"} 24.0' in page  # both workers' turns, added up
    assert "tokentrue_coverage_ratio 1.0" in page


def test_a_path_with_dot_segments_reaches_no_worker(pair: Server) -> None:
    sessions = [pair.session(session_id=f"dots{n}") for n in range(6)]
    assert {find_owner(session.session_id, 2) for session in sessions} == {0, 1}
    for session in sessions:
        for up in ("../../..", "..%2F..%2F..", "%2e%2e/%2E%2E/%2e.", ".", "x/../../../.."):
            connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=60)
            path = f"/sessions/{session.session_id}/v1/{up}/internal/metrics"
            connection.request("GET", path, headers={"authorization": f"Bearer {session.api_key}"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert (response.status, answer["error"]["code"]) == (404, "unknown_path"), (path, answer)
            connection.close()


def test_streams_pass_between_workers(pair: Server) -> None:
    for n in range(4):
        session = pair.session(session_id=f"stream{n}")
        connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=30)
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]})
        connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {session.api_key}"})
        stream = connection.getresponse().read().decode()
        connection.close()
        assert stream.endswith("data: [DONE]\n\n") and stream.count("data: ") > 10


def test_a_pause_reaches_every_worker(pair: Server) -> None:
    assert pair.ask("POST", "/admin/pause", {"drain": True})[1] == {"paused": True, "drained": True, "in_flight": 0}
    assert "tokentrue_paused 1.0" in pair.ask("GET", "/metrics")[1]
    assert pair.ask("POST", "/admin/resume", {})[0] == 200
    play(pair, pair.session(session_id="after0"), 1)
    play(pair, pair.session(session_id="after1"), 1)


def test_a_worker_that_dies_comes_back_with_its_sessions(pair: Server) -> None:
    sessions = [pair.session(session_id=f"die{n}") for n in range(4)]
    history = {
        s.session_id: [{"role": "user", "content": "go"}, turn(pair, s, [{"role": "user", "content": "go"}])]
        for s in sessions
    }
    before = worker_pids(pair)
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(worker_pids(pair)) == 2 and before[0] not in worker_pids(pair))
    wait_until(lambda: pair.ask("GET", "/ready")[0] == 200, seconds=60)
    for session in sessions:
        turn(pair, session, [*history[session.session_id], {"role": "user", "content": "on"}])
        answer = pair.samples(session.session_id)
        assert (len(answer["samples"]), answer["coverage"]["ratio"]) == (1, 1.0)


def test_workers_that_die_come_back_paused_and_with_the_version(pair: Server) -> None:
    sessions = [pair.session(session_id=f"held{n}") for n in range(4)]
    assert {find_owner(session.session_id, 2) for session in sessions} == {0, 1}
    assert pair.ask("POST", "/admin/version", {"version": 7})[0] == 200
    assert pair.ask("POST", "/admin/pause", {"drain": True})[0] == 200
    before = worker_pids(pair)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(worker_pids(pair)) == 2 and not set(before) & set(worker_pids(pair)))
    wait_until(lambda: pair.ask("GET", "/ready")[0] == 200, seconds=60)
    asked = [{"role": "user", "content": "go"}]
    answers: list[Any] = []
    asking = [
        threading.Thread(target=lambda session=session: answers.append(turn(pair, session, asked)))
        for session in sessions
    ]
    for thread in asking:
        thread.start()
    wait_until(
        lambda: answers or all(pair.ask("GET", f"/sessions/{one.session_id}")[1]["in_flight"] for one in sessions)
    )
    page = pair.ask("GET", "/metrics")[1]
    assert "tokentrue_policy_version 7.0" in page and "tokentrue_paused 1.0" in page
    assert not answers, "no worker generates during the pause"
    assert pair.ask("POST", "/admin/resume", {})[0] == 200
    for thread in asking:
        thread.join(60)
    assert len(answers) == 4


def test_a_worker_that_starts_takes_what_was_set_before() -> None:
    state = share_admin_state()
    apps = [gateway(peers=Peers(me=me, sockets=("a", "b")), admin_state=state) for me in (0, 1)]
    apps[0].services.set_version(7)
    apps[0].services.set_paused(True)
    apps[1].services.restore_admin_state()
    assert (apps[1].provider.version, apps[1].services.admission.paused) == (7, True)
    apps[0].services.set_paused(False)
    apps[1].services.restore_admin_state()
    assert (apps[1].provider.version, apps[1].services.admission.paused) == (7, False)


@pytest.mark.slow
def test_workers_of_a_killed_supervisor_keep_the_next_server_waiting(tmp_path: Path) -> None:
    """They end what they are generating and record it; whoever serves the store next reads it before it writes."""
    engine = Engine(tmp_path, delay_s=6.0)
    server = serving(tmp_path, engine.url, workers=2)
    session = server.session(session_id="s")
    answers: list[dict[str, Any]] = []
    asked: list[Any] = [{"role": "user", "content": "go"}]
    asking = threading.Thread(target=lambda: answers.append(turn(server, session, asked)))
    asking.start()
    wait_until(lambda: server.ask("GET", "/sessions/s")[1]["in_flight"] == 1)
    server.kill()  # the supervisor alone; a worker still waits for the engine
    assert not answers
    again = serving(tmp_path, engine.url)
    try:
        asking.join(60)
        assert len(answers) == 1, "a worker ends its turn before it ends"
        made = replace(session, api_key=again.ask("POST", "/sessions/s/key", {})[1]["api_key"])
        turn(again, made, [*asked, answers[0], {"role": "user", "content": "on"}])
        answer = again.samples("s")
        assert (len(answer["samples"]), answer["coverage"]["ratio"]) == (1, 1.0)
        assert len(again.ask("GET", "/sessions/s")[1]["nodes"]) == 2
    finally:
        assert again.stop() == 0
        engine.stop()


def test_replicas_share_the_work_and_one_may_die(tmp_path: Path) -> None:
    engines = [Engine(tmp_path), Engine(tmp_path, first=5 * 10**6)]
    server = serving(tmp_path, *[engine.url for engine in engines])
    try:
        sessions = [server.session(session_id=f"r{n}") for n in range(8)]
        first = {s.session_id: turn(server, s, [{"role": "user", "content": "go"}]) for s in sessions}
        homes = {sid: "module_5" in json.dumps(message) for sid, message in first.items()}
        assert set(homes.values()) == {True, False}  # sticky by session, spread over both
        engines[1].stop()
        for session in sessions:
            messages = [{"role": "user", "content": "go"}, first[session.session_id], {"role": "user", "content": "on"}]
            turn(server, session, messages)
            answer = server.samples(session.session_id)
            assert (len(answer["samples"]), answer["coverage"]["ratio"]) == (1, 1.0)
    finally:
        assert server.stop() == 0
        engines[0].stop()


def test_a_client_that_leaves_cancels_and_what_was_sampled_is_kept(tmp_path: Path) -> None:
    engine = Engine(tmp_path, token_delay_s=0.05)
    server = serving(tmp_path, engine.url)
    try:
        session = server.session()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]})
        connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {session.api_key}"})
        response = connection.getresponse()
        assert response.read(200)
        response.close()
        connection.close()
        path = f"/sessions/{session.session_id}"
        wait_until(lambda: len(server.ask("GET", path)[1]["nodes"]) == 1)
        (node,) = server.ask("GET", path)[1]["nodes"]
        assert (node["outcome"], node["finish"]) == ("disconnected", "abort")
        settings = standin_settings(str(model_dir()))
        assert 0 < node["sampled_tokens"] < len(settings["head"]) + 7 + len(settings["tail"])
        wait_until(lambda: server.ask("GET", path)[1]["in_flight"] == 0)
    finally:
        assert server.stop() == 0
        engine.stop()
