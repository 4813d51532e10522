"""From the record to samples: borders, rewards, versions, shared spans, what is left out and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.errors import InputError, TokenContractError
from tokentrue.types import Completion, Finish, TurnRequest, VersionSpan

HI = [{"role": "user", "content": "hi"}]


def more(text: str = "go on") -> dict[str, Any]:
    return {"role": "user", "content": text}


def session_of(count: int = 40, engine: type[Engine] = Engine) -> tt.Session:
    return tt.Session(renderer=Letters(), provider=engine(sampled("r", f"c{i}") for i in range(count)))


async def line(session: tt.Session, turns: int) -> list[Any]:
    history: list[Any] = list(HI)
    replies = []
    for _ in range(turns):
        replies.append(await session.chat(history))
        history = [*history, replies[-1].message, more()]
    return replies


async def test_one_sample_holds_everything_in_order() -> None:
    session = session_of()
    replies = await line(session, 3)
    (sample,) = session.samples()
    assert sample.sample_id == f"{session.id}-{replies[-1].node}" and sample.finish_reason == "stop"
    assert [(span.kind, span.turn) for span in sample.spans] == [
        (kind, turn) for turn in range(3) for kind in ("given", "sampled")
    ]
    assert sample.spans[0].start == 0 and sample.spans[-1].end == len(sample.token_ids)
    for span, reply in zip(sample.spans[1::2], replies, strict=True):
        assert tuple(sample.token_ids[span.start : span.end]) == reply.completion.token_ids
        assert tuple(sample.rollout_logprobs[span.start : span.end]) == reply.completion.logprobs
        assert (span.trainable, span.why, span.policy_version, span.role) == (True, "sampled", 7, "assistant")
    for span in sample.spans[::2]:
        assert set(sample.rollout_logprobs[span.start : span.end]) == {None} and (span.trainable, span.why) == (
            False,
            "prompt",
        )


async def test_a_weight_update_in_mid_generation_is_a_span_border() -> None:
    class Updated(Engine):
        def _next(self, prompt_ids: Any, sampling: Any) -> Completion:
            done = super()._next(prompt_ids, sampling)
            size = len(done.token_ids)
            return replace(
                done, versions=(VersionSpan(start=0, end=2, version=4), VersionSpan(start=2, end=size, version=5))
            )

    session = session_of(engine=Updated)
    await session.chat(HI)
    (sample,) = session.samples()
    assert [(span.end - span.start, span.policy_version) for span in sample.spans if span.kind == "sampled"] == [
        (2, 4),
        (3, 5),
    ]


async def test_a_shared_span_is_trained_in_the_first_leaf_only() -> None:
    session = session_of()
    replies = await line(session, 3)
    history = [*HI, replies[0].message, more("otherwise")]
    other = await session.chat(history)
    first, second = session.samples()
    assert first.metadata["tokentrue"]["leaf"] == replies[2].node and second.metadata["tokentrue"]["leaf"] == other.node
    assert [span.why for span in second.spans if span.kind == "sampled"] == ["trained_elsewhere", "sampled"]
    assert sum(first.loss_mask) + sum(second.loss_mask) == session.coverage().sampled
    shared = second.spans[1].end
    assert (
        first.token_ids[:shared] == second.token_ids[:shared]
        and first.rollout_logprobs[:shared] == second.rollout_logprobs[:shared]
    )


@pytest.mark.parametrize("cut", range(8, 75))
async def test_max_tokens_cuts_at_the_end_of_a_turn(cut: int) -> None:
    session = session_of()
    replies = await line(session, 3)
    whole = session.samples()[0]
    ends = [span.end for span in whole.spans if span.kind == "sampled"]
    fits = [end for end in ends if end <= cut]
    samples, account = session.samples(max_tokens=cut), session.coverage(max_tokens=cut)
    assert [len(sample.token_ids) for sample in samples] == fits[-1:]
    assert account.trained == sum(sum(sample.loss_mask) for sample in samples) == 5 * len(fits)
    assert [item.node for item in account.untrained] == [reply.node for reply in replies[len(fits) :]]
    assert all(item.why == "max_tokens" for item in account.untrained)
    for sample in samples:
        assert ("truncated" in sample.metadata["tokentrue"]) == (len(fits) < 3)


async def test_max_tokens_must_be_positive() -> None:
    with pytest.raises(InputError):
        session_of().samples(max_tokens=0)


async def test_rewards_go_to_the_session_or_to_a_leaf() -> None:
    session = session_of()
    replies = await line(session, 2)
    other = await session.chat([*HI, replies[0].message, more("otherwise")])
    await session.reward(0.25)
    assert [sample.reward for sample in session.samples()] == [0.25, 0.25]
    await session.reward(1, leaf=other.node)
    assert [sample.reward for sample in session.samples()] == [0.25, 1.0]
    with pytest.raises(InputError, match="finite"):
        await session.reward(float("nan"))


async def test_what_was_given_up_is_kept_labelled_and_trained_when_asked_for() -> None:
    session = session_of()
    first = await session.chat(HI)
    again = await session.chat(HI)
    assert [sample.metadata["tokentrue"]["leaf"] for sample in session.samples()] == [again.node]
    everything = session.samples(include_abandoned=True)
    assert [sample.metadata["tokentrue"]["leaf"] for sample in everything] == [first.node, again.node]
    assert [span.why for span in everything[0].spans if span.trainable] == ["asked_for:retried"]
    assert session.coverage(include_abandoned=True).ratio == 1.0


async def test_a_reward_on_a_leaf_speaks_for_it() -> None:
    session = session_of()
    first = await session.chat(HI)
    await session.chat(HI)
    await session.reward(-1.0, leaf=first.node)
    assert [sample.reward for sample in session.samples()] == [-1.0, None] and session.coverage().ratio == 1.0


async def test_of_parallel_answers_those_that_were_passed_over_are_left_out() -> None:
    session = session_of()
    replies = await session.turn(TurnRequest(messages=HI, n=3))
    assert session.coverage().ratio == 1.0 and len(session.samples()) == 3
    await session.chat([*HI, replies[1].message, more()])
    assert {item.node: item.why for item in session.coverage().untrained} == {
        replies[0].node: "not_chosen",
        replies[2].node: "not_chosen",
    }
    await session.chat([*HI, replies[2].message, more()])
    assert {item.node for item in session.coverage().untrained} == {replies[0].node}


async def test_the_attempt_that_was_gone_on_with_survives_even_if_it_was_the_first() -> None:
    session = session_of()
    first = await session.chat(HI)
    again = await session.chat(HI)
    await session.chat([*HI, first.message, more()])
    assert {item.node: item.why for item in session.coverage().untrained} == {again.node: "not_chosen"}


async def test_an_aborted_end_is_left_out_and_the_turns_before_it_are_not() -> None:
    session = session_of()
    replies = await line(session, 2)
    engine: Any = session.provider
    engine.finish = Finish.ABORT
    last = await session.chat([*HI, replies[0].message, more(), replies[1].message, more()])
    (sample,) = session.samples()
    assert sample.metadata["tokentrue"]["leaf"] == replies[1].node and sum(sample.loss_mask) == 10
    assert [(item.node, item.why) for item in session.coverage().untrained] == [(last.node, "aborted")]
    engine.finish = Finish.STOP
    await session.chat([*HI, replies[0].message, more(), replies[1].message, more(), last.message, more()])
    assert session.coverage().ratio == 1.0, "it was gone on with after all"


async def test_a_record_that_was_tampered_with_builds_no_sample() -> None:
    session = session_of()
    await line(session, 2)
    node = next(iter(session.tree.nodes.values()))
    node.logprobs[0] -= 1
    with pytest.raises(TokenContractError, match="certificate"):
        session.samples()


async def test_malformed_calls_are_named_with_their_place() -> None:
    from tests.turn.test_matching import encode, renderer

    text = '<think>\nx\n</think>\n\nHm. <tool_call>\n{"name": "look", "arguments": {"a": }}\n</tool_call>'
    session = tt.Session(
        renderer=renderer("own"), provider=Engine([(*encode(text, "own"), renderer("own").stop_token_ids[0])])
    )
    reply = await session.chat(HI)
    (sample,) = session.samples()
    (attempt,) = sample.metadata["tokentrue"]["malformed_calls"]
    assert attempt["status"] == "invalid_json" and sample.loss_mask[attempt["start"]] == 1
    raw = renderer("own").decode(sample.token_ids[attempt["start"] : attempt["end"]])
    assert '"arguments": {"a": }' in raw
    assert '{"a": }' in str(reply.message["content"]), "the client sees what the model wrote"


async def test_user_metadata_is_carried() -> None:
    session = tt.Session(renderer=Letters(), provider=Engine([sampled("r", "c")]), group="g7", metadata={"task": "t"})
    await session.chat(HI)
    (sample,) = session.samples(metadata={"run": 3})
    assert sample.group == "g7" and sample.metadata["task"] == "t" and sample.metadata["run"] == 3
