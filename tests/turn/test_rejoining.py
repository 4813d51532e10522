"""Tools or system prompts that alternate: a request rejoins the branch of its own, with the turns that were sampled
elsewhere as given context. Never a wrong branch, and every sampled token is trained once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.coverage_table import alternating, reasoning_dropped, several, verbatim
from tests.turn.test_matching import bare, said, session_of
from tests.turn.world import OPENING, OTHER_TOOLS, TOOLS, Engine, answer_to, encode, renderer, sampled_turn
from tokentrue.samples import audit, sample_from_json, sample_to_json
from tokentrue.samples.recorded_turns import seal
from tokentrue.sessions import Journal, ServedRef
from tokentrue.types import Sampling, TurnRequest

USER = {"role": "user", "content": "go on"}
SYSTEM = OPENING[0]
OTHER_SYSTEM = {"role": "system", "content": "Act."}


def parent(session: Any, reply: Any) -> str | None:
    return session.tree.get(reply.node).parent


def copies(session: Any, reply: Any) -> list[str]:
    """The nodes whose turns are given again in the turn of `reply`."""
    return [item.node for item in session.tree.get(reply.node).given if isinstance(item, ServedRef)]


def check(session: Any, engine: Engine, *, given_up: int = 0) -> list[Any]:
    """What the trainer gets is what the engine was given and sampled; every token is trained once or accounted for."""
    samples, coverage = session.samples(), session.coverage()
    assert audit(samples).findings == []
    assert coverage.trained == sum(sum(sample.loss_mask) for sample in samples) == coverage.sampled - given_up
    trained: Counter[Any] = Counter()
    for sample in samples:
        for span in sample.spans:
            assert not (span.kind == "given" and span.trainable)
            if span.kind == "sampled":
                assert tuple(sample.token_ids[: span.start]) in engine.prompts
            if span.trainable:
                trained[sample.metadata["tokentrue"]["nodes"][span.turn]["node"]] += span.end - span.start
    assert all(trained[name] in (0, len(node.sampled_ids)) for name, node in session.tree.nodes.items())
    return samples


@pytest.mark.parametrize("replay", [verbatim, reasoning_dropped, several])
async def test_the_prompt_is_the_one_of_a_conversation_that_never_changed_its_tools(replay: Any) -> None:
    """The independent figure: all 20 turns sampled under the same tools give one sequence; with alternating tools the
    branch of the first ones is that sequence, token by token."""
    alone = await alternating([TOOLS], replay=replay)
    both = await alternating([TOOLS, OTHER_TOOLS], replay=replay)
    (whole,) = alone.samples()
    first, second = both.samples()
    assert first.token_ids == whole.token_ids[: len(first.token_ids)]
    assert sum(first.loss_mask) + sum(second.loss_mask) == sum(whole.loss_mask) == 2000
    elsewhere = [span for span in first.spans if span.why == "sampled_elsewhere"]
    assert len(elsewhere) == 9 and all(span.kind == "given" and span.role == "assistant" for span in elsewhere)
    for span in elsewhere:  # whole in the other sample, trained there
        ids = first.token_ids[span.start : span.end]
        places = [s for s in second.spans if s.trainable and second.token_ids[s.start : s.end] == ids]
        assert len(places) == 1
    check(both, both.provider)


async def test_the_longest_recorded_prefix_of_the_right_branch_is_rejoined() -> None:
    """Two branches of the same tools part at a user message; the other tools follow the second one."""
    session, engine = session_of(*[said(f"a{i}", "r") for i in range(6)])
    first = await session.chat(OPENING, TOOLS)
    left: list[Any] = [*OPENING, bare(first.message), {"role": "user", "content": "left"}]
    right: list[Any] = [*OPENING, bare(first.message), {"role": "user", "content": "right"}]
    await session.chat(left, TOOLS)
    on_right = await session.chat(right, TOOLS)
    right += [bare(on_right.message), USER]
    other = await session.chat(right, OTHER_TOOLS)
    right += [bare(other.message), {"role": "user", "content": "and back"}]
    back = await session.chat(right, TOOLS)
    assert (parent(session, back), copies(session, back)) == (on_right.node, [other.node])
    assert back.edge_reason == "rejoined" and back.projection == "reasoning_dropped"
    assert session.tree.get(back.node).origin == other.node
    check(session, engine)


async def test_an_edit_between_the_branches_is_no_copy() -> None:
    """One changed character in what was served or given elsewhere: the client's own words are given instead."""
    for change in ("served", "given"):
        session, engine = session_of(*[said(f"a{i}", "r") for i in range(3)])
        first = await session.chat(OPENING, TOOLS)
        asked = [*OPENING, first.message, USER]
        other = await session.chat(asked, OTHER_TOOLS)
        replayed: Any = dict(other.message)
        if change == "served":
            replayed["content"] += "!"
        else:
            asked = [*asked[:-1], {**USER, "content": "go  on"}]
        back = await session.chat([*asked, replayed, USER], TOOLS)
        assert parent(session, back) == first.node and copies(session, back) == []
        assert back.edge_reason == "edited"
        assert not any(span.why == "sampled_elsewhere" for sample in check(session, engine) for span in sample.spans)


