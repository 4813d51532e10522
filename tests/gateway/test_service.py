"""The gateway as a service, over a real process: keys, refusals, retries, limits, pause, restart, rewards, metrics."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import Made, Server, renderer, scripted_server

ADMIN = "an-admin-key-for-tests"
TEXT = "<think>\nhm\n</think>\n\nok"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every answer is the same and takes 0.3 s."""
    flags = (
        "--set",
        "engine.options.loop=true",
        "--set",
        "limits.in_flight_per_session=2",
        "--set",
        "limits.body_bytes=200000",
    )
    folder = tmp_path_factory.mktemp("service")
    made = scripted_server(
        folder, [{"text": TEXT, "delay_s": 0.3}], *flags, "--set", "limits.messages=50", admin_key=ADMIN
    )
    yield made
    assert made.stop() == 0
    log = made.log.read_text()
    assert "Traceback" not in log
    assert ADMIN not in log and '"tt-' not in log and "-key" not in log


def chat(server: Server, session: Made, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, answer, headers of a chat completion."""
    return post(server, "/v1/chat/completions", body or HELLO, session.api_key, **headers)


def post(server: Server, path: str, body: Any, key: str | None, **headers: str) -> tuple[int, Any, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        named["authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path, data=data, method="POST", headers={"content-type": "application/json", **named}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def in_background(work: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work)
    finally:
        pool.shutdown(wait=False)


def nodes(server: Server, session: Made) -> list[dict[str, Any]]:
    return server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]


# Keys.


def test_only_its_own_key_and_the_admin_key_open_a_session(server: Server) -> None:
    mine, other = server.session(), server.session()
    path = f"/sessions/{mine.session_id}/v1/chat/completions"
    forged = mine.api_key[:-1] + ("0" if mine.api_key[-1] != "0" else "1")
    for key, status, code in [
        (None, 401, "missing_key"),
        ("x", 401, "invalid_key"),
        (forged, 401, "invalid_key"),
        (other.api_key, 403, "wrong_session"),
        (f"tt-{mine.session_id}-{'0' * 40}", 401, "invalid_key"),
        ("tt-no-such-" + "0" * 40, 403, "wrong_session"),
    ]:
        got, answer, _ = post(server, path, HELLO, key)
        assert (got, answer["error"]["code"]) == (status, code), key
    assert nodes(server, mine) == []
    assert post(server, path, HELLO, mine.api_key)[0] == 200
    assert post(server, path, HELLO, ADMIN)[0] == 200
    assert (
        post(server, "/v1/chat/completions", HELLO, "tt-no-such-" + "0" * 40)[0] == 401
    )  # not 404: it does not learn what exists
    assert post(server, "/v1/chat/completions", HELLO, ADMIN)[1]["error"]["code"] == "no_session"


def test_administration_needs_the_admin_key(server: Server) -> None:
    mine = server.session()
    routes = [
        ("GET", "/sessions"),
        ("POST", "/sessions"),
        ("POST", "/admin/pause"),
        ("POST", "/admin/version"),
        ("POST", "/admin/resume"),
    ]
    routes += [("GET", f"/sessions/{mine.session_id}{tail}") for tail in ("", "/samples")]
    routes += [("DELETE", f"/sessions/{mine.session_id}"), ("POST", f"/sessions/{mine.session_id}/reward")]
    for method, path in routes:
        assert server.ask(method, path, {}, key="x")[0] == 401, path
        assert server.ask(method, path, {}, key=mine.api_key)[0] == 403, path  # an agent must not reward itself
    assert server.ask("GET", f"/sessions/{mine.session_id}")[1]["state"] == "open"


def test_the_key_works_as_x_api_key_too(server: Server) -> None:
    session = server.session()
    body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
    status, answer, _ = post(server, "/v1/messages", body, None, x_api_key=session.api_key)
    assert (status, answer["content"][-1]["text"]) == (200, "ok")


# Refusals.


def test_unknown_paths_are_refused(server: Server) -> None:
    session = server.session()
    for path in (
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses/resp_1",
        "/v1/chat",
        "/v1/",
        "/generate",
        "/internal/metrics",
        "/",
    ):
        for root in ("", f"/sessions/{session.session_id}"):
            status, answer, _ = post(server, root + path, HELLO, session.api_key)
            assert status == 404 and answer["error"]["code"] == "unknown_path", (root + path, answer)
    assert server.ask("GET", "/v1/chat/completions", key=session.api_key)[0] == 405
    assert nodes(server, session) == []


def test_limits_say_413_and_429(server: Server) -> None:
    session = server.session()
    status, answer, _ = chat(server, session, {"model": "m", "messages": [{"role": "user", "content": "x" * 200_001}]})
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    status, answer, _ = chat(server, session, {"model": "m", "messages": [{"role": "user", "content": "x"}] * 51})
    assert (status, answer["error"]["code"]) == (413, "limit_exceeded")
    asked = [in_background(lambda i=i: chat(server, session, {**HELLO, "seed": i})) for i in range(4)]
    answers = sorted((answer.result() for answer in asked), key=lambda answer: answer[0])
    assert [status for status, _, _ in answers] == [200, 200, 429, 429]
    assert int(answers[-1][2]["retry-after"]) >= 1
    assert answers[-1][1]["error"]["code"] == "too_many_in_flight"


def test_an_ended_session_refuses_turns_and_keeps_its_samples(server: Server) -> None:
    session = server.session()
    assert chat(server, session)[0] == 200
    assert server.ask("DELETE", f"/sessions/{session.session_id}")[1]["state"] == "ended"
    status, answer, headers = chat(server, session)
    assert (status, answer["error"]["code"], headers["x-should-retry"]) == (409, "session_conflict", "false")
    assert len(server.samples(session.session_id)["samples"]) == 1
    assert server.ask("DELETE", f"/sessions/{session.session_id}?purge=true")[1]["state"] == "purged"
    assert server.ask("GET", f"/sessions/{session.session_id}/samples")[0] == 404
    assert chat(server, session)[0] == 401


# Retries.


def test_an_idempotency_key_gets_the_recorded_answer(server: Server) -> None:
    session = server.session()
    first = chat(server, session, idempotency_key="a")[1]
    again = chat(server, session, idempotency_key="a")[1]
    assert first["id"] == again["id"] and first["choices"] == again["choices"]
    other = chat(server, session, idempotency_key="b")[1]
    assert other["id"] != first["id"]
    status, answer, _ = chat(server, session, {**HELLO, "seed": 3}, idempotency_key="a")
    assert (status, answer["error"]["code"]) == (409, "idempotency_conflict")
    assert len(nodes(server, session)) == 2


def test_an_sdk_retry_gets_the_recorded_answer_and_a_new_request_a_new_sample(server: Server) -> None:
    session = server.session()
    first = chat(server, session, x_stainless_retry_count="0")[1]
    retry = chat(server, session, x_stainless_retry_count="1")[1]
    second = chat(server, session, x_stainless_retry_count="0")[1]
    retry_of_second = chat(server, session, x_stainless_retry_count="1")[1]
    assert first["id"] == retry["id"] != second["id"] == retry_of_second["id"]
    streamed = {**HELLO, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", data=json.dumps(streamed).encode(), method="POST"
    )
    request.add_header("authorization", f"Bearer {session.api_key}")
    ids = set()
    for count in ("0", "1"):
        request.add_header("x-stainless-retry-count", count)
        with urllib.request.urlopen(request, timeout=60) as answer:
            stream = answer.read().decode()
        assert stream.endswith("data: [DONE]\n\n")
        ids.add(json.loads(stream.split("\n", 1)[0][6:])["id"])
    assert len(ids) == 1
    assert len(nodes(server, session)) == 3


def test_identical_bodies_in_flight_are_one_turn(server: Server) -> None:
    session = server.session()
    asked = [in_background(lambda: chat(server, session)) for _ in range(2)]
    ids = {answer.result()[1]["id"] for answer in asked}
    assert len(ids) == 1
    assert len(nodes(server, session)) == 1


# Operation.


def test_a_pause_holds_generations_back_and_the_version_is_stamped(server: Server) -> None:
    session = server.session()
    assert server.ask("POST", "/admin/pause", {"drain": True})[1] == {"paused": True, "drained": True, "in_flight": 0}
    try:
        waiting = in_background(lambda: chat(server, session))
        time.sleep(0.5)
        assert not waiting.done()
        assert "tokentrue_paused 1.0" in server.ask("GET", "/metrics")[1]
        assert server.ask("POST", "/admin/version", {"version": 7})[1] == {"version": 7}
    finally:
        server.ask("POST", "/admin/resume", {})
    assert waiting.result(30)[0] == 200
    assert [node["policy_versions"][0][2] for node in nodes(server, session)] == [7]
    sample = server.samples(session.session_id)["samples"][0]
    assert {span["policy_version"] for span in sample["spans"] if span["kind"] == "sampled"} == {7}


def test_rewards_reach_the_samples(server: Server) -> None:
    session = server.session(group="g", metadata={"task": 4})
    chat(server, session)
    path = f"/sessions/{session.session_id}/reward"
    assert server.ask("POST", path, {"reward": 0.5, "metadata": {"why": "half"}})[0] == 200
    sample = server.samples(session.session_id)["samples"][0]
    assert (sample["reward"], sample["group"]) == (0.5, "g")
    for bad in ({"reward": "x"}, {}, {"reward": 1, "leaf": "nowhere"}, {"reward": 1, "extra": 1}):
        assert server.ask("POST", path, bad)[0] in (400, 409), bad
    assert server.ask("POST", path, raw=b'{"reward": 1e999}')[0] == 400


@pytest.mark.parametrize("format_", ["jsonl", "parquet", "safetensors", "verl", "trl", "slime", "prime-rl", "tinker"])
def test_samples_in_every_format(server: Server, format_: str, tmp_path: Path) -> None:
    from tokentrue.samples import read_samples

    session = server.session()
    chat(server, session)
    request = urllib.request.Request(f"{server.url}/sessions/{session.session_id}/samples?format={format_}")
    request.add_header("authorization", f"Bearer {ADMIN}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        (tmp_path / "samples").write_bytes(answer.read())
    (sample,) = read_samples(tmp_path / "samples", format=format_)
    wanted = server.samples(session.session_id)["samples"][0]
    assert (list(sample.token_ids), list(sample.rollout_logprobs)) == (wanted["token_ids"], wanted["rollout_logprobs"])
    assert server.ask("GET", f"/sessions/{session.session_id}/samples?format=xml")[0] == 400


def test_sessions_are_listed_and_ids_are_unique(server: Server) -> None:
    session = server.session(session_id="named.session:1", group="listed")
    assert session.session_id == "named.session:1"
    assert server.ask("POST", "/sessions", {"session_id": "named.session:1"})[0] == 409
    for bad in ("", "a/b", "-x", "x" * 129, "ä"):
        assert server.ask("POST", "/sessions", {"session_id": bad})[0] == 400, bad
    listed = server.ask("GET", "/sessions?group=listed&limit=5")[1]
    assert [s["session_id"] for s in listed["sessions"]] == ["named.session:1"]
    assert server.ask("GET", "/sessions?limit=x")[0] == 400
    assert server.ask("POST", "/sessions", {"sampling": {"temperatur": 1}})[0] == 400


def test_pinned_sampling_wins(server: Server) -> None:
    session = server.session(sampling={"max_tokens": 2})
    answer = chat(server, session, {**HELLO, "max_tokens": 100})[1]
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


def test_models_health_ready_metrics_openapi(server: Server) -> None:
    session = server.session()
    assert (
        server.ask("GET", f"/sessions/{session.session_id}/v1/models", key=session.api_key)[1]["data"][0]["object"]
        == "model"
    )
    assert server.ask("GET", "/health", key="x")[1] == {"status": "ok"}
    assert server.ask("GET", "/ready", key="x")[1]["status"] == "ready"
    chat(server, session)
    page = server.ask("GET", "/metrics", key="x")[1]
    for name in (
        "coverage_ratio ",
        'turns_total{dialect="openai_chat"',
        'tokens_total{kind="sampled"}',
        "added_latency_seconds_bucket",
    ):
        assert f"tokentrue_{name}" in page, name
    paths = server.ask("GET", "/openapi.json")[1]["paths"]
    assert "/sessions/{session_id}/v1/responses" in paths and "/admin/version" in paths


def test_one_log_line_per_turn(server: Server) -> None:
    session = server.session()
    started = time.perf_counter()
    chat(server, session)
    taken_ms = (time.perf_counter() - started) * 1000
    (line,) = [line for line in server.turns_logged() if line["session"] == session.session_id]
    assert line["node"] == nodes(server, session)[0]["id"]
    assert line["tokens_sampled"] == len(renderer().encode_sampled(TEXT)) + 1
    assert line["tokens_in"] == line["tokens_new"] > 0
    assert (
        line["engine_ms"] > 290
    )  # it sleeps for 0.3 s, and timers count whole milliseconds; that does not count as added
    assert 0 < line["added_ms"] <= taken_ms - line["engine_ms"]
    assert (line["projection"], line["fork"]) == ("root", "first")


def test_n_choices_logprobs_and_token_ids(server: Server) -> None:
    session = server.session()
    answer = chat(server, session, {**HELLO, "n": 2, "logprobs": True, "return_token_ids": True})[1]
    truth = [*renderer().encode_sampled(TEXT), renderer().stop_token_ids[0]]
    assert [choice["token_ids"] for choice in answer["choices"]] == [truth, truth]
    assert answer["prompt_token_ids"] == list(renderer().render(HELLO["messages"]).token_ids), "as vLLM's"
    assert "prompt_token_ids" not in chat(server, session)[1], "only where it was asked for"
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == TEXT + "<|im_end|>"
    assert answer["usage"]["completion_tokens"] == 2 * len(truth)
    assert server.samples(session.session_id)["coverage"]["sampled"] == 3 * len(truth)


def test_a_kill_loses_nothing_and_the_session_goes_on(server: Server) -> None:
    """Last in this file: it restarts the server."""
    session = server.session()
    answer = chat(server, session, idempotency_key="before")[1]
    message = answer["choices"][0]["message"]
    server.kill()
    server.start()
    assert chat(server, session, idempotency_key="before")[1]["id"] == answer["id"]
    longer = {"model": "m", "messages": [*HELLO["messages"], message, {"role": "user", "content": "more"}]}
    assert chat(server, session, longer)[0] == 200
    recorded = server.samples(session.session_id)
    assert (len(recorded["samples"]), recorded["coverage"]["ratio"]) == (1, 1.0)
    assert sum(recorded["samples"][0]["loss_mask"]) == 2 * (len(renderer().encode_sampled(TEXT)) + 1)


def test_sigterm_finishes_what_is_in_flight(server: Server) -> None:
    session = server.session()
    asked = in_background(lambda: chat(server, session))
    time.sleep(0.15)
    assert server.stop() == 0
    assert asked.result(30)[0] == 200
    server.start()
    assert len(nodes(server, session)) == 1
