"""What a session keeps of earlier requests changes no answer: random conversations, resolved with it and without,
against the same trees.

Also: a session that is closed and opened again after every turn answers as one that stays open.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import tokentrue as tt
from tests.marks import examples
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.conversation import Conversations
from tokentrue.conversation.match_keys import message_key
from tokentrue.plain_json import MAX_DEPTH
from tokentrue.sessions import Journal, Matcher, load_tree
from tokentrue.types import Attempt, Completion, Finish, RoutedExperts, TurnRequest, VersionSpan

TOOL_SETS: list[Any] = [None, [{"name": "f"}], [{"name": "f", "default": True}], [{"name": "f", "default": 1}]]


def replay(message: Any, how: str) -> Any:
    """What a harness may make of a message, lossy or edited."""
    copy: Any = json.loads(json.dumps(message))
    if how == "same object":
        return message
    if how == "dropped":
        copy.pop("reasoning_content", None)
    elif how == "inlined" and copy.get("reasoning_content"):
        copy["content"] = f"<think>{copy.pop('reasoning_content')}</think>{copy['content']}"
    elif how == "parts":
        copy["content"] = (
            [{"type": "text", "text": copy["content"]}] if isinstance(copy["content"], str) else copy["content"]
        )
    elif how == "edited":
        copy["content"] = "edited"
    return copy


HOW = st.sampled_from(["same object", "copy", "dropped", "inlined", "parts", "edited"])


class ReaderOnAndOff(RuleBasedStateMachine):
    """Each request is read and resolved thrice: with what the session keeps, without, and by a matcher made for it
    alone."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.renderer, self.engine, self.journal = Letters(), Engine([]), Journal("memory")
        self.session = tt.Session(renderer=self.renderer, provider=self.engine, journal=self.journal)
        self.plain = Matcher(self.session.tree, self.renderer)
        self.histories: list[list[Any]] = []

    @initialize()
    def opening(self) -> None:
        self.histories.append([{"role": "user", "content": "hi"}])

    @rule(
        pick=st.integers(0, 20),
        how=st.lists(HOW, min_size=3, max_size=3),
        tools=st.sampled_from(TOOL_SETS),
        text=st.sampled_from(["a", "b"]),
        mutate=st.booleans(),
        n=st.integers(1, 2),
    )
    def ask(self, pick: int, how: list[str], tools: Any, text: str, mutate: bool, n: int) -> None:
        history = self.histories[pick % len(self.histories)]
        if mutate and len(history) > 2:
            history[-1]["content"] = f"changed in place {len(self.histories)}"
        messages = [
            replay(message, how[at % 3]) if message["role"] == "assistant" else message
            for at, message in enumerate(history)
        ]
        self.compare(messages, tools)
        self.engine.answers = [sampled("r", text)] * n
        before = set(self.session.tree.nodes)
        replies = self.loop.run_until_complete(self.session.turn(TurnRequest(messages=messages, tools=tools, n=n)))
        for node in self.session.tree.in_order():
            if node.id not in before:
                self.plain.index.add(node)
        for reply in replies:
            self.histories.append([*messages, reply.message, {"role": "user", "content": f"next {text}"}])

    @rule(pick=st.integers(0, 20))
    def walk(self, pick: int) -> None:
        """The tree goes on from the path that was asked for last; whichever node is asked for, it gives the walk from
        the root."""
        tree = self.session.tree
        if nodes := tree.in_order():
            node = nodes[pick % len(nodes)]
            path = tree.path(node)
            assert tree.full_ids(node) == [
                id_ for step in path for ids in (step.given_ids, step.sampled_ids) for id_ in ids
            ]
            assert list(tree.messages(node)) == [
                message for step in path for message in (*tree.given_messages(step), step.served)
            ]

    def compare(self, messages: list[Any], tools: Any) -> None:
        session, fresh = self.session, Matcher(self.session.tree, self.renderer)
        matchers = session._matcher, self.plain, fresh
        read = [known.read(messages, tools) for known in (session.conversations, Conversations(0), Conversations())]
        plans = [
            self.loop.run_until_complete(matcher.resolve(conversation))
            for matcher, conversation in zip(matchers, read, strict=True)
        ]
        names = [conversation.digest for conversation in read]
        assert plans[0] == plans[1] == plans[2] and names[0] == names[1] == names[2]

    def teardown(self) -> None:
        _, tree = load_tree(self.journal, self.session.id)
        assert tree.nodes == self.session.tree.nodes
        self.loop.run_until_complete(self.session.end())
        self.journal.close()
        self.loop.close()


