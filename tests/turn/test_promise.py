"""Defects that once broke the promise, one test each: histories that were lost, answers served wrongly, tokens that
disappeared."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
import tokentrue.turn as turn_module
from tests.turn.letters import Letters, sampled
from tests.turn.test_matching import USER, bare, said, session_of
from tests.turn.world import OPENING, OTHER_TOOLS, TOOLS, Engine, answer_to, encode, renderer
from tokentrue.errors import (
    EngineContractError,
    EngineError,
    MessageError,
    SamplingError,
    SessionConflict,
    TokenContractError,
)
from tokentrue.samples import audit, sample_from_json, sample_to_json
from tokentrue.sessions import Journal, matching, requests
from tokentrue.types import Chunk, Refusal, TurnRequest, VersionSpan

GIVEN = {"role": "assistant", "content": "I will."}


async def stream_until_error(session: tt.Session, request: TurnRequest) -> tuple[list[Any], Exception | None]:
    events: list[Any] = []
    try:
        async for event in session.stream(request):
            events.append(event)
    except Exception as error:
        return events, error
    return events, None


def letters_session(*answers: tuple[int, ...], **options: Any) -> tuple[tt.Session, Engine]:
    engine = Engine(answers)
    return tt.Session(renderer=Letters(), provider=engine, **options), engine


# Identity is the exact request.
@pytest.mark.parametrize("other", [{**GIVEN, "content": "<think>hm</think>I will."}, {**GIVEN, "content": "I will. "}])
async def test_requests_that_differ_in_a_given_assistant_message_are_two_turns(other: Any) -> None:
    session, engine = session_of(said("a", "1"), said("b", "2"), said("c", "3"), said("d", "4"))
    one, two = [*OPENING, GIVEN, USER], [*OPENING, other, USER]
    first, second = await asyncio.gather(session.chat(one, TOOLS), session.chat(two, TOOLS))
    assert first.node != second.node and len(engine.prompts) == 2
    await session.chat(two, TOOLS)
    reasons = {item.node: item.why for item in session.coverage().untrained}
    assert first.node not in reasons and reasons == {second.node: "retried"}


async def test_a_second_key_that_joined_a_request_in_flight_gets_its_answer_later_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), said("b", "2"), journal=journal)
    engine.hold = asyncio.Event()
    requests = [TurnRequest(messages=OPENING, request_key=key) for key in ("k1", "k2")]
    running = [asyncio.create_task(session.turn(request)) for request in requests]
    await asyncio.sleep(0.05)
    engine.hold.set()
    ((first,), (second,)) = await asyncio.gather(*running)
    assert first.node == second.node
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    for who in (session, reopened):
        for request in requests if who is reopened else ():
            (again,) = await who.turn(request)
            assert again.node == first.node and again.from_record
    assert len(engine.prompts) == 1
    journal.close()


async def test_a_keyed_retry_of_a_half_failed_stream_of_two_gives_two_choices() -> None:
    session, engine = session_of(said("a", "1"))
    request = TurnRequest(messages=OPENING, n=2, request_key="k")
    _, error = await stream_until_error(session, request)
    assert isinstance(error, IndexError)
    engine.answers = [said("b", "2"), said("c", "3")]
    assert [reply.message["content"] for reply in await session.turn(request)] == ["b", "c"]
    assert [reply.message["content"] for reply in await session.turn(request)] == ["b", "c"] and len(
        engine.prompts
    ) == 4
    assert {item.why for item in session.coverage().untrained} == {"engine_failed"}


async def test_the_same_request_after_hanging_up_starts_anew_while_the_engine_still_aborts() -> None:
    class SlowToAbort(Engine):
        async def stream(
            self, prompt_ids: Any, sampling: Any, *, session: str | None = None, whole: bool = False
        ) -> Any:
            try:
                async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole):
                    yield chunk
                    await asyncio.sleep(0.01)
            except (asyncio.CancelledError, GeneratorExit):
                await asyncio.sleep(0.2)
                raise

    session = tt.Session(renderer=renderer("own"), provider=SlowToAbort([said("a long answer", "1"), said("b", "2")]))
    events = session.stream(TurnRequest(messages=OPENING))
    while not (await anext(events)).token_ids:
        pass
    leaving = asyncio.create_task(events.aclose())
    await asyncio.sleep(0.05)
    (reply,) = await session.turn(TurnRequest(messages=OPENING))
    assert reply.message["content"] == "b" and not reply.from_record
    await leaving


# What was sampled is recorded.
class FailsInMidStream(Engine):
    """Raises, or reports nonsense, after five tokens."""

    def __init__(self, answers: Any, trouble: Any) -> None:
        super().__init__(answers)
        self.trouble = trouble

    async def stream(self, prompt_ids: Any, sampling: Any, *, session: str | None = None, whole: bool = False) -> Any:
        count = 0
        async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole):
            if count == 5:
                if isinstance(self.trouble, Exception):
                    raise self.trouble
                yield self.trouble
            yield chunk
            count += 1


TROUBLES = [
    EngineError("connection lost"),
    Chunk(token_ids=(5,), logprobs=()),  # type: ignore[arg-type]
    Chunk(token_ids=(5,), logprobs=(0.5,)),  # type: ignore[arg-type]
    Chunk(token_ids=(5,), logprobs=(-0.5,), policy_version=20261115212000123456),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_tokens_streamed_before_the_engine_failed_are_recorded_with_the_reason(
    trouble: Any, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j.db")
    answer = said("a long enough answer", "with reasons")
    engine = FailsInMidStream([answer], trouble)
    session = tt.Session(renderer=renderer("own"), provider=engine, journal=journal)
    events, error = await stream_until_error(session, TurnRequest(messages=OPENING, request_key="k"))
    assert isinstance(error, EngineError)
    sent = [token for event in events for token in event.token_ids]
    (node,) = session.tree.nodes.values()
    assert node.sampled_ids == sent == list(answer[:5]) and node.outcome == "engine_failed"
    coverage = session.coverage()
    assert (coverage.sampled, coverage.trained, coverage.untrained[0].why) == (5, 0, "engine_failed")
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    assert reopened.coverage() == coverage
    journal.close()


async def test_a_final_answer_that_rewrites_the_stream_is_refused_and_what_was_streamed_is_kept() -> None:
    class Rewrites(Engine):
        async def stream(
            self, prompt_ids: Any, sampling: Any, *, session: str | None = None, whole: bool = False
        ) -> Any:
            async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole):
                yield (
                    chunk
                    if chunk.final is None
                    else Chunk(final=replace(chunk.final, token_ids=(7, *chunk.final.token_ids[1:])))
                )

    answer = said("a", "1")
    session = tt.Session(renderer=renderer("own"), provider=Rewrites([answer]))
    _, error = await stream_until_error(session, TurnRequest(messages=OPENING))
    assert isinstance(error, EngineContractError)
    (node,) = session.tree.nodes.values()
    assert (node.sampled_ids, node.outcome) == (answer, "engine_failed")


async def test_deleting_a_session_records_what_its_streams_had_sampled(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a long enough answer", "1"), said("b", "2"), journal=journal)
    engine.delay_s = 0.02
    events = session.stream(TurnRequest(messages=OPENING))
    sent = 0
    while sent < 3:
        sent += len((await anext(events)).token_ids)
    await session.end()
    with pytest.raises(SessionConflict, match="deleted while"):
        async for event in events:
            sent += len(event.token_ids)
    (row,) = journal.rows(session.id)
    (node,) = session.tree.nodes.values()
    assert (node.id, node.outcome, len(node.sampled_ids)) == (row.id, "deleted", sent)
    assert session.coverage().untrained[0].why == "deleted" and engine.cancelled == 1
    with pytest.raises(SessionConflict, match="has ended"):
        await session.chat(OPENING)
    journal.close()


@pytest.mark.parametrize("moment", ["before it began", "while it is rendered", "while it is committed"])
async def test_a_session_deleted_at_any_moment_of_a_turn_is_a_conflict_and_no_cancellation(
    moment: str, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j.db")
    session, _ = session_of(said("a", "1"), journal=journal)
    await session.wait_created()
    reached = asyncio.Event()
    if moment == "while it is committed":
        append = journal.append_nodes

        async def slow(*args: Any) -> None:
            reached.set()
            await asyncio.sleep(0.05)
            await append(*args)

        journal.append_nodes = slow  # type: ignore[method-assign]
    messages = (
        [{"role": "user", "content": "x" * 20_000}] if moment == "while it is rendered" else OPENING
    )  # in a thread
    turn = asyncio.create_task(session.turn(TurnRequest(messages=messages)))
    await (reached.wait() if moment == "while it is committed" else asyncio.sleep(0))
    await session.end()
    if moment == "while it is committed":  # it is complete, and is served
        assert [reply.node for reply in await turn] == list(session.tree.nodes)
    else:
        with pytest.raises(SessionConflict, match="deleted while"):
            await turn
    assert [node.id for node in session.tree.in_order()] == [row.id for row in journal.rows(session.id)]
    journal.close()


# What was sent is what is recorded.
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_provider_that_sent_other_ids_is_found_out(streamed: bool) -> None:
    class SendsOthers(Engine):
        """A cache of request bodies gone wrong, say: the engine samples after a prompt that differs in one id."""

        def _next(self, prompt_ids: Any, sampling: Any) -> Any:
            return super()._next([*prompt_ids[:-1], prompt_ids[-1] ^ 1], sampling)

    session = tt.Session(renderer=renderer("own"), provider=SendsOthers([said("a", "1")]))
    with pytest.raises(TokenContractError, match="sent other ids"):
        if streamed:
            raise (await stream_until_error(session, TurnRequest(messages=OPENING)))[1] or AssertionError
        await session.chat(OPENING)
    assert len(session.tree) == 0


async def test_a_sample_says_what_the_engine_was_sent_and_audit_checks_it() -> None:
    session, engine = session_of(said("a", "1"), said("b", "2"))
    first = await session.chat(OPENING)
    await session.chat([*OPENING, first.message, USER])
    rows = [sample_to_json(sample) for sample in session.samples()]
    assert audit(map(sample_from_json, json.loads(json.dumps(rows)))).ok
    from tokentrue.ids import TokenIds

    sent = [node["prompt_sha256"] for node in rows[0]["metadata"]["tokentrue"]["nodes"]]
    assert sent == [TokenIds(prompt).sha256().hex() for prompt in engine.prompts]
    rows[0]["metadata"]["tokentrue"]["nodes"][1]["prompt_sha256"] = sent[0]
    assert any(
        "not what the engine was sent" in finding.what for finding in audit(map(sample_from_json, rows)).findings
    )


# A real edit forks, a replay does not.
async def test_deleted_visible_text_is_an_edit_and_an_inlined_replay_of_it_is_none() -> None:
    served = "The answer is 41. </think>No, 42."
    session, _ = letters_session(sampled("r", served), *[sampled("s", "ok")] * 3)
    first = await session.chat([USER])
    assert first.message["content"] == served
    cut = await session.chat([USER, {"role": "assistant", "content": "No, 42."}, USER])
    assert session.tree.get(cut.node).parent is None and cut.edge_reason == "edited"
    inlined = await session.chat([USER, {"role": "assistant", "content": f"<think>r</think>{served}"}, USER])
    assert session.tree.get(inlined.node).parent == first.node and inlined.projection == "reasoning_inlined"
    doubled = await session.chat(
        [USER, {**first.message, "content": f"<think>other</think>{served}"}, {"role": "user", "content": "x"}]
    )
    assert session.tree.get(doubled.node).parent is None


@pytest.mark.parametrize(("served", "replayed"), [('{"a": 1e400}', '{"a": "inf"}'), ('{"a": 1e400}', '{"a": 1e500}')])
async def test_numbers_beyond_doubles_are_not_confused(served: str, replayed: str) -> None:
    session, _ = letters_session(sampled("r", "c", served), sampled("s", "ok"))
    first = await session.chat([USER])
    call = first.message["tool_calls"][0]
    edited = {**first.message, "tool_calls": [{**call, "function": {**call["function"], "arguments": replayed}}]}
    follow = await session.chat([USER, edited, {"role": "tool", "tool_call_id": call["id"], "content": "r"}])
    assert session.tree.get(follow.node).parent is None


async def test_changed_tools_that_are_changed_back_continue_in_meaning() -> None:
    session, _ = session_of(*[said(f"a{i}", "r") for i in range(3)])
    history: list[Any] = list(OPENING)
    replies = []
    for tools in (TOOLS, OTHER_TOOLS, TOOLS):
        replies.append(await session.chat(history, tools))
        history += [bare(replies[-1].message), {"role": "user", "content": f"next {len(history)}"}]
    assert [reply.edge_reason for reply in replies] == ["first", "tools_changed", "rejoined"]
    assert session.tree.get(replies[2].node).origin == replies[1].node


PARTS = [{"type": "text", "text": "12"}, {"type": "text", "text": "3"}]


class PrintsParts(Letters):
    """A template that prints a list of parts otherwise than a string, and tools as they stand."""

    def _message(self, message: Any) -> list[int]:
        if isinstance(message.get("content"), list) and self.parts_differ:
            return super()._message({**message, "content": "|".join(part["text"] for part in message["content"])})
        return super()._message(message)

    parts_differ = True


@pytest.mark.parametrize("differ", [True, False])
async def test_given_parts_that_render_otherwise_are_an_edit(differ: bool) -> None:
    prints = PrintsParts()
    prints.parts_differ = differ
    session = tt.Session(renderer=prints, provider=Engine([sampled("r", "a"), sampled("s", "b")]))
    first = await session.chat([{"role": "user", "content": "123"}])
    follow = await session.chat([{"role": "user", "content": PARTS}, first.message, USER])
    assert session.tree.get(follow.node).parent == (None if differ else first.node)
    assert follow.edge_reason == ("edited" if differ else None)


def tool(default: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"default": default}}}}}


@pytest.mark.parametrize("tools", [[tool(1), tool("b")], [tool("b"), tool(True)]], ids=["true to 1", "other order"])
async def test_tools_that_render_otherwise_are_other_tools(tools: Any) -> None:
    session, _ = letters_session(sampled("r", "a"), sampled("s", "b"))
    first = await session.chat([USER], [tool(True), tool("b")])
    follow = await session.chat([USER, first.message, USER], tools)
    assert follow.edge_reason == "tools_changed" and session.tree.get(follow.node).origin == first.node


async def test_a_whole_answer_is_preferred_to_an_equal_one_that_broke_off() -> None:
    session, engine = letters_session(sampled("", "abc"), sampled("", "abc"), sampled("", "ok"))
    whole = await session.chat([USER])
    events = session.stream(TurnRequest(messages=[USER]))
    count = 0
    while count < 4:
        count += len((await anext(events)).token_ids)
    await events.aclose()
    broken = next(node for node in session.tree.nodes.values() if node.outcome == "disconnected")
    assert broken.served["content"] == whole.message["content"] == "abc" and engine.answers
    follow = await session.chat([USER, whole.message, USER])
    assert session.tree.get(follow.node).parent == whole.node


async def test_a_served_turn_is_preferred_to_a_failed_one_that_fits_better() -> None:
    answers = (sampled("door", ""), sampled("", "ok"))
    engine = FailsInMidStream([sampled("", "")[:1] * 6], EngineError("gone"))
    session = tt.Session(renderer=Letters(), provider=engine)
    await stream_until_error(session, TurnRequest(messages=[USER]))
    engine.trouble, engine.answers = Chunk(), list(answers)
    served = await session.chat([USER])
    follow = await session.chat([USER, bare(served.message), {"role": "user", "content": "x"}])
    assert len(session.tree) == 3 and session.tree.get(follow.node).parent == served.node


async def test_a_failed_turn_that_showed_nothing_is_never_continued() -> None:
    """An id that no tokenizer knows is recorded, and must not come back as the prefix of another prompt."""
    session, engine = session_of((5, 2_000_000), said("a", "1"))
    with pytest.raises(EngineContractError, match="cannot be read"):
        await session.chat(OPENING)
    await session.chat([*OPENING, {"role": "assistant", "content": ""}, USER])
    assert all(node.parent is None for node in session.tree.in_order()) and 2_000_000 not in engine.prompts[1]
    assert session.coverage().sampled == 2 + len(said("a", "1"))


async def test_a_key_that_joins_while_the_turn_is_written_gets_its_answer_later_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), said("b", "2"), journal=journal)
    writing, go_on, append = asyncio.Event(), asyncio.Event(), Journal.append_nodes

    async def slow(self: Any, *arguments: Any) -> None:
        writing.set()
        await go_on.wait()
        await append(self, *arguments)

    monkeypatch.setattr(Journal, "append_nodes", slow)
    first = asyncio.create_task(session.turn(TurnRequest(messages=OPENING, request_key="k1")))
    await writing.wait()
    second = asyncio.create_task(session.turn(TurnRequest(messages=OPENING, request_key="k2")))
    await asyncio.sleep(0.02)
    go_on.set()
    ((one,), (two,)) = await asyncio.gather(first, second)
    (again,) = await session.turn(TurnRequest(messages=OPENING, request_key="k2"))
    assert one.node == two.node == again.node and again.from_record and len(engine.prompts) == 1
    journal.close()
    journal = Journal(tmp_path / "j.db")  # a restart: the key is in the record
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    for key in ("k1", "k2"):
        (again,) = await reopened.turn(TurnRequest(messages=OPENING, request_key=key))
        assert again.node == one.node and again.from_record and len(engine.prompts) == 1
    with pytest.raises(SessionConflict, match="k2"):
        await reopened.turn(TurnRequest(messages=[*OPENING, GIVEN, USER], request_key="k2"))
    journal.close()


async def test_a_key_names_one_request_while_it_is_in_flight() -> None:
    """Another request under the key is refused; were both recorded, a retry would be answered with two choices."""
    session, engine = session_of(said("a", "1"), said("b", "2"))
    engine.hold = asyncio.Event()
    first = asyncio.create_task(session.turn(TurnRequest(messages=OPENING, request_key="k")))
    await asyncio.sleep(0.02)
    with pytest.raises(SessionConflict, match="'k' was used for another request"):
        await asyncio.wait_for(session.turn(TurnRequest(messages=[USER], request_key="k")), 1)
    engine.hold.set()
    await first
    assert len(await session.turn(TurnRequest(messages=OPENING, request_key="k"))) == 1 and len(engine.prompts) == 1


async def test_tools_that_a_caller_changes_in_place_are_other_tools() -> None:
    """`1` and `True` are equal in Python, and templates print them otherwise."""
    session, _ = letters_session(*[sampled("r", f"c{i}") for i in range(3)])
    tools: list[Any] = [{"name": "f", "parameters": {"default": 1}}]
    first = await session.chat([USER], tools)
    tools[0]["parameters"]["default"] = True
    second = await session.chat([USER], tools)
    recorded = [session.tree.get(reply.node).tools[0]["parameters"]["default"] for reply in (first, second)]  # type: ignore[index]
    assert recorded[0] is not True and recorded == [1, True] and recorded[1] is True
    for value in ({1}, float("nan")):
        tools[0]["parameters"]["default"] = value
        with pytest.raises(MessageError, match=r"must be (a JSON value|finite: JSON has no number nan)"):
            await session.chat([USER], tools)
    tools[0]["parameters"]["default"] = None
    await session.chat([USER], tools)
    tools[0]["parameters"]["default"] = float("nan")  # some JSON writers spell it like None
    with pytest.raises(MessageError, match=r"must be (a JSON value|finite: JSON has no number nan)"):
        await session.chat([USER], tools)


async def test_what_a_caller_does_to_its_objects_changes_nothing_recorded() -> None:
    session, _ = letters_session(*[sampled("r", f"c{i}") for i in range(4)])
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    first = await session.chat(messages)
    messages.append(first.message)
    messages.append(dict(USER))
    second = await session.chat(messages)
    assert session.tree.get(second.node).parent == first.node
    first.message["content"] = "changed"  # type: ignore[index]
    assert session.tree.get(first.node).served["content"] == "c0"
    third = await session.chat(messages)
    assert session.tree.get(third.node).parent is None, "an edit in place is an edit"
    messages[0]["content"][0]["text"] = "ho"
    assert session.tree.get(first.node).given[0]["content"][0]["text"] == "hi"  # type: ignore[index]
    assert (await session.chat(messages)).edge_reason == "new_conversation"


# Two objects for one session.
async def test_a_session_has_one_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), said("b", "2"), journal=journal)
    engine.hold = asyncio.Event()
    running = asyncio.create_task(session.chat(OPENING))
    await asyncio.sleep(0.05)
    with pytest.raises(SessionConflict, match="in use"):
        await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    engine.hold.set()
    await running
    newer = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    for write in (lambda: session.chat(OPENING), lambda: session.reward(1.0), session.end):
        with pytest.raises(SessionConflict, match="opened again"):
            await write()
    await newer.chat(OPENING)
    assert len(journal.rows(session.id)) == len(newer.tree) == 2
    journal.close()


# Sampling that a trainer cannot score.
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
async def test_penalties_are_refused_in_training_and_recorded_otherwise(penalty: str) -> None:
    class Truthful(Engine):
        truthful_filters = frozenset({"top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})

    sampling = tt.Sampling(**{penalty: 1.5})
    session = tt.Session(renderer=renderer("own"), provider=Truthful([said("a", "1")]))
    with pytest.raises(SamplingError, match=rf"no trainer can score.*{penalty}.*training=False"):
        await session.chat(OPENING, sampling=sampling)
    free = tt.Session(renderer=renderer("own"), provider=Truthful([said("a", "1")]), training=False)
    await free.chat(OPENING, sampling=sampling)
    (sample,) = free.samples()
    assert sample.metadata["tokentrue"]["nodes"][0]["sampling"] == {penalty: 1.5}


async def test_a_sample_carries_every_setting_that_shaped_it() -> None:
    session, _ = session_of(said("a", "1"))
    await session.chat(OPENING, sampling=tt.Sampling(temperature=0.7, top_p=0.9, max_tokens=50, seed=1))
    (sample,) = session.samples()
    assert sample.metadata["tokentrue"]["nodes"][0]["sampling"] == {"temperature": 0.7, "top_p": 0.9}


# What the journal cannot give back is refused.
async def test_a_version_beyond_64_bits_is_the_engines_fault(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), said("b", "2"), journal=journal)
    engine.version = 20261115212000123456
    with pytest.raises(EngineContractError, match="20261115212000123456"):
        await session.chat(OPENING)
    assert journal.rows(session.id) == [] and len(session.tree) == 0
    engine.version = 2**63 - 1
    await session.chat(OPENING)
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    (node,) = reopened.tree.nodes.values()
    assert node.versions == (VersionSpan(start=0, end=len(node.sampled_ids), version=2**63 - 1),)
    journal.close()


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, {1: 2}, b"x"])
async def test_messages_that_json_cannot_hold_are_refused_before_anything_is_generated(value: Any) -> None:
    session, engine = session_of(said("a", "1"))
    with pytest.raises(MessageError, match=r"messages\[0\]"):
        await session.chat([{"role": "user", "content": "hi", "extra": value}])
    assert not engine.prompts


# Streamed text is the recorded text.
@pytest.mark.parametrize("stops", [("abc", "b"), ("bc", "abc"), ("c x", "abc"), ("b",)])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
async def test_overlapping_stop_strings_cut_a_stream_where_they_cut_the_record(
    stops: tuple[str, ...], size: int
) -> None:
    from tokentrue.sessions.stages.generation import StreamedMessage, find_stop
    from tokentrue.types import Delta

    text = "xxabcabc xyz"
    shown = StreamedMessage("0" * 32, stops)
    seen = ""
    for at in range(0, len(text), size):
        seen += "".join(delta.content for delta in shown.feed([Delta(content=text[at : at + size])]))
    assert seen + "".join(delta.content for delta in shown.finish()) == text[: find_stop(text, stops)]


async def test_a_call_that_breaks_off_is_recorded_as_it_was_streamed() -> None:
    """It was shown before it broke off: the record holds what the client has, so that its replay is recognised."""
    broken = encode('Hm. <tool_call>\n{"name": "look", "arguments": {"at": "x"', "own")
    session, _ = session_of(tuple(broken), said("ok", "1"))
    events, error = await stream_until_error(session, TurnRequest(messages=OPENING, tools=TOOLS))
    assert error is None
    served, deltas = events[-1].reply.message, [event.delta for event in events if event.delta is not None]
    assert "".join(delta.content for delta in deltas) == served["content"]
    (call,) = served["tool_calls"]
    assert "".join(delta.arguments for delta in deltas) == call["function"]["arguments"]
    follow = await session.chat([*OPENING, served, *answer_to(served, 0)], TOOLS)
    assert session.tree.get(follow.node).parent == events[-1].reply.node and follow.projection == "exact"


# What a turn's place in time says.
async def test_a_request_that_comes_while_another_is_being_written_did_not_replace_it(tmp_path: Path) -> None:
    class SlowJournal(Journal):
        async def append_nodes(self, *arguments: Any) -> None:
            await asyncio.sleep(0.1)
            await super().append_nodes(*arguments)

    journal = SlowJournal(tmp_path / "j.db")
    session, _ = session_of(said("a", "1"), said("b", "2"), journal=journal)
    first = asyncio.create_task(session.turn(TurnRequest(messages=OPENING, sampling=tt.Sampling(seed=1))))
    await asyncio.sleep(0.05)  # the first answer is sampled, and its row is being written
    second = asyncio.create_task(session.turn(TurnRequest(messages=OPENING, sampling=tt.Sampling(seed=2))))
    (one,), (two,) = await first, await second
    assert one.node != two.node and two.edge_reason == "parallel"
    assert session.coverage().ratio == 1.0, "neither was given up for the other"
    journal.close()


async def test_a_turn_that_is_recorded_while_another_is_matched_was_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching waits where long histories must be rendered."""
    session, _ = session_of(said("a", "1"), said("b", "2"))
    find, both, recorded = matching._Search.find_deepest, asyncio.Event(), asyncio.Event()
    matched = list[Any]()

    async def find_late(search: Any) -> Any:
        matched.append(search)
        if len(matched) == 2:
            both.set()
        await (both if search is matched[0] else recorded).wait()
        return await find(search)

    monkeypatch.setattr(matching._Search, "find_deepest", find_late)
    first, second = (
        asyncio.create_task(session.turn(TurnRequest(messages=OPENING, sampling=tt.Sampling(seed=seed))))
        for seed in (1, 2)
    )
    (one,) = await first
    recorded.set()
    (two,) = await second
    assert one.node != two.node and two.edge_reason == "parallel"
    assert session.coverage().ratio == 1.0, "neither was given up for the other"


