"""No wrong match: siblings that differ only in what a projection drops, edits of one character, swapped results.
Ambiguity is recorded."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, letters, sampled
from tests.turn.world import OPENING, OTHER_TOOLS, TOOLS, Engine, answer_to, encode, renderer, sampled_turn
from tokentrue.errors import MessageError, SamplingError
from tokentrue.sessions.client import InProcessClient
from tokentrue.types import TurnRequest


def session_of(*answers: tuple[int, ...], **options: Any) -> tuple[tt.Session, Engine]:
    engine = Engine(answers)
    return tt.Session(renderer=renderer("own"), provider=engine, **options), engine


def said(text: str, reasoning: str = "", call: str = "", *, name: str = "own") -> tuple[int, ...]:
    think = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "<think>\n\n</think>\n\n"
    tail = f'\n<tool_call>\n{{"name": "look", "arguments": {call}}}\n</tool_call>' if call else ""
    return (*encode(think + text + tail, name), renderer(name).stop_token_ids[0])


def bare(message: Any) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k != "reasoning_content"}


async def ask(session: tt.Session, *messages: Any, **options: Any) -> Any:
    return await session.chat([*OPENING, *messages], TOOLS, **options)


USER = {"role": "user", "content": "go on"}


async def test_siblings_that_differ_only_in_reasoning_are_told_apart_while_it_is_there() -> None:
    session, engine = session_of(said("Four.", "first way"), said("Four.", "second way"), *[said("ok", "x")] * 4)
    first, second = await ask(session), await ask(session)
    for reply in (first, second, first, second):
        follow = await ask(session, reply.message, USER)
        assert session.tree.get(follow.node).parent == reply.node
        assert follow.projection == "exact"
    assert engine.prompts[2] != engine.prompts[3]


async def test_siblings_that_differ_only_in_what_was_dropped_are_ambiguous_and_the_newest_wins() -> None:
    session, _ = session_of(said("Four.", "first way"), said("Four.", "second way"), said("ok", "x"))
    await ask(session)
    second = await ask(session)
    follow = await ask(session, bare(second.message), USER)
    assert session.tree.get(follow.node).parent == second.node
    assert follow.projection == "reasoning_dropped+ambiguous"


async def test_a_thinking_part_beside_the_reasoning_is_an_edit() -> None:
    """In process a message may carry both; over HTTP each dialect has one place. An edit must be rendered, and this
    one cannot be."""
    session, _ = session_of(said("Four.", "one way"), said("Four.", "other way"), *[said("ok", "x")] * 3)
    first, second = await ask(session), await ask(session)

    def with_part(reply: Any, thinking: str) -> dict[str, Any]:
        parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": reply.message["content"]}]
        return {**reply.message, "content": parts}

    with pytest.raises(MessageError, match="only text parts can be rendered, got type 'thinking'"):
        await ask(session, with_part(first, "other way"), USER)
    follow = await ask(session, {**first.message, "reasoning": "other way"}, USER)
    assert session.tree.get(follow.node).parent is None and follow.edge_reason == "edited"
    for reply, thinking in ((first, "one way"), (second, "other way")):
        follow = await ask(session, with_part(reply, thinking), USER)
        assert session.tree.get(follow.node).parent == reply.node and follow.projection == "parts"


FORMS = ["caf\u00e9", "cafe\u0301", "caf\u00e9\u0301", "cafe\u0301\u0301", "\ufb01n", "fin", "\u212b", "\u00c5", "A\u030a", "q\u0323\u0307",
         "q\u0307\u0323", "\u1112\u1161\u11ab", "\ud55c", "\uff21", "A"]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["own", "qwen3"])
async def test_texts_that_look_alike_are_told_apart(name: str, streamed: bool) -> None:
    """Combining marks, normal forms, ligatures: every answer is served as sampled, and its verbatim replay continues
    that turn. Qwen3's tokenizer composes what it encodes, so characters are sampled one by one."""
    stop = renderer(name).stop_token_ids[0]
    sampled_ids = [tuple(token for char in text for token in encode(char, name)) for text in FORMS]
    written = {renderer(name).decode(ids): (*ids, stop) for ids in sampled_ids}
    assert len(written) >= len(FORMS) - 1  # to Qwen3, the Angstrom sign is the letter
    session = tt.Session(renderer=renderer(name), provider=Engine([*written.values(), *written.values()]))

    async def turn(*messages: Any) -> Any:
        request = TurnRequest(messages=[*OPENING, *messages])
        if not streamed:
            return (await session.turn(request))[0]
        (reply,) = [event.reply async for event in session.stream(request) if event.reply is not None]
        return reply

    replies = [await turn() for _ in written]
    assert [reply.message["content"] for reply in replies] == list(written)
    for question, reply in zip(FORMS, replies, strict=False):
        follow = await turn(json.loads(json.dumps(reply.message)), {"role": "user", "content": question})
        assert session.tree.get(follow.node).parent == reply.node and follow.projection == "exact"
    assert session.coverage().ratio == 1.0


