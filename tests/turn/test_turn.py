"""The corridor: what goes to the engine, what comes back, what is written and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.test_matching import USER, said, session_of
from tests.turn.world import OPENING, TOOLS, Engine, agent, answer_to, renderer, sampled_turn
from tokentrue.errors import (
    ConfigError,
    EngineContractError,
    InputError,
    LimitExceeded,
    MessageError,
    SamplingError,
    SessionConflict,
    SessionNotFound,
    TokenContractError,
)
from tokentrue.ids import EMPTY, TokenIds
from tokentrue.samples import audit
from tokentrue.sessions import Journal, SessionLimits
from tokentrue.sessions.client import InProcessClient
from tokentrue.sessions.stages.prompts import Prompt, build_prompt
from tokentrue.types import Completion, Finish, RoutedExperts, TurnEvent, TurnRequest


def verbatim(message: Any, turn: int) -> Any:
    return message


async def heard(session: tt.Session, request: TurnRequest) -> list[TurnEvent]:
    return [event async for event in session.stream(request)]


async def test_prompts_are_the_recorded_ids_and_nothing_else() -> None:
    answers = [sampled_turn(i, tokens=160, name="own") for i in range(5)]
    session, engine = session_of(*answers)
    await agent(session, verbatim, turns=5)
    for turn in range(1, 5):
        before = (*engine.prompts[turn - 1], *answers[turn - 1])
        assert engine.prompts[turn][: len(before)] == before
    (sample,) = session.samples()
    assert tuple(sample.token_ids) == (*engine.prompts[4], *answers[4])
    assert [i for i, bit in zip(sample.token_ids, sample.loss_mask, strict=True) if bit] == [
        i for answer in answers for i in answer
    ]


async def test_a_stream_tells_the_same_as_the_whole_turn() -> None:
    whole, _ = session_of(sampled_turn(1, tokens=160, name="own"))
    streamed, _ = session_of(sampled_turn(1, tokens=160, name="own"))
    reply = await whole.chat(OPENING, TOOLS)
    events = await heard(streamed, TurnRequest(messages=OPENING, tools=TOOLS))
    assert events[0].node_id and events[0].delta is None and events[0].reply is None
    last = events[-1].reply
    assert last is not None and last.node == events[0].node_id
    assert sum((event.token_ids for event in events), EMPTY) == last.completion.token_ids == reply.completion.token_ids
    assert sum((event.logprobs for event in events), ()) == last.completion.logprobs
    deltas = [event.delta for event in events if event.delta is not None]
    assert "".join(delta.reasoning for delta in deltas) == last.message["reasoning_content"]
    assert "".join(delta.content for delta in deltas) == last.message["content"]
    (opened,) = [delta for delta in deltas if delta.name]
    assert opened.call_id == last.message["tool_calls"][0]["id"]
    strip = lambda message: {**message, "tool_calls": [{**c, "id": ""} for c in message["tool_calls"]]}  # noqa: E731
    assert strip(last.message) == strip(reply.message)
    assert len(events) > 20, "not one big chunk"


async def test_the_journal_has_a_turn_before_anyone_hears_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, _ = session_of(*[said("a", "1")] * 2, journal=journal)
    reply = await session.chat(OPENING)
    assert [row.id for row in journal.rows(session.id)] == [reply.node]
    async for event in session.stream(TurnRequest(messages=[*OPENING, reply.message, USER])):
        if event.reply is not None:
            assert journal.rows(session.id)[-1].id == event.reply.node
    journal.close()


async def test_hanging_up_cancels_the_engine_and_keeps_what_was_sampled(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(sampled_turn(0, tokens=160, name="own"), journal=journal)
    events = session.stream(TurnRequest(messages=OPENING, tools=TOOLS, request_key="k"))
    count = 0
    async for event in events:
        count += len(event.token_ids)
        if count == 10:
            break
    await events.aclose()
    assert engine.cancelled == 1
    (node,) = session.tree.nodes.values()
    assert (node.outcome, node.finish, node.request_key) == ("disconnected", Finish.ABORT, "k")
    assert 10 <= len(node.sampled_ids) < 20 and [span.version for span in node.versions] == [7]
    assert session.coverage().untrained[0].why == "disconnected" and session.samples() == []
    assert len(journal.rows(session.id)) == 1
    # The same key asks again: the broken answer is not the recorded one.
    engine.answers.append(said("a", "1"))
    (reply,) = await session.turn(TurnRequest(messages=OPENING, tools=TOOLS, request_key="k"))
    assert not reply.from_record and reply.edge_reason == "retry"
    journal.close()


async def test_hanging_up_before_the_first_token_leaves_nothing() -> None:
    session, engine = session_of(said("a", "1"))
    engine.hold = asyncio.Event()
    events = session.stream(TurnRequest(messages=OPENING))
    await anext(events)
    await events.aclose()
    assert len(session.tree) == 0


async def test_a_cancelled_call_leaves_nothing_and_frees_the_turn() -> None:
    session, engine = session_of(said("a", "1"), said("b", "2"))
    engine.hold = asyncio.Event()
    task = asyncio.create_task(session.chat(OPENING))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(session.tree) == 0
    engine.hold = None
    assert (await session.chat(OPENING)).edge_reason == "first"


async def test_the_same_request_in_flight_is_one_turn_even_if_the_first_caller_leaves() -> None:
    session, engine = session_of(said("a", "1"))
    engine.hold = asyncio.Event()
    first = asyncio.create_task(session.chat(OPENING))
    second = asyncio.create_task(heard(session, TurnRequest(messages=OPENING)))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    engine.hold.set()
    events = await second
    assert events[-1].reply is not None and events[-1].reply.from_record
    assert len(engine.prompts) == 1 and len(session.tree) == 1
    assert "".join(event.delta.content for event in events if event.delta) == "a"


async def test_a_request_key_gives_the_recorded_answer_also_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), said("b", "2"), journal=journal)
    request = TurnRequest(messages=OPENING, tools=TOOLS, request_key="abc", n=2)
    first = await session.turn(request)
    again = await session.turn(request)
    assert [reply.node for reply in again] == [reply.node for reply in first] and all(
        reply.from_record for reply in again
    )
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    events = await heard(reopened, request)
    replies = [event.reply for event in events if event.reply is not None]
    for was, now in zip(first, replies, strict=True):
        assert (now.node, now.message, now.parsed, now.completion) == (
            was.node,
            was.message,
            was.parsed,
            was.completion,
        )
    assert len(engine.prompts) == 2
    with pytest.raises(SessionConflict, match="another request"):
        await reopened.turn(replace(request, messages=[*OPENING, USER]))
    journal.close()


async def test_n_answers_come_together_with_their_own_seeds() -> None:
    session, engine = session_of(*[said(f"a{i}", "1") for i in range(3)])
    replies = await session.turn(TurnRequest(messages=OPENING, n=3, sampling=tt.Sampling(seed=5)))
    assert [reply.message["content"] for reply in replies] == ["a0", "a1", "a2"]
    assert [sampling.seed for sampling in engine.settings] == [5, 6, 7]
    assert len(session.samples()) == 3 and session.coverage().ratio == 1.0


async def test_one_failure_among_n_fails_the_request_and_records_what_the_engine_had_answered() -> None:
    session, _ = session_of(said("a", "1"))
    with pytest.raises(IndexError):
        await session.turn(TurnRequest(messages=OPENING, n=2, request_key="k"))
    (node,) = session.tree.nodes.values()
    assert (node.outcome, node.sampled_ids) == ("engine_failed", said("a", "1"))
    assert [item.why for item in session.coverage().untrained] == ["engine_failed"] and session.samples() == []
    assert not session.tree.nodes_by_key


async def test_a_failed_generation_leaves_nothing() -> None:
    session, engine = session_of(said("a", "1"))
    engine.fail = EngineContractError("broken")
    for call in (session.chat(OPENING), heard(session, TurnRequest(messages=OPENING))):
        with pytest.raises(EngineContractError):
            await call
    assert len(session.tree) == 0
    engine.fail = None
    assert (await session.chat(OPENING)).edge_reason == "first"


async def test_an_engine_that_counts_another_prompt_is_refused() -> None:
    class Wrong(Engine):
        def _next(self, prompt_ids: Any, sampling: Any) -> Completion:
            return replace(super()._next(prompt_ids, sampling), prompt_tokens=len(prompt_ids) - 1)

    session = tt.Session(renderer=renderer("own"), provider=Wrong([said("a", "1")]))
    with pytest.raises(EngineContractError, match="counted"):
        await session.chat(OPENING)
    assert [item.why for item in session.coverage().untrained] == ["engine_failed"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_that_leaves_the_record_is_never_committed(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine was given is compared with the record, whoever built it."""
    session, engine = session_of(said("a", "1"), said("b", "2"), said("b", "2"))
    reply = await session.chat(OPENING)
    follow_up = TurnRequest(messages=[*OPENING, reply.message, USER])

    async def changed(*args: Any, **kwargs: Any) -> Prompt:
        prompt = await build_prompt(*args, **kwargs)
        ids = prompt.ids.tolist()
        ids[3] += 1  # as a bug in a cache would
        return replace(prompt, ids=TokenIds(ids))

    with monkeypatch.context() as patch, pytest.raises(TokenContractError, match="leaves the recorded ids at token 3"):
        patch.setattr("tokentrue.turn.build_prompt", changed)
        await (heard(session, follow_up) if streamed else session.turn(follow_up))
    assert len(session.tree) == 1 and len(engine.prompts) == 2
    assert (await session.turn(follow_up))[0].edge_reason is None and len(session.tree) == 2


