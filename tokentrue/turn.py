"""One turn of an agent, and the first file to read: resolve → prompt → generate → parse → commit.

`Session._start_or_join` checks whether a request retries a recorded turn or equals one in flight; if not,
`Session._run_turn` runs it:
1. resolve  (`sessions/matching`): find the recorded turn that the messages continue
2. prompt   (`sessions/stages/prompts`): its recorded ids, untouched, plus what the renderer adds for the new messages
3. generate (`sessions/stages/generation`): the engine samples n choices; a stream emits events as tokens arrive
4. parse    (`sessions/stages/generation`): sampled ids become the served message; a stream is parsed incrementally
5. commit   (`sessions/stages/commits`): check the nodes, write them to the journal, add them to the tree; then the
   reply, or the last event of a stream, whose deltas were sent before

A turn that ends early is committed with its reason and the tokens received so far. `providers/pool` resumes a
generation that breaks off at one engine. The stages run on the event loop. Other threads: large renderings and parses
(`sessions/requests.run_by_size`), the bytes of images (`sessions/images`), the journal's writer, most of loading a
session (`Session.open`), and an engine in this process."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import structs

from tokentrue.conversation import Conversation, Conversations
from tokentrue.errors import ConfigError, KeyConflict, MessageError, SessionConflict
from tokentrue.images import ImageSettings
from tokentrue.json_types import JsonMapping
from tokentrue.plain_json import freeze
from tokentrue.protocols import Provider, Renderer
from tokentrue.samples import Assembly, assemble, coverage_of
from tokentrue.sessions import requests
from tokentrue.sessions.client import InProcessClient
from tokentrue.sessions.images import SessionImages, add_parsed, check_engine
from tokentrue.sessions.journal import Journal, Rewards, SessionRecord, copy_metadata, read_reward
from tokentrue.sessions.journal.journal import tree_from_rows
from tokentrue.sessions.journal.rows import row_from_node
from tokentrue.sessions.matching import Matcher
from tokentrue.sessions.requests import SessionLimits
from tokentrue.sessions.singleflight import InFlightTurn, SingleFlight, run_to_completion
from tokentrue.sessions.stages import commits, generation
from tokentrue.sessions.stages.generation import Choice
from tokentrue.sessions.stages.pinning import PinnedPrompts, check_pin
from tokentrue.sessions.stages.prompts import Prompt, build_prompt, prompt_from_ids
from tokentrue.sessions.tree import Node, Outcome, Tree
from tokentrue.tracing import traced
from tokentrue.types import (
    Coverage,
    Messages,
    PromptImage,
    Reply,
    Sample,
    Sampling,
    TemplateKwargs,
    Tools,
    TurnEvent,
    TurnRequest,
    shift_images,
)

History = Literal["keep", "template"]
"""keep: recorded tokens stay unchanged. template: begins a new root where the template would rewrite earlier turns."""


@dataclass(frozen=True, slots=True)
class JoinedTurn:
    """An equal request is in flight: this caller waits for its replies."""

    turn: InFlightTurn


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """The request key was answered before; a node for each choice."""

    nodes: Sequence[Node]


class Session:
    """A record of conversations: a tree, since histories are edited and sub-agents share a session. `sampling`
    overrides the client's values; `training=False` allows settings that no trainer can score. `pin=("system",)`
    keeps each conversation's first system prompt; `side_requests="train"` also trains what a harness asks beside the
    task."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        provider: Provider,
        journal: Journal | None = None,
        session_id: str | None = None,
        group: str | None = None,
        metadata: JsonMapping | None = None,
        sampling: Sampling | JsonMapping | None = None,
        history: History | None = None,
        training: bool = True,
        pin: Sequence[str] = (),
        side_requests: str = "leave_out",
        limits: SessionLimits | None = None,
        images: ImageSettings | None = None,
        key_hash: str | None = None,
        _record: SessionRecord | None = None,
        _tree: Tree | None = None,
        _fencing_token: int = 1,
    ) -> None:
        self.renderer, self.provider, self.journal = renderer, provider, journal
        self.limits = limits or SessionLimits()
        follows = renderer.history
        if history not in (None, follows):
            raise ConfigError(
                f"history={history!r}, but the renderer was loaded with history={follows!r}: load it with the same one"
            )
        if side_requests not in ("leave_out", "train"):
            raise ConfigError(f"side_requests: {side_requests!r} is not one of leave_out, train")
        self.record = _record or SessionRecord(
            id=session_id or uuid.uuid4().hex,
            group=group,
            metadata=copy_metadata(metadata),
            sampling=requests.check_pinned(sampling),
            history=follows,
            training=training,
            pin=check_pin(pin),
            side_requests=side_requests,
            template=renderer.template_hash,
            tokenizer=renderer.tokenizer_hash,
            key_hash=key_hash,
            created=time.time(),
        )
        self.tree = _tree or Tree(template=self.record.template, tokenizer=self.record.tokenizer)
        self.revision = 0  # incremented with every change of the record: results of another revision are stale
        self.recorded_tokens = sum(map(count_tokens, self.tree.nodes.values()))
        vision = getattr(renderer, "vision", None)
        refusal = vision if isinstance(vision, str) else None
        self.images = SessionImages(self.record.id, images, journal, self.tree, refusal=refusal)
        # Of the last requests.
        self.conversations = Conversations(self.limits.conversation_bytes, images=self.images.reader)
        self._matcher = Matcher(self.tree, renderer)
        self._pinned_prompts = PinnedPrompts(self.record.pin, self.tree)
        self._single_flight = SingleFlight()
        self._is_ending = False
        self._created = journal.create(self.record) if journal is not None and _record is None else None
        # Claim a new session only once it is in the journal: a taken id must not revoke the session that has it.
        self._claim = None
        if journal is not None and self._created is None:
            self._claim = journal.claim(self.record.id, self._single_flight, _fencing_token)

    @classmethod
    async def open(
        cls,
        journal: Journal,
        session_id: str,
        *,
        renderer: Renderer,
        provider: Provider,
        limits: SessionLimits | None = None,
        images: ImageSettings | None = None,
    ) -> "Session":
        """Resumes a recorded session. An older object of the same session can write no more."""
        fencing_token, record, rows = await asyncio.to_thread(
            lambda: (journal.acquire(session_id), journal.get(session_id), journal.rows(session_id))
        )
        if (record.template, record.tokenizer) != (renderer.template_hash, renderer.tokenizer_hash):
            raise SessionConflict(
                f"session {session_id!r} was recorded with another template or tokenizer; open it with that one"
            )
        tree = await asyncio.to_thread(tree_from_rows, record, rows)
        return cls(
            renderer=renderer,
            provider=provider,
            journal=journal,
            limits=limits,
            images=images,
            _record=record,
            _tree=tree,
            _fencing_token=fencing_token,
        )

    @property
    def id(self) -> str:
        return self.record.id

    async def wait_created(self) -> None:
        if (created := self._created) is not None:
            await asyncio.shield(asyncio.wrap_future(created))
            if self._created is created and self.journal is not None:  # the first of the waiting callers
                self._created = None
                self._claim = self.journal.claim(self.record.id, self._single_flight)

    # The turn.
    async def chat(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        sampling: Sampling | None = None,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Reply:
        """An agent's next model call: the whole conversation in, the model's turn out."""
        kwargs, sampling = template_kwargs or {}, sampling or Sampling()
        request = TurnRequest(messages=messages, tools=tools, sampling=sampling, template_kwargs=kwargs)
        return (await self.turn(request))[0]

    async def turn(self, request: TurnRequest) -> tuple[Reply, ...]:
        """The n replies to one request. Equal requests in flight share one turn: use `n` or different seeds for
        several samples. A request key that was answered before gets the recorded replies."""
        found = self._start_or_join(await self._read(request), streamed=False)
        return await found.wait() if isinstance(found, InFlightTurn) else await self._wait_or_read(found)

    async def stream(self, request: TurnRequest) -> AsyncGenerator[TurnEvent]:
        """Events as tokens are sampled; a request that joins a turn in flight, or repeats a recorded one, gets the
        whole message once it is committed. Closing the iterator cancels the turn if no other caller waits."""
        async with aclosing(self.stream_batches(await self._read(request))) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def _read(self, request: TurnRequest) -> TurnRequest:
        self.check_open()
        if isinstance(request.messages, Conversation):
            return request
        parsed = self.conversations.parse(request.messages, request.tools)
        return replace(request, messages=await add_parsed(self.conversations, parsed))

    def stream_batches(self, request: TurnRequest) -> AsyncGenerator[list[TurnEvent]]:
        """`stream`, with events that are ready together in one list. The turn starts at once: read the iterator."""
        found = self._start_or_join(request, streamed=True)
        return found.events() if isinstance(found, InFlightTurn) else self._stream_again(found)

    async def _stream_again(self, found: JoinedTurn | AnsweredTurn) -> AsyncGenerator[list[TurnEvent]]:
        for index, reply in enumerate(await self._wait_or_read(found)):
            named = TurnEvent(index=index, node_id=reply.node)
            deltas = [structs.replace(named, delta=each) for each in generation.deltas_from_message(reply.message)]
            yield [named, *deltas, structs.replace(named, reply=reply)]

    async def _wait_or_read(self, found: JoinedTurn | AnsweredTurn) -> tuple[Reply, ...]:
        if isinstance(found, JoinedTurn):  # nothing was added to the record for this caller
            return tuple(replace(reply, from_record=True) for reply in await found.turn.wait())
        return await commits.replies_from_record(found.nodes, tree=self.tree, renderer=self.renderer)

    def _start_or_join(self, request: TurnRequest, *, streamed: bool) -> InFlightTurn | JoinedTurn | AnsweredTurn:
        """A turn that was started, or what this request repeats: an equal turn in flight, or the nodes recorded under
        its key. Has no await, so no other request can come between the search and the start."""
        self.check_open()
        request = replace(request, template_kwargs=freeze(request.template_kwargs, "template_kwargs"))
        if request.prompt_ids is not None and self.record.pin:
            raise MessageError("cannot be kept where a pinned prompt replaces the client's", field="tokens")
        conversation = self.conversations.read(request.messages, request.tools)
        if request.prompt_ids is not None and conversation.num_images:
            raise MessageError("do not say where the images are: send messages without tokens", field="tokens")
        recorded, in_flight = self._find_key(request.request_key)
        retried = self._pinned_prompts.prompt(recorded[0]) if recorded else in_flight.pinned.prompt if in_flight else ()
        pinned = self._pinned_prompts.apply(conversation, retried=retried)
        sampling = requests.resolve_sampling(
            request.sampling, self.record.sampling, renderer=self.renderer, training=self.record.training
        )
        identity = requests.identify_request(request, pinned.conversation, sampling)
        if recorded:
            is_same = requests.is_same_request(recorded[0].request_digest, identity)
        else:
            is_same = in_flight is None or in_flight.identity == identity
        if not is_same:
            raise KeyConflict(f"request key {request.request_key!r} was used for another request; use a new key")
        if recorded:
            return AnsweredTurn(recorded)
        if (turn := self._single_flight.find(identity)) is not None:
            turn.add_caller(request.request_key)
            return JoinedTurn(turn)
        self.limits.check_turn(
            n=request.n, nodes=len(self.tree), tokens=self.recorded_tokens, in_flight=len(self._single_flight)
        )
        turn = InFlightTurn(identity, request, sampling, pinned, streamed=streamed)
        self._single_flight.start(turn, self._run_turn(turn))
        turn.add_caller(request.request_key)
        return turn

    def _find_key(self, request_key: str | None) -> tuple[Sequence[Node], InFlightTurn | None]:
        if request_key is None:
            return (), None
        return self.tree.nodes_by_key.get(request_key, ()), self._single_flight.find_key(request_key)

    def check_open(self) -> None:
        if self.record.state != "open" or self._is_ending:
            raise SessionConflict(f"session {self.id!r} has ended; its samples stay readable")
        if self._claim is not None:
            self._claim.check()

    async def _run_turn(self, turn: InFlightTurn) -> tuple[Reply, ...]:
        await self.wait_created()
        if self.record.training:
            await requests.check_truthful(turn.sampling, self.provider)
        request, conversation = turn.request, turn.conversation
        if request.prompt_ids is not None:
            resolution = self._matcher.resolve_ids(conversation, request.prompt_ids)
        else:
            resolution = await self._matcher.resolve(conversation, named=request.continues)
        with self._matcher.hold(resolution.turn_key):
            if request.prompt_ids is not None:
                prompt = prompt_from_ids(resolution, request.prompt_ids)
            else:
                prompt = await build_prompt(
                    resolution, conversation.tools, request.template_kwargs, self._matcher, self.limits
                )
            self.limits.check_prompt(len(prompt.ids))
            with self._matcher.hold(prompt.resolution.turn_key):  # another one where the renderer refused to extend
                choices = await self._generate(turn, prompt, await self._load_images(turn, prompt))
                turn.is_complete = True
                replies = await self._commit(choices, turn, prompt)
                await self._close_turn(turn, [reply.node for reply in replies])
        if turn.streamed:
            for index, reply in enumerate(replies):
                turn.emit(TurnEvent(index=index, node_id=reply.node, reply=reply))
        return replies

    async def _load_images(self, turn: InFlightTurn, prompt: Prompt) -> Sequence[PromptImage]:
        if not prompt.images and not self.images.reader.recorded:
            return ()
        files, start = turn.conversation.files, len(prompt.ids) - len(prompt.given_ids)
        turn.new_images = self.images.find_new(self.tree.expand(prompt.resolution.given), files)
        runs = (*self.tree.images(prompt.resolution.parent), *shift_images(prompt.images, start))
        if not runs:
            return ()
        await check_engine(self.provider)
        return await self.images.load(runs, files)

    async def _generate(self, turn: InFlightTurn, prompt: Prompt, images: Sequence[PromptImage]) -> list[Choice]:
        choices = [Choice(index, turn, prompt.ids, self.renderer, images) for index in range(turn.request.n)]
        try:
            await generation.generate_all(choices, self.provider, self.id)
            for choice in choices:
                await choice.parse()
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            outcome: Outcome = turn.outcome_if_cancelled if is_cancelled else "engine_failed"
            await run_to_completion(self._commit_partial(choices, turn, prompt, outcome))
            raise
        return choices

    async def _commit_partial(
        self, choices: Sequence[Choice], turn: InFlightTurn, prompt: Prompt, outcome: Outcome
    ) -> None:
        await self._commit([choice for choice in choices if await choice.parse_partial(outcome)], turn, prompt)

    @traced("commit")
    async def _commit(self, choices: Sequence[Choice], turn: InFlightTurn, prompt: Prompt) -> tuple[Reply, ...]:
        """Writes all or nothing: the journal first, then the tree."""
        # If the journal fails, the tree is unchanged. The write may still have happened, so
        # `SessionRegistry.keep_loaded` drops the session, and the next request reads it from the journal.
        nodes, parent = commits.reserve_nodes(choices, turn, prompt, self.tree), prompt.resolution.parent
        if not nodes:
            return ()
        try:
            if self.journal is not None:
                rows = [row_from_node(node, parent) for node in nodes]
                await self.journal.append_nodes(self.id, rows, self._claim, turn.new_images)
            self.images.add(turn.new_images)
            for node in nodes:
                self._add_node(node)
        finally:
            self.tree.release(nodes)
        pairs = zip(nodes, choices, strict=True)
        return tuple(commits.reply_from_node(node, choice.parsed, choice.completion) for node, choice in pairs)

    def _add_node(self, node: Node) -> None:
        self.tree.add(node)
        self._matcher.index.add(node)
        self._pinned_prompts.add(node)
        self.recorded_tokens += count_tokens(node)
        self.revision += 1

    async def _close_turn(self, turn: InFlightTurn, node_ids: Sequence[str]) -> None:
        # Late keys are of callers that joined after the nodes were built (`joined_keys` has the earlier ones). A crash
        # before this loses only these keys: their retries are generated again.
        while late := [key for key in turn.request_keys if key not in self.tree.nodes_by_key]:
            await run_to_completion(self._record_late_keys(dict.fromkeys(late, node_ids)))
        self._single_flight.remove(turn)

    async def _record_late_keys(self, added: Mapping[str, Sequence[str]]) -> None:
        await self._update_record(lambda record: replace(record, late_keys={**record.late_keys, **added}))
        for key, node_ids in added.items():
            self.tree.add_key(key, node_ids)

    # Samples, rewards and the end.
    def samples(
        self, *, max_tokens: int | None = None, include_abandoned: bool = False, metadata: JsonMapping | None = None
    ) -> list[Sample]:
        """One contiguous sample per leaf that was not replaced; every sampled token is trained once or accounted for
        in `coverage`."""
        return assemble(
            self.tree, self.record, max_tokens=max_tokens, include_abandoned=include_abandoned, metadata=metadata
        ).samples

    async def assembly(self) -> Assembly:
        return await asyncio.to_thread(assemble, self.tree.snapshot(), self.record)

    def coverage(self, *, max_tokens: int | None = None, include_abandoned: bool = False) -> Coverage:
        return coverage_of(self.tree, self.record, max_tokens=max_tokens, include_abandoned=include_abandoned)

    async def reward(
        self, reward: float, *, leaf: str | None = None, metadata: JsonMapping | None = None, group: str | None = None
    ) -> None:
        """Rewards the whole session, or one node (`leaf`). `group` sets the group of a session without one."""
        if group is not None and self.record.group not in (None, group):
            raise SessionConflict(f"session {self.id!r} is of group {self.record.group!r}, not {group!r}")
        if leaf is not None:
            self.tree.get(leaf)
        value, added = read_reward(reward), copy_metadata(metadata)

        def change(record: SessionRecord) -> SessionRecord:
            old = record.rewards
            session = value if leaf is None else old.session
            leaves = old.leaves if leaf is None else {**old.leaves, leaf: value}
            rewards = Rewards(session=session, leaves=leaves, metadata={**old.metadata, **added})
            return replace(record, rewards=rewards, group=record.group if group is None else group)

        await self._update_record(change)

    async def replace_key(self, key_hash: str) -> None:
        await self._update_record(
            lambda record: replace(record, key_hash=key_hash, first_key_hash=record.first_key_hash or record.key_hash)
        )

    async def end(self) -> None:
        """Ends turns in flight: received tokens are recorded as "deleted", and callers get `SessionConflict`."""
        self._is_ending = True
        try:
            await self._single_flight.cancel_all("deleted")
            await self._update_record(lambda record: replace(record, state="ended", ended=time.time()))
        finally:
            self._is_ending = False

    async def _update_record(self, change: Callable[[SessionRecord], SessionRecord]) -> None:
        await self.wait_created()
        if self._claim is not None:
            self._claim.check()
        self.record = (
            change(self.record) if self.journal is None else await self.journal.update(self.id, change, self._claim)
        )
        self.revision += 1


def count_tokens(node: Node) -> int:
    return len(node.given_ids) + len(node.sampled_ids)


async def rollout(agent: Callable[[InProcessClient, Any], Awaitable[Any]], task: Any, session: Session) -> Sample:
    """Runs an agent function on a task and returns a training sample (of the newest leaf). The agent gets one object
    that is both a chat callable and an OpenAI-like client. If it returns a number, that is the reward."""
    outcome = await agent(InProcessClient(session), task)
    if isinstance(outcome, (int, float)):
        await session.reward(float(outcome))
    samples = session.samples()
    if not samples:
        raise SessionConflict("the agent made no model call that can be trained on; see session.coverage()")
    newest = {node.id: node.seq for node in session.tree.in_order()}
    return max(samples, key=lambda sample: newest[sample.metadata["tokentrue"]["leaf"]])