async def test_call_ids_tell_equal_siblings_apart() -> None:
    session, _ = session_of(said("", "a", "{}"), said("", "b", "{}"), *[said("ok", "x")] * 2)
    first, second = await ask(session), await ask(session)
    assert first.message["tool_calls"][0]["id"] != second.message["tool_calls"][0]["id"]
    follow = await ask(session, bare(first.message), *answer_to(first.message, 0))
    assert session.tree.get(follow.node).parent == first.node
    assert follow.projection == "reasoning_dropped"


async def test_parallel_equal_siblings_each_get_their_own_continuation() -> None:
    session, _ = session_of(*[said("Four.", f"way {i}") for i in range(3)], *[said("ok", "x")] * 3)
    replies = await session.turn(TurnRequest(messages=OPENING, tools=TOOLS, n=3))
    parents = []
    for reply in replies:
        follow = await ask(session, bare(reply.message), USER)
        parents.append(session.tree.get(follow.node).parent)
        assert "ambiguous" in follow.projection
    assert sorted(parents) == sorted(reply.node for reply in replies)
    assert session.coverage().ratio == 1.0


@pytest.mark.parametrize("edit", range(6))
async def test_an_edit_of_one_character_never_matches(edit: int) -> None:
    session, engine = session_of(said("Looking now.", "plan it", '{"path": "a/b"}'), said("ok", "x"))
    reply = await ask(session)
    message, call = dict(reply.message), reply.message["tool_calls"][0]
    respelled = {**call, "function": {"name": "look", "arguments": '{"path": "a/c"}'}}
    edited: Any = [
        {**message, "content": "Looking now!"},
        {**message, "reasoning_content": "plan it."},
        {**message, "tool_calls": [respelled]},
        {**message, "tool_calls": [{**call, "function": {**call["function"], "name": "lookk"}}]},
        {**message, "content": "Looking  now."},
        {**message, "tool_calls": []},
    ][edit]
    follow = await ask(session, edited, USER)
    node = session.tree.get(follow.node)
    assert node.parent is None and node.edge_reason == "edited"
    assert tuple(node.given_ids) == engine.prompts[-1]
    assert session.coverage().ratio == 1.0 and len(session.samples()) == 2


async def test_an_edited_question_forks() -> None:
    session, _ = session_of(said("a", "1"), said("b", "2"), said("c", "3"))
    first = await ask(session)
    await ask(session, first.message, {"role": "user", "content": "yes"})
    other = await ask(session, first.message, {"role": "user", "content": "yes "})
    assert session.tree.get(other.node).parent == first.node
    assert other.edge_reason == "branch"