async def test_filters_that_the_engine_cannot_account_for_are_refused_in_training() -> None:
    session, engine = session_of(said("a", "1"), said("b", "2"))
    with pytest.raises(SamplingError, match=r"top_k.*training=False"):
        await session.chat(OPENING, sampling=tt.Sampling(top_k=5))
    assert not engine.prompts
    await session.chat(OPENING, sampling=tt.Sampling(top_p=0.9))  # this one it can
    free, _ = session_of(said("a", "1"), training=False)
    await free.chat(OPENING, sampling=tt.Sampling(top_k=5))


async def test_an_engine_that_has_not_said_what_it_can_do_is_asked_before_it_is_refused() -> None:
    """As vLLM's provider: it learns from the server's first answer."""
    session, engine = session_of(said("a", "1"), said("b", "2"))
    engine.truthful_filters, asked = None, list[str]()

    async def health() -> dict[str, str]:
        asked.append("health")
        engine.truthful_filters = frozenset({"top_p"})
        return {"engine": "test"}

    engine.health = health
    reply = await session.chat(OPENING, sampling=tt.Sampling(top_p=0.9))
    await session.chat([*OPENING, reply.message, USER], sampling=tt.Sampling(top_p=0.9))
    assert len(engine.prompts) == 2 and asked == ["health"]
    with pytest.raises(SamplingError, match="top_k"):
        await session.chat(OPENING, sampling=tt.Sampling(top_k=5))
    assert len(engine.prompts) == 2


