"""What a client sees of the defects that hostile tests found: each was reproduced before it was mended."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.gateway.test_mutations import Engine, Exchange, begin, chat, nodes, until
from tests.gateway.world import call, renderer
from tokentrue.errors import EngineContractError
from tokentrue.gateway import Gateway
from tokentrue.types import Completion, Finish, TokenIds

HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_hang_up_then_ask_the_same_again() -> None:
    """The first generation is still being aborted when the same request comes again: it is answered, not failed."""
    app, engine, session = await begin()
    engine.hold_at = 3
    for streamed in (True, False):
        exchange = Exchange(app, session["api_key"], {**HELLO, "stream": streamed})
        await asyncio.sleep(0.05)
        exchange.leave()
        again = asyncio.create_task(chat(app, session["api_key"], {**HELLO, "stream": False}))
        await asyncio.sleep(0.05)
        engine.go_on.set()
        status, answer = await asyncio.wait_for(again, 5)
        assert status == 200 and answer["choices"][0]["finish_reason"] == "stop", answer
        await asyncio.wait_for(exchange.task, 5)
        engine.go_on.clear()
    await app.close()


async def test_a_deleted_session_keeps_what_was_streamed() -> None:
    app, engine, session = await begin()
    engine.hold_at = 9
    exchange = Exchange(app, session["api_key"], {**HELLO, "stream": True})
    await until(lambda: exchange.sent.count(b"data:") >= 3)
    status, _ = await ask(app, "DELETE", f"/sessions/{session['session_id']}")
    assert status == 200
    await asyncio.wait_for(exchange.task, 5)
    assert b'"error"' in exchange.sent and b"[DONE]" not in exchange.sent
    _, shown = await ask(app, "GET", f"/sessions/{session['session_id']}")
    (node,) = json.loads(shown)["nodes"]
    assert (node["outcome"], node["sampled_tokens"]) == ("deleted", 9)
    coverage = json.loads(shown)["coverage"]
    assert coverage["sampled"] == 9 and coverage["trained"] + sum(one["tokens"] for one in coverage["untrained"]) == 9
    await app.close()


class Failing(Engine):
    """The second choice of a turn fails, the first time."""

    failures = 1

    async def stream(self, prompt_ids: Any, sampling: Any, *, session: str | None = None, whole: bool = False) -> Any:
        number = self.asked
        async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole):
            if number == 1 and self.failures:
                self.failures = 0
                raise EngineContractError("made to fail")
            yield chunk


async def test_a_keyed_retry_of_a_half_failed_turn_has_all_choices() -> None:
    app, _, session = await begin(Failing())
    body = json.dumps({**HELLO, "stream": True, "n": 2}).encode()
    answers = [
        await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"], idempotency_key="k")
        for _ in range(2)
    ]
    assert b"[DONE]" not in answers[0][1]
    chunks = [json.loads(line[6:]) for line in answers[1][1].decode().split("\n\n") if line.startswith("data: {")]
    ended = {choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]}
    assert ended == {0, 1}, answers[1][1]
    await app.close()


async def test_a_second_key_that_joined_a_request_has_the_same_answer_later() -> None:
    app, engine, session = await begin()
    first, second = await asyncio.gather(
        chat(app, session["api_key"], idempotency_key="a"), chat(app, session["api_key"], idempotency_key="b")
    )
    later = await chat(app, session["api_key"], idempotency_key="b")
    assert first[1]["id"] == second[1]["id"] == later[1]["id"] and engine.asked == 1
    await app.close()


async def test_a_request_that_joined_does_not_count_as_time_that_the_gateway_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, engine, session = await begin()
    with caplog.at_level(logging.INFO, logger="tokentrue.gateway"):
        await asyncio.gather(chat(app, session["api_key"]), chat(app, session["api_key"]))
    lines = sorted(
        (json.loads(line) for line in caplog.messages if '"turn"' in line), key=lambda line: line["replayed"]
    )
    assert [line["replayed"] for line in lines] == [False, True] and engine.asked == 1
    assert lines[0]["added_ms"] > 0 and lines[1]["added_ms"] is None
    page = (await ask(app, "GET", "/metrics"))[1].decode()
    assert 'tokentrue_added_latency_seconds_count{dialect="openai_chat"} 1.0' in page
    await app.close()


async def test_a_key_names_a_request_not_its_spelling(tmp_path: Path) -> None:
    """What does not change the turn (streamed or not, `user`) may differ, before a restart and after it; what does is
    refused."""
    store = f"sqlite:{tmp_path / 'j.db'}"
    app = gateway(Engine(), store=store)
    session = await new_session(app)
    first = await chat(app, session["api_key"], idempotency_key="k")
    for _ in range(2):
        other = await chat(app, session["api_key"], {**HELLO, "user": "me"}, idempotency_key="k")
        again = await chat(app, session["api_key"], idempotency_key="k")
        assert [first[0], other[0], again[0]] == [200] * 3 and first[1]["id"] == other[1]["id"] == again[1]["id"]
        status, refused = await chat(app, session["api_key"], {**HELLO, "seed": 1}, idempotency_key="k")
        assert (status, refused["error"]["code"]) == (409, "idempotency_conflict")
        await app.close()
        app = gateway(Engine(), store=store)
    await app.close()


async def test_coverage_is_not_stale_after_a_leaf_reward() -> None:
    app, _, session = await begin()
    await chat(app, session["api_key"])
    await chat(app, session["api_key"], {**HELLO, "seed": 1})
    path = f"/sessions/{session['session_id']}"
    before = json.loads((await ask(app, "GET", path))[1])
    assert len(before["nodes"]) == 2
    leaf = json.dumps({"reward": 1.0, "leaf": before["nodes"][0]["id"]}).encode()
    assert (await ask(app, "POST", f"{path}/reward", leaf))[0] == 200
    after = json.loads((await ask(app, "GET", path))[1])
    samples = json.loads((await ask(app, "GET", f"{path}/samples"))[1])
    assert after["coverage"] == samples["coverage"]
    await app.close()


async def responses(app: Gateway, key: str, **body: Any) -> dict[str, Any]:
    status, answer = await ask(app, "POST", "/v1/responses", json.dumps({"model": "m", **body}).encode(), key=key)
    assert status == 200, answer
    return json.loads(answer)


async def test_instructions_are_not_carried_over() -> None:
    """As in the protocol: with `previous_response_id`, a request's own instructions count, or none."""
    app, _, session = await begin()
    key = session["api_key"]
    first = await responses(app, key, input="one", instructions="Be brief.")
    await responses(app, key, input="two", instructions="Be brief.", previous_response_id=first["id"])
    await responses(app, key, input="three", previous_response_id=first["id"])
    inline = await responses(
        app, key, input=[{"role": "system", "content": "Be long."}, {"role": "user", "content": "one"}]
    )
    await responses(app, key, input="two", previous_response_id=inline["id"])
    prompts = [renderer().decode(app_prompt(app, session, node)) for node in nodes(app, session)]
    assert ["Be brief." in prompt for prompt in prompts] == [True, True, False, False, False]
    assert ["Be long." in prompt for prompt in prompts] == [False, False, False, True, True]
    assert (
        nodes(app, session)[1].parent == nodes(app, session)[0].id
        and nodes(app, session)[4].parent == nodes(app, session)[3].id
    )
    await app.close()


