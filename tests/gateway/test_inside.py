"""What is easier to see from inside: old sessions are purged, idle ones leave the memory and come back."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.gateway.world import TOOLS
from tokentrue.errors import SessionElsewhere, SessionNotFound
from tokentrue.gateway import Gateway
from tokentrue.gateway.sessions import SessionRegistry
from tokentrue.turn import Session
from tokentrue.types import Completion, Ids, Sampling


def open_late(app: Gateway, found: Session | Exception) -> SessionRegistry:
    """A registry that finds no session when it first looks, and `found` when it looks again."""
    answers: list[Session | Exception] = [SessionNotFound("no session 'new'"), found]

    async def open_session(session_id: str) -> Session:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SessionRegistry(open_session, app.config.limits, app.services.journal)


async def test_a_session_that_was_created_meanwhile_is_opened() -> None:
    app = gateway()
    made = app.services.new_session("new")
    await made.wait_created()
    handle = await open_late(app, made).open("new", app.services.new_session)
    assert handle.session is made
    elsewhere = SessionElsewhere("session 'new' is owned by gateway 'b'", url="http://b:8000")
    with pytest.raises(SessionElsewhere):  # so that the request is forwarded
        await open_late(app, elsewhere).open("new", app.services.new_session)
    await app.close()


async def test_a_session_that_was_added_meanwhile_is_not_opened_a_second_time() -> None:
    """POST /sessions with the same id came first."""
    app = gateway()
    made = app.services.new_session("new")

    async def open_session(session_id: str) -> Session:
        await made.wait_created()
        registry.add(made)
        raise SessionNotFound(f"no session {session_id!r}")

    registry = SessionRegistry(open_session, app.config.limits, app.services.journal)
    handle = await registry.open("new", app.services.new_session)
    assert handle.session is made and registry.get_loaded("new") is handle
    await app.close()


async def test_ended_sessions_are_purged_by_age(caplog: pytest.LogCaptureFixture) -> None:
    app = gateway()
    old, young = await new_session(app), await new_session(app)
    await ask(app, "DELETE", f"/sessions/{old['session_id']}")
    assert await app.purge_old() == []
    app.config = replace(app.config, purge_after_s=1e-9)
    with caplog.at_level(logging.INFO, logger="tokentrue.gateway"):
        assert await app.purge_old() == [old["session_id"]]
    assert {"event": "purged", "session": old["session_id"], "purge_after_s": 1e-9} in map(json.loads, caplog.messages)
    assert (await ask(app, "GET", f"/sessions/{old['session_id']}"))[0] == 404
    assert (await ask(app, "GET", f"/sessions/{young['session_id']}"))[0] == 200
    await app.close()


async def test_sessions_beyond_the_memory_limit_come_back_from_the_journal() -> None:
    app = gateway(live_sessions=2)
    made = [await new_session(app) for _ in range(4)]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    for session in made:
        assert (await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"]))[0] == 200
    assert len(app.services.sessions) == 2
    for session in made:
        _, answer = await ask(app, "GET", f"/sessions/{session['session_id']}/samples")
        assert json.loads(answer)["coverage"]["ratio"] == 1.0
    page = (await ask(app, "GET", "/metrics"))[1].decode()
    assert "tokentrue_coverage_ratio 1.0" in page
    await app.close()


async def test_prompts_are_not_changed_behind_the_providers_back() -> None:
    """The contract of `protocols.Provider`: an adapter may keep the array of a prompt and compare the next one with
    it."""

    class Keeping(Parrot):
        seen: ClassVar[list[tuple[Any, list[int]]]] = []

        async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Any:
            self.seen.append((prompt_ids, list(prompt_ids)))
            return await super().generate(prompt_ids, sampling, session=session)

    app = gateway(Keeping())
    session = await new_session(app)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for turn in range(6):
        if turn == 4:
            del messages[-2:]  # a fork
        body = json.dumps({"messages": messages, "model": "m", "n": 2 if turn == 3 else 1}).encode()
        status, answer = await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"])
        assert status == 200
        messages += [json.loads(answer)["choices"][0]["message"], {"role": "user", "content": f"more {turn}"}]
    assert len(Keeping.seen) == 7
    for kept, was in Keeping.seen:
        assert list(kept[: len(was)]) == was
    await app.close()


class Noting(Parrot):
    """Remembers what it was asked to enforce."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Any:
        self.asked.append(dict(sampling.extra))
        return await super().generate(prompt_ids, sampling, session=session)


async def test_a_call_that_must_be_made_reaches_the_engine_as_the_models_own_format() -> None:
    engine = Noting()
    app = gateway(engine)
    session = await new_session(app)
    head = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    named = {"type": "function", "function": {"name": "wait"}}
    for choice in ("required", named, "auto"):
        body = json.dumps({**head, "tool_choice": choice}).encode()
        status, answer = await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"])
        assert status == 200, answer
    begins = [
        [tag["begin"] for tag in asked["tool_choice"]["format"]["elements"][1]["tags"]] for asked in engine.asked[:2]
    ]
    look, wait = (f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("look", "wait"))
    assert begins == [[look, wait], [wait]] and engine.asked[2] == {}
    await app.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_failure_behind_the_answer_does_not_answer_twice(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = gateway()
    session = await new_session(app)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the metrics are broken")

    monkeypatch.setattr(app.services.metrics, "note_turn", fail)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}).encode()
    status, answer = await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"])
    assert status == 200
    assert answer.endswith(b"data: [DONE]\n\n") if streamed else json.loads(answer)["choices"]
    await app.close()


class Silent(Parrot):
    """An engine that never answers."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_server_that_stops_answers_503(path: str) -> None:
    """uvicorn cancels the requests that outlast the drain, and answers 500 for those that say nothing."""
    app = gateway(Silent())
    session = await new_session(app)
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    request = asyncio.create_task(ask(app, "POST", f"/v1/{path}", json.dumps(body).encode(), key=session["api_key"]))
    await asyncio.sleep(0.05)
    request.cancel()
    status, answer = await request
    assert status == 503, answer
    assert "send this again" in json.loads(answer)["error"]["message"]