async def test_pinned_values_win_and_are_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(
        said("a", "1"), said("b", "2"), journal=journal, sampling={"temperature": 0.7, "max_tokens": 50}
    )
    await session.chat(OPENING, sampling=tt.Sampling(temperature=0.1, max_tokens=9, seed=3))
    assert (engine.settings[0].temperature, engine.settings[0].max_tokens, engine.settings[0].seed) == (0.7, 50, 3)
    assert set(renderer("own").stop_token_ids) <= set(engine.settings[0].stop_token_ids)
    (node,) = session.tree.nodes.values()
    assert node.sampling.temperature == 0.7
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    await reopened.chat([*OPENING, node.served, USER])
    assert engine.settings[1].temperature == 0.7
    journal.close()
    with pytest.raises(SamplingError, match="no sampling setting named heat"):
        session_of(sampling={"heat": 1})


async def test_a_turn_cut_off_by_length_goes_on() -> None:
    session, engine = session_of(*[sampled_turn(i, tokens=160, name="own") for i in range(3)])
    first = await session.chat(OPENING, TOOLS, sampling=tt.Sampling(max_tokens=30))
    assert first.completion.finish is Finish.LENGTH
    second = await session.chat([*OPENING, first.message, USER], TOOLS)
    assert session.tree.get(second.node).parent == first.node, second.edge_reason
    assert engine.prompts[1][: len(engine.prompts[0]) + 30] == (*engine.prompts[0], *first.completion.token_ids)
    (sample,) = session.samples()
    assert sum(sample.loss_mask) == 30 + 160