async def test_of_twins_the_one_is_rejoined_whose_conversation_went_on_elsewhere() -> None:
    """Two answers with equal text; the harness drops the reasoning that tells them apart after the switch."""
    for chosen in (0, 1):
        session, engine = session_of(
            said("Four.", "first way"), said("Four.", "second way"), *[said(f"ok{i}", "r") for i in range(2)]
        )
        twins = await session.turn(TurnRequest(messages=OPENING, tools=TOOLS, n=2))
        other = await session.chat([*OPENING, twins[chosen].message, USER], OTHER_TOOLS)
        back = await session.chat([*OPENING, bare(twins[0].message), USER, bare(other.message), USER], TOOLS)
        assert (parent(session, back), copies(session, back)) == (twins[chosen].node, [other.node])
        check(session, engine, given_up=len(session.tree.get(twins[1 - chosen].node).sampled_ids))


@pytest.mark.parametrize("switch", ["tools", "system"])
async def test_twins_elsewhere_that_nothing_tells_apart_are_ambiguous(switch: str) -> None:
    """Two answers with equal text under the other tools or system prompt; the harness drops the reasoning."""
    tools = OTHER_TOOLS if switch == "tools" else TOOLS
    for named in (None, 0, 1):
        session, engine = session_of(said("a", "r"), said("Four.", "first way"), said("Four.", "second way"), said("b"))
        first = await session.chat(OPENING, TOOLS)
        opening = OPENING if switch == "tools" else [OTHER_SYSTEM, *OPENING[1:]]
        twins = await session.turn(TurnRequest(messages=[*opening, first.message, USER], tools=tools, n=2))
        messages = [*OPENING, first.message, USER, bare(twins[0].message), USER]
        continues = None if named is None else twins[named].node
        (back,) = await session.turn(TurnRequest(messages=messages, tools=TOOLS, continues=continues))
        (copied,) = copies(session, back)
        assert ("ambiguous" in back.projection) == (named is None)
        assert named is None or copied == continues
        (left_out,) = session.coverage().untrained
        check(session, engine, given_up=left_out.tokens)


async def test_a_retry_of_a_rejoined_turn_is_a_retry() -> None:
    session, engine = session_of(*[said(f"a{i}", "r") for i in range(5)])
    first = await session.chat(OPENING, TOOLS)
    other = await session.chat([*OPENING, first.message, USER], OTHER_TOOLS)
    history = [*OPENING, first.message, USER, other.message, USER]
    once = await session.chat(history, TOOLS)
    again = await session.chat([*history[:4], bare(other.message), USER], TOOLS)
    assert again.edge_reason == "retry" and parent(session, again) == first.node
    (left_out,) = session.coverage().untrained
    assert (left_out.node, left_out.why) == (once.node, "retried")
    last = await session.chat([*history, again.message, USER], TOOLS)
    assert parent(session, last) == again.node
    check(session, engine, given_up=left_out.tokens)


async def test_a_turn_that_is_asked_again_elsewhere_gives_up_what_followed_it_here() -> None:
    session, engine = session_of(*[said(f"a{i}", "r") for i in range(5)])
    first = await session.chat(OPENING, TOOLS)
    asked = [*OPENING, first.message, USER]
    other = await session.chat(asked, OTHER_TOOLS)
    followed = await session.chat([*asked, other.message, USER], TOOLS)
    again = await session.chat(asked, OTHER_TOOLS)
    back = await session.chat([*asked, again.message, USER], TOOLS)
    assert copies(session, back) == [again.node] and parent(session, back) == first.node
    reasons = {item.node: item.why for item in session.coverage().untrained}
    assert reasons == {other.node: "rolled_back", followed.node: "rolled_back"}
    check(session, engine, given_up=sum(item.tokens for item in session.coverage().untrained))


