"""The gateway's promises, each broken on purpose: a mutant that no guard catches would mean that the promise is only
words.

A guard is an ordinary check of the running application; it must hold as the code is, and must fail under its mutants.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest

import tokentrue as tt
from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.gateway.test_hostile import FORGED
from tests.gateway.world import TOOLS, call, model_dir, renderer
from tests.parts import whole_chunks
from tokentrue.errors import TokenTrueError
from tokentrue.gateway import Gateway
from tokentrue.types import Chunk, Completion, Ids, Sampling

HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Engine(Parrot):
    """Says its text one token at a time, counts what it was asked, and can be held before a token."""

    def __init__(self, text: str = "<think>\nhm\n</think>\n\nok, and so on") -> None:
        super().__init__(text)
        self.asked = 0
        self.closed_early = False
        self.hold_at: int | None = None
        self.go_on = asyncio.Event()

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        self.asked += 1
        await asyncio.sleep(0.02)
        return await super().generate(prompt_ids, sampling, session=session)

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        if whole:
            for chunk in whole_chunks(await self.generate(prompt_ids, sampling, session=session)):
                yield chunk
            return
        self.asked += 1
        done = self._completion(prompt_ids, sampling)
        finished = False
        try:
            for place, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
                if place == self.hold_at:
                    await self.go_on.wait()
                yield Chunk(token_ids=(token,), logprobs=(logprob,))
            finished = True
        finally:
            self.closed_early = not finished
        yield Chunk(final=done)


class Exchange:
    """A request under way: what was sent so far, and a client that can leave."""

    def __init__(
        self, app: Gateway, key: str, body: dict[str, Any], *, on_send: Callable[[bytes], None] | None = None
    ) -> None:
        self.sent = b""
        self._body, self._gone, self._asked = json.dumps(body).encode(), asyncio.Event(), False
        self._on_send = on_send
        path = "/v1/chat/completions"
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
        }
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        self.task = asyncio.create_task(
            app({**scope, "headers": headers, "http_version": "1.1"}, self._receive, self._send)
        )

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        data = message.get("body", b"")
        if data and self._on_send is not None:
            self._on_send(data)
        self.sent += data

    def leave(self) -> None:
        self._gone.set()


async def until(condition: Callable[[], bool], *, seconds: float = 3.0) -> None:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def chat(app: Gateway, key: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
    status, answer = await ask(
        app, "POST", "/v1/chat/completions", json.dumps(body or HELLO).encode(), key=key, **headers
    )
    return status, json.loads(answer)


def nodes(app: Gateway, session: dict[str, str]) -> list[Any]:
    known = app.services.sessions.get_loaded(session["session_id"])
    assert known is not None
    return known.session.tree.in_order()


async def begin(engine: Engine | None = None, **limits: Any) -> tuple[Gateway, Engine, dict[str, str]]:
    engine = engine or Engine()
    app = gateway(engine, **limits)
    return app, engine, await new_session(app)


# The guards.


async def terminal_event_comes_after_the_journal() -> None:
    app, _, session = await begin()
    rows: list[int] = []

    def look(data: bytes) -> None:
        if b"[DONE]" in data or b'"finish_reason":"stop"' in data:
            rows.append(len(app.services.journal.rows(session["session_id"])))

    await Exchange(app, session["api_key"], {**HELLO, "stream": True}, on_send=look).task
    assert rows and set(rows) == {1}, "the end was told before the turn was durable"


async def answers_come_after_the_journal() -> None:
    app, _, session = await begin()
    rows: list[int] = []
    await Exchange(
        app,
        session["api_key"],
        HELLO,
        on_send=lambda _: rows.append(len(app.services.journal.rows(session["session_id"]))),
    ).task
    assert rows == [1], "the answer was told before the turn was durable"


async def a_key_opens_its_own_session_only() -> None:
    app, engine, session = await begin()
    other = await new_session(app)
    secret = other["api_key"].rpartition("-")[2]
    forged = f"tt-{session['session_id']}-{secret}"
    assert (await chat(app, forged))[0] == 401
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    assert (await ask(app, "POST", path, json.dumps(HELLO).encode(), key=other["api_key"]))[0] == 403
    assert engine.asked == 0


async def only_the_admin_key_administers() -> None:
    app, _, session = await begin()
    for key in (session["api_key"], "bos", "bossy", "Boss", "", None):
        assert (await ask(app, "GET", "/sessions", key=key))[0] in (401, 403), key
        assert (await ask(app, "POST", f"/sessions/{session['session_id']}/reward", b'{"reward": 1}', key=key))[0] in (
            401,
            403,
        ), key


async def identical_requests_in_flight_are_one_turn() -> None:
    app, engine, session = await begin()
    answers = await asyncio.gather(*(chat(app, session["api_key"]) for _ in range(3)))
    assert len({answer["id"] for _, answer in answers}) == 1
    assert engine.asked == 1 and len(nodes(app, session)) == 1


async def a_retry_gets_the_recorded_answer() -> None:
    app, engine, session = await begin()
    answers = [await chat(app, session["api_key"], idempotency_key="k") for _ in range(2)]
    answers += [await chat(app, session["api_key"], x_stainless_retry_count=count) for count in ("0", "1")]
    ids = [answer["id"] for _, answer in answers]
    assert ids[0] == ids[1] and ids[2] == ids[3] and ids[0] != ids[2]
    assert engine.asked == 2 and len(nodes(app, session)) == 2


async def nothing_generates_untracked() -> None:
    app, engine, session = await begin()
    body = json.dumps(HELLO).encode()
    for path in (
        "/v1/completions",
        "/generate",
        "/v1/chat",
        "/v1/embeddings",
        f"/sessions/{session['session_id']}/v1/completions",
    ):
        assert (await ask(app, "POST", path, body, key=session["api_key"]))[0] == 404, path
    await chat(app, session["api_key"])
    await Exchange(app, session["api_key"], {**HELLO, "stream": True}).task
    assert engine.asked == len(nodes(app, session)) == 2, "a generation is not in the record"
    known = app.services.sessions.get_loaded(session["session_id"])
    assert known is not None and known.coverage().sampled == 2 * len(engine.ids)


async def text_never_becomes_structure() -> None:
    app, _, session = await begin()
    await chat(app, session["api_key"], {"model": "m", "messages": [{"role": "user", "content": f"hi {FORGED}"}]})
    (node,) = nodes(app, session)
    plain = renderer().render([{"role": "user", "content": "hi"}]).token_ids
    structure = {id_ for id_ in renderer().codec.texts}
    assert sum(i in structure for i in node.given_ids) == sum(i in structure for i in plain)


async def left_in_mid_stream() -> tuple[Gateway, Engine, dict[str, str], Exchange]:
    app, engine, session = await begin()
    engine.hold_at = 9
    exchange = Exchange(app, session["api_key"], {**HELLO, "stream": True})
    await until(lambda: exchange.sent.count(b"data:") >= 3)
    exchange.leave()
    return app, engine, session, exchange


async def what_was_sampled_for_a_client_that_left_is_kept() -> None:
    app, engine, session, exchange = await left_in_mid_stream()
    await asyncio.wait_for(exchange.task, 5)
    await until(lambda: len(nodes(app, session)) == 1)
    (node,) = nodes(app, session)
    assert list(node.sampled_ids) == list(engine.ids[:9]) and node.outcome == "disconnected"


async def a_client_that_leaves_stops_the_engine() -> None:
    _, engine, _, exchange = await left_in_mid_stream()
    try:
        await until(lambda: engine.closed_early, seconds=1.0)
    finally:
        engine.go_on.set()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(exchange.task, 5)


async def tokens_flow_while_they_are_sampled() -> None:
    app, engine, session = await begin()
    engine.hold_at = len(engine.ids) - 1
    exchange = Exchange(app, session["api_key"], {**HELLO, "stream": True})
    try:
        await until(lambda: b'"content":" and' in exchange.sent or b"so on" in exchange.sent, seconds=1.0)
    finally:
        engine.go_on.set()
        await exchange.task


async def logprobs_are_the_engines_own_floats() -> None:
    app, engine, session = await begin()
    await chat(app, session["api_key"])
    (node,) = nodes(app, session)
    assert list(node.logprobs) == list(engine._completion([], Sampling()).logprobs)


async def a_pause_holds_generations_back() -> None:
    app, engine, session = await begin()
    await ask(app, "POST", "/admin/pause", b"{}")
    waiting = asyncio.create_task(chat(app, session["api_key"]))
    await asyncio.sleep(0.1)
    held = engine.asked == 0
    await ask(app, "POST", "/admin/resume", b"{}")
    await waiting
    assert held


async def the_noted_version_is_stamped() -> None:
    app, _, session = await begin()
    await ask(app, "POST", "/admin/version", b'{"version": 7}')
    await chat(app, session["api_key"])
    (node,) = nodes(app, session)
    assert [span.version for span in node.versions] == [7]


async def a_changed_history_is_not_the_old_one() -> None:
    """The same number of bytes, one of them changed in the middle: the first turn must not be continued as if it
    were."""
    app, _, session = await begin()
    messages: list[Any] = [{"role": "user", "content": "alpha"}]
    _, answer = await chat(app, session["api_key"], {"model": "m", "messages": messages})
    tail = [answer["choices"][0]["message"], {"role": "user", "content": "more"}]
    await chat(app, session["api_key"], {"model": "m", "messages": [{"role": "user", "content": "alphb"}, *tail]})
    first, second = nodes(app, session)
    assert second.parent != first.id
    assert "alphb" in renderer().decode(second.given_ids)


async def a_broken_call_is_never_json() -> None:
    engine = Engine(call("look", '{"at": "shelf"}').replace("}}", "}"))
    app, _, session = await begin(engine)
    await Exchange(app, session["api_key"], {**HELLO, "tools": TOOLS, "stream": True}).task
    (node,) = nodes(app, session)
    for made in node.served["tool_calls"]:
        with pytest.raises(ValueError):
            json.loads(made["function"]["arguments"])


async def changed_reasoning_is_refused() -> None:
    app, _, session = await begin()
    body: dict[str, Any] = {"model": "m", "max_tokens": 99, "messages": HELLO["messages"]}
    _, raw = await ask(app, "POST", "/v1/messages", json.dumps(body).encode(), key=session["api_key"])
    content = json.loads(raw)["content"]
    assert content[0]["type"] == "thinking"
    content[0]["thinking"] = "something else"
    later = [*HELLO["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    status, _ = await ask(
        app, "POST", "/v1/messages", json.dumps({**body, "messages": later}).encode(), key=session["api_key"]
    )
    assert status == 400


async def too_many_in_flight_are_told_to_wait() -> None:
    app, _, session = await begin(in_flight_per_session=1)
    answers = await asyncio.gather(*(chat(app, session["api_key"], {**HELLO, "seed": seed}) for seed in range(3)))
    assert sorted(status for status, _ in answers) == [200, 429, 429]


# The mutants.

Patch = pytest.MonkeyPatch


def journal_written_later(patch: Patch) -> None:
    from tokentrue.sessions import journal

    late: set[asyncio.Task[None]] = set()
    append_nodes = journal.Journal.append_nodes

    async def later(self: Any, *arguments: Any) -> None:
        async def write() -> None:
            await asyncio.sleep(0.05)
            await append_nodes(self, *arguments)

        late.add(asyncio.create_task(write()))

    patch.setattr(journal.Journal, "append_nodes", later)


def any_secret_opens(patch: Patch) -> None:
    patch.setattr("tokentrue.gateway.auth.SessionAccess.check", lambda self, key_hash: None)


def a_key_opens_any_named_session(patch: Patch) -> None:
    from tokentrue.gateway.auth import ApiKeys, SessionAccess

    authenticate = ApiKeys.authenticate

    def open_door(self: Any, headers: Any, named: str | None, in_url: str | None = None) -> SessionAccess:
        made = authenticate(self, headers, None, in_url)
        return made if named is None else SessionAccess(session_id=named, key_hash=None)

    patch.setattr(ApiKeys, "authenticate", open_door)


def admin_by_prefix(patch: Patch) -> None:
    patch.setattr(
        "tokentrue.gateway.auth.ApiKeys.is_admin",
        lambda self, presented: bool(presented) and "boss".startswith(presented),
    )


def agents_are_admins(patch: Patch) -> None:
    patch.setattr("tokentrue.gateway.auth.ApiKeys.require_admin", lambda self, headers: None)


def flights_are_not_shared(patch: Patch) -> None:
    patch.setattr("tokentrue.sessions.singleflight.SingleFlight.find", lambda self, identity: None)
    patch.setattr(
        "tokentrue.gateway.sessions.SessionHandle.find_request_key", lambda self, scope, dialect, body: uuid.uuid4().hex
    )


def retries_have_new_names(patch: Patch) -> None:
    patch.setattr(
        "tokentrue.gateway.sessions.SessionHandle.find_request_key", lambda self, scope, dialect, body: uuid.uuid4().hex
    )


def retry_counts_are_ignored(patch: Patch) -> None:
    from tokentrue.gateway import sessions

    read = sessions.read_header
    patch.setattr(
        sessions,
        "read_header",
        lambda headers, name: None if name == b"x-stainless-retry-count" else read(headers, name),
    )


def a_path_around_the_record(patch: Patch) -> None:
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from tokentrue.gateway import app

    def with_another(services: Any) -> list[Any]:
        async def generate(request: Any) -> JSONResponse:
            done = await services.provider.generate([1], Sampling())
            return JSONResponse({"ids": list(done.token_ids)})

        return [Route("/v1/completions", generate, methods=["POST"]), *model_routes(services)]

    model_routes = app.model_routes
    patch.setattr(app, "model_routes", with_another)


def streams_are_generated_twice(patch: Patch) -> None:
    from tokentrue.gateway.metrics import MeteredProvider

    stream = MeteredProvider.stream

    async def twice(
        self: Any, prompt_ids: Any, sampling: Any, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        await self.inner.generate(prompt_ids, sampling, session=session)
        async for chunk in stream(self, prompt_ids, sampling, session=session, whole=whole):
            yield chunk

    patch.setattr(MeteredProvider, "stream", twice)


def text_is_encoded_as_engines_do(patch: Patch) -> None:
    unsafe = tt.load_renderer(str(model_dir()), injection="engine")
    patch.setattr("tests.gateway.inside.renderer", lambda: unsafe)


def partial_turns_are_dropped(patch: Patch) -> None:
    patch.setattr("tokentrue.sessions.stages.generation._Received.completion", lambda self, prompt_tokens: None)


def nobody_watches_the_client(patch: Patch) -> None:
    patch.setattr("tokentrue.gateway.model_routes.cancel_on_disconnect", lambda receive: nullcontext())


def one_big_chunk(patch: Patch) -> None:
    from tokentrue.gateway.asgi import EventStream

    held: list[Any] = []
    feed = EventStream.feed

    async def at_the_end(self: Any, events: Any) -> None:
        held.extend(events)
        if any(event.reply is not None for event in events):
            await feed(self, held)
            held.clear()

    patch.setattr(EventStream, "feed", at_the_end)


def logprobs_with_four_decimals(patch: Patch) -> None:
    from tokentrue.gateway.metrics import MeteredProvider

    stream = MeteredProvider.stream

    async def rounded(self: Any, *args: Any, **options: Any) -> AsyncIterator[Chunk]:
        async for chunk in stream(self, *args, **options):
            final = chunk.final
            if final is not None:
                final = replace(final, logprobs=tuple(round(value, 4) for value in final.logprobs))
            yield replace(chunk, logprobs=tuple(round(value, 4) for value in chunk.logprobs), final=final)

    patch.setattr(MeteredProvider, "stream", rounded)


def pauses_hold_nothing(patch: Patch) -> None:
    patch.setattr("tokentrue.gateway.admission.AdmissionGate.pause", lambda self: None)


def versions_are_forgotten(patch: Patch) -> None:
    patch.setattr("tokentrue.gateway.metrics.MeteredProvider._stamp", lambda self, completion, seen: completion)


def messages_are_cached_by_length(patch: Patch) -> None:
    from tokentrue.conversation import reading

    count: Any = reading.count_equal

    def by_length(one: Any, other: Any) -> int:
        return count([len(bytes(item)) for item in one], [len(bytes(item)) for item in other])

    patch.setattr(reading, "count_equal", by_length)


def the_last_brace_is_shown_at_once(patch: Patch) -> None:
    from tokentrue.renderers.parsing.calls import JsonCallReader

    feed = JsonCallReader.feed

    def feed_and_show(self: JsonCallReader, text: str) -> str:
        shown = feed(self, text)
        return shown + "}" if shown and self._state == "done" else shown

    patch.setattr(JsonCallReader, "feed", feed_and_show)


def seals_are_not_read(patch: Patch) -> None:
    patch.setattr("tokentrue.gateway.dialects.signing.ReasoningSigner.holds", lambda self, signature, text: True)


def the_queue_has_no_end(patch: Patch) -> None:
    patch.setattr("tokentrue.gateway.sessions.SessionHandle.count_in_flight", lambda self: nullcontext())


Guard = Callable[[], Awaitable[None]]
CAUGHT_BY: dict[Callable[[Patch], None], list[Guard]] = {
    journal_written_later: [terminal_event_comes_after_the_journal, answers_come_after_the_journal],
    any_secret_opens: [a_key_opens_its_own_session_only],
    a_key_opens_any_named_session: [a_key_opens_its_own_session_only],
    admin_by_prefix: [only_the_admin_key_administers],
    agents_are_admins: [only_the_admin_key_administers],
    flights_are_not_shared: [identical_requests_in_flight_are_one_turn],
    retries_have_new_names: [a_retry_gets_the_recorded_answer],
    retry_counts_are_ignored: [a_retry_gets_the_recorded_answer],
    a_path_around_the_record: [nothing_generates_untracked],
    streams_are_generated_twice: [nothing_generates_untracked],
    text_is_encoded_as_engines_do: [text_never_becomes_structure],
    partial_turns_are_dropped: [what_was_sampled_for_a_client_that_left_is_kept],
    nobody_watches_the_client: [a_client_that_leaves_stops_the_engine],
    one_big_chunk: [tokens_flow_while_they_are_sampled],
    logprobs_with_four_decimals: [logprobs_are_the_engines_own_floats],
    pauses_hold_nothing: [a_pause_holds_generations_back],
    versions_are_forgotten: [the_noted_version_is_stamped],
    messages_are_cached_by_length: [a_changed_history_is_not_the_old_one],
    the_last_brace_is_shown_at_once: [a_broken_call_is_never_json],
    seals_are_not_read: [changed_reasoning_is_refused],
    the_queue_has_no_end: [too_many_in_flight_are_told_to_wait],
}
GUARDS = list(dict.fromkeys(guard for guards in CAUGHT_BY.values() for guard in guards))


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
async def test_the_promise_holds(guard: Guard) -> None:
    await guard()


@pytest.mark.parametrize(
    ("mutant", "guard"),
    [(mutant, guard) for mutant, guards in CAUGHT_BY.items() for guard in guards],
    ids=lambda one: one.__name__,
)
async def test_the_mutant_is_caught(mutant: Callable[[Patch], None], guard: Guard, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, TokenTrueError, pytest.fail.Exception)):
        await guard()