async def test_swapped_tool_results_fork() -> None:
    two = "<think>\nx\n</think>\n\n" + "\n".join(
        f'<tool_call>\n{{"name": "look", "arguments": {{"path": "{p}"}}}}\n</tool_call>' for p in "ab"
    )
    session, _ = session_of((*encode(two, "own"), renderer("own").stop_token_ids[0]), *[said("ok", "x")] * 4)
    reply = await ask(session)
    one, other = (call["id"] for call in reply.message["tool_calls"])

    def results(first: str, second: str) -> list[Any]:
        return [
            {"role": "tool", "tool_call_id": first, "content": "same"},
            {"role": "tool", "tool_call_id": second, "content": "same"},
        ]

    straight = await ask(session, reply.message, *results(one, other))
    swapped = await ask(session, reply.message, *results(other, one))
    assert straight.edge_reason is None and swapped.edge_reason == "branch"
    # Rewritten ids that keep the order are the same results; those that swap it are not.
    renamed = {**reply.message, "tool_calls": [{**c, "id": f"x{i}"} for i, c in enumerate(reply.message["tool_calls"])]}
    again = await ask(session, renamed, *results("x0", "x1"))
    assert again.edge_reason == "retry"
    swapped_again = await ask(session, renamed, *results("x1", "x0"))
    assert swapped_again.edge_reason == "retry"
    assert session.tree.answers_like(session.tree.get(swapped.node))[-1].id == swapped_again.node


async def test_the_model_sees_the_ids_that_were_served() -> None:
    session, _ = session_of(said("", "a", "{}"), said("ok", "x"))
    reply = await ask(session)
    renamed = {**reply.message, "tool_calls": [{**reply.message["tool_calls"][0], "id": "toolu_1"}]}
    follow = await ask(session, renamed, {"role": "tool", "tool_call_id": "toolu_1", "content": "r"})
    (given,) = session.tree.get(follow.node).given
    assert given["tool_call_id"] == reply.message["tool_calls"][0]["id"]  # type: ignore[index]
    assert follow.projection == "call_ids"


async def test_ids_that_repeat_every_turn_are_resolved_to_the_nearest_call() -> None:
    session, _ = session_of(*[said(f"step {i}", "r", json.dumps({"i": i})) for i in range(6)])
    history: list[Any] = list(OPENING)
    for turn in range(6):
        reply = await session.chat(history, TOOLS)
        renamed = {**reply.message, "tool_calls": [{**reply.message["tool_calls"][0], "id": "call_0"}]}
        history = [*history, renamed, {"role": "tool", "tool_call_id": "call_0", "content": f"r{turn}"}]
    assert len(session.samples()) == 1 and session.coverage().ratio == 1.0


async def test_other_tools_begin_a_new_root() -> None:
    session, _ = session_of(*[said(f"a{i}", "r") for i in range(3)])
    first = await session.chat(OPENING, OTHER_TOOLS)
    changed = await session.chat([*OPENING, first.message, USER], TOOLS)
    assert changed.edge_reason == "tools_changed"
    node = session.tree.get(changed.node)
    assert node.parent is None and node.origin == first.node
    third = await session.chat([*OPENING, bare(first.message), USER, changed.message, USER], TOOLS)
    assert session.tree.get(third.node).parent == changed.node


class PrintsNames(Letters):
    """A template that prints who speaks."""

    def _message(self, message: Any) -> list[int]:
        return [*letters(message.get("name") or ""), *super()._message(message)]


def named(message: Any, name: str | None) -> dict[str, Any]:
    plain = {field: value for field, value in message.items() if field != "name"}
    return plain if name is None else {**plain, "name": name}


