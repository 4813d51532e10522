"""The whole session against a simple model: random interleavings of turns, retries, forks, hang-ups, failures, crashes
and reopenings.

The model is a table: what the engine was given and what it sampled, by node. Invariants: prefix identity, the right
parent, exactly once, coverage adds up, certificates verify, and a reopened session is the same.
`TOKENTRUE_STATEFUL_RUNS=20000` runs more.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import tokentrue as tt
from tests.marks import examples
from tests.turn.letters import Letters, sampled
from tests.turn.world import Engine
from tokentrue.samples import audit, sample_from_json, sample_to_json
from tokentrue.sessions import Journal
from tokentrue.types import Finish, TurnRequest

RUNS = int(os.environ.get("TOKENTRUE_STATEFUL_RUNS", examples(400)))
LOSSES = ("none", "reasoning", "inline", "ids", "arguments", "parts", "spaces", "extras", "all")
TOOLS = ({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}})


class Store:
    """One journal for all runs: opening a file costs more than a whole conversation."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.reopen()

    def reopen(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
        self.journal = Journal(Path(self.folder.name) / "journal.db")


store = Store()


class Conversations(RuleBasedStateMachine):
    """`talks` are the histories that some client holds: (node they end at, messages as that client replays them, number
    of tools)."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.renderer, self.engine = Letters(), Engine([])
        self.session = tt.Session(renderer=self.renderer, provider=self.engine, journal=store.journal)
        self.talks: list[tuple[str | None, list[Any], int]] = []
        self.known: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.said = 0

    def run_async(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def prepare(self, count: int = 1, *, call: bool = False) -> list[tuple[int, ...]]:
        """Answers that all differ, so that the right parent is always known."""
        answers = []
        for _ in range(count):
            self.said += 1
            arguments = json.dumps({"n": self.said, "a": 1.0}) if call else None
            answers.append(sampled(f"r{self.said % 2}", f" c{self.said} ", arguments))
        self.engine.answers = list(answers)
        return answers

    def record(self, reply: Any, prompt: tuple[int, ...], parent: str | None, *, forked: bool = False) -> None:
        node = self.session.tree.get(reply.node)
        assert reply.completion.token_ids == tuple(node.sampled_ids)
        self.known[reply.node] = (prompt, reply.completion.token_ids)
        if not forked:
            assert node.parent == parent, f"{reply.edge_reason}: expected to follow {parent}"
            if parent is not None:
                before, said = self.known[parent]
                assert prompt[: len(before) + len(said)] == (*before, *said)

    def replayed(self, message: Any, loss: str) -> Any:
        out = dict(message)
        if loss in ("reasoning", "all"):
            out.pop("reasoning_content", None)
        if loss == "inline" and out.get("reasoning_content"):
            out["content"] = f"<think>{out.pop('reasoning_content')}</think>{out['content']}"
        if out.get("tool_calls"):
            call = dict(out["tool_calls"][0])
            if loss in ("ids", "all"):
                call["id"] = "other"
            if loss in ("arguments", "all"):
                value = json.loads(call["function"]["arguments"])
                call["function"] = {
                    "name": "f",
                    "arguments": json.dumps({"a": 1, "n": value["n"]}, separators=(",", ":")),
                }
            out["tool_calls"] = [call]
        if loss in ("spaces", "all"):
            out["content"] = out["content"].strip()
        if loss in ("parts", "all"):
            out["content"] = [{"type": "text", "text": out["content"]}]
        if loss in ("extras", "all"):
            out["vendor"] = {"x": 1}
        return out

    def follow(self, reply: Any, history: list[Any], loss: str, tools: int) -> None:
        message = self.replayed(reply.message, loss)
        calls = message.get("tool_calls") or ()
        tail = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls] or [
            {"role": "user", "content": "more"}
        ]
        self.talks.append((reply.node, [*history, message, *tail], tools))

    def ask(self, history: list[Any], tools: int, **options: Any) -> Any:
        return self.run_async(self.session.turn(TurnRequest(messages=history, tools=TOOLS[:tools] or None, **options)))

    @initialize()
    def opening(self) -> None:
        self.talks.append((None, [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], 0))

    @rule(pick=st.integers(0, 50), loss=st.sampled_from(LOSSES), call=st.booleans())
    def turn(self, pick: int, loss: str, call: bool) -> None:
        """Go on, branch or retry: it depends on which history is picked."""
        parent, history, tools = self.talks[-1 - pick % len(self.talks)]
        self.prepare(call=call)
        (reply,) = self.ask(history, tools)
        self.record(reply, self.engine.prompts[-1], parent)
        self.follow(reply, history, loss, tools)

    @rule(pick=st.integers(0, 50), n=st.integers(2, 3), loss=st.sampled_from(LOSSES))
    def several(self, pick: int, n: int, loss: str) -> None:
        parent, history, tools = self.talks[-1 - pick % len(self.talks)]
        self.prepare(n)
        for reply in self.ask(history, tools, n=n):
            self.record(reply, self.engine.prompts[-1], parent)
            self.follow(reply, history, loss, tools)

    @rule(pick=st.integers(0, 50))
    def twice_in_flight(self, pick: int) -> None:
        parent, history, tools = self.talks[-1 - pick % len(self.talks)]
        self.prepare(1)
        request = TurnRequest(messages=history, tools=TOOLS[:tools] or None)

        async def both() -> Any:
            return await asyncio.gather(self.session.turn(request), self.session.turn(request))

        (one,), (other,) = self.run_async(both())
        assert one.node == other.node and other.from_record
        self.record(one, self.engine.prompts[-1], parent)
        self.follow(one, history, "none", tools)

    @rule(pick=st.integers(0, 50), tokens=st.integers(0, 4))
    def hang_up(self, pick: int, tokens: int) -> None:
        parent, history, tools = self.talks[-1 - pick % len(self.talks)]
        (answer,) = self.prepare(1)

        async def listen() -> str:
            events = self.session.stream(TurnRequest(messages=history, tools=TOOLS[:tools] or None))
            name, heard = "", 0
            async for event in events:
                name, heard = event.node_id, heard + len(event.token_ids)
                if heard >= tokens:
                    break
            await events.aclose()
            return name

        name = self.run_async(listen())
        if name in self.session.tree.nodes:
            node = self.session.tree.get(name)
            assert node.outcome == "disconnected" and node.parent == parent
            assert tuple(node.sampled_ids) == answer[: len(node.sampled_ids)]
            self.known[name] = (self.engine.prompts[-1], tuple(node.sampled_ids))

    @rule(pick=st.integers(0, 50), cut=st.integers(1, 5))
    def cut_off(self, pick: int, cut: int) -> None:
        parent, history, tools = self.talks[-1 - pick % len(self.talks)]
        self.prepare(1)
        (reply,) = self.ask(history, tools, sampling=tt.Sampling(max_tokens=cut))
        assert reply.completion.finish is Finish.LENGTH and len(reply.completion.token_ids) == cut
        self.known[reply.node] = (self.engine.prompts[-1], reply.completion.token_ids)
        assert self.session.tree.get(reply.node).parent == parent

    @rule(pick=st.integers(0, 50))
    def fail(self, pick: int) -> None:
        _, history, tools = self.talks[-1 - pick % len(self.talks)]
        before = set(self.session.tree.nodes)
        self.engine.fail = RuntimeError("gone")
        try:
            self.ask(history, tools)
        except RuntimeError:
            pass
        else:
            raise AssertionError("the failure was swallowed")
        finally:
            self.engine.fail = None
        assert set(self.session.tree.nodes) == before

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 50), place=st.integers(0, 9))
    def edit(self, pick: int, place: int) -> None:
        """A message is rewritten: the turn may go on from any node before it, never from one after it."""
        _, history, tools = self.talks[-1 - pick % len(self.talks)]
        at = place % len(history)
        changed = [*history[:at], {**history[at], "content": f"edited {self.said}"}, *history[at + 1 :]]
        self.prepare(1)
        (reply,) = self.ask(changed, tools)
        parent = self.session.tree.parent(self.session.tree.get(reply.node))
        assert parent is None or len(self.session.tree.messages(parent)) <= at
        self.record(reply, self.engine.prompts[-1], None, forked=True)

    @rule(pick=st.integers(0, 50))
    def other_tools(self, pick: int) -> None:
        _, history, tools = self.talks[-1 - pick % len(self.talks)]
        self.prepare(1)
        (reply,) = self.ask(history, (tools + 1) % 3)
        node = self.session.tree.get(reply.node)
        if node.parent is not None:
            assert len(self.session.tree.get(node.parent).tools or ()) == (tools + 1) % 3
        self.record(reply, self.engine.prompts[-1], None, forked=True)

    @rule(pick=st.integers(0, 50))
    def refused(self, pick: int) -> None:
        """The renderer cannot extend: a new root that continues in meaning."""
        parent, history, tools = self.talks[-1 - pick % len(self.talks)]
        self.prepare(1)
        self.renderer.refuse = True
        (reply,) = self.ask(history, tools)
        self.renderer.refuse = False
        node = self.session.tree.get(reply.node)
        assert node.parent is None and node.origin == parent
        self.record(reply, self.engine.prompts[-1], None)
        self.follow(reply, history, "none", tools)

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 50), reward=st.floats(-1, 1))
    def reward(self, pick: int, reward: float) -> None:
        self.run_async(self.session.reward(reward, leaf=list(self.known)[pick % len(self.known)]))

    @rule(file_too=st.integers(0, 9))
    def crash(self, file_too: int) -> None:
        """Everything in memory is gone; the record goes on from the file, which now and then is opened anew as well."""
        before = self.session.samples(), self.session.coverage()
        self.run_async(self.session.wait_created())
        if file_too == 0:
            store.reopen()
        self.session = self.run_async(
            tt.Session.open(store.journal, self.session.id, renderer=self.renderer, provider=self.engine)
        )
        assert (self.session.samples(), self.session.coverage()) == before

    def teardown(self) -> None:
        try:
            self.check()
        finally:
            self.loop.close()

    def check(self) -> None:
        tree = self.session.tree
        assert set(tree.nodes) == set(self.known)
        for name, (prompt, said) in self.known.items():
            node = tree.get(name)
            assert (tuple(tree.prompt_ids(node)), tuple(node.sampled_ids)) == (prompt, said)
            parent = tree.parent(node)
            if parent is not None:
                before, heard = self.known[parent.id]
                assert prompt[: len(before) + len(heard)] == (*before, *heard)
        for everything in (False, True):
            self.check_samples(everything)

    def check_samples(self, everything: bool) -> None:
        samples, account = (
            self.session.samples(include_abandoned=everything),
            self.session.coverage(include_abandoned=everything),
        )
        trained: Counter[str] = Counter()
        for sample in samples:
            at = 0
            for row in sample.metadata["tokentrue"]["nodes"]:
                prompt, said = self.known[row["node"]]
                assert tuple(sample.token_ids[: at + row["given"]]) == prompt
                at += row["given"]
                assert tuple(sample.token_ids[at : at + row["sampled"]]) == said
                trained[row["node"]] += sum(sample.loss_mask[at : at + row["sampled"]])
                at += row["sampled"]
        for name, tokens in trained.items():
            assert tokens in (0, len(self.known[name][1])), "trained in part or twice"
        assert account.sampled == sum(len(said) for _, said in self.known.values())
        assert account.trained == sum(trained.values())
        left_out = {item.node: item.tokens for item in account.untrained}
        assert account.sampled == account.trained + sum(left_out.values()) and all(
            item.why for item in account.untrained
        )
        assert not (everything and left_out)
        assert (
            audit(sample_from_json(json.loads(json.dumps(sample_to_json(sample)))) for sample in samples).findings == []
        )


@pytest.fixture(scope="module", autouse=True)
def close_the_store() -> Iterator[None]:
    yield
    store.journal.close()
    store.folder.cleanup()


TestConversations = pytest.mark.timeout(1200)(Conversations.TestCase)
TestConversations.settings = settings(
    max_examples=RUNS,
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