async def test_stop_strings_are_kept_in_the_record_and_hidden_from_the_client() -> None:
    class Stops(Engine):
        def _next(self, prompt_ids: Any, sampling: Any) -> Completion:
            return replace(super()._next(prompt_ids, sampling), stopped_by="END")

    text = said("one two END", "1")[:-1]
    session = tt.Session(renderer=renderer("own"), provider=Stops([text, text]))
    sampling = tt.Sampling(stop=("END", "ENOUGH"))
    reply = await session.chat(OPENING, sampling=sampling)
    assert reply.message["content"] == "one two "
    assert reply.completion.token_ids == text
    events = await heard(session, TurnRequest(messages=[*OPENING, reply.message, USER], sampling=sampling))
    assert "".join(event.delta.content for event in events if event.delta) == "one two "


async def test_template_history_forks_where_the_template_rewrites_it() -> None:
    engine = Engine([said(f"a{i}", f"think {i}", name="qwen3") for i in range(4)])
    session = tt.Session(renderer=renderer("qwen3", "template"), provider=engine, history="template")
    first = await session.chat(OPENING)
    second = await session.chat([*OPENING, first.message, USER])
    assert second.edge_reason == "history_rewritten"
    node = session.tree.get(second.node)
    assert node.parent is None and node.origin == first.node
    # What the engine was given is the template's own view of the history.
    assert engine.prompts[1] == renderer("qwen3", "template").render([*OPENING, first.message, USER]).token_ids
    third = await session.chat([*OPENING, {"role": "assistant", "content": "a0"}, USER, second.message, USER])
    assert third.edge_reason == "history_rewritten" and session.tree.get(third.node).origin == second.node
    assert len(session.samples()) == 3 and session.coverage().ratio == 1.0
    again = await session.chat([*OPENING, {"role": "assistant", "content": "a0"}, USER, second.message, USER])
    assert again.edge_reason == "retry" and session.tree.get(again.node).origin == second.node
    assert [span.why for span in session.coverage().untrained] == ["retried"]
    with pytest.raises(ConfigError, match="history"):
        tt.Session(renderer=renderer("qwen3"), provider=engine, history="template")


@pytest.mark.parametrize("start", [0, 3])
async def test_each_turn_records_the_routing_of_the_positions_that_it_added(start: int) -> None:
    """The engine reports all positions at every turn; positions before `start` are not known."""

    class Mixture(Engine):
        def _next(self, prompt_ids: Any, sampling: Any) -> Completion:
            done = super()._next(prompt_ids, sampling)
            size = len(prompt_ids) + len(done.token_ids) - 1 - start
            data = bytes([len(self.prompts)]) * (size * 4)
            return replace(
                done, routed_experts=RoutedExperts(shape=(size, 2, 1), data=data, start=start, weights=data + data)
            )

    session = tt.Session(renderer=renderer("own"), provider=Mixture([said("a", "1"), said("b", "2")]))
    first = await session.chat(OPENING)
    await session.chat([*OPENING, first.message, USER])
    (sample,) = session.samples()
    routed, known = sample.routed_experts, len(session.tree.nodes[first.node].sampled_ids) + first.prompt_tokens - 1
    assert routed is not None and routed.shape == (len(sample.token_ids) - 1, 2, 1) and routed.start == 0
    rest = routed.shape[0] - known
    assert routed.data == b"\xff" * (4 * start) + bytes([1]) * (4 * (known - start)) + bytes([2]) * (4 * rest)
    assert routed.weights == bytes(8 * start) + bytes([1]) * (8 * (known - start)) + bytes([2]) * (8 * rest)
    assert audit([sample]).findings == []
    broken = replace(sample, routed_experts=replace(routed, data=bytes([3]) + routed.data[1:]))
    assert "seal" in str(audit([broken]).findings[0])


