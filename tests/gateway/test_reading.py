"""What a session keeps of its last requests changes nothing but the time: with it and without it the same bodies give
the same conversations, within its byte limits."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from tests.gateway.inside import ask, gateway, new_session, read_conversation
from tests.gateway.world import call, renderer
from tests.marks import examples
from tokentrue.conversation import ByteBudget, Conversations
from tokentrue.errors import InputError
from tokentrue.gateway.dialects.anthropic import Anthropic
from tokentrue.gateway.dialects.base import DecodedBody, Dialect, RequestHead
from tokentrue.gateway.dialects.google import Google
from tokentrue.gateway.dialects.openai_chat import OpenAIChat
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.providers.scripted import ScriptedProvider
from tokentrue.turn import Session
from tokentrue.types import TurnRequest

SEAL = ReasoningSigner(b"x")
TEXT = st.sampled_from(["", "a", "b", "é 🙂", "<think>x</think>", "a" * 300])
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ITEMS: dict[str, tuple[Dialect, st.SearchStrategy[Any]]] = {
    "chat": (
        OpenAIChat(ReasoningSigner(b"secret")),
        st.one_of(
            st.builds(lambda text: {"role": "user", "content": text}, TEXT),
            st.builds(lambda text: {"role": "assistant", "content": text, "tool_calls": [CALL]}, TEXT),
            st.builds(lambda text: {"content": [{"type": "text", "text": text}], "role": "user"}, TEXT),
            st.builds(lambda text: {"role": "tool", "tool_call_id": "c1", "content": text}, TEXT),
            st.just({"role": "nobody"}),
        ),
    ),
    "responses": (
        OpenAIResponses(SEAL),
        st.one_of(
            st.builds(lambda text: {"role": "user", "content": text}, TEXT),
            st.builds(lambda text: {"role": "assistant", "content": text}, TEXT),
            st.builds(
                lambda text: {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": text}],
                },
                TEXT,
            ),
            st.builds(lambda text: {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}, TEXT),
            st.builds(lambda text: {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": text}, TEXT),
            st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, TEXT),
            st.just({"type": "nothing"}),
        ),
    ),
    "google": (
        Google(SEAL),
        st.one_of(
            st.builds(lambda text: {"role": "user", "parts": [{"text": text}]}, TEXT),
            st.builds(lambda text: {"role": "model", "parts": [{"text": text}, {"functionCall": {"name": "f"}}]}, TEXT),
            st.builds(lambda text: {"role": "model", "parts": [{"text": text, "thought": True}]}, TEXT),
            st.builds(
                lambda text: {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "f", "response": {"output": text}}}],
                },
                TEXT,
            ),
            st.just({"role": "nobody"}),
        ),
    ),
    "anthropic": (
        Anthropic(SEAL),
        st.one_of(
            st.builds(lambda text: {"role": "user", "content": text}, TEXT),
            st.builds(lambda text: {"role": "assistant", "content": [{"type": "text", "text": text}]}, TEXT),
            st.builds(
                lambda text: {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": text},
                        {"type": "text", "text": text},
                    ],
                },
                TEXT,
            ),
        ),
    ),
}


def parse(earlier: Conversations, dialect: Dialect, items: list[bytes]) -> Any:
    try:
        decoded = DecodedBody(head=RequestHead(model="m"), items=list(map(Raw, items)))
        return list(read_conversation(dialect, decoded, earlier))
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("name", ITEMS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_messages_are_the_same_whatever_is_kept(name: str, data: st.DataObject) -> None:
    dialect, item = ITEMS[name]
    limit = data.draw(st.sampled_from([1500, 4000, 100_000]))
    budget = ByteBudget(data.draw(st.sampled_from([3000, 1_000_000])))
    caches = [Conversations(limit, budget) for _ in range(2)]  # two sessions of one process
    conversation: list[Any] = []
    for _ in range(data.draw(st.integers(1, 8))):
        kept = data.draw(st.integers(0, len(conversation)))  # go on, go back, or begin again
        conversation = conversation[:kept] + data.draw(st.lists(item, min_size=1, max_size=4))
        spacing = data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        items = [json.dumps(one, separators=spacing).encode() for one in conversation]
        cache = data.draw(st.sampled_from(caches))
        wanted = parse(Conversations(0), dialect, items)
        assert parse(cache, dialect, items) == wanted
        assert (
            all(one.used <= limit for one in caches) and sum(one.used for one in caches) == budget.used <= budget.limit
        )
    for cache in caches:
        cache.close()
    assert budget.used == 0


@pytest.mark.parametrize("name", ITEMS)
def test_the_same_bytes_are_the_same_object(name: str) -> None:
    dialect, _ = ITEMS[name]
    cache = Conversations(100_000)
    first = [
        b'{"role": "user", "content": "hi"}',
        b'{"role": "assistant", "content": "ho"}',
        b'{"role": "user", "content": "hi"}',
    ]
    if name == "responses":
        first.insert(1, b'{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}')
    more = b'{"role": "user", "content": "more"}'
    if name == "google":
        hi = b'{"role": "user", "parts": [{"text": "hi"}]}'
        first = [hi, b'{"role": "model", "parts": [{"text": "ho"}]}', hi]
        more = b'{"parts": [{"text": "more"}]}'
    before = parse(cache, dialect, first)
    kept = copy.deepcopy(before)
    after = parse(cache, dialect, [*first, more])
    assert all(one is other for one, other in zip(before, after, strict=False))
    assert before == kept and len(after) == len(before) + 1


def test_one_large_session_does_not_pin_the_process() -> None:
    """26 requests of 2 MB under a limit of 5 MB: what is kept is bounded by bytes, not by number."""
    budget = ByteBudget(8_000_000)
    caches = [Conversations(5_000_000, budget) for _ in range(3)]
    for number in range(26):
        for cache in caches:
            parse(
                cache,
                OpenAIChat(ReasoningSigner(b"secret")),
                [json.dumps({"role": "user", "content": f"{number}" + "x" * 1_000_000}).encode()],
            )
            assert cache.used <= 5_000_000 and budget.used <= 8_000_000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_nothing_changes_a_message_that_is_kept(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = renderer()
    texts = [call("f", '{"a": 1}'), "B", "C"]
    app = gateway(
        ScriptedProvider([{"text": text} for text in texts], encode=r.encode_sampled, stop_id=r.stop_token_ids[0])
    )
    session = await new_session(app)
    seen: list[tuple[Any, bytes]] = []
    start = Session._start_or_join  # pyright: ignore[reportPrivateUsage]

    def watch(self: Session, request: TurnRequest, *, streamed: bool) -> Any:
        seen.extend((message, orjson.dumps(message)) for message in request.messages)
        return start(self, request, streamed=streamed)

    monkeypatch.setattr(Session, "_start_or_join", watch)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for _ in texts:
        body = {"model": "m", "max_tokens": 99, "messages": messages}
        status, answer = await ask(app, "POST", path, orjson.dumps(body), key=session["api_key"])
        assert status == 200, answer
        served = orjson.loads(answer)
        message = (
            {"role": "assistant", "content": served["content"]}
            if "content" in served
            else served["choices"][0]["message"]
        )
        messages += [message, {"role": "user", "content": "on"}]
    assert len({id(message) for message, _ in seen}) == 5 and len(seen) == 9  # each was parsed once
    assert all(orjson.dumps(message) == spelled for message, spelled in seen)