TestReaderOnAndOff = ReaderOnAndOff.TestCase
TestReaderOnAndOff.settings = settings(
    max_examples=examples(150),
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


CALLER = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
POOL: list[Any] = [
    CALLER,
    dict(CALLER),
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": "a"},
    CALLER | {"id": 1},
]


@settings(max_examples=examples(300), deadline=None, database=None)
@given(st.lists(st.lists(st.sampled_from(range(len(POOL))), min_size=1, max_size=7), min_size=2, max_size=5))
def test_a_conversation_is_read_the_same_after_any_other(requests: list[list[int]]) -> None:
    kept, plain = Conversations(), Conversations(0)
    for request in requests:
        messages = [POOL[at] for at in request]
        one, other = kept.read(messages, None), plain.read(messages, None)
        assert (one.keys, one.references, one.calls, one.digest) == (
            other.keys,
            other.references,
            other.calls,
            other.digest,
        )


@pytest.mark.parametrize("limit", [0, 32 << 20])
@pytest.mark.parametrize("changed", [{"a": True, "b": 0}, {"a": 1.0, "b": 0}, {"a": 1, "b": -0.0}, {"b": 0, "a": 1}])
def test_a_message_that_is_changed_in_place_to_an_equal_one_is_read_again(changed: dict[str, Any], limit: int) -> None:
    reader = Conversations(limit)
    function: dict[str, Any] = {"name": "f", "arguments": {"a": 1, "b": 0}}
    messages: Any = [
        POOL[0],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
    ]
    before = reader.read(messages, None)
    assert reader.read(messages, None).digest == before.digest
    function["arguments"].clear()
    function["arguments"].update(changed)
    assert reader.read(messages, None).digest == Conversations(0).read(messages, None).digest != before.digest


def test_any_sequence_of_messages_is_read() -> None:
    messages = [POOL[at] for at in range(3)]
    tool = {"type": "function", "function": {"name": "f"}}
    wanted = Conversations().read(messages, [tool]).digest
    assert all(Conversations().read(kind(messages), kind([tool])).digest == wanted for kind in (tuple, deque))


async def test_a_fit_is_not_carried_over_to_another_replay() -> None:
    """The same turn replayed whole, then without its reasoning: the second request begins with the first one's messages
    up to there."""
    engine = Engine([sampled("r", "a"), sampled("r", "b"), sampled("r", "c")])
    session = tt.Session(renderer=Letters(), provider=engine)
    asked: list[Any] = [{"role": "user", "content": "hi"}]
    (first,) = await session.turn(TurnRequest(messages=asked))
    follow = {"role": "user", "content": "more"}
    for replayed, projection in ((first.message, "exact"), (replay(first.message, "dropped"), "reasoning_dropped")):
        (reply,) = await session.turn(TurnRequest(messages=[*asked, replayed, follow]))
        assert reply.projection == projection


TEXT = st.text(st.characters(codec=None, exclude_characters="~"), max_size=8)
FLOATS = st.floats(-8999, 0)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Anything that an engine may answer and a `Completion` can hold."""
    ids = draw(st.lists(st.integers(17, 2**31 - 1).filter(lambda i: i < 0x10000), min_size=1, max_size=6))
    cut = draw(st.integers(0, len(ids)))
    versions = draw(st.lists(st.integers(-(2**63) + 1, 2**63 - 1), min_size=2, max_size=2))
    spans = (
        VersionSpan(start=0, end=cut, version=versions[0]),
        VersionSpan(start=cut, end=len(ids), version=versions[1]),
    )
    tops = draw(st.none() | st.just(tuple({int(i): -0.5, 7: draw(FLOATS)} for i in ids)))
    shape, routed = (len(ids), 1, 2), st.binary(min_size=len(ids) * 4, max_size=len(ids) * 4)
    return Completion(
        token_ids=ids,  # type: ignore[arg-type]
        logprobs=tuple(draw(st.lists(FLOATS, min_size=len(ids), max_size=len(ids)))),
        finish=draw(st.sampled_from(Finish)),
        versions=draw(st.sampled_from([(), spans])),
        stopped_by=draw(st.none() | st.integers(0, 2**31 - 1) | TEXT),
        top_logprobs=tops,
        routed_experts=draw(st.none() | routed.map(lambda data: RoutedExperts(shape=shape, data=data))),
        fingerprint=draw(st.none() | TEXT),
    )


class Answers(Engine):
    def __init__(self, completion: Completion) -> None:
        super().__init__([])
        self.completion = completion

    async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Completion:
        return self.completion


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(completions(), TEXT, JSON, JSON)
def test_whatever_is_acknowledged_comes_back_bit_for_bit(
    completion: Completion, text: str, extra: Any, tool: Any
) -> None:
    journal = Journal("memory")

    async def run() -> None:
        session = tt.Session(renderer=Letters(), provider=Answers(completion), journal=journal)
        tools = [{"name": "f", "parameters": tool}]
        reply = await session.chat([{"role": "user", "content": text, "x": extra}], tools, template_kwargs={"k": extra})
        _, tree = load_tree(journal, session.id)
        node = tree.get(reply.node)
        assert node == session.tree.get(reply.node) and json.dumps(node.tools) == json.dumps(tools)
        assert node.sampled_ids == completion.token_ids and [x.hex() for x in node.logprobs] == [
            float(x).hex() for x in completion.logprobs
        ]
        assert (node.versions, node.stopped_by, node.finish) == (
            completion.versions,
            completion.stopped_by,
            completion.finish,
        )
        assert json.dumps(node.given[0]) == json.dumps({"role": "user", "content": text, "x": extra})

    try:
        asyncio.run(run())
    finally:
        journal.close()


def test_attempts_with_arguments_beyond_json_are_kept_as_text() -> None:
    """A model may write 1e400 into a call that is malformed in another way: the turn is recorded all the same."""
    from tokentrue.sessions.stages.commits import _storable
    from tokentrue.types import Status

    attempt = Attempt(
        status=Status.UNKNOWN_TOOL, raw='{"a": 1e400}', start=0, end=3, name="f", arguments={"a": float("inf")}
    )
    assert _storable(attempt).arguments is None and _storable(attempt).raw == attempt.raw


@pytest.mark.parametrize("depth", [MAX_DEPTH, 490, 950, 990, 5000])
def test_the_key_of_deep_arguments_does_not_depend_on_the_stack(depth: int) -> None:
    """Recursion that ends at the interpreter's limit would end earlier in a deeper call."""
    call = {"function": {"name": "f", "arguments": f'{{"a":{"[" * depth}{"]" * depth}}}'}}

    def key_below(frames: int) -> bytes:
        return key_below(frames - 1) if frames else message_key({"role": "assistant", "tool_calls": [call]})

    assert key_below(0) == key_below(30) == key_below(200)
