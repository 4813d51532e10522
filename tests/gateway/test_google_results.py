"""Google's results without ids, sent by the real SDK, on templates that print call ids: each result names the call that
was served. What the engine must be given is rendered by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import types

from tests import parts
from tests.gateway.inside import Parrot, new_session, read_conversation
from tests.parts import own_dir, tokenizer_dir
from tokentrue.conversation import Conversations
from tokentrue.gateway import Gateway, GatewayConfig
from tokentrue.gateway.dialects.google import Google
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.renderers import renderer_of
from tokentrue.sessions.journal import Journal
from tokentrue.types import Completion, Finish, Ids, Sampling

CALLS = [("read", {"at": "a"}), ("write", {"at": "b"}), ("read", {"at": "c"})]
RESULTS = ["contents of a", "written to b", "contents of c"]
AT = {"type": "object", "properties": {"at": {"type": "string"}}}
DECLARED = [
    types.FunctionDeclaration(name=name, description=f"{name} a file", parameters_json_schema=AT)
    for name in ("read", "write")
]
CONFIG = types.GenerateContentConfig(
    tools=[types.Tool(function_declarations=DECLARED)],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


@dataclass(frozen=True)
class Model:
    """A template that prints call ids. `said` is a turn with the three calls, which has `ids` where the model writes
    them itself."""

    folder: Path
    said: str
    ids: tuple[str, ...] = ()


@cache
def model(name: str) -> Model:
    if name == "mistral-nemo":
        calls = [{"name": name, "arguments": given, "id": f"abcdefgh{n}"} for n, (name, given) in enumerate(CALLS)]
        ids = tuple(str(call["id"]) for call in calls)
        return Model(tokenizer_dir(name), f"[TOOL_CALLS]{json.dumps(calls)}</s>", ids)
    ids = tuple(f"functions.{called}:{n}" for n, (called, _) in enumerate(CALLS))
    calls = "".join(
        f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
        for call_id, (_, given) in zip(ids, CALLS, strict=True)
    )
    said = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|><|im_end|>"
    if name == "own":
        return Model(own_dir("kimi-like"), f"</think>{said}", ids)
    return Model(tokenizer_dir(name), said, ids)


class Caller(Parrot):
    """Says the same turn again and again, and keeps the prompts."""

    def __init__(self, ids: Ids) -> None:
        self.ids, self.finish = tuple(ids), Finish.STOP
        self.prompts: list[tuple[int, ...]] = []

    def _completion(self, prompt_ids: Ids, sampling: Sampling) -> Completion:
        self.prompts.append(tuple(prompt_ids))
        return super()._completion(prompt_ids, sampling)


def answer(name: str, said: str, *, call_id: str | None = None) -> types.Part:
    part = types.Part.from_function_response(name=name, response={"output": said})
    if call_id is not None and part.function_response is not None:
        part.function_response.id = call_id
    return part


def user(*parts: types.Part) -> types.Content:
    return types.Content(role="user", parts=list(parts))


def without_ids(content: types.Content) -> types.Content:
    parts = [types.Part.from_function_call(name=name, args=given) for name, given in CALLS]
    return content.model_copy(update={"parts": parts})


def replay(how: str, content: types.Content) -> list[types.Content]:
    """The served content and its results, as different clients send them back."""
    (a, b, c), ids = RESULTS, [part.function_call.id for part in content.parts or () if part.function_call]
    read_a, wrote_b, read_c = answer("read", a), answer("write", b), answer("read", c)
    ways: Mapping[str, list[types.Content]] = {
        "one content": [content, user(read_a, wrote_b, read_c)],
        "a content each": [content, user(read_a), user(wrote_b), user(read_c)],
        "by function": [content, user(wrote_b), user(read_a), user(read_c)],
        "text between": [content, user(read_a, types.Part(text="hm"), wrote_b), user(read_c)],
        "chunks": [*(content.model_copy(update={"parts": [part]}) for part in content.parts or ()),
                   user(read_a), user(wrote_b, read_c)],
        "no ids": [without_ids(content), user(read_a), user(wrote_b, read_c)],
        "one id": [content, user(answer("read", c, call_id=ids[2]), wrote_b, read_a)],
    }  # fmt: skip
    return list(ways[how])


ORDER = {"by function": (1, 0, 2), "one id": (2, 1, 0)}


@cache
def load_renderer(name: str) -> Any:
    return renderer_of(load_tokenizer(name), model(name).folder)


def load_tokenizer(name: str) -> Any:
    return parts.loaded_tokenizer(model(name).folder)


def expected(name: str, how: str) -> str:
    ids = model(name).ids
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
        for call_id, (name, given) in zip(ids, CALLS, strict=True)
    ]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": ids[n], "name": CALLS[n][0], "content": RESULTS[n]}
        for n in ORDER.get(how, (0, 1, 2))
    ]
    if how == "text between":
        results.insert(1, {"role": "user", "content": "hm"})
    tools = [
        {"type": "function", "function": {"name": d.name, "description": d.description, "parameters": AT}}
        for d in DECLARED
    ]
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    return load_tokenizer(name).apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


WAYS = ["one content", "a content each", "by function", "text between", "chunks", "no ids", "one id"]
CASES = [(name, how) for name in ("own", "kimi-k2", "mistral-nemo") for how in WAYS]
CASES.remove(("mistral-nemo", "text between"))  # its template takes no user message between results


@pytest.mark.parametrize(("name", "how"), CASES)
async def test_a_result_without_an_id_answers_the_served_call(name: str, how: str) -> None:
    renderer = load_renderer(name)
    sampled = renderer.encode_sampled(model(name).said)
    engine = Caller(sampled)
    app = Gateway(
        config=GatewayConfig(model="m", admin_key="boss"),
        renderer_for=lambda _: renderer,
        provider=engine,  # type: ignore[arg-type]
        journal=Journal("memory"),
    )
    session = await new_session(app)
    options = types.HttpOptions(
        base_url="http://localhost", async_client_args={"transport": httpx.ASGITransport(app=app)}
    )
    client = genai.Client(api_key=session["api_key"], http_options=options).aio
    contents: list[Any] = [user(types.Part(text="go"))]
    for _ in range(2):
        served = await client.models.generate_content(model="m", contents=contents, config=CONFIG)
        assert served.candidates is not None and served.candidates[0].content is not None
        contents += replay(how, served.candidates[0].content)
    await client.models.generate_content(model="m", contents=contents, config=CONFIG)
    first, second, third = engine.prompts
    for before, after in ((first, second), (second, third)):
        recorded = (*before, *sampled)
        assert after[: len(recorded)] == recorded, "nothing recorded is rendered again"
        added = renderer.decode(after[len(recorded) :])
        assert all(said in added for said in RESULTS)
        assert expected(name, how).endswith(added)
    await client.aclose()
    await app.close()


def parse(*contents: types.Content, earlier: Conversations | None = None) -> list[Any]:
    body = {"contents": [content.model_dump(mode="json", exclude_none=True) for content in contents]}
    dialect = Google(ReasoningSigner(b"x"))
    return list(read_conversation(dialect, dialect.decode(json.dumps(body).encode()), earlier))


def calls_of(*calls: tuple[str, str | None]) -> types.Content:
    parts = [types.Part(function_call=types.FunctionCall(name=name, id=call_id, args={})) for name, call_id in calls]
    return types.Content(role="model", parts=parts)


def test_a_result_is_paired_within_its_own_turn() -> None:
    """A turn before it with the same function, a result too many, one that no call asked for, and ids that repeat."""
    asked = user(types.Part(text="go"))
    earlier = [asked, calls_of(("read", "r1"), ("read", "r2")), user(answer("read", "1"))]
    later = [calls_of(("read", "r3"), ("write", None)), user(answer("write", "3"), answer("read", "2"))]
    more = [user(answer("read", "4"), answer("erase", "5"))]
    messages = parse(*earlier, *later, *more)
    paired = [(m["content"], m["tool_call_id"]) for m in messages if m["role"] == "tool"]
    assert paired == [("1", "r1"), ("3", "write#0"), ("2", "r3"), ("4", "read#2"), ("5", "erase#3")]
    assert not any("name" in message for message in messages)
    twice = parse(asked, calls_of(("read", "r"), ("read", "r")), user(answer("read", "1")), user(answer("read", "2")))
    assert [m["tool_call_id"] for m in twice[2:]] == ["r", "r"]


def test_what_is_kept_changes_no_pairing() -> None:
    earlier = Conversations(1 << 20)
    contents = [user(types.Part(text="go"))]
    for turn in range(4):
        contents += [
            calls_of(("read", f"a{turn}"), ("read", f"b{turn}")),
            user(answer("read", "1")),
            user(answer("read", "2")),
        ]
        assert parse(*contents[:-1], earlier=earlier) == parse(*contents[:-1])
        assert parse(*contents, earlier=earlier) == parse(*contents)
