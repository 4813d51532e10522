"""Nodes from generated choices, and replies from nodes. `turn` writes them."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

from tokentrue.errors import EngineContractError, MessageError, TokenContractError
from tokentrue.plain_json import freeze
from tokentrue.protocols import Renderer
from tokentrue.routing_replay import own_routing
from tokentrue.sessions.requests import CHARS_PER_ID, format_identity, run_by_size
from tokentrue.sessions.singleflight import InFlightTurn
from tokentrue.sessions.stages.generation import Choice
from tokentrue.sessions.stages.prompts import Prompt
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Attempt, Completion, Parsed, Reply, Status

# What a node and a completion have in common.
_REPORTED = ("versions", "finish", "stopped_by", "top_logprobs", "sampling_mask", "fingerprint")


def reserve_nodes(choices: Sequence[Choice], turn: InFlightTurn, prompt: Prompt, tree: Tree) -> list[Node]:
    nodes = [_build_node(choice, turn, prompt, tree, tree.next_seq + offset) for offset, choice in enumerate(choices)]
    tree.reserve(nodes)
    return nodes


def _build_node(choice: Choice, turn: InFlightTurn, prompt: Prompt, tree: Tree, seq: int) -> Node:
    request, resolution, done = turn.request, prompt.resolution, choice.completion
    parent, origin = resolution.parent, resolution.origin
    edge_reason, detail = resolution.edge_reason, resolution.detail
    if choice.index and edge_reason in (None, "first"):
        edge_reason, detail = "choice", f"choice {choice.index} of {request.n}"
    try:
        parent_length, length = 0 if parent is None else parent.length, len(prompt.ids) + len(done.token_ids)
        routing = own_routing(done.routed_experts, parent_length=parent_length, length=length)
    except TokenContractError as error:
        raise EngineContractError(str(error)) from error
    node = Node(
        id=choice.node_id,
        seq=seq,
        started=resolution.started,
        parent=None if parent is None else parent.id,
        given=resolution.given,
        given_ids=prompt.given_ids,
        given_spans=prompt.spans,
        sampled_ids=done.token_ids,
        logprobs=array("d", done.logprobs),
        served=freeze(choice.served, "served"),
        chain=b"",
        prompt_length=len(prompt.ids),
        prompt_digest=_sent_digest(done, prompt, tree),
        attempts=tuple(_storable(attempt) for attempt in choice.parsed.attempts if attempt.status is not Status.OK),
        dialect=request.dialect,
        model=request.model,
        replaced=turn.pinned.replaced,
        projection=resolution.projection,
        edge_reason=edge_reason,
        detail=detail,
        origin=None if origin is None else origin.id,
        outcome=choice.outcome,
        tools=turn.conversation.tools if parent is None else parent.tools,
        template_kwargs=request.template_kwargs,
        sampling=choice.sampling,
        request_key=request.request_key,
        joined_keys=tuple(key for key in turn.request_keys if key != request.request_key),
        request_digest=format_identity(turn.identity),
        choice=choice.index,
        created=time.time(),
        routed_experts=routing,
        images=prompt.images,
        **{name: getattr(done, name) for name in _REPORTED},
    )
    return replace(node, chain=tree.link(node))


def _storable(attempt: Attempt) -> Attempt:
    # Arguments that JSON cannot represent (1e400, for example) are kept only in `raw`.
    try:
        return replace(attempt, arguments=freeze(attempt.arguments, "arguments"))
    except MessageError:
        return replace(attempt, arguments=None)


def _sent_digest(completion: Completion, prompt: Prompt, tree: Tree) -> bytes:
    """SHA-256 of the sent prompt; raises unless it is the recorded one."""
    parent = prompt.resolution.parent
    recorded = tree.hash_prompt(parent, prompt.given_ids).digest()
    if recorded == (completion.prompt_digest or prompt.ids.sha256()):
        return recorded
    kept = tree.full_ids(parent) + prompt.given_ids
    at = next((i for i, (a, b) in enumerate(zip(kept, prompt.ids, strict=False)) if a != b), None)
    sent = "the provider sent other ids than it was given"
    place = sent if at is None else f"the prompt leaves the recorded ids at token {at}"
    raise TokenContractError(f"after {'a new root' if parent is None else f'node {parent.id}'}: {place}")


def reply_from_node(node: Node, parsed: Parsed, completion: Completion, *, from_record: bool = False) -> Reply:
    """The message is a copy: a client may change it."""
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


async def replies_from_record(nodes: Sequence[Node], *, tree: Tree, renderer: Renderer) -> tuple[Reply, ...]:
    replies: list[Reply] = []
    for node in sorted(nodes, key=lambda node: node.choice):
        ids, prompt_ids = node.sampled_ids, tree.prompt_ids(node)
        chars = CHARS_PER_ID * len(ids)
        parsed = await run_by_size(renderer.parse, chars, ids, prompt_ids=prompt_ids, tools=node.tools)
        completion = Completion(
            token_ids=node.sampled_ids,
            logprobs=tuple(node.logprobs),
            prompt_tokens=node.prompt_length,
            routed_experts=node.routed_experts,
            prompt_digest=node.prompt_digest,
            **{name: getattr(node, name) for name in _REPORTED},
        )
        replies.append(reply_from_node(node, parsed, completion, from_record=True))
    return tuple(replies)