CUSTOM = {"type": "custom", "name": "patch", "description": "Apply a patch.", "format": {"type": "text"}}
ODD_INPUTS = {
    "broken_off": '{"input": "*** Begin\\n+a \\ud83e',
    "not_closed": '{"input": "*** Begin"',
    "with_more_fields": '{"input": "*** Begin", "and": 1}',
    "of_another_shape": '{"at": "x"}',
    "spaced": '{ "input" :  "*** \\u0042egin" }',
}


async def stream_responses(app: Gateway, key: str, **body: Any) -> dict[str, Any]:
    asked = json.dumps({"model": "m", "stream": True, **body}).encode()
    _, events = await ask(app, "POST", "/v1/responses", asked, key=key)
    return json.loads(events.decode().strip().rpartition("data: ")[2])["response"]


@pytest.mark.parametrize("arguments", ODD_INPUTS.values(), ids=ODD_INPUTS)
async def test_a_custom_tools_input_comes_back_as_what_the_model_wrote(arguments: str) -> None:
    """Several arguments are served as one input. A verbatim replay continues the call's own turn; an edited input does
    not."""
    engine = Engine(call("patch", arguments))
    app, _, session = await begin(engine)
    key, question = session["api_key"], {"role": "user", "content": "go on"}
    first = await stream_responses(app, key, input=[question], tools=[CUSTOM])
    (item,) = (item for item in first["output"] if item["type"] == "custom_tool_call")
    done = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    for edited in (False, True):
        replayed = [{**one, "input": one["input"] + "!"} if edited and one is item else one for one in first["output"]]
        await responses(app, key, input=[question, *replayed, done], tools=[CUSTOM])
        node = nodes(app, session)[-1]
        assert (node.parent is None) == edited, (node.edge_reason, node.detail, item["input"])
    await app.close()


