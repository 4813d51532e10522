"""Builds nodes from finished generations, and replies from nodes. `turn` writes them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from tokentrue.conversation import Conversation
from tokentrue.errors import EngineContractError, MessageError, SamplingError, TokenContractError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import digest, dumps, freeze, loads
from tokentrue.protocols import Provider, Renderer
from tokentrue.routing_replay import own_routing
from tokentrue.sessions.journal.rows import Row, body_from_node, row_from_body, sampling_from_json, sampling_to_json
from tokentrue.sessions.limits import INLINE_IDS, run_inline_or_thread
from tokentrue.sessions.stages.generation import Draft
from tokentrue.sessions.stages.prompts import Prompt
from tokentrue.sessions.tree import Node, Tree, next_link
from tokentrue.types import (
    PENALTIES,
    Attempt,
    Completion,
    Message,
    Parsed,
    Reply,
    RoutedExperts,
    Sampling,
    Status,
    Tools,
    TurnRequest,
)

_OF_THE_ENGINE = ("versions", "stopped_by", "replay", "top_logprobs", "fingerprint", "attempts", "served")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTurn:
    """Everything that is settled before the engine is called."""

    request: TurnRequest
    tools: Tools | None
    prompt: Prompt
    sampling: Sampling
    started: int
    identity: str
    request_keys: Sequence[str]  # grows while equal requests join
    replaced: tuple[Message, ...] = ()  # the client's system prompt, where a pinned one replaces it


def reserve_nodes(drafts: Sequence[Draft], prepared: PreparedTurn, tree: Tree) -> list[Node]:
    """Builds the nodes, checks them (recorded prompt equals the sent one, certificate fits) and reserves their
    places."""
    nodes = [_node_from_draft(draft, prepared, tree, seq=tree.next_seq + index) for index, draft in enumerate(drafts)]
    tree.reserve(nodes)
    return nodes


def _node_from_draft(draft: Draft, prepared: PreparedTurn, tree: Tree, *, seq: int) -> Node:
    prompt, done = prepared.prompt, draft.completion
    logprobs = array("d", done.logprobs)
    link = next_link(
        tree.link_before(prompt.parent),
        given_ids=prompt.given_ids,
        sampled_ids=done.token_ids,
        logprobs=logprobs,
        versions=done.versions,
    )
    edge_reason, detail = prompt.edge_reason, prompt.detail
    if draft.choice and edge_reason in (None, "first"):
        edge_reason, detail = "choice", f"choice {draft.choice} of {prepared.request.n}"
    return Node(
        id=draft.node_id,
        seq=seq,
        started=prepared.started,
        parent=None if prompt.parent is None else prompt.parent.id,
        given=prompt.given,
        given_ids=prompt.given_ids,
        given_spans=prompt.spans,
        sampled_ids=done.token_ids,
        logprobs=logprobs,
        versions=done.versions,
        finish=done.finish,
        served=freeze(draft.served, "served"),
        chain=link,
        prompt_length=len(prompt.ids),
        prompt_digest=_sent_digest(done, prompt, tree),
        stopped_by=done.stopped_by,
        attempts=tuple(_storable(attempt) for attempt in draft.parsed.attempts if attempt.status is not Status.OK),
        dialect=prepared.request.dialect,
        replaced=prepared.replaced,
        projection=prompt.projection,
        edge_reason=edge_reason,
        detail=detail,
        origin=None if prompt.origin is None else prompt.origin.id,
        outcome=draft.outcome,
        tools=prepared.tools if prompt.parent is None else prompt.parent.tools,
        template_kwargs=prepared.request.template_kwargs,
        sampling=draft.sampling,
        request_key=prepared.request.request_key,
        joined_keys=tuple(key for key in prepared.request_keys if key != prepared.request.request_key),
        request_digest=prepared.identity,
        choice=draft.choice,
        created=time.time(),
        routed_experts=_own_routing(done, prompt),
        sampling_mask=done.sampling_mask,
        top_logprobs=done.top_logprobs,
        fingerprint=done.fingerprint,
    )


def _own_routing(done: Completion, prompt: Prompt) -> RoutedExperts | None:
    parent_length = 0 if prompt.parent is None else prompt.parent.length
    try:
        return own_routing(
            done.routed_experts, parent_length=parent_length, length=len(prompt.ids) + len(done.token_ids)
        )
    except TokenContractError as error:
        raise EngineContractError(str(error)) from error


def _storable(attempt: Attempt) -> Attempt:
    # Arguments that JSON cannot represent (1e400, for example) are kept only in `raw`.
    try:
        return replace(attempt, arguments=freeze(attempt.arguments, "arguments"))
    except MessageError:
        return replace(attempt, arguments=None)


def _sent_digest(completion: Completion, prompt: Prompt, tree: Tree) -> bytes:
    """SHA-256 of the sent prompt; raises unless it is the recorded one."""
    recorded = tree.prompt_digest(prompt.parent, prompt.given_ids)
    sent = prompt.ids.sha256() if completion.prompt_digest is None else completion.prompt_digest
    if sent != recorded:
        kept = tree.full_ids(prompt.parent) + prompt.given_ids
        at = next((i for i, (a, b) in enumerate(zip(kept, prompt.ids, strict=False)) if a != b), None)
        after = "a new root" if prompt.parent is None else f"node {prompt.parent.id}"
        place = (
            "the provider sent other ids than it was given"
            if at is None
            else f"the prompt leaves the recorded ids at token {at}"
        )
        raise TokenContractError(f"after {after}: {place}")
    return recorded


def rows_from_nodes(nodes: Sequence[Node], parent: Node | None) -> list[Row]:
    """Raises if the journal cannot store a node exactly: its JSON must round-trip."""
    return [_row_from_node(node, parent) for node in nodes]


def _row_from_node(node: Node, parent: Node | None) -> Row:
    try:
        body, replay = body_from_node(node, parent)
        row = row_from_body(node, body, replay)
    except (TypeError, ValueError) as error:
        raise MessageError(f"messages and tools must be plain JSON values: {error}", field="messages") from error
    reread = loads(row.body)
    if reread != body:
        name = next(name for name in body if reread.get(name, ...) != body[name])
        if name in _OF_THE_ENGINE:
            raise EngineContractError(f"the engine's {name} cannot be recorded exactly: {body[name]!r}")
        raise MessageError("cannot be recorded exactly; send plain JSON values", field=name)
    return row


def reply_from_node(node: Node, parsed: Parsed, completion: Completion, *, from_record: bool = False) -> Reply:
    """The message is a copy: a client that changes it does not change the record."""
    return Reply(
        node=node.id,
        message=freeze(node.served, "served"),
        parsed=parsed,
        completion=completion,
        prompt_tokens=node.prompt_length,
        given_tokens=len(node.given_ids),
        projection=node.projection,
        edge_reason=node.edge_reason,
        from_record=from_record,
    )


def _completion_from_node(node: Node) -> Completion:
    return Completion(
        token_ids=node.sampled_ids,
        logprobs=tuple(node.logprobs),
        finish=node.finish,
        versions=node.versions,
        prompt_tokens=node.prompt_length,
        stopped_by=node.stopped_by,
        top_logprobs=node.top_logprobs,
        routed_experts=node.routed_experts,
        sampling_mask=node.sampling_mask,
        fingerprint=node.fingerprint,
        prompt_digest=node.prompt_digest,
    )


async def replies_from_record(nodes: Sequence[Node], *, tree: Tree, renderer: Renderer) -> tuple[Reply, ...]:
    replies: list[Reply] = []
    for node in sorted(nodes, key=lambda node: node.choice):
        is_small = len(node.sampled_ids) < INLINE_IDS
        parsed = await run_inline_or_thread(
            renderer.parse, is_small, node.sampled_ids, prompt_ids=tree.prompt_ids(node), tools=node.tools
        )
        replies.append(reply_from_node(node, parsed, _completion_from_node(node), from_record=True))
    return tuple(replies)


_FIELDS = frozenset(f.name for f in fields(Sampling))
_CURE = "switch it off, or use a session with training=False"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSampling:
    """Sampling values that override the client's. A whole `Sampling` pins every field, a mapping only the fields it
    names."""

    values: JsonMapping = field(default_factory=JsonObject)

    @classmethod
    def of(cls, sampling: Sampling | JsonMapping | None) -> PinnedSampling:
        if isinstance(sampling, Sampling):
            return cls(values={name: getattr(sampling, name) for name in _FIELDS})
        values = dict(sampling or {})
        if unknown := sorted(set(values) - _FIELDS):
            raise SamplingError(f"no sampling setting named {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}")
        sampling_from_json(values)  # refuses bad values now, not at the first turn
        return cls(values=values)

    def apply(self, sampling: Sampling) -> Sampling:
        if not self.values:
            return sampling
        pinned = sampling_from_json(self.values)
        return replace(sampling, **{name: getattr(pinned, name) for name in self.values})


def resolve_sampling(requested: Sampling, pinned: PinnedSampling, *, renderer: Renderer, training: bool) -> Sampling:
    """Pinned values over the client's, plus the renderer's stop tokens. Refuses penalties if a trainer will score
    the tokens."""
    sampling = pinned.apply(requested)
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *sampling.stop_token_ids)))
    sampling = replace(sampling, stop_token_ids=stops, extra=freeze(sampling.extra, "sampling.extra"))
    if training and (penalties := [name for name in sampling.filters if name in PENALTIES]):
        raise SamplingError(f"no trainer can score tokens sampled under {', '.join(penalties)}; {_CURE}")
    return sampling


async def check_truthful(sampling: Sampling, provider: Provider) -> None:
    """Refuses filters under which the engine does not report the log-probabilities that it sampled from. Queries the
    engine if its capabilities are not known yet."""
    if not sampling.filters:
        return
    if provider.truthful_filters is None:
        await provider.health()
    truthful = provider.truthful_filters or frozenset()
    if blind := [name for name in sampling.filters if name not in truthful]:
        raise SamplingError(f"{provider.name} cannot report true log-probabilities under {', '.join(blind)}; {_CURE}")


def identify_request(request: TurnRequest, conversation: Conversation, sampling: Sampling) -> bytes:
    """A digest of the exact request: messages, tools, sampling, template settings, n, dialect and named node."""
    try:
        settings = dumps([sampling_to_json(sampling), request.template_kwargs])
    except (TypeError, ValueError) as error:
        raise SamplingError(f"sampling.extra and template_kwargs must be plain JSON values: {error}") from error
    named = () if request.continues is None else (request.continues.encode(),)
    return digest(conversation.digest, settings, b"%d" % request.n, request.dialect.encode(), *named)


def format_identity(identity: bytes) -> str:
    """The form that a node stores. Records without the prefix are older and identify a request by looser keys."""
    return f"exact:{identity.hex()}"


def is_same_request(recorded: str | None, identity: bytes) -> bool:
    return recorded is None or not recorded.startswith("exact:") or recorded == format_identity(identity)