async def test_a_twin_of_a_turn_that_was_refused_is_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = session_of(said("a", "1"), said("b", "2"), said("c", "3"))
    opened = await session.chat(OPENING)
    refusal = Refusal(why="boundary_changed", detail="the template says otherwise")
    monkeypatch.setattr(session.renderer, "extend", lambda *_, **__: refusal)
    generate, both = turn_module.generation.generate_all, asyncio.Event()
    running = list[Any]()

    async def generate_together(*arguments: Any, **more: Any) -> Any:
        running.append(arguments)
        if len(running) == 2:
            both.set()
        await both.wait()
        return await generate(*arguments, **more)

    monkeypatch.setattr(turn_module.generation, "generate_all", generate_together)
    messages = [*OPENING, opened.message, {"role": "user", "content": "more"}]
    tasks = [
        asyncio.create_task(session.turn(TurnRequest(messages=messages, sampling=tt.Sampling(seed=seed))))
        for seed in (1, 2)
    ]
    (one,), (two,) = await asyncio.gather(*tasks)
    assert [one.edge_reason, two.edge_reason] == ["boundary_changed", "parallel"]
    assert session.tree.get(one.node).parent is None and session.tree.get(two.node).parent is None


async def test_a_twin_of_a_refused_turn_that_is_still_being_rendered_is_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long conversations are rendered in threads."""
    session, _ = session_of(said("a", "1"), said("b", "2"), said("c", "3"))
    opened = await session.chat(OPENING)
    render, both = session.renderer.render, threading.Barrier(2, timeout=10)

    def render_together(*arguments: Any, **more: Any) -> Any:
        both.wait()
        return render(*arguments, **more)

    refusal = Refusal(why="boundary_changed", detail="the template says otherwise")
    monkeypatch.setattr(session.renderer, "extend", lambda *_, **__: refusal)
    monkeypatch.setattr(session.renderer, "render", render_together)
    monkeypatch.setattr(requests, "INLINE_CHARS", 0)
    messages = [*OPENING, opened.message, {"role": "user", "content": "more"}]
    turns = (session.turn(TurnRequest(messages=messages, sampling=tt.Sampling(seed=seed))) for seed in (1, 2))
    replies = [reply for (reply,) in await asyncio.gather(*turns)]
    assert sorted(str(reply.edge_reason) for reply in replies) == ["boundary_changed", "parallel"]


async def test_a_failed_write_leaves_no_place_open(tmp_path: Path) -> None:
    class FullDisk(Journal):
        async def append_nodes(self, *arguments: Any) -> None:
            raise SessionConflict("the disk is full")

    journal = FullDisk(tmp_path / "j.db")
    session, _ = session_of(said("a", "1"), journal=journal)
    with pytest.raises(SessionConflict):
        await session.chat(OPENING)
    assert session.tree.committed_seq == session.tree.next_seq
    journal.close()


async def test_each_choice_records_the_seed_it_was_sampled_with() -> None:
    session, _ = session_of(said("a", "1"), said("b", "2"))
    replies = await session.turn(TurnRequest(messages=OPENING, n=2, sampling=tt.Sampling(seed=7)))
    assert [session.tree.get(reply.node).sampling.seed for reply in replies] == [7, 8]


async def test_a_taken_id_does_not_revoke_the_session_that_has_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), journal=journal, session_id="one")
    await session.wait_created()
    other = tt.Session(renderer=renderer("own"), provider=engine, journal=journal, session_id="one")
    with pytest.raises(SessionConflict, match="exists already"):
        await other.wait_created()
    await session.chat(OPENING)
    await session.end()
    journal.close()