@pytest.mark.parametrize(("wrong", "words"), [({"n": "2"}, "n must be a whole number, got '2'"), ({"n": True}, "n must be a whole number"),
                                              ({"template_kwargs": "x"}, "template_kwargs must be an object, got 'x'")])  # fmt: skip
async def test_values_of_another_type_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    session, _ = session_of(said("a", "1"))
    with pytest.raises(InputError, match=words):
        await session.turn(TurnRequest(messages=[{"role": "user", "content": "hi"}], **wrong))
    if "template_kwargs" in wrong:
        with pytest.raises(InputError, match=words):
            await session.chat([{"role": "user", "content": "hi"}], **wrong)


async def test_limits_are_settings() -> None:
    session, _ = session_of(*[said("a", "1")] * 4, limits=SessionLimits(max_nodes=1, max_prompt_tokens=40, max_n=2))
    with pytest.raises(InputError, match="n must be"):
        await session.turn(TurnRequest(messages=OPENING, n=3))
    with pytest.raises(LimitExceeded, match="max_prompt_tokens=40"):
        await session.chat([{"role": "user", "content": "word " * 100}])
    await session.chat([{"role": "user", "content": "x"}])
    with pytest.raises(LimitExceeded, match="max_nodes=1"):
        await session.chat([{"role": "user", "content": "y"}])


async def test_an_ended_session_admits_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), said("b", "2"), journal=journal, group="g", metadata={"task": 1})
    await session.chat(OPENING)
    await session.reward(0.5, metadata={"by": "judge"})
    await session.end()
    with pytest.raises(SessionConflict, match="ended"):
        await session.chat(OPENING)
    reopened = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
    with pytest.raises(SessionConflict, match="ended"):
        await reopened.chat(OPENING)
    (sample,) = reopened.samples()
    assert (sample.reward, sample.group) == (0.5, "g")
    assert sample.metadata["task"] == 1 and sample.metadata["by"] == "judge"
    with pytest.raises(SessionNotFound):
        await tt.Session.open(journal, "nobody", renderer=renderer("own"), provider=engine)
    with pytest.raises(SessionConflict, match="exists already"):
        await tt.Session(
            renderer=renderer("own"), provider=engine, journal=journal, session_id=session.id
        ).wait_created()
    journal.close()


async def test_another_tokenizer_may_not_go_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    session, engine = session_of(said("a", "1"), journal=journal)
    await session.chat(OPENING)

    class Other:
        tokenizer_hash = "sha256:other"
        template_hash = renderer("own").template_hash

    with pytest.raises(SessionConflict, match="another template or tokenizer"):
        await tt.Session.open(journal, session.id, renderer=Other(), provider=engine)  # type: ignore[arg-type]
    journal.close()


async def test_thinking_may_be_switched_from_turn_to_turn() -> None:
    """A setting that only changes how the generation prompt ends goes on; one that changes the prompt's head begins a
    new root."""
    session, _ = session_of(*[said("a", "1")] * 3)
    first = await session.chat(OPENING)
    second = await session.chat([*OPENING, first.message, USER], template_kwargs={"enable_thinking": False})
    assert second.edge_reason is None


# Agents.
async def chatting(chat: Any, task: str) -> float:
    messages = [{"role": "user", "content": task}]
    for _ in range(3):
        reply = await chat(messages, TOOLS)
        messages += [reply.message, *answer_to(reply.message, 0)]
    return 1.0


async def openai_like(client: Any, task: str) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": task}]
    for _ in range(2):
        done = await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, temperature=1.0, max_tokens=500
        )
        assert done.choices[0].finish_reason == "tool_calls" and done.usage.completion_tokens == 160
        messages += [done.choices[0].message, *answer_to(done.choices[0].message.model_dump(), 0)]
    stream = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Looking at 2."
    return {"ignored": True}