@pytest.mark.parametrize(("was", "now"), [(None, "look"), ("look", None), ("look", "peek")])
@pytest.mark.parametrize("place", [0, 2], ids=["user", "tool"])
@pytest.mark.parametrize("prints", [False, True])
async def test_a_name_counts_where_the_template_prints_it(
    was: str | None, now: str | None, place: int, prints: bool
) -> None:
    engine = Engine([sampled("r", "a", "{}"), sampled("s", "b"), sampled("t", "c")])
    session = tt.Session(renderer=PrintsNames() if prints else Letters(), provider=engine)
    history: list[Any] = [named(USER, was if place == 0 else None)]
    first = await session.chat(history)
    history += [
        first.message,
        named({"role": "tool", "tool_call_id": first.message["tool_calls"][0]["id"], "content": "r"}, was),
    ]
    second = await session.chat(history)
    history[place] = named(history[place], now)
    third = await session.chat([*history, second.message, USER])
    if prints:
        assert third.edge_reason == "edited" and session.tree.get(third.node).parent == (first.node if place else None)
    else:
        assert session.tree.get(third.node).parent == second.node
        assert (third.edge_reason, third.projection) == (None, "exact") and session.coverage().ratio == 1.0


@pytest.mark.parametrize("first", ["ann", "bob"])
async def test_sub_agents_that_differ_only_by_name_keep_their_own_turns(first: str) -> None:
    """The template prints no name, and both are served the same text: the spelling of the question still tells them
    apart."""
    session, _ = session_of(said("Yes.", "ann thinks"), said("Yes."), *[said("ok", "x")] * 2)
    asked = {name: [{"role": "user", "content": "Ready?", "name": name}] for name in ("ann", "bob")}
    replies = {name: await session.chat(asked[name]) for name in asked}
    for name in sorted(asked, reverse=first == "bob"):
        follow = await session.chat([*asked[name], bare(replies[name].message), USER])
        assert session.tree.get(follow.node).parent == replies[name].node
        assert follow.edge_reason is None and "ambiguous" not in follow.projection
    assert len(session.samples()) == 2 and session.coverage().ratio == 1.0


async def test_sub_agents_that_differ_only_by_name_keep_their_own_pinned_prompts() -> None:
    session, _ = session_of(*[said("Yes.")] * 4, pin=("system",))
    histories: dict[str, list[Any]] = {
        name: [{"role": "user", "content": "Ready?", "name": name}] for name in ("ann", "bob")
    }
    for name, clock in (("ann", 0), ("bob", 0), ("ann", 1), ("bob", 1)):
        reply = await session.chat([{"role": "system", "content": f"Be {name}, at {clock}."}, *histories[name]])
        system = session.tree.messages(session.tree.get(reply.node))[0]
        assert system["content"] == f"Be {name}, at 0."
        histories[name] += [reply.message, USER]
    assert len(session.samples()) == 2