CUT_TURNS = {  # what is sampled before the limit; whether its call is complete
    "after_a_call": (call("look", "{}") + "\n<tool_call>", "completed"),
    "text_after_a_call": (call("look", "{}") + "\nand so", "completed"),
    "inside_a_call": ('<tool_call>\n{"name": "look", "arguments": {"at": "x', "incomplete"),
}


@pytest.mark.parametrize("text", CUT_TURNS)
async def test_the_status_of_a_call_does_not_depend_on_how_the_turn_is_sent(text: str) -> None:
    """A turn that was cut off: the stream has text after the call, the whole answer before it. Under its key, the same
    turn is both."""
    engine = Engine(CUT_TURNS[text][0])
    engine.ids, engine.finish = engine.ids[:-1], Finish.LENGTH
    app, _, session = await begin(engine)
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    asked = {"input": "go", "tools": tools}
    streaming = asyncio.create_task(stream_responses(app, session["api_key"], **asked))
    await asyncio.sleep(0)
    whole, streamed = await responses(app, session["api_key"], **asked), await streaming
    assert whole["id"] == streamed["id"] and whole["status"] == streamed["status"] == "incomplete"
    calls = [[item for item in answer["output"] if item["type"] == "function_call"] for answer in (whole, streamed)]
    assert calls[0] == calls[1] and [item["status"] for item in calls[0]] == [CUT_TURNS[text][1]]
    await app.close()


def app_prompt(app: Gateway, session: dict[str, str], node: Any) -> Any:
    handle = app.services.sessions.get_loaded(session["session_id"])
    assert handle is not None
    return handle.session.tree.prompt_ids(node)


class Odd(Parrot):
    """Answers what no engine should."""

    def __init__(self, ids: tuple[int, ...], *, prompt_tokens: int | None = None) -> None:
        super().__init__()
        self.ids, self._prompt_tokens = ids, prompt_tokens

    def _completion(self, prompt_ids: Any, sampling: Any) -> Completion:
        logprobs = tuple(-0.5 for _ in self.ids)
        return Completion(
            token_ids=TokenIds(self.ids), logprobs=logprobs, finish=Finish.STOP, prompt_tokens=self._prompt_tokens
        )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "engine", [Odd((2_000_000_000,)), Odd((5, 6), prompt_tokens=1)], ids=["id_beyond_the_vocabulary", "prompt_tokens"]
)
async def test_the_engines_fault_is_502(engine: Odd, streamed: bool) -> None:
    app = gateway(engine)
    session = await new_session(app)
    body = json.dumps({**HELLO, "stream": streamed}).encode()
    status, answer = await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"])
    if streamed and status == 200:
        assert b'"code":"engine_contract"' in answer and b"[DONE]" not in answer
    else:
        assert status == 502 and json.loads(answer)["error"]["code"] == "engine_contract", answer
    await app.close()


async def test_an_sdks_retry_names_the_request_that_failed_not_an_earlier_one_with_the_same_body() -> None:
    app, _, session = await begin()
    first, again = {"headers": [(b"x-stainless-retry-count", b"0")]}, {"headers": [(b"x-stainless-retry-count", b"1")]}
    async with app.services.sessions.checkout(session["session_id"]) as handle:
        chat = handle.dialects["openai_chat"]
        served = handle.find_request_key(first, chat, b"body")
        assert served is not None
        handle.session.tree.nodes_by_key[served] = []
        handle.session.tree.nodes_by_key[served].append(object())  # type: ignore[arg-type]  # a recorded turn
        failed = handle.find_request_key(
            first, chat, b"body"
        )  # the same body, meant as a new request; the engine fails
        assert failed != served and handle.find_request_key(again, chat, b"body") == failed
        assert handle.find_request_key(again, chat, b"another body") == handle.find_request_key(
            again, chat, b"another body"
        )
    await app.close()


async def test_an_interrupted_stream_keeps_the_noted_version() -> None:
    app, engine, session = await begin()
    app.provider.version = 5
    engine.hold_at = 3
    exchange = Exchange(app, session["api_key"], {**HELLO, "stream": True})
    await until(lambda: exchange.sent.count(b"data:") >= 2)
    exchange.leave()
    engine.go_on.set()
    await asyncio.wait_for(exchange.task, 5)
    await until(lambda: bool(nodes(app, session)))
    assert {span.version for node in nodes(app, session) for span in node.versions} == {5}
    await app.close()