@pytest.mark.parametrize(("run", "reward"), [(chatting, 1.0), (openai_like, None)])
async def test_an_unchanged_agent_comes_back_as_a_sample(run: Any, reward: float | None) -> None:
    session, _ = session_of(*[sampled_turn(i, tokens=160, name="own") for i in range(3)])
    sample = await tt.rollout(run, "mend it", session)
    assert sum(sample.loss_mask) == 480 and sample.reward == reward
    assert session.coverage().ratio == 1.0 and len(session.samples()) == 1


async def test_the_in_process_client_passes_what_the_engine_must_enforce() -> None:
    session, _ = session_of(*[sampled_turn(i, tokens=160, name="own") for i in range(2)])
    client = InProcessClient(session)
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "look"}], "tools": TOOLS}
    await client.chat.completions.create(**ask, tool_choice="required")
    assert session.tree.in_order()[-1].sampling.extra["tool_choice"] == "required"
    await client.chat.completions.create(**ask, tool_choice="none")
    assert session.tree.in_order()[-1].tools is None
    with pytest.raises(MessageError, match="tool_choice"):
        await client.chat.completions.create(**ask, tool_choice="sometimes")


@pytest.mark.parametrize("finish", list(Finish))
async def test_the_in_process_client_names_the_end_as_the_gateway_does(finish: Finish) -> None:
    session, engine = session_of(said("a", "1"))
    engine.finish = finish
    answer = await InProcessClient(session).chat.completions.create(messages=[USER])
    assert answer.choices[0].finish_reason == ("stop" if finish is Finish.STOP else "length")


async def test_an_agent_that_never_asked_has_no_sample() -> None:
    async def idle(client: Any, task: Any) -> None: ...

    session, _ = session_of()
    with pytest.raises(SessionConflict, match="no model call"):
        await tt.rollout(idle, None, session)


async def test_samples_are_built_in_a_thread_from_what_was_there_when_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import threading

    import tokentrue.turn as corridor

    where: list[threading.Thread] = []
    held = threading.Event()

    def watched(*args: Any, **settings: Any) -> Any:
        where.append(threading.current_thread())
        held.wait(10)
        return real(*args, **settings)

    real = corridor.assemble
    session, _ = session_of(said("a", "1"), said("b", "2"))
    first = await session.chat([USER])
    monkeypatch.setattr(corridor, "assemble", watched)
    building = asyncio.ensure_future(session.assembly())
    await asyncio.sleep(0.01)
    second = await session.chat([USER, first.message, USER])  # a turn goes through while they are built
    held.set()
    made = await building
    assert where[0] is not threading.main_thread()
    assert made.coverage.sampled == len(first.completion.token_ids)
    assert session.coverage().sampled == made.coverage.sampled + len(second.completion.token_ids)
    monkeypatch.undo()
    assert (await session.assembly()).samples == session.samples()


async def test_a_long_history_that_is_spelled_otherwise_is_compared_in_a_thread() -> None:
    import threading

    session, engine = session_of(said("a", "1"), said("b", "2"), said("c", "3"))
    long = "x" * 20_000
    first = await session.chat([{"role": "user", "content": long}])
    compared: list[threading.Thread] = []
    held = threading.Event()
    real = session.renderer.render

    def watched(*args: Any, **settings: Any) -> Any:
        compared.append(threading.current_thread())
        held.wait(10)
        return real(*args, **settings)

    session.renderer.render = watched  # type: ignore[method-assign]
    parts = {"role": "user", "content": [{"type": "text", "text": long}]}
    turn = asyncio.ensure_future(session.chat([parts, first.message, USER]))
    await asyncio.sleep(0.01)
    again = await session.chat([{"role": "user", "content": long}, first.message, {"role": "user", "content": "other"}])
    held.set()
    second = await turn
    assert compared and threading.main_thread() not in compared
    parents = {node.id: node.parent for node in session.tree.in_order()}
    assert parents[second.node] == parents[again.node] == first.node
    assert engine.prompts[2][: len(engine.prompts[0])] == engine.prompts[0]
