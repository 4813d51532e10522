"""A chat template that hangs at a word of a conversation: the operating system ends the gateway, its parent starts it
again, and every acknowledged turn is in the journal."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import Server, check_recorded, model_dir, scripted_server, wait_until

WORD = "please hang"
# One division of whole numbers with millions of digits: minutes in C, without a moment in which another thread runs.
DIVISION = "{% set n = messages|length * 10000000 %}{{ ('f' * n)|int(0, 16) // ('7' * (n // 2))|int(0, 16) }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEXTS = ["one", "two", "three"]


def hanging_server(folder: Path, body: str, *arguments: str, **more: Any) -> Server:
    source = model_template() + "{% if messages[-1].content is string and '" + WORD + "' in messages[-1].content %}"
    path = folder / "template.jinja"
    path.write_text(source + body + "{% endif %}")
    settings = ("--set", f"model.chat_template={path}", "--set", "limits.render_s=2", *arguments)
    return scripted_server(folder, TEXTS, *settings, admin_key="a-key-for-this-test", **more)


def model_template() -> str:
    config = json.loads((model_dir() / "tokenizer_config.json").read_text())
    return config.get("chat_template") or (model_dir() / "chat_template.jinja").read_text()


def say(server: Server, key: str, messages: list[dict[str, Any]]) -> str:
    status, answer = server.ask("POST", "/v1/chat/completions", {"model": "m", "messages": messages}, key=key)
    assert status == 200, answer
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return messages[-1]["content"]


def is_healthy(server: Server) -> bool:
    try:
        return server.ask("GET", "/health")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize("body", [DIVISION, pytest.param(LOOPS, marks=pytest.mark.slow)], ids=["division", "loops"])
def test_the_gateway_comes_back(tmp_path: Path, body: str) -> None:
    server = hanging_server(tmp_path, body)
    try:
        session = server.session(session_id="kept")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        assert say(server, session.api_key, messages) == "one"
        assert server.ask("POST", "/admin/version", {"version": 7}, key="a-key-for-this-test")[0] == 200
        began = time.monotonic()
        with pytest.raises(OSError):
            bad = [*messages, {"role": "user", "content": WORD}]
            server.ask("POST", "/v1/chat/completions", {"model": "m", "messages": bad}, key=session.api_key)
        assert server.ask("GET", "/health")[0] == 200  # waits in the socket's queue for the new process
        assert time.monotonic() - began < 60
        lines = [line for line in server.log.read_text().splitlines() if line.startswith("tokentrue serve: ")]
        assert len(lines) == 1 and "limits.render_s" in lines[0]
        check_recorded(server, "kept", TEXTS[:1])  # with the engine's ids and log-probabilities
        messages.append({"role": "user", "content": "and now?"})
        assert say(server, session.api_key, messages) == "one"  # the script begins again; the session goes on
        check_recorded(server, "kept", [TEXTS[0], TEXTS[0]])
        _, sent = server.ask("GET", "/sessions/kept/samples", key="a-key-for-this-test")
        versions = {span["policy_version"] for span in sent["samples"][0]["spans"] if span["kind"] == "sampled"}
        assert 7 in versions, "what /admin/version set holds after the restart"
        assert server.stop() == 0
    finally:
        server.kill()


def test_sigterm_while_a_template_hangs(tmp_path: Path) -> None:
    server = hanging_server(tmp_path, DIVISION)
    try:
        session = server.session()
        with pytest.raises(OSError):
            body = {"model": "m", "messages": [{"role": "user", "content": WORD}]}
            threading.Timer(1.0, server.process.send_signal, [signal.SIGTERM]).start()
            server.ask("POST", "/v1/chat/completions", body, key=session.api_key)
        assert server.process.wait(20) == 128 + signal.SIGALRM
    finally:
        server.kill()


def test_a_killed_server_leaves_no_process(tmp_path: Path) -> None:
    """Of the two processes of `serve`, the one that a user sees is the parent."""
    server = hanging_server(tmp_path, LOOPS)
    child = server.serving_pid
    server.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists(), seconds=5)
    server.start()
    assert is_healthy(server) and server.stop() == 0