async def test_of_several_answers_elsewhere_the_one_that_was_continued_here_is_trained() -> None:
    session, engine = session_of(*[said(f"a{i}", "r") for i in range(5)])
    first = await session.chat(OPENING, TOOLS)
    asked = [*OPENING, first.message, USER]
    choices = await session.turn(TurnRequest(messages=asked, tools=OTHER_TOOLS, n=3))
    back = await session.chat([*asked, bare(choices[1].message), USER], TOOLS)
    assert copies(session, back) == [choices[1].node]
    reasons = {item.node: item.why for item in session.coverage().untrained}
    assert reasons == {choices[0].node: "not_chosen", choices[2].node: "not_chosen"}
    check(session, engine, given_up=sum(item.tokens for item in session.coverage().untrained))


async def test_a_compaction_rejoins_nothing() -> None:
    session, engine = session_of(*[said(f"a{i}", "r") for i in range(3)])
    first = await session.chat(OPENING, TOOLS)
    other = await session.chat([*OPENING, first.message, USER], OTHER_TOOLS)
    summary = {"role": "user", "content": "Summary: all is well."}
    back = await session.chat([SYSTEM, summary, other.message, USER], TOOLS)
    assert parent(session, back) is None and copies(session, back) == []
    check(session, engine)


async def test_sub_agents_with_equal_first_messages_keep_to_themselves() -> None:
    """Other system prompts, the same task, the same words served: each goes on where it was, and takes no turn of the
    other for its own."""
    session, engine = session_of(
        said("Four.", "planned"), said("Four.", "acted"), *[said(f"ok{i}", "r") for i in range(3)]
    )
    plan = await session.chat([SYSTEM, OPENING[1]], TOOLS)
    act = await session.chat([OTHER_SYSTEM, OPENING[1]], TOOLS)
    for system, own in ((SYSTEM, plan), (OTHER_SYSTEM, act)):
        follow = await session.chat([system, OPENING[1], bare(own.message), USER], TOOLS)
        assert parent(session, follow) == own.node and copies(session, follow) == []
    # A third agent was given the words of the two: nothing of it is recorded.
    third = {"role": "system", "content": "Judge."}
    judged = await session.chat([third, OPENING[1], bare(plan.message), USER], TOOLS)
    assert parent(session, judged) is None and copies(session, judged) == []
    check(session, engine)


@pytest.mark.parametrize("systems", [(SYSTEM, OTHER_SYSTEM), (SYSTEM, None)])
async def test_system_prompts_that_alternate_rejoin_with_exact_copies(systems: Any) -> None:
    """Also where one of the two is no system prompt at all, so that every message has another index."""
    session, engine = session_of(*[sampled_turn(i, tokens=300, name="own") for i in range(6)])
    history: list[Any] = [OPENING[1]]
    replies = []
    for turn in range(6):
        system = systems[turn % 2]
        replies.append(await session.chat([*([system] if system else []), *history], TOOLS))
        history += [bare(replies[-1].message), *answer_to(replies[-1].message, turn)]
    for turn in range(2, 6):
        assert parent(session, replies[turn]) == replies[turn - 2].node
        assert copies(session, replies[turn]) == [replies[turn - 1].node]
    assert len(check(session, engine)) == 2


async def test_results_are_given_the_call_ids_that_were_served() -> None:
    """The harness rewrites call ids: in the rejoined branch every result answers the served one again."""
    session, engine = session_of(*[sampled_turn(i, tokens=300, name="own") for i in range(4)])
    history: list[Any] = list(OPENING)
    for turn, tools in enumerate((TOOLS, OTHER_TOOLS, TOOLS, OTHER_TOOLS)):
        reply = await session.chat(history, tools)
        renamed = {
            **bare(reply.message),
            "tool_calls": [{**call, "id": f"x{turn}"} for call in reply.message["tool_calls"]],
        }
        history += [renamed, *answer_to(renamed, turn)]
        messages = session.tree.messages(session.tree.get(reply.node))
        calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
        results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        assert results == calls[: len(results)] and not any(name.startswith("x") for name in calls)
    check(session, engine)


