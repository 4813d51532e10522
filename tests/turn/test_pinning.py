"""`pin=("system",)`: the first system prompt of a conversation is what the model is given; what the client sent instead
is on record.

How many samples it saves is in the coverage table (`test_coverage.py`); through HTTP it is tested in tests/client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import OTHER_TOOLS, TOOLS, Engine, answer_to, encode, renderer, sampled_turn
from tokentrue.errors import ConfigError, EngineContractError, KeyConflict, MessageError, TokenTrueError
from tokentrue.sessions.journal import Journal
from tokentrue.types import Message, TurnRequest

TASK: Message = {"role": "user", "content": "Mend the build."}


def told(turn: int) -> Message:
    return {"role": "system", "content": f"Be careful. It is 10:{turn:02} now."}


def new_session(turns: int, **options: Any) -> tuple[tt.Session, Engine]:
    engine = Engine([sampled_turn(turn, tokens=200, name="own") for turn in range(turns)])
    return tt.Session(renderer=renderer("own"), provider=engine, pin=("system",), **options), engine


async def play(session: tt.Session, turns: range, history: list[Message]) -> list[Message]:
    for turn in turns:
        reply = await session.chat([told(turn), *history], TOOLS)
        history = [*history, reply.message, *answer_to(reply.message, turn)]
    return history


async def test_the_model_sees_the_first_prompt_and_the_record_keeps_the_others() -> None:
    session, engine = new_session(4)
    await play(session, range(4), [TASK])
    (sample,) = session.samples()
    assert [node.replaced for node in session.tree.in_order()] == [(), (told(1),), (told(2),), (told(3),)]
    shown = renderer("own").render([told(0), TASK], TOOLS).token_ids
    for prompt in engine.prompts:
        assert prompt[: len(shown)] == tuple(shown), "the engine was given the pinned prompt, in every turn"
    assert tuple(sample.token_ids[: len(shown)]) == tuple(shown), "and it is what is trained on"
    assert sample.metadata["tokentrue"]["pin"] == {"prompts": ["system"], "replaced_in_turns": [1, 2, 3]}
    assert session.coverage().pinned_turns == sample.metadata["tokentrue"]["coverage"]["pinned_turns"] == 3


async def test_sub_agents_compaction_and_other_tools_keep_their_own_prompt() -> None:
    session, engine = new_session(5)
    history = await play(session, range(2), [TASK])
    searcher: list[Message] = [{"role": "system", "content": "You search."}, {"role": "user", "content": "find it"}]
    title: list[Message] = [{"role": "system", "content": "Write a title."}, TASK]
    compacted: list[Message] = [told(9), {"role": "user", "content": "Summary: half is done."}]
    for messages, tools in ((searcher, TOOLS), (title, OTHER_TOOLS), (compacted, TOOLS)):
        await session.chat(messages, tools)
        assert engine.prompts[-1] == tuple(renderer("own").render(messages, tools).token_ids)
    assert [bool(node.replaced) for node in session.tree.in_order()] == [False, True, False, False, False]
    assert len(history) == 5


async def test_a_request_without_a_system_prompt_is_left_alone() -> None:
    session, engine = new_session(2)
    await play(session, range(1), [TASK])
    await session.chat([TASK], TOOLS)
    assert engine.prompts[-1] == tuple(renderer("own").render([TASK], TOOLS).token_ids)


async def test_a_retry_under_another_clock_gets_the_recorded_answer() -> None:
    session, engine = new_session(2)
    (first,) = await session.turn(TurnRequest(messages=[told(0), TASK], tools=TOOLS, request_key="a"))
    (again,) = await session.turn(TurnRequest(messages=[told(1), TASK], tools=TOOLS, request_key="a"))
    assert again.node == first.node and again.from_record and len(engine.prompts) == 1


def key_request(key: str | None, clock: int, *more: Message) -> TurnRequest:
    return TurnRequest(messages=[told(clock), TASK, *more], tools=TOOLS, request_key=key)


@pytest.mark.parametrize("reopened", [False, True])
async def test_a_retry_in_flight_has_the_prompt_of_its_key(reopened: bool, tmp_path: Path) -> None:
    """Two openings are two conversations; the same key under another clock is the same request, and one turn."""
    with closing(Journal(f"sqlite:{tmp_path / 'journal.db'}")) as journal:
        session, engine = new_session(4, journal=journal)
        engine.hold = asyncio.Event()
        asked = [("K0", 0), ("K1", 1), ("K0", 7), ("K1", 8)]
        turns = [asyncio.create_task(session.turn(key_request(key, clock))) for key, clock in asked]
        while len(engine.prompts) < 2:
            await asyncio.sleep(0)
        engine.hold.set()
        replies = [(await turn)[0] for turn in turns]
        assert [reply.from_record for reply in replies] == [False, False, True, True] and len(engine.prompts) == 2
        assert replies[0].node == replies[2].node != replies[1].node == replies[3].node
        if reopened:
            session = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
        for (key, _), reply in zip(asked, replies, strict=True):
            for clock in (0, 1, 9):
                (again,) = await session.turn(key_request(key, clock))
                assert again.from_record and again.node == reply.node, "a retry gets its answer, whatever the time is"
        with pytest.raises(KeyConflict):
            await session.turn(key_request("K0", 0, {"role": "user", "content": "and this"}))
        for clock, reply in ((5, replies[0]), (6, replies[1])):
            later = await session.chat([told(clock), TASK, reply.message, *answer_to(reply.message, 0)], TOOLS)
            node = session.tree.nodes[later.node]
            assert node.parent == reply.node and node.replaced == (told(clock),)
        assert session.coverage().ratio == 1.0


async def test_a_key_without_a_system_prompt_names_no_request_with_one() -> None:
    session, _ = new_session(2)
    await session.turn(TurnRequest(messages=[TASK], tools=TOOLS, request_key="K"))
    with pytest.raises(KeyConflict):
        await session.turn(key_request("K", 0))


def agent(name: str, clock: int) -> Message:
    return {"role": "system", "content": f"You {name}. It is 10:{clock:02} now."}


def said(text: str) -> tuple[int, ...]:
    return (*encode(text, "own"), renderer("own").stop_token_ids[0])


def session_that_says(*texts: str) -> tuple[tt.Session, Engine]:
    engine = Engine([said(text) for text in texts])
    return tt.Session(renderer=renderer("own"), provider=engine, pin=("system",)), engine


GO_ON: Message = {"role": "user", "content": "Go on."}


@pytest.mark.parametrize("order", [("search", "write"), ("write", "search")])
async def test_agents_that_begin_with_the_same_message_keep_their_own_prompts(order: tuple[str, str]) -> None:
    """Prompts that change with every turn, the same tools, the same first message; then other answers."""
    session, _ = session_that_says("I search.", "I write.", "A", "B", "C", "D")
    histories: dict[str, list[Message]] = {}
    for name in ("search", "write"):
        reply = await session.chat([agent(name, 0), TASK], TOOLS)
        histories[name] = [TASK, reply.message, GO_ON]
        assert session.tree.nodes[reply.node].given[0] == agent(name, 0)
    for clock in (1, 2):
        for name in order:
            reply = await session.chat([agent(name, clock), *histories[name]], TOOLS)
            node = session.tree.nodes[reply.node]
            assert session.tree.messages(node)[0] == agent(name, 0) and node.replaced == (agent(name, clock),)
            histories[name] += [reply.message, GO_ON]
    assert len(session.samples()) == 2 and session.coverage().ratio == 1.0


async def test_agents_that_were_told_the_same_so_far_are_not_confused() -> None:
    """Equal answers: the prompt that was sent before tells which is meant; a prompt that was never sent tells nothing,
    and opens a conversation. Once the answers differ, they tell."""
    session, _ = session_that_says("Yes.", "Yes.", "Same.", "Same.", "One.", "Two.", "Three.", "Four.")
    reply = None
    for name in ("search", "write"):
        reply = await session.chat([agent(name, 0), TASK], TOOLS)
    assert reply is not None
    history: list[Message] = [TASK, reply.message, GO_ON]
    for name in ("search", "write"):  # the same prompt again
        reply = await session.chat([agent(name, 0), *history], TOOLS)
        assert session.tree.messages(session.tree.nodes[reply.node])[0] == agent(name, 0)
    history += [reply.message, GO_ON]
    unknown = await session.chat([agent("write", 3), *history], TOOLS)
    assert session.tree.messages(session.tree.nodes[unknown.node])[0] == agent("write", 3)
    history += [unknown.message, GO_ON]
    later = await session.chat([agent("write", 4), *history], TOOLS)
    assert session.tree.nodes[later.node].parent == unknown.node, "only one conversation has this answer"


async def test_an_edited_turn_continues_nothing_and_keeps_its_own_prompt() -> None:
    session, engine = session_that_says("Yes.", "Fine.", "B")
    first = await session.chat([told(0), TASK], TOOLS)
    edited: list[Message] = [told(1), TASK, {"role": "assistant", "content": "No."}, GO_ON]
    await session.chat(edited, TOOLS)
    assert engine.prompts[-1] == tuple(renderer("own").render(edited, TOOLS).token_ids)
    (_, node) = session.tree.in_order()
    assert node.replaced == ()
    later = await session.chat([told(2), TASK, first.message, GO_ON], TOOLS)
    assert session.tree.nodes[later.node].parent == first.node


@pytest.mark.parametrize("broken", [5, {"role": "tool", "content": 5}, {"content": "x"}])
async def test_a_malformed_message_is_named_as_without_pinning(broken: Any) -> None:
    shown: list[str] = []
    for pin in ((), ("system",)):
        session = tt.Session(renderer=renderer("own"), provider=Engine([said("Yes.")]), pin=pin)
        reply = await session.chat([told(0), TASK], TOOLS)
        for messages in ([told(1), broken], [told(1), TASK, broken], [told(1), TASK, reply.message, broken, GO_ON]):
            with pytest.raises(MessageError) as error:
                await session.chat(messages, TOOLS)
            shown.append(str(error.value))
    assert shown[:3] == shown[3:]


async def test_an_opening_that_fails_leaves_no_prompt_behind() -> None:
    session, engine = new_session(3)
    engine.hold = asyncio.Event()
    opening = asyncio.create_task(session.turn(key_request("K", 0)))
    while not engine.prompts:
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    engine.hold = None
    await session.chat([told(4), TASK], TOOLS)
    assert session.tree.in_order()[-1].given[0] == told(4)


async def test_a_request_that_was_refused_or_failed_pins_nothing() -> None:
    session, engine = new_session(2)
    with pytest.raises(TokenTrueError, match="min_p"):
        await session.chat([told(7), TASK], TOOLS, sampling=tt.Sampling(min_p=0.5))
    engine.fail = EngineContractError("made to fail")
    with pytest.raises(EngineContractError):
        await session.chat([told(8), TASK], TOOLS)
    engine.fail = None
    await session.chat([told(0), TASK], TOOLS)
    (node,) = session.tree.in_order()
    assert session.tree.given_messages(node)[0] == told(0) and node.replaced == ()


async def test_pins_hold_after_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'journal.db'}"
    journal = Journal(store)
    session, engine = new_session(4, journal=journal)
    history = await play(session, range(2), [TASK])
    journal.close()
    journal = Journal(store)
    session = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    assert session.record.pin == ("system",)
    await play(session, range(2, 4), history)
    assert len(session.samples()) == 1
    assert [node.replaced for node in session.tree.in_order()] == [(), (told(1),), (told(2),), (told(3),)]
    journal.close()


def test_only_what_can_be_pinned_is_taken() -> None:
    with pytest.raises(ConfigError, match="'tools' cannot be pinned; choose from system"):
        tt.Session(renderer=renderer("own"), provider=Engine([]), pin=("tools",))


@pytest.mark.parametrize("tools", [None, 5])
@pytest.mark.parametrize("kind", [iter, deque, lambda _: None, lambda _: 5, lambda _: "hi"])
async def test_what_is_no_list_is_refused_as_without_pinning(kind: Callable[[Any], Any], tools: Any) -> None:
    told: list[str] = []
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for pin in ((), ("system",)):
        session = tt.Session(renderer=Letters(), provider=Engine([sampled("r", "a")] * 2), pin=pin)
        await session.chat(history)
        try:
            await session.chat(kind(history), tools)
            told.append("served")
        except MessageError as error:
            told.append(str(error))
    assert told[0] == told[1]
