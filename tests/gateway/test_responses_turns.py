"""OpenAI Responses: items of two turns that follow each other directly stay two turns; the ids of served items tell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.inside import ask, gateway, new_session, read_conversation
from tests.gateway.world import call, renderer
from tokentrue.conversation import Conversations
from tokentrue.gateway import Gateway
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.providers.scripted import ScriptedProvider

USER = {"role": "user", "content": "Go on."}
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
TURNS = [
    "<think>\nfirst\n</think>\n\nOne.",
    "Two.",
    f"<think>\nthird\n</think>\n\nThree.\n{call('f', '{}')}",
    "Four.",
    "Five.",
]


def scripted() -> Gateway:
    script = [{"text": text} for text in TURNS]
    return gateway(ScriptedProvider(script, encode=renderer().encode_sampled, stop_id=renderer().stop_token_ids[0]))


async def post(app: Gateway, session: dict[str, str], path: str, body: Any) -> Any:
    status, answer = await ask(app, "POST", path, json.dumps({"model": "m", **body}).encode(), key=session["api_key"])
    assert status == 200, answer
    return json.loads(answer)


async def respond(app: Gateway, session: dict[str, str], history: list[Any]) -> list[Any]:
    answer = await post(app, session, "/v1/responses", {"input": history, "tools": TOOLS})
    return [*history, *answer["output"]]


async def nodes_of(app: Gateway, session: dict[str, str]) -> list[Any]:
    status, answer = await ask(app, "GET", f"/sessions/{session['session_id']}")
    assert status == 200
    return json.loads(answer)["nodes"]


async def test_turns_without_a_user_between_them_are_kept_apart() -> None:
    """As Chat Completions, where every turn is a message of its own."""
    app = scripted()
    session = await new_session(app)
    history: list[Any] = [USER]
    for _ in range(3):
        history = await respond(app, session, history)
    output = {"type": "function_call_output", "call_id": history[-1]["call_id"], "output": "r"}
    history = await respond(app, session, [*history, output])
    await respond(app, session, [*history, USER])
    nodes = await nodes_of(app, session)
    assert [node["why"] for node in nodes] == ["first", "nothing_new", "nothing_new", None, None]
    assert [node["projection"] for node in nodes[3:]] == ["exact", "exact"]
    await app.close()


async def test_the_same_conversation_is_recorded_as_over_chat() -> None:
    whys: list[Any] = []
    for dialect in ("chat", "responses"):
        app = scripted()
        session = await new_session(app)
        history: list[Any] = [USER]
        for added in ([], [USER], []):
            if dialect == "responses":
                history = [*(await respond(app, session, history)), *added]
            else:
                answer = await post(app, session, "/v1/chat/completions", {"messages": history})
                history = [*history, answer["choices"][0]["message"], *added]
        whys.append([node["why"] for node in await nodes_of(app, session)])
        await app.close()
    assert whys[0] == whys[1]


SERVED = ("ab" * 16, "cd" * 16)


def text(item_id: str | None, content: str) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": content}
    return item if item_id is None else {"id": item_id, **item}


def thought(item_id: str, content: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "summary": [], "content": [{"type": "reasoning_text", "text": content}]}


def asked(item_id: str) -> dict[str, Any]:
    return {"type": "function_call", "id": item_id, "call_id": "c", "name": "f", "arguments": "{}"}


A, B = SERVED
CASES: list[tuple[str, list[Any], list[str]]] = [
    ("two turns", [text(f"msg_{A}", "1"), text(f"msg_{B}", "2")], ["1", "2"]),
    ("one turn", [thought(f"rs_{A}", "t"), text(f"msg_{A}", "1"), asked(f"fc_{A}_0"), text(f"msg_{A}_3", "2")], ["12"]),
    (
        "a turn of several items, then another",
        [text(f"msg_{A}", "1"), asked(f"fc_{A}_0"), thought(f"rs_{B}", "t")],
        ["1", ""],
    ),
    ("ids dropped", [text(None, "1"), text(None, "2")], ["12"]),
    ("an id dropped", [text(f"msg_{A}", "1"), text(None, "2"), text(f"msg_{B}", "3")], ["12", "3"]),
    ("ids of another server", [text("msg_" + "01" * 16, "1"), text("msg_" + "23" * 16, "2")], ["12"]),
    ("another server's, then ours", [text("msg_" + "01" * 16, "1"), text(f"msg_{A}", "2")], ["12"]),
    ("no id at all", [text("msg", "1"), text("", "2"), text(f"x_{B}", "3")], ["123"]),
]


@pytest.mark.parametrize(("items", "texts"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_only_ids_of_this_session_part_turns(items: list[Any], texts: list[str]) -> None:
    dialect = OpenAIResponses(ReasoningSigner(b"x"), is_node=SERVED.__contains__)
    for kept in (0, 1 << 20):
        earlier = Conversations(kept)
        for _ in range(2):
            decoded = dialect.decode(json.dumps({"input": [USER, *items, USER]}).encode())
            messages = list(read_conversation(dialect, decoded, earlier))
            assert [message["content"] or "" for message in messages[1:-1]] == texts
            assert all(set(message) <= {"role", "content", "reasoning_content", "tool_calls"} for message in messages)


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_an_item_of_a_turn_in_flight_is_parsed_again_once_it_is_committed(kept: int) -> None:
    """A client may send back what it has seen of a stream."""
    nodes, arguments = set[str](), dict[str, list[str]]()
    dialect = OpenAIResponses(ReasoningSigner(b"x"), lambda call_id: arguments.get(call_id, ()), nodes.__contains__)
    earlier = Conversations(kept)
    call = {"type": "custom_tool_call", "name": "run", "call_id": "c", "input": "ls"}
    items = [USER, text(f"msg_{A}", "1"), text(f"msg_{B}", "2"), USER, call, USER]

    def parse() -> list[Any]:
        return list(read_conversation(dialect, dialect.decode(json.dumps({"input": items}).encode()), earlier))

    assert [message["content"] for message in parse()] == [
        USER["content"],
        "12",
        USER["content"],
        None,
        USER["content"],
    ]
    nodes.update((A, B))
    assert [message["content"] for message in parse()] == [
        USER["content"],
        "1",
        "2",
        USER["content"],
        None,
        USER["content"],
    ]
    arguments["c"] = ['{"input": "ls", "x": 1}']
    first, again = parse(), parse()
    assert first[4]["tool_calls"][0]["function"]["arguments"] == arguments["c"][0]
    assert [one is other for one, other in zip(first, again, strict=True)] == [bool(kept)] * 6  # now it is settled


@pytest.mark.parametrize("item_id", [7, None, ["msg"], {}])
def test_an_id_that_is_no_string_names_nothing(item_id: Any) -> None:
    dialect = OpenAIResponses(ReasoningSigner(b"x"), is_node=SERVED.__contains__)
    (message,) = dialect.parse_item({**text(None, "1"), "id": item_id}, "input[0]")
    assert message == {"role": "assistant", "content": "1"}


@pytest.mark.parametrize("by", ["previous_response_id", "item ids"])
async def test_a_named_response_is_continued_whatever_else_has_its_text(by: str) -> None:
    script = [{"text": "Same."}] * 6
    app = gateway(ScriptedProvider(script, encode=renderer().encode_sampled, stop_id=renderer().stop_token_ids[0]))
    session = await new_session(app)
    twice = [await post(app, session, "/v1/responses", {"input": "q"}) for _ in range(2)]

    async def continue_it(earlier: Any) -> Any:
        if by == "item ids":
            items = [{"role": "user", "content": "q"}, *earlier["output"], {"role": "user", "content": "more"}]
            return await post(app, session, "/v1/responses", {"input": items})
        return await post(app, session, "/v1/responses", {"input": "more", "previous_response_id": earlier["id"]})

    await continue_it(twice[0])
    await asyncio.gather(*map(continue_it, twice))  # equal in all but the answer that they name
    nodes = await nodes_of(app, session)
    first, second = nodes[0]["id"], nodes[1]["id"]
    assert sorted(node["parent"] for node in nodes[2:]) == sorted([first, first, second])
    assert {node["projection"] for node in nodes[2:]} == {"exact"}, "nothing is ambiguous where the node is named"
    await app.close()


DEVELOPER = {"role": "developer", "content": "Be brief."}


def given_to(app: Gateway, session: dict[str, str]) -> list[list[str]]:
    """The system prompt that each turn of the session was sampled under."""
    known = app.services.sessions.get_loaded(session["session_id"])
    assert known is not None
    tree = known.session.tree
    return [
        [m["content"] for m in tree.messages(node) if m["role"] == "system"] for node in tree.in_order()
    ]  # fmt: skip


@pytest.mark.parametrize("pin", [[], ["system"]], ids=["plain", "pinned"])
@pytest.mark.parametrize("told", [["I", None, None], [None, "I", None], ["I", "J", None], [None, "I", "J", None]])
async def test_instructions_are_not_carried_over_and_developer_messages_are(
    told: list[str | None], pin: list[str]
) -> None:
    """As the API documents it: with `previous_response_id`, the instructions of the earlier response are not carried
    over; its input is. A pinned conversation keeps the prompt that it began with."""
    app = scripted()
    session = await new_session(app, pin=pin)
    previous: dict[str, str] = {}
    for instructions in told:
        body: dict[str, Any] = {"input": [USER] if previous else [DEVELOPER, USER], **previous}
        answer = await post(app, session, "/v1/responses", {**body, "instructions": instructions})
        previous = {"previous_response_id": answer["id"]}
    sent = [[*([name] if name else []), "Be brief."] for name in told]
    assert given_to(app, session) == ([sent[0]] * len(told) if pin else sent)
    nodes = await nodes_of(app, session)
    if pin:
        assert [node["parent"] for node in nodes] == [None, *(node["id"] for node in nodes[:-1])], "one conversation"


@pytest.mark.parametrize("named", ["resp_", "resp__i"])
async def test_an_id_without_a_node_continues_nothing_and_is_refused(named: str) -> None:
    app = scripted()
    session = await new_session(app)
    body = json.dumps({"model": "m", "input": "go on", "previous_response_id": named}).encode()
    status, answer = await ask(app, "POST", "/v1/responses", body, key=session["api_key"])
    assert (status, json.loads(answer)["error"]["param"]) == (400, "previous_response_id")
