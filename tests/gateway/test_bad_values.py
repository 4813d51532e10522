"""Values of the wrong type or nested too deeply: refused where they enter, so that nothing fails later on them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.gateway.world import renderer
from tests.turn.test_matching import USER, said, session_of
from tokentrue.errors import EngineContractError, InputError, JournalError, MessageError, SamplingError
from tokentrue.plain_json import MAX_DEPTH
from tokentrue.sessions.journal import Journal
from tokentrue.types import TurnRequest

CHAT, MESSAGES, RESPONSES, GOOGLE = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1beta/models/m:generateContent",
)
SAID = {"role": "user", "content": "x"}
ASKED = {"role": "user", "parts": [{"text": "x"}]}


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def deep_requests(value: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": value}}
    tool = {"name": "f", "parameters": value}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": value}
    return {
        "messages[0]": (CHAT, {"messages": [{**SAID, "more": value}]}),
        "messages[1]": (CHAT, {"messages": [SAID, {"role": "assistant", "tool_calls": [call]}]}),
        "chat_template_kwargs": (CHAT, {"messages": [SAID], "chat_template_kwargs": value}),
        "tools": (CHAT, {"messages": [SAID], "tools": [{"type": "function", "function": tool}]}),
        "response_format": (
            CHAT,
            {"messages": [SAID], "response_format": {"type": "json_schema", "json_schema": {"schema": value}}},
        ),
        "input": (MESSAGES, {"max_tokens": 9, "messages": [SAID, {"role": "assistant", "content": [use]}, SAID]}),
        "input_schema": (
            MESSAGES,
            {"max_tokens": 9, "messages": [SAID], "tools": [{"name": "f", "input_schema": value}]},
        ),
        "function": (RESPONSES, {"input": [SAID], "tools": [{"type": "function", **tool}]}),
        "args": (
            GOOGLE,
            {"contents": [ASKED, {"role": "model", "parts": [{"functionCall": {"name": "f", "args": value}}]}, ASKED]},
        ),
        "declaration": (
            GOOGLE,
            {"contents": [ASKED], "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": value}]}]},
        ),
    }


@pytest.mark.parametrize("depth", [300, 900])
@pytest.mark.parametrize("name", list(deep_requests(1)))
async def test_deep_requests_are_refused_and_the_session_goes_on(name: str, depth: int) -> None:
    app = gateway()
    session = await new_session(app)
    path, body = deep_requests(nest(depth))[name]
    body = body if path == GOOGLE else {"model": "m", **body}
    status, answer = await ask(app, "POST", path, json.dumps(body).encode(), key=session["api_key"])
    assert (status, b"is nested deeper than" in answer) == (400, True), answer
    status, answer = await ask(
        app, "POST", CHAT, json.dumps({"model": "m", "messages": [SAID]}).encode(), key=session["api_key"]
    )
    assert status == 200, answer
    await app.close()


@pytest.mark.parametrize("depth", [260, 900])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, GOOGLE])
async def test_deep_arguments_that_a_model_samples_are_served_and_replayed(path: str, depth: int) -> None:
    """Whatever the dialect makes of them: the turn is served, it comes back as the recorded one, and everything can be
    read."""
    sampled = f'<tool_call>\n{{"name": "f", "arguments": {"{" + chr(34) + "a" + chr(34) + ":"}{"[" * depth}{"]" * depth}}}}}\n</tool_call>'
    app = gateway(Parrot(sampled))
    session = await new_session(app)
    tool = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}

    async def send(body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await ask(app, "POST", path, json.dumps(body).encode(), key=session["api_key"])
        assert status == 200, answer[:300]
        return json.loads(answer)

    if path == CHAT:
        head: dict[str, Any] = {"model": "m", "tools": [{"type": "function", "function": tool}]}
        message = (await send({**head, "messages": [SAID]}))["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "done"}
        await send({**head, "messages": [SAID, message, result]})
    elif path == MESSAGES:
        head = {"model": "m", "max_tokens": 9999, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
        content = (await send({**head, "messages": [SAID]}))["content"]
        use = next(block for block in content if block["type"] == "tool_use")
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "done"}]}
        await send({**head, "messages": [SAID, {"role": "assistant", "content": content}, result]})
    elif path == RESPONSES:
        head = {"model": "m", "tools": [{"type": "function", **tool}]}
        output = (await send({**head, "input": [SAID]}))["output"]
        called = next(item for item in output if item["type"] == "function_call")
        await send(
            {
                **head,
                "input": [
                    SAID,
                    *output,
                    {"type": "function_call_output", "call_id": called["call_id"], "output": "done"},
                ],
            }
        )
    else:
        head = {"tools": [{"functionDeclarations": [{"name": "f"}]}]}
        content = (await send({**head, "contents": [ASKED]}))["candidates"][0]["content"]
        result = {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "done"}}}]}
        await send({**head, "contents": [ASKED, content, result]})
    status, listed = await ask(app, "GET", "/sessions")
    assert status == 200, listed
    status, answer = await ask(app, "GET", f"/sessions/{session['session_id']}/samples")
    samples = json.loads(answer)
    assert status == 200 and len(samples["samples"]) == 1 and samples["coverage"]["ratio"] == 1.0
    await app.close()


async def test_the_deepest_value_that_is_taken_can_be_written_and_read_everywhere() -> None:
    app = gateway()
    session = await new_session(app, metadata=nest(MAX_DEPTH))
    body = {"model": "m", "messages": [{**SAID, "more": nest(MAX_DEPTH - 1)}], "chat_template_kwargs": nest(MAX_DEPTH)}
    status, answer = await ask(app, "POST", CHAT, json.dumps(body).encode(), key=session["api_key"])
    assert status == 200, answer
    for path in ("/sessions", f"/sessions/{session['session_id']}", f"/sessions/{session['session_id']}/samples"):
        assert (await ask(app, "GET", path))[0] == 200
    for wrong in ({"metadata": nest(MAX_DEPTH + 1)}, {"sampling": {"extra": nest(MAX_DEPTH)}}):
        assert (await ask(app, "POST", "/sessions", json.dumps(wrong).encode()))[0] == 400
    await app.close()


WRONG_SAMPLING: list[dict[str, Any]] = [
    {"stop": "END"}, {"stop": ["END", 5]}, {"stop": {"a": 1}}, {"stop": None}, {"stop_token_ids": "12"}, {"stop_token_ids": ["5"]},
    {"stop_token_ids": [1.5]}, {"stop_token_ids": [True]}, {"temperature": True}, {"temperature": None}, {"temperature": "hot"},
    {"temperature": 1e39}, {"temperature": 1e-50},
    {"top_p": "0.5"}, {"top_k": 1.5}, {"top_k": True}, {"max_tokens": 2.5}, {"max_tokens": "5"}, {"max_tokens": True}, {"seed": "abc"},
    {"seed": 1.5}, {"top_logprobs": True}, {"extra": 5}, {"extra": []}, {"extra": None},
    {"seed": 2**63}, {"seed": -(2**63) - 1}, {"max_tokens": 2**31}, {"top_k": 2**31}, {"top_logprobs": 2**31}, {"stop_token_ids": [2**31]},
    {"stop_token_ids": [7, -1]}, {"presence_penalty": 1e31}, {"frequency_penalty": -(10**40)}, {"repetition_penalty": 10**40},
]  # fmt: skip


@pytest.mark.parametrize("values", WRONG_SAMPLING, ids=str)
async def test_sampling_values_of_another_type_are_refused_at_once(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(SamplingError, match=name):
        tt.Sampling(**values)
    app = gateway()
    status, answer = await ask(app, "POST", "/sessions", json.dumps({"sampling": values}).encode())
    assert status == 400 and name in json.loads(answer)["error"]["message"]
    await app.close()


def requests_beyond(value: int) -> list[tuple[str, dict[str, Any], str]]:
    """Where a client sends it, and the name under which it is refused."""
    chat = ("seed", "max_tokens", "max_completion_tokens", "top_k")
    return [
        *((CHAT, {"messages": [SAID], name: value}, "max_tokens" if "max" in name else name) for name in chat),
        (CHAT, {"messages": [SAID], "seed": -value}, "seed"),
        (CHAT, {"messages": [SAID], "seed": value, "stream": True}, "seed"),
        (CHAT, {"messages": [SAID], "logprobs": True, "top_logprobs": value}, "top_logprobs"),
        (CHAT, {"messages": [SAID], "stop_token_ids": [value]}, "stop_token_ids"),
        (MESSAGES, {"messages": [SAID], "max_tokens": value}, "max_tokens"),
        (MESSAGES, {"messages": [SAID], "max_tokens": 9, "top_k": value}, "top_k"),
        (RESPONSES, {"input": [SAID], "max_output_tokens": value}, "max_tokens"),
        (GOOGLE, {"contents": [ASKED], "generationConfig": {"seed": value}}, "seed"),
        (GOOGLE, {"contents": [ASKED], "generationConfig": {"maxOutputTokens": value}}, "max"),
    ]


@pytest.mark.parametrize("value", [2**63 + 1, 2**64, 10**30])
async def test_integers_that_no_engine_holds_are_the_clients_mistake_in_every_dialect(value: int) -> None:
    app = gateway()
    session = await new_session(app)
    for path, body, name in requests_beyond(value):
        body = body if path == GOOGLE else {"model": "m", **body}
        status, answer = await ask(app, "POST", path, json.dumps(body).encode(), key=session["api_key"])
        assert (status, name in answer.decode()) == (400, True), (body, answer)
    await app.close()


def test_the_largest_values_are_taken_and_an_endless_integer_is_refused_by_name() -> None:
    ends = tt.Sampling(
        seed=2**63 - 1, max_tokens=2**31 - 1, top_k=2**31 - 1, top_logprobs=2**31 - 1, stop_token_ids=(0, 2**31 - 1)
    )
    assert (ends.seed, ends.max_tokens) == (2**63 - 1, 2**31 - 1) and tt.Sampling(seed=-(2**63)).seed == -(2**63)
    assert type(tt.Sampling(temperature=10**20).temperature) is float, "JSON has no integer of this size for an engine"
    with pytest.raises(
        SamplingError, match="seed must be a signed 64-bit integer, got a number of more than 4,300 digits"
    ):
        tt.Sampling(seed=10**5000)


def test_lists_of_sampling_values_become_tuples() -> None:
    sampling = tt.Sampling(stop=["a"], stop_token_ids=[1], temperature=1, max_tokens=None)  # pyright: ignore[reportArgumentType]
    assert (sampling.stop, sampling.stop_token_ids) == (("a",), (1,))


@pytest.mark.parametrize("reward", [None, "much", float("nan"), float("inf"), 10**400, [1.0]])
async def test_a_reward_is_a_finite_number(reward: Any) -> None:
    session, _ = session_of(said("a", "1"))
    await session.chat([USER])
    with pytest.raises(InputError, match="reward"):
        await session.reward(reward)
    assert session.samples()[0].reward is None


@pytest.mark.parametrize(
    "metadata", [{"tokentrue": {"seal": "x"}}, {"score": float("nan")}, {"all": {1, 2}}, {1: "a"}, nest(MAX_DEPTH + 1)]
)
async def test_metadata_is_json_and_leaves_our_own_name_alone(metadata: Any) -> None:
    session, engine = session_of(said("a", "1"))
    with pytest.raises(MessageError, match="metadata"):
        await session.reward(1.0, metadata=metadata)
    with pytest.raises(MessageError, match="metadata"):
        tt.Session(renderer=session.renderer, provider=engine, metadata=metadata)


class Wrong(Parrot):
    """A user's own engine that miscounts."""

    async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Any:
        return tt.Completion(token_ids=self.ids, logprobs=(-1.0,), finish=self.finish)

    async def stream(self, prompt_ids: Any, sampling: Any, *, session: str | None = None, whole: bool = False) -> Any:
        yield await self.generate(prompt_ids, sampling)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_completion_that_breaks_its_contract_is_the_engines_fault(streamed: bool) -> None:
    session = tt.Session(renderer=renderer(), provider=Wrong())
    with pytest.raises(EngineContractError, match="not a completion"):
        if streamed:
            async for _ in session.stream(TurnRequest(messages=[USER])):
                pass
        else:
            await session.chat([USER])
    app = gateway(Wrong())
    opened = await new_session(app)
    body = json.dumps({"model": "m", "messages": [SAID], "stream": streamed}).encode()
    assert (await ask(app, "POST", CHAT, body, key=opened["api_key"]))[0] == 502
    await app.close()


async def test_queries_say_what_they_do_not_understand() -> None:
    app = gateway()
    session = await new_session(app, group="a")
    await new_session(app, group="b")
    assert json.loads((await ask(app, "GET", "/sessions?group=a"))[1])["total"] == 1
    assert json.loads((await ask(app, "GET", "/sessions?state=ended"))[1])["total"] == 0
    status, answer = await ask(app, "GET", "/sessions?state=closed")
    assert status == 400 and "must be open or ended" in answer.decode()
    status, answer = await ask(app, "DELETE", f"/sessions/{session['session_id']}?purge=yes")
    assert status == 400 and b"purge: must be true or false" in answer
    assert json.loads((await ask(app, "GET", f"/sessions/{session['session_id']}"))[1])["state"] == "open"
    await app.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_the_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "places.sqlite"
    with sqlite3.connect(path) as foreign:
        foreign.execute("CREATE TABLE places (url TEXT)")
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="another program"):
        Journal(f"sqlite:{path}", read_only=read_only)
    assert path.read_bytes() == before