DIGITS = "1" + "0" * 400  # more than a double holds
REPLAYED = [  # served, replayed, by whom
    ('{"a": -0.0}', '{"a":0}', "node"),
    ('{"a": -0}', '{"a":0}', "node"),
    ('{"a": 1e400, "b": [-1e400]}', '{"a":null,"b":[null]}', "node"),
    ('{"a": ' + DIGITS + "}", '{"a":null}', "node"),
    ('{"a": ' + "9" * 5000 + "}", '{"a":null}', "node"),
    ('{"a": 1e-400}', '{"a":0}', "node"),
    ('{"a": 1.0, "b": 1E5}', '{"a":1,"b":100000}', "node"),
    ('{"a": 1e21}', '{"a":1e+21}', "node"),
    ('{"a": 12345678901234567890}', '{"a":12345678901234567000}', "node"),
    ('{"a": 0.1000000000000000055}', '{"a":0.1}', "node"),
    ('{"b": 1, "2": 1, "1": 2, "b": 3}', '{"1":2,"2":1,"b":3}', "node"),
    ('{"a": "\\ud800", "b": "\\ud83d\\ude00 \\/"}', '{"a":"\\ud800","b":"😀 /"}', "node"),
    ('{"a": 1e400, "b": -1e400}', '{"a": Infinity, "b": -Infinity}', "python"),
    ('{"a": -0.0, "b": 1E5}', '{"a": -0.0, "b": 100000.0}', "python"),
    ('{"a": "\\ud800ü", "b": 1, "b": 2}', '{"a": "\\ud800\\u00fc", "b": 2}', "python"),
    ('{"a": ' + DIGITS + "}", '{"a": ' + DIGITS + "}", "python"),
    ('{"a": "<b> & \u2028", "\\ud800": "\\udfff"}', '{"a":"\\u003cb\\u003e \\u0026 \\u2028","\ufffd":"\ufffd"}', "go"),
    ('{"b": -0.0, "a": 1e21}', '{"a":1e+21,"b":-0}', "go"),
]  # fmt: skip
EDITED = [
    ('{"a": null}', '{"a": 1e400}'),
    ('{"a": null}', '{"a": Infinity}'),
    ('{"a": 1e400}', '{"a": -Infinity}'),
    ('{"a": 1e400}', '{"a": 0}'),
    ('{"a": 1e400}', '{"a": 1e500}'),
    ('{"a": 1e400}', "{}"),
    ('{"a": [1e400, 1]}', '{"a": [1, null]}'),
    ('{"a": 0}', '{"a": false}'),
    ('{"a": 0}', '{"a": null}'),
    ('{"a": -0.0}', '{"a": ""}'),
    ('{"a": "\ufffd"}', '{"a": "\\ud800"}'),
    ('{"a": "\\ud800"}', '{"a": "\\ud801"}'),
    ('{"a": "\\ud800"}', '{"a": ""}'),
]


async def replay_arguments(served: str, replayed: str) -> tuple[str | None, str]:
    """Why the turn after a call with `served` was begun anew when its arguments came back as `replayed`, and how it
    matched."""
    session = tt.Session(renderer=Letters(), provider=Engine([sampled("r", "c", served), sampled("s", "ok")]))
    first = await session.chat([USER])
    call = first.message["tool_calls"][0]
    message = {**first.message, "tool_calls": [{**call, "function": {**call["function"], "arguments": replayed}}]}
    follow = await session.chat([USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "r"}])
    return follow.edge_reason, follow.projection


@pytest.mark.parametrize(("served", "replayed", "by"), REPLAYED)
async def test_arguments_that_a_client_decoded_and_encoded_again_are_a_replay(
    served: str, replayed: str, by: str
) -> None:
    root, projection = await replay_arguments(served, replayed)
    assert root is None and projection in ("exact", "arguments"), by


