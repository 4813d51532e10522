"""Where the record is one and where a secret is whose: links to a store, signatures on reasoning, a full gateway."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.gateway.world import ROOT, scripted_server
from tokentrue.errors import JournalError
from tokentrue.gateway.auth import hash_key
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.sessions import StoreLock
from tokentrue.sessions.journal import open_journal

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("link", ["file", "folder"])
def test_a_link_to_a_store_is_the_same_store(link: str, tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    first = open_journal(f"sqlite:{folder / 'a.sqlite'}")
    if link == "file":
        other = tmp_path / "b.sqlite"
        other.symlink_to(folder / "a.sqlite")
    else:
        (tmp_path / "linked").symlink_to(folder)
        other = tmp_path / "linked" / "a.sqlite"
    try:
        with pytest.raises(JournalError, match="in use"):
            open_journal(f"sqlite:{other}")
        with pytest.raises(JournalError, match="in use"):
            StoreLock(f"sqlite:{other}")
    finally:
        first.close()


async def answer_anthropic(app: Any, key: str, messages: list[Any]) -> tuple[int, Any]:
    body = {
        "model": "m",
        "max_tokens": 99,
        "messages": messages,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    status, answer = await ask(app, "POST", "/v1/messages", json.dumps(body).encode(), key=key)
    return status, json.loads(answer)


async def test_a_client_cannot_sign_reasoning_and_signatures_survive_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'a.sqlite'}"
    app = gateway(store=store)
    session = await new_session(app)
    status, answer = await answer_anthropic(app, session["api_key"], HELLO)
    assert status == 200 and answer["content"][0]["type"] == "thinking"
    await app.close()
    app = gateway(store=store)
    messages = [*HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "on"}]
    assert (await answer_anthropic(app, session["api_key"], messages))[0] == 200
    for guess in (hash_key(session["api_key"]), session["api_key"], session["session_id"]):
        forged = {
            "type": "thinking",
            "thinking": "made up",
            "signature": ReasoningSigner(guess.encode()).sign("made up"),
        }
        messages[1] = {"role": "assistant", "content": [forged, *answer["content"][1:]]}
        status, refused = await answer_anthropic(app, session["api_key"], messages)
        assert status == 400 and "signature" in refused["error"]["message"], refused
    await app.close()


async def test_sessions_that_are_older_than_the_stores_secret_keep_their_signatures(tmp_path: Path) -> None:
    """A store of an earlier version: the secret is created when it is first opened by this one."""
    store = f"sqlite:{tmp_path / 'a.sqlite'}"
    app = gateway(store=store)
    session = await new_session(app)
    _, answer = await answer_anthropic(app, session["api_key"], HELLO)
    await app.close()
    journal = open_journal(store)
    await journal.write(lambda db: db.execute("DELETE FROM secrets"))
    journal.close()
    app = gateway(store=store)
    thinking = answer["content"][0]["thinking"]
    old = ReasoningSigner(hash_key(session["api_key"]).encode()).sign(thinking)
    content = [{**answer["content"][0], "signature": old}, *answer["content"][1:]]
    messages = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": "on"}]
    assert (await answer_anthropic(app, session["api_key"], messages))[0] == 200
    await app.close()


class Slow(Parrot):
    async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Any:
        await asyncio.sleep(0.02)
        return self._completion(prompt_ids, sampling)


async def test_of_many_sessions_at_a_full_gateway_all_are_served() -> None:
    app = gateway(Slow(), in_flight=2)
    sessions = [await new_session(app) for _ in range(12)]
    body = json.dumps({"model": "m", "messages": HELLO}).encode()
    asked = [ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"]) for session in sessions]
    assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 12
    await app.close()


def read(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_viewer_of_a_gateway_shows_nothing_without_its_secret_path(tmp_path: Path) -> None:
    key = "the-admin-key-0123"
    server = scripted_server(tmp_path, ["a"], admin_key=key)
    command = [sys.executable, "-m", "tokentrue", "view", server.url, "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENTRUE_ADMIN_KEY": key}
    viewer = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert viewer.stdout is not None
        found = re.match(r"viewer: (http://127\.0\.0\.1:\d+/)(\S*)", viewer.stdout.readline())
        assert found is not None
        base, secret = found.groups()
        assert len(secret) > 30
        assert read(base + secret) == 200 and read(base + secret + "data/index") == 200
        for path in ("", "data/index", "static/viewer.js", "x" * len(secret), secret + "../data/index"):
            assert read(base + path) == 404, path
    finally:
        viewer.send_signal(signal.SIGINT)
        viewer.communicate(timeout=60)
        server.stop()