async def test_a_turn_that_opens_otherwise_is_not_copied() -> None:
    """Without thinking, Qwen3's template opens the turn with an empty think block. The copy is opened the same way, the
    turn after it as it asks itself."""
    ids = [sampled_turn(0), (*encode("No thought."), renderer().stop_token_ids[0]), sampled_turn(2)]
    engine = Engine(ids)
    session = tt.Session(renderer=renderer(), provider=engine)
    first = await session.chat(OPENING, TOOLS)
    history: list[Any] = [*OPENING, first.message, *answer_to(first.message, 0)]
    other = await session.chat(history, OTHER_TOOLS, template_kwargs={"enable_thinking": False})
    back = await session.chat([*history, other.message, USER], TOOLS)
    assert (parent(session, back), copies(session, back)) == (first.node, [other.node])
    text = renderer().decode(engine.prompts[-1])
    assert "<think>\n\n</think>\n\nNo thought.<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")
    check(session, engine)


async def test_a_turn_that_was_cut_off_elsewhere_is_closed_here() -> None:
    session, engine = session_of(said("a0", "r"), said("a long answer that is cut", "r"), said("a2", "r"))
    first = await session.chat(OPENING, TOOLS)
    history: list[Any] = [*OPENING, first.message, USER]
    other = await session.chat(history, OTHER_TOOLS, sampling=Sampling(max_tokens=9))
    back = await session.chat([*history, other.message, USER], TOOLS)
    assert (parent(session, back), copies(session, back)) == (first.node, [other.node])
    check(session, engine)


async def test_history_template_rejoins_only_what_its_template_would_not_rewrite() -> None:
    """After a tool result Qwen3's template keeps the reasoning, after a new question it strips it: a new root."""
    for tool_result in (True, False):
        engine = Engine([sampled_turn(i, call=tool_result) for i in range(3)])
        session = tt.Session(renderer=renderer("qwen3", "template"), provider=engine)
        history: list[Any] = list(OPENING)
        replies = []
        for turn, tools in enumerate((TOOLS, OTHER_TOOLS, TOOLS)):
            replies.append(await session.chat(history, tools))
            history += [replies[-1].message, *answer_to(replies[-1].message, turn)]
        assert parent(session, replies[2]) == (replies[0].node if tool_result else None)
        assert replies[2].edge_reason == ("rejoined" if tool_result else "history_rewritten")
        expected = renderer("qwen3", "template").render(history[:-2], TOOLS).token_ids
        text = renderer().decode
        assert tool_result or text(engine.prompts[2]) == text(expected)
        assert session.tree.get(replies[2].node).origin == replies[1].node
        check(session, engine)


async def test_a_reopened_session_rejoins_as_before(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'journal.db'}"
    answers = [said(f"a{i}", "r") for i in range(6)]

    async def play(reopen: bool) -> list[tuple[int, ...]]:
        engine = Engine(answers)
        journal = Journal(store)
        session = tt.Session(renderer=renderer("own"), provider=engine, journal=journal)
        history: list[Any] = list(OPENING)
        for turn in range(6):
            if reopen:
                await session.wait_created()
                journal.close()
                journal = Journal(store)
                session = await tt.Session.open(journal, session.id, renderer=renderer("own"), provider=engine)
            reply = await session.chat(history, (TOOLS, OTHER_TOOLS)[turn % 2])
            history += [bare(reply.message), USER]
        assert session.coverage().rejoined_turns == 4 and len(check(session, engine)) == 2
        journal.close()
        return engine.prompts

    assert await play(reopen=True) == await play(reopen=False)


async def two_samples() -> list[Any]:
    session = await alternating([TOOLS, OTHER_TOOLS])
    return [json.loads(json.dumps(sample_to_json(sample))) for sample in session.samples()]


def reseal(row: dict[str, Any]) -> dict[str, Any]:
    """As a forger would who knows how a seal is made."""
    sample = sample_from_json(row)
    own = {**row["metadata"]["tokentrue"], "seal": seal(sample)}
    return {**row, "metadata": {**row["metadata"], "tokentrue": own}}


def copy_span(row: dict[str, Any]) -> dict[str, Any]:
    return next(span for span in row["spans"] if span["why"] == "sampled_elsewhere")