@pytest.mark.parametrize(("served", "replayed"), EDITED)
async def test_other_values_in_arguments_are_an_edit(served: str, replayed: str) -> None:
    assert (await replay_arguments(served, replayed))[0] == "edited"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_cases_above_are_what_node_and_python_write() -> None:
    served = [case[0] for case in REPLAYED if case[2] == "node"]
    script = "console.log(JSON.stringify(JSON.parse(process.argv[1]).map(s => JSON.stringify(JSON.parse(s)))))"
    done = subprocess.run(["node", "-e", script, json.dumps(served)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [case[1] for case in REPLAYED if case[2] == "node"]
    for given, written, by in REPLAYED:
        assert by != "python" or json.dumps(json.loads(given)) == written


@pytest.mark.parametrize("seed", range(8))
async def test_random_histories_always_find_the_node_they_came_from(seed: int) -> None:
    """Many conversations with equal texts in one session, in random order and random spellings: never the wrong
    node."""
    rng = random.Random(seed)
    session, _ = session_of(
        *[sampled_turn(rng.randrange(3), tokens=160, tag=rng.choice("xy"), name="own") for _ in range(60)]
    )
    leaves: list[tuple[str | None, list[Any]]] = [(None, list(OPENING))]
    for turn in range(60):
        parent, history = rng.choice(leaves)
        reply = await session.chat(history, TOOLS)
        assert session.tree.get(reply.node).parent == parent
        message: dict[str, Any] = dict(reply.message)
        if rng.random() < 0.5:
            message["content"] = [{"type": "text", "text": f" {message['content']}"}]
        leaves.append((reply.node, [*history, message, {"role": "user", "content": f"{turn}"}]))
    account = session.coverage()
    assert account.sampled == account.trained + sum(item.tokens for item in account.untrained)


def calls(value: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": None, "tool_calls": value}]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ((message for message in [USER]), "messages"),
        ([{}], "messages[0]"),
        ([{"role": "user"}, {"content": "x"}], "messages[1]"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": ["a", 7]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        (calls("x"), "messages[1].tool_calls"),
        (calls({"a": 1}), "messages[1].tool_calls"),
        (calls([None]), "messages[1].tool_calls[0]"),
        (calls([{"function": "x"}]), "messages[1].tool_calls[0]"),
        ([USER, {"role": "tool", "tool_call_id": [], "content": "x"}], "messages[1].tool_call_id"),
    ],
)
@pytest.mark.parametrize("pin", [(), ("system",)])
async def test_malformed_messages_are_refused_by_field_and_leave_no_trace(
    messages: Any, field: str, pin: tuple[str, ...]
) -> None:
    session, engine = session_of(said("a", "1"), pin=pin)
    with pytest.raises(MessageError) as caught:
        await session.chat(messages)
    assert caught.value.field == field
    assert len(session.tree) == 0 and not engine.prompts


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("x", "tools"),
        ({"a": 1}, "tools"),
        ([None], "tools[0]"),
        ([*TOOLS, "x"], "tools[1]"),
        ([{"type": "function", "function": {"name": "\ud800"}}], "tools[0].function.name"),
    ],
)
async def test_malformed_tools_are_refused_by_field_and_leave_no_trace(tools: Any, field: str) -> None:
    session, engine = session_of(said("a", "1"))
    with pytest.raises(MessageError) as caught:
        await session.chat(OPENING, tools)
    assert caught.value.field == field
    assert len(session.tree) == 0 and not engine.prompts


async def test_two_names_of_the_token_limit_must_agree() -> None:
    """As over HTTP."""
    session, engine = session_of(said("a", "1"))
    create = InProcessClient(session).chat.completions.create
    with pytest.raises(SamplingError, match="max_tokens and max_completion_tokens differ"):
        await create(messages=OPENING, max_tokens=3, max_completion_tokens=4)
    assert not engine.prompts
    await create(messages=OPENING, max_tokens=4, max_completion_tokens=4)
    assert engine.settings[0].max_tokens == 4


async def test_a_request_key_is_honoured_where_siblings_are_ambiguous() -> None:
    session, engine = session_of(*[said("Four.", f"way {i}") for i in range(2)], *[said("ok", "x")] * 2)
    first, _ = await session.turn(TurnRequest(messages=OPENING, tools=TOOLS, n=2))
    request = TurnRequest(messages=[*OPENING, bare(first.message), USER], tools=TOOLS, request_key="k")
    (one,), (again,) = await session.turn(request), await session.turn(request)
    assert one.node == again.node and again.from_record and len(engine.prompts) == 3


async def test_going_back_before_a_new_root_gives_up_what_followed_it() -> None:
    """A changed tool set begins a root that continues in meaning; asking the turn before it again gives up both."""
    session, _ = session_of(*[said(f"a{i}", "r") for i in range(4)])
    first = await session.chat(OPENING, TOOLS)
    second = await session.chat([*OPENING, first.message, USER], OTHER_TOOLS)
    assert session.tree.get(second.node).origin == first.node
    third = await session.chat(OPENING, TOOLS)
    account = session.coverage()
    assert {item.node: item.why for item in account.untrained} == {
        first.node: "rolled_back",
        second.node: "rolled_back",
    }
    assert [sample.metadata["tokentrue"]["leaf"] for sample in session.samples()] == [third.node]
