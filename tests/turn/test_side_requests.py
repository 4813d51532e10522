"""What a harness asks beside the task is left out of training, with its reason; a conversation of the task never is."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.turn.letters import Letters, sampled
from tests.turn.world import OTHER_TOOLS, TOOLS, Engine
from tokentrue.errors import ConfigError
from tokentrue.plain_json import loads
from tokentrue.sessions.journal import Journal
from tokentrue.types import Sampling, TurnRequest

TASK = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Mend the build."}]
# As opencode 1.18.18, Claude Code 2.1 and qwen-code send them (read from requests, or from the installed package).
OPENCODE_TITLE = [
    {
        "role": "system",
        "content": "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>\nGenerate a brief title",
    },
    {"role": "user", "content": "Generate a title for this conversation:\n"},
    {"role": "user", "content": "Mend the build."},
]
CLAUDE_TITLE = [
    {
        "role": "system",
        "content": "You are a Claude agent, built on Anthropic's Claude Agent SDK.\n\nGenerate a concise, sentence-case "
        "title (3-7 words) that captures the main topic or goal of this coding session.",
    },
    {"role": "user", "content": "<session>\nMend the build.\n</session>"},
]
SUGGESTION = "[SUGGESTION MODE: Suggest what the user might naturally type next.]\n\nFIRST: look at the messages."
SMALL = [{"role": "user", "content": "Is this a new topic? Mend the build."}]


class Conversations:
    """One session, and what a harness asks in it."""

    def __init__(self, answers: Sequence[str], journal: Journal | None = None, **settings: Any) -> None:
        self.session = tt.Session(
            renderer=Letters(), provider=Engine(sampled("r", text) for text in answers), journal=journal, **settings
        )

    async def ask(self, messages: Any, tools: Any = None, model: str | None = "policy", **sampling: Any) -> Any:
        request = TurnRequest(messages=messages, tools=tools, model=model, sampling=Sampling(**sampling))
        return (await self.session.turn(request))[0]

    async def work(self, turns: int = 2, *, models: Sequence[str] = ("policy",), tools: Any = TOOLS) -> list[Any]:
        history, replies = list(TASK), list[Any]()
        for turn in range(turns):
            replies.append(await self.ask(history, tools, models[turn % len(models)]))
            history = [*history, replies[-1].message, {"role": "user", "content": f"go on {turn}"}]
        return replies

    @property
    def left_out(self) -> dict[str, str]:
        return {item.node: item.why for item in self.session.coverage().untrained}


def answers(*first: str, count: int = 12) -> list[str]:
    return [*first, *(f"answer number {index}" for index in range(count))]


@pytest.mark.parametrize("messages", [OPENCODE_TITLE, CLAUDE_TITLE], ids=["opencode", "claude-code"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_title_is_left_out_whether_it_is_asked_first_or_later(messages: Any, is_first: bool) -> None:
    talk = Conversations(answers())
    if is_first:
        title, (*_, last) = await talk.ask(messages), await talk.work()
    else:
        *_, last = await talk.work()
        title = await talk.ask(messages)
    await talk.session.reward(1.0)
    (sample,) = talk.session.samples()
    assert sample.metadata["tokentrue"]["leaf"] == last.node and sample.reward == 1.0
    coverage = talk.session.coverage()
    assert [(item.node, item.why) for item in coverage.untrained] == [(title.node, "side_request")]
    assert coverage.untrained[0].tokens == len(title.completion.token_ids)
    assert coverage.trained + coverage.untrained[0].tokens == coverage.sampled


async def test_the_operator_may_train_them() -> None:
    talk = Conversations(answers(), side_requests="train")
    title = await talk.ask(OPENCODE_TITLE)
    await talk.work()
    assert talk.session.coverage().ratio == 1.0 and len(talk.session.samples()) == 2
    talk = Conversations(answers())
    title = await talk.ask(OPENCODE_TITLE)
    await talk.work()
    whys = {span.why for sample in talk.session.samples(include_abandoned=True) for span in sample.spans}
    assert "asked_for:side_request" in whys
    await talk.session.reward(0.5, leaf=title.node)  # a reward on a leaf speaks for it
    assert talk.session.coverage().ratio == 1.0
    with pytest.raises(ConfigError, match="side_requests: 'drop' is not one of leave_out, train"):
        Conversations((), side_requests="drop")


@pytest.mark.parametrize("tools", [TOOLS, None, OTHER_TOOLS])
async def test_a_guess_of_the_next_message_is_left_out_and_the_turns_before_it_are_not(tools: Any) -> None:
    talk = Conversations(answers())
    replies = await talk.work(2)
    history = [*TASK, replies[0].message, {"role": "user", "content": "go on 0"}, replies[1].message]
    guess = await talk.ask([*history, {"role": "user", "content": SUGGESTION}], tools)
    assert talk.left_out == {guess.node: "side_request"}
    talk = Conversations(answers())
    replies = await talk.work(2)
    guess = await talk.ask([*history[:2], replies[0].message, {"role": "user", "content": SUGGESTION}], tools)
    assert talk.left_out == {guess.node: "side_request"}, "in the middle of the conversation"


async def test_another_model_without_tools_for_one_turn_is_beside_the_task() -> None:
    talk = Conversations(answers("no"))
    (first,) = await talk.work(1)
    side = await talk.ask(SMALL, None, "small")
    await talk.ask([*TASK, first.message, {"role": "user", "content": "go on 0"}], TOOLS)
    assert talk.left_out == {side.node: "side_request"}


# A conversation of the task is never taken for a side request.
async def test_a_task_of_one_turn_without_tools() -> None:
    for messages in (TASK, OPENCODE_TITLE, CLAUDE_TITLE):
        talk = Conversations(answers())
        await talk.ask(messages)
        assert talk.left_out == {} and len(talk.session.samples()) == 1


async def test_a_task_without_tools_beside_a_title() -> None:
    talk = Conversations(answers())
    title, work = await talk.ask(OPENCODE_TITLE), await talk.ask(TASK)
    assert talk.left_out == {title.node: "side_request"}
    assert [sample.metadata["tokentrue"]["leaf"] for sample in talk.session.samples()] == [work.node]


@pytest.mark.parametrize("messages", [OPENCODE_TITLE, CLAUDE_TITLE])
async def test_an_agent_with_tools_under_the_prompt_of_a_title(messages: Any) -> None:
    talk = Conversations(answers())
    await talk.ask(messages, TOOLS)
    await talk.ask(TASK, TOOLS)
    opened = await talk.ask([*messages, {"role": "user", "content": "and"}])
    await talk.ask([*messages, {"role": "user", "content": "and"}, opened.message, {"role": "user", "content": "on"}])
    assert talk.left_out == {}, "nor without tools, if it is a conversation"


async def test_a_task_that_begins_with_the_words_of_a_guess() -> None:
    for tools in (None, TOOLS):
        talk = Conversations(answers())
        await talk.ask([{"role": "user", "content": SUGGESTION}], tools)
        await talk.ask(TASK, TOOLS)
        assert talk.left_out == {}
    history = [*TASK, {"role": "assistant", "content": "Done."}, {"role": "user", "content": SUGGESTION}]
    guess = await talk.ask(history, TOOLS)
    assert talk.left_out == {guess.node: "side_request"}
    await talk.ask([*history, guess.message, {"role": "user", "content": "on"}], TOOLS)
    assert talk.left_out == {}, "what is continued is no guess"


async def test_tasks_without_tools_under_many_model_names() -> None:
    talk = Conversations(answers())
    for index in range(4):
        await talk.ask([{"role": "user", "content": f"task {index}"}], None, f"model-{index}")
    assert talk.left_out == {}


async def test_a_harness_that_switches_the_model_in_the_middle() -> None:
    talk = Conversations(answers())
    await talk.work(4, models=("large", "small"))
    assert talk.left_out == {}
    talk = Conversations(answers())  # the history is rewritten at the switch: a new root under the other model
    (first,) = await talk.work(1)
    edited = {**first.message, "content": "rewritten"}
    await talk.ask([*TASK, edited, {"role": "user", "content": "go on"}], TOOLS, "small")
    await talk.ask([*TASK, edited, {"role": "user", "content": "sum up"}], None, "small")  # without tools at the end
    assert talk.left_out == {}


async def test_sub_agents() -> None:
    """With tools; without tools for two turns; without tools for one turn, its answer passed on in any writing."""
    talk = Conversations(answers())
    (first,) = await talk.work(1)
    await talk.ask([{"role": "user", "content": "Explore."}], OTHER_TOOLS, "small")
    opened = [{"role": "user", "content": "Think."}]
    thought = await talk.ask(opened, None, "thinker")
    await talk.ask([*opened, thought.message, {"role": "user", "content": "More."}], None, "thinker")
    await talk.ask([*TASK, first.message, {"role": "user", "content": "go on 0"}], TOOLS)
    assert talk.left_out == {}


PLAN = 'First read the failing test.\nThen "mend" the import in build.py.'


@pytest.mark.parametrize(
    ("answer", "passed_on"),
    [
        (PLAN, f"Your plan:\n\n> {PLAN}"),
        (PLAN, '{"plan": "First read the failing test.\\nThen \\"mend\\" the import in build.py."}'),
        (PLAN, "Step 2: Then **mend** the import in build.py"),
        ('{"steps": ["read the failing test", "mend the import"]}', "Do this now: read the failing test"),
        ("code", "The router chose: CODE code"),
    ],
)
async def test_an_answer_that_another_conversation_was_given(answer: str, passed_on: str) -> None:
    talk = Conversations(answers(answer))
    await talk.ask([{"role": "user", "content": "Plan it."}], None, "planner")
    opened = [{"role": "system", "content": "You execute."}, {"role": "user", "content": passed_on}]
    await talk.ask(opened, TOOLS, "executor")
    assert talk.left_out == {}
    talk = Conversations(answers(answer))  # the same, but what was given onwards is something else
    side = await talk.ask([{"role": "user", "content": "Plan it."}], None, "planner")
    await talk.ask([*opened[:1], {"role": "user", "content": "Do what you want."}], TOOLS, "executor")
    assert talk.left_out == {side.node: "side_request"}


async def test_what_was_given_before_the_answer_is_no_use_of_it() -> None:
    """It is given again where the conversation is rendered again."""
    talk = Conversations(["one", "Mend the build quickly", "three"])
    opened = [{"role": "user", "content": "Mend the build quickly."}]
    first = await talk.ask(opened, TOOLS)
    side = await talk.ask(SMALL, None, "small")
    edited = {**first.message, "content": "rewritten"}
    await talk.ask([*opened, edited, {"role": "user", "content": "on"}], TOOLS)
    assert talk.left_out == {side.node: "side_request"}


async def test_a_last_word_without_tools() -> None:
    """A writer that another model name is asked for, after all work with tools is done."""
    talk = Conversations(answers())
    await talk.work(2)
    await talk.ask([{"role": "user", "content": "Write the report."}], None, "writer")
    assert talk.left_out == {}


async def test_a_fallback_without_tools_while_the_first_is_in_flight() -> None:
    talk = Conversations(answers())
    engine: Any = talk.session.provider
    engine.hold = asyncio.Event()
    both = [asyncio.create_task(talk.ask(TASK, TOOLS, "large")), asyncio.create_task(talk.ask(TASK, None, "small"))]
    await asyncio.sleep(0.05)
    engine.hold.set()
    await asyncio.gather(*both)
    assert talk.left_out == {}


async def test_policies_of_their_own_are_trained() -> None:
    """A loaded adapter samples them: two policies in one session."""
    talk = Conversations(answers())
    await talk.ask([{"role": "user", "content": "Plan it."}], None, "base:planner", extra={"adapter": "planner"})
    await talk.work(2, models=("base:executor",))
    assert talk.left_out == {}


async def test_a_compaction_is_trained() -> None:
    """Its answer becomes the context of the task."""
    talk = Conversations(answers("one", "We mended the build and wrote a test."))
    (first,) = await talk.work(1)
    asked = {"role": "user", "content": "Summarise the conversation."}
    summary = await talk.ask([*TASK, first.message, asked], None, "small")
    shown = {"role": "user", "content": f"Earlier: {summary.message['content']}"}
    await talk.ask([TASK[0], shown, {"role": "user", "content": "go on"}], TOOLS)
    assert talk.left_out == {}


async def test_names_that_are_not_known_decide_nothing() -> None:
    """Turns of an older release have no model name."""
    talk = Conversations(answers())
    await talk.ask(SMALL, None, None)
    await talk.work(2)
    assert talk.left_out == {}
    talk = Conversations(answers())
    await talk.ask(SMALL, None, "small")
    await talk.ask(TASK, TOOLS, None)
    assert talk.left_out == {}


async def test_a_store_of_an_older_release_opens_and_a_new_one_keeps_names_and_choice(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(Journal(path)) as journal:
        talk = Conversations(answers(), journal, session_id="new", side_requests="train")
        await talk.ask(SMALL, None, "small")
        old = Conversations(answers(), journal, session_id="old")
        await old.ask(TASK, TOOLS, None)
    with closing(
        sqlite3.connect(path)
    ) as database:  # an older release wrote exactly these rows: nothing is added to them
        bodies = {name: loads(body) for name, body in database.execute("SELECT id, body FROM sessions")}
        nodes = [loads(body) for (body,) in database.execute("SELECT body FROM nodes WHERE session = 'old'")]
    assert "side_requests" not in bodies["old"] and all("model" not in node for node in nodes)
    with closing(Journal(path)) as journal:
        again = await tt.Session.open(journal, "new", renderer=Letters(), provider=Engine([]))
        assert again.record.side_requests == "train" and [node.model for node in again.tree.in_order()] == ["small"]
        again = await tt.Session.open(journal, "old", renderer=Letters(), provider=Engine([]))
        assert again.record.side_requests == "leave_out" and [node.model for node in again.tree.in_order()] == [None]