def mark_copy(rows: list[dict[str, Any]]) -> None:
    span = copy_span(rows[0])
    for at in range(span["start"], span["end"]):
        rows[0]["loss_mask"][at] = 1


def mark_copy_and_span(rows: list[dict[str, Any]]) -> None:
    mark_copy(rows)
    copy_span(rows[0])["trainable"] = True


def train_copy_as_sampled(rows: list[dict[str, Any]]) -> None:
    """Log-probabilities and all: the turn is then trained twice."""
    mark_copy(rows)
    span, other = copy_span(rows[0]), rows[1]
    trained = next(s for s in other["spans"] if s["trainable"])
    rows[0]["rollout_logprobs"][span["start"] : span["end"]] = other["rollout_logprobs"][
        trained["start"] : trained["end"]
    ]
    span |= {"kind": "sampled", "trainable": True, "policy_version": trained["policy_version"], "why": "sampled"}


def name_another_node(rows: list[dict[str, Any]]) -> None:
    node = next(node for node in rows[0]["metadata"]["tokentrue"]["nodes"] if "copies" in node)
    node["copies"][0][2] = rows[0]["metadata"]["tokentrue"]["nodes"][0]["node"]


def name_no_node(rows: list[dict[str, Any]]) -> None:
    node = next(node for node in rows[0]["metadata"]["tokentrue"]["nodes"] if "copies" in node)
    node["copies"][0][2] = "0" * 32


def forget_copy(rows: list[dict[str, Any]]) -> None:
    """The tokens may then be any."""
    del next(node for node in rows[0]["metadata"]["tokentrue"]["nodes"] if "copies" in node)["copies"]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(
    "forge", [mark_copy, mark_copy_and_span, train_copy_as_sampled, name_another_node, name_no_node, forget_copy]
)
async def test_a_forged_copy_is_found(forge: Any, sealed: bool) -> None:
    rows = await two_samples()
    assert audit(map(sample_from_json, rows)).findings == []
    forge(rows)
    rows = [reseal(row) for row in rows] if sealed else rows
    findings = audit(map(sample_from_json, rows)).findings
    assert findings and {finding.sample for finding in findings} == {rows[0]["sample_id"]}
    if sealed:
        assert not any("seal" in finding.what for finding in findings)


async def test_the_record_says_what_was_sampled_elsewhere() -> None:
    session = await alternating([TOOLS, OTHER_TOOLS])
    sample, other = session.samples()
    coverage = sample.metadata["tokentrue"]["coverage"]
    assert coverage["rejoined_turns"] == session.coverage().rejoined_turns == 18
    copied = [copy for row in sample.metadata["tokentrue"]["nodes"] for copy in row.get("copies", ())]
    sampled = [row["node"] for row in other.metadata["tokentrue"]["nodes"]]
    assert [node for _, _, node in copied] == sampled[: len(copied)]
    assert audit([sample]).findings != [], "the other sample, which trains these turns, is missing"
    shorter = replace(sample, metadata={**sample.metadata, "tokentrue": {**sample.metadata["tokentrue"], "nodes": []}})
    assert audit([shorter, other]).findings != []


@pytest.mark.parametrize(
    ("label", "tools", "systems", "rows"),
    [
        ("one tool set (for comparison)", [TOOLS], ["Be careful."], 1),
        ("tools A 7 turns, B 7, A 6", [TOOLS] * 7 + [OTHER_TOOLS] * 7 + [TOOLS] * 6, ["Be careful."], 2),
        ("tools A and B at every turn", [TOOLS, OTHER_TOOLS], ["Be careful."], 2),
        ("three tool sets by turns", [TOOLS, OTHER_TOOLS, None], ["Be careful."], 3),
        ("two system prompts at every turn", [TOOLS], ["Plan.", "Act."], 2),
    ],
)
async def test_the_page_shows_the_tokens_to_forward(label: str, tools: Any, systems: Any, rows: int) -> None:
    samples = (await alternating(tools, systems)).samples()
    tokens = sum(len(sample.token_ids) for sample in samples)
    assert len(samples) == rows
    page = Path(__file__).parents[2] / "docs" / "coverage.md"
    assert f"| {label} | {rows} | {tokens:,} |" in page.read_text(encoding="utf-8")
