"""The corridor, and the first file to read: match → render or extend → generate → parse → commit.

A `Session` is a conversation's record with an engine behind it. Messages come in, a reply goes out, and what lies between is kept
as exact token ids. Nothing is written before a turn is whole; a turn is in the journal before anyone hears of it.
The rooms behind the doors: `sessions/matching` (what is being continued), `sessions/prompts` (its ids), `sessions/recording` (nodes).
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from secrets import token_hex
from typing import Any, Literal

from tokentrue.errors import ConfigError, InputError, SamplingError, SessionConflict
from tokentrue.protocols import Provider, Renderer, call_if_there
from tokentrue.samples import Assembly, assemble, coverage_of
from tokentrue.sessions.client import Client
from tokentrue.sessions.flights import Airspace, Flight, to_the_end
from tokentrue.sessions.generation import Choice, Disconnected, all_of
from tokentrue.sessions.journal import Journal, Rewards, SessionRecord
from tokentrue.sessions.limits import Limits
from tokentrue.sessions.matching import Continue, Matcher, Plan
from tokentrue.sessions.prompts import Prompt, prompt_for
from tokentrue.sessions.recording import Asked, Draft, nodes_from, recorded_reply, reply_from, rows_from
from tokentrue.sessions.requests import Pinned, Settled, request_digest
from tokentrue.sessions.rows import Row
from tokentrue.sessions.serve import deltas_of
from tokentrue.sessions.spare_time import Meanwhile, afterwards
from tokentrue.sessions.store import tree_from_rows
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Coverage, Messages, Reply, Sample, Sampling, TemplateKwargs, Tools, TurnEvent, TurnRequest

History = Literal["keep", "template"]


class Session:
    """One agent's record. `sampling` pins values over the client's; `training=False` allows filters that no engine can account for."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        provider: Provider,
        journal: Journal | None = None,
        session_id: str | None = None,
        group: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        history: History | None = None,
        training: bool = True,
        limits: Limits | None = None,
        key_hash: str | None = None,
        _record: SessionRecord | None = None,
    ) -> None:
        self.renderer, self.provider, self.journal = renderer, provider, journal
        self.limits = limits or Limits()
        self._pinned = Pinned.of(sampling)
        follows: History = getattr(renderer, "history", "keep")
        if history not in (None, follows):
            raise ConfigError(f"history={history!r}, but the renderer was loaded with history={follows!r}: load it with the same one")
        self.record = _record or SessionRecord(
            id=session_id or uuid.uuid4().hex,
            group=group,
            metadata=dict(metadata or {}),
            sampling=self._pinned.values,
            history=follows,
            training=training,
            template=renderer.template_hash,
            tokenizer=renderer.tokenizer_hash,
            key_hash=key_hash,
            created=time.time(),
        )
        self._tree = Tree(template=self.record.template, tokenizer=self.record.tokenizer)
        self._entering: deque[tuple[Node, Prompt, Plan]] = deque()  # in the journal, not yet in the tree
        self.counters: Counter[str] = Counter()
        self._matcher = Matcher(self._tree)
        self._airspace: Airspace[tuple[Any, ...]] = Airspace()
        self._tokens = 0
        self._settled: Settled | None = None  # of the last turn
        self._creating: asyncio.Future[None] | None = None
        self._created = journal.create(self.record) if journal is not None and _record is None else None

    @classmethod
    async def open(
        cls, journal: Journal, session_id: str, *, renderer: Renderer, provider: Provider, limits: Limits | None = None
    ) -> Session:
        """Go on with a recorded session, bit for bit where it stood."""
        record, rows = await asyncio.to_thread(lambda: (journal.get(session_id), journal.rows(session_id)))
        if (record.template, record.tokenizer) != (renderer.template_hash, renderer.tokenizer_hash):
            raise SessionConflict(f"session {session_id!r} was recorded with another template or tokenizer; open it with that one")
        session = cls(renderer=renderer, provider=provider, journal=journal, sampling=record.sampling, limits=limits, _record=record)
        session._adopt(await asyncio.to_thread(tree_from_rows, record, rows))
        return session

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def tree(self) -> Tree:
        """The record in memory, up to the last turn that was answered."""
        while self._entering:
            node, prompt, plan = self._entering.popleft()
            self._tree.add(node, prompt.ids)
            self._matcher.remember_calls(node, plan)
            if not self._entering:  # the newest will most likely be continued: what that needs is made now
                self._tree.messages(node)
                call_if_there(self.provider, "foresee", self._tree.full_ids(node), self.id)
        return self._tree

    async def ready(self) -> None:
        """The session itself is in the journal. Everyone waits for one future: who came together goes on together."""
        if self._created is not None:
            if self._creating is None:
                self._creating = asyncio.wrap_future(self._created)
            await asyncio.shield(self._creating)
            self._created = self._creating = None

    # The turn.
    async def chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        sampling: Sampling | None = None,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Reply:
        """An agent's next model call: the whole conversation in, the model's turn out. Several answers at once: `turn` with `n`."""
        settings: dict[str, Any] = {"sampling": sampling or Sampling(), "template_kwargs": dict(template_kwargs or {})}
        (reply,) = await self.turn(TurnRequest(messages=messages, tools=tools, **settings))
        return reply

    async def turn(self, request: TurnRequest) -> tuple[Reply, ...]:
        """The n replies to one request. The same request in flight is the same turn; the same request key is the recorded answer."""
        await self.ready()
        flight, recorded, joined = self._board(request, streamed=False)
        if flight is None:
            return tuple(recorded_reply(node, tree=self.tree, renderer=self.renderer) for node in recorded)
        replies = await flight.result()
        return tuple(replace(reply, replayed=True) for reply in replies) if joined else replies

    async def stream(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """The turn as it is sampled. Close the iterator to cancel: what was sampled is kept, labelled "disconnected"."""
        await self.ready()
        flight, recorded, joined = self._board(request, streamed=True)
        if flight is not None and not joined:
            flight.join()
            try:
                while events := await flight.heard():
                    for event in events:
                        yield event
                await flight.outcome()
            finally:
                await flight.leave()
            return
        replies = (
            [recorded_reply(node, tree=self.tree, renderer=self.renderer) for node in recorded]
            if flight is None
            else [replace(reply, replayed=True) for reply in await flight.result()]
        )
        for index, reply in enumerate(replies):
            yield TurnEvent(index=index, node=reply.node)
            for delta in deltas_of(reply.message):
                yield TurnEvent(index=index, node=reply.node, delta=delta)
            yield TurnEvent(index=index, node=reply.node, reply=reply)

    def _board(self, request: TurnRequest, *, streamed: bool) -> tuple[Flight | None, list[Node], bool]:
        """Resolve without changing anything; then the flight to wait for (and whether it was another's), or the recorded answer."""
        if self.record.state != "open":
            raise SessionConflict(f"session {self.id!r} has ended")
        tree = self.tree
        plan = self._matcher.resolve(request.messages, request.tools, after=request.after)
        settled = self._settle(request.sampling)
        digest = request_digest(request, settled, plan.place, plan.key)
        if request.request_key is not None and (recorded := tree.keyed.get(request.request_key)):
            if recorded[0].request_digest != digest:
                raise SessionConflict(f"request key {request.request_key!r} was used for another request; use a new key")
            return None, sorted(recorded, key=lambda node: node.choice), False
        key = (digest,)
        if (flight := self._airspace.get(key)) is not None:
            self.counters["joined"] += 1
            return flight, [], True
        self.limits.admit(n=request.n, nodes=len(tree), tokens=self._tokens, in_flight=len(self._airspace))
        started = tree.next_seq
        turn_key = (plan.node.id if isinstance(plan, Continue) else None, plan.key)
        self._matcher.flying[turn_key] = self._matcher.flying.get(turn_key, 0) + 1
        flight = self._airspace.launch(
            key,
            lambda me: self._fly(me, request, settled.sampling, plan, started, digest),
            lambda error: self._landed(error, turn_key),
            streamed=streamed,
        )
        return flight, [], False

    def _landed(self, error: BaseException | None, turn_key: tuple[str | None, bytes]) -> None:
        self._matcher.flying[turn_key] -= 1
        if not self._matcher.flying[turn_key]:
            del self._matcher.flying[turn_key]
        if isinstance(error, asyncio.CancelledError):
            self.counters["cancelled"] += 1
        elif error is not None:
            self.counters[f"failed:{getattr(error, 'code', 'error')}"] += 1

    async def _fly(
        self, flight: Flight, request: TurnRequest, sampling: Sampling, plan: Plan, started: int, digest: str
    ) -> tuple[Reply, ...]:
        """The corridor, once it is known what is being continued."""
        prompt = await prompt_for(plan, request, renderer=self.renderer, tree=self.tree, matcher=self._matcher)
        self.limits.admit_prompt(len(prompt.ids))
        asked = Asked(request=request, prompt=prompt, sampling=sampling, started=started, digest=digest)
        engine: dict[str, Any] = {"provider": self.provider, "renderer": self.renderer, "session_id": self.id}
        choices = [Choice(asked=asked, index=index, node=token_hex(16), **engine) for index in range(request.n)]
        if flight.streamed:
            return tuple(await all_of([self._stream_one(choice, flight, plan) for choice in choices]))
        Meanwhile(lambda: asked.foreseen(self.tree))
        drafts = await all_of([choice.generate() for choice in choices])
        return await self._commit(drafts, asked, plan)

    async def _stream_one(self, choice: Choice, flight: Flight, plan: Plan) -> Reply:
        try:
            draft = await choice.stream(flight.emit)
        except Disconnected as gone:
            if gone.draft is not None:
                self.counters["disconnected"] += 1
                await self._commit([gone.draft], choice.asked, plan)
            raise
        (reply,) = await self._commit([draft], choice.asked, plan)
        flight.emit(TurnEvent(index=choice.index, node=choice.node, reply=reply))
        return reply

    async def _commit(self, drafts: list[Draft], asked: Asked, plan: Plan) -> tuple[Reply, ...]:
        """All or nothing: the journal first, then memory."""
        nodes = nodes_from(drafts, asked, self.tree)
        if self.journal is not None:
            rows = rows_from(nodes, asked, self.tree)
            if not self.journal.append_now(self.id, rows):
                return await to_the_end(self._commit_waiting(self.journal, rows, nodes, drafts, asked, plan))
        return self._enter(nodes, drafts, asked, plan)

    async def _commit_waiting(
        self, journal: Journal, rows: list[Row], nodes: list[Node], drafts: list[Draft], asked: Asked, plan: Plan
    ) -> tuple[Reply, ...]:
        await journal.append_all(self.id, rows)
        return self._enter(nodes, drafts, asked, plan)

    def _enter(self, nodes: list[Node], drafts: list[Draft], asked: Asked, plan: Plan) -> tuple[Reply, ...]:
        """Nobody need wait for the tree's indexes: they are made afterwards, or when `tree` is looked at before."""
        for node in nodes:
            self._count(node)
            self._entering.append((node, asked.prompt, plan))
        afterwards(lambda: self.tree)
        return tuple(reply_from(node, draft.parsed, draft.completion) for node, draft in zip(nodes, drafts, strict=True))

    def _settle(self, asked: Sampling) -> Settled:
        """Pinned values over the client's, the renderer's stop tokens added; refused where log-probabilities would not be true."""
        if self._settled is not None and self._settled.asked is asked:
            return self._settled
        sampling = self._pinned.over(asked)
        sampling = replace(sampling, stop_token_ids=tuple(dict.fromkeys((*self.renderer.stop_token_ids, *sampling.stop_token_ids))))
        blind = [name for name in sampling.filters if name not in self.provider.truthful_filters]
        if self.record.training and blind:
            cure = "switch it off, or use a session with training=False"
            raise SamplingError(f"{self.provider.name} cannot report true log-probabilities under {', '.join(blind)}; {cure}")
        self._settled = Settled.of(asked, sampling)
        return self._settled

    def _adopt(self, tree: Tree) -> None:
        self._tree, self._matcher = tree, Matcher(tree)
        for node in tree.in_order():
            self._count(node)

    def _count(self, node: Node) -> None:
        self._tokens += len(node.given_ids) + len(node.sampled_ids)
        if node.why:
            self.counters[f"edge:{node.why}"] += 1

    # What comes out.
    def samples(
        self, *, max_tokens: int | None = None, include_abandoned: bool = False, metadata: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """One contiguous sample per surviving leaf; every sampled token is trained once or accounted for in `coverage`."""
        return assemble(self.tree, self.record, max_tokens=max_tokens, include_abandoned=include_abandoned, metadata=metadata).samples

    async def assembly(self) -> Assembly:
        """`samples` and `coverage` as they are now, built in a thread: other sessions' turns do not wait for it."""
        return await asyncio.to_thread(assemble, self.tree.snapshot(), self.record)

    def coverage(self, *, max_tokens: int | None = None, include_abandoned: bool = False) -> Coverage:
        return coverage_of(self.tree, self.record, max_tokens=max_tokens, include_abandoned=include_abandoned)

    async def reward(self, reward: float, *, leaf: str | None = None, metadata: Mapping[str, Any] | None = None) -> None:
        """Of the whole session, or of one leaf (a node's id)."""
        if leaf is not None:
            self.tree.get(leaf)
        if not math.isfinite(reward):
            raise InputError(f"reward: must be a finite number, got {reward!r}")

        def change(record: SessionRecord) -> SessionRecord:
            old = record.rewards
            session = float(reward) if leaf is None else old.session
            leaves = old.leaves if leaf is None else {**old.leaves, leaf: float(reward)}
            return replace(record, rewards=Rewards(session=session, leaves=leaves, metadata={**old.metadata, **(metadata or {})}))

        await self._change(change)

    async def end(self) -> None:
        """No further turn is admitted; the record stays readable."""
        await self._change(lambda record: replace(record, state="ended", ended=time.time()))

    async def _change(self, change: Callable[[SessionRecord], SessionRecord]) -> None:
        await self.ready()
        self.record = change(self.record) if self.journal is None else await self.journal.update(self.id, change)


async def rollout(agent: Callable[[Client, Any], Awaitable[Any]], task: Any, session: Session) -> Sample:
    """Run an agent function on a task and return what it did as a training sample (of the newest leaf, where there are several).

    The agent gets one object that is both a chat callable and an OpenAI-like client. A number that it returns is the reward.
    """
    outcome = await agent(Client(session), task)
    if isinstance(outcome, (int, float)):
        await session.reward(float(outcome))
    samples = session.samples()
    if not samples:
        raise SessionConflict("the agent made no model call that can be trained on; see session.coverage()")
    newest = {node.id: node.seq for node in session.tree.in_order()}
    return max(samples, key=lambda sample: newest[sample.metadata["tokentrue"]["leaf"]])
