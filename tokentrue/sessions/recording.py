"""A finished generation becomes a node, and a node becomes a reply. Nothing is written here: `turn` commits, journal first, then memory."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokentrue.errors import EngineContractError, MessageError
from tokentrue.protocols import Renderer
from tokentrue.sessions import chain
from tokentrue.sessions.prompts import Prompt
from tokentrue.sessions.rows import Row, row_from_node, written_before
from tokentrue.sessions.serve import served_message
from tokentrue.sessions.tree import Node, Tree
from tokentrue.types import Completion, Parsed, Reply, Sampling, Status, TurnRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One sampled turn that is not in the record yet."""

    node: str
    choice: int
    completion: Completion
    parsed: Parsed
    outcome: Literal["served", "disconnected"] = "served"


@dataclass(slots=True, kw_only=True)
class Asked:
    """What the turn was asked for, with everything that was settled before the engine was called."""

    request: TurnRequest
    prompt: Prompt
    sampling: Sampling
    started: int
    digest: str
    _written: bytes | None = None

    def foreseen(self, tree: Tree) -> bytes:
        """What must hold and can be written whatever is sampled, settled once: the prompt that the engine gets is, bit for bit, what is
        recorded and what was given; and the row's first half."""
        if self._written is None:
            prompt, request = self.prompt, self.request
            tree.check_prompt(prompt.ids, prompt.parent, prompt.given_ids)
            try:
                self._written = written_before(
                    started=self.started,
                    given=prompt.given,
                    spans=prompt.spans,
                    prompt_length=len(prompt.ids),
                    projection=prompt.projection,
                    dialect=request.dialect,
                    template_kwargs=request.template_kwargs,
                    sampling=self.sampling,
                )
            except TypeError as error:
                raise not_json(error) from error
        return self._written


def checked(completion: Completion, prompt: Prompt) -> Completion:
    """The engine's own account must agree with what it was sent."""
    if completion.prompt_tokens is not None and completion.prompt_tokens != len(prompt.ids):
        raise EngineContractError(f"the engine counted {completion.prompt_tokens} prompt tokens of the {len(prompt.ids)} that were sent")
    if not completion.token_ids:
        raise EngineContractError("the engine sampled no token; raise max_tokens or shorten the prompt")
    return completion


def node_from(draft: Draft, asked: Asked, tree: Tree) -> Node:
    prompt, done = asked.prompt, draft.completion
    sampled, logprobs = array("i", done.token_ids), array("d", done.logprobs)
    link = chain.link(
        tree.start_link(prompt.parent), given_ids=prompt.given_ids, sampled_ids=sampled, logprobs=logprobs, versions=done.versions
    )
    why, detail = prompt.why, prompt.detail
    if draft.choice and why in (None, "first"):
        why, detail = "choice", f"choice {draft.choice} of {asked.request.n}"
    parent_tools = None if prompt.parent is None else prompt.parent.tools
    return Node(
        id=draft.node,
        seq=tree.reserve_seq(),
        started=asked.started,
        parent=None if prompt.parent is None else prompt.parent.id,
        given=prompt.given,
        given_ids=prompt.given_ids,
        given_spans=prompt.spans,
        sampled_ids=sampled,
        logprobs=logprobs,
        versions=done.versions,
        finish=done.finish,
        served=served_message(draft.parsed, draft.node, stopped_by=done.stopped_by),
        chain=link,
        prompt_length=len(prompt.ids),
        stopped_by=done.stopped_by,
        attempts=tuple(attempt for attempt in draft.parsed.attempts if attempt.status is not Status.OK),
        dialect=asked.request.dialect,
        projection=prompt.projection,
        why=why,
        detail=detail,
        origin=None if prompt.origin is None else prompt.origin.id,
        outcome=draft.outcome,
        tools=asked.request.tools if prompt.parent is None else parent_tools,
        template_kwargs=asked.request.template_kwargs,
        sampling=asked.sampling,
        request_key=asked.request.request_key,
        request_digest=asked.digest,
        choice=draft.choice,
        created=time.time(),
        routed_experts=done.routed_experts,
        top_logprobs=done.top_logprobs,
        fingerprint=done.fingerprint,
    )


def nodes_from(drafts: Sequence[Draft], asked: Asked, tree: Tree) -> list[Node]:
    """Fit to enter the record."""
    asked.foreseen(tree)
    nodes = [node_from(draft, asked, tree) for draft in drafts]
    for node in nodes:
        tree.check(node)
    return nodes


def rows_from(nodes: Sequence[Node], asked: Asked, tree: Tree) -> list[Row]:
    return [_row(node, asked.prompt.parent, asked.foreseen(tree)) for node in nodes]


def _row(node: Node, parent: Node | None, before: bytes) -> Row:
    try:
        return row_from_node(node, parent, before)
    except TypeError as error:
        raise not_json(error) from error


def not_json(error: TypeError) -> MessageError:
    return MessageError(f"messages and tools must be plain JSON values: {error}", field="messages")


def reply_from(node: Node, parsed: Parsed, completion: Completion, *, replayed: bool = False) -> Reply:
    return Reply(
        node=node.id,
        message=node.served,
        parsed=parsed,
        completion=completion,
        prompt_tokens=node.prompt_length,
        given_tokens=len(node.given_ids),
        projection=node.projection,
        root=node.why,
        replayed=replayed,
    )


def recorded_completion(node: Node) -> Completion:
    return Completion(
        token_ids=tuple(node.sampled_ids),
        logprobs=tuple(node.logprobs),
        finish=node.finish,
        versions=node.versions,
        prompt_tokens=node.prompt_length,
        stopped_by=node.stopped_by,
        top_logprobs=node.top_logprobs,
        routed_experts=node.routed_experts,
        fingerprint=node.fingerprint,
    )


def recorded_reply(node: Node, *, tree: Tree, renderer: Renderer) -> Reply:
    """The answer that was given, from the record alone."""
    completion = recorded_completion(node)
    parsed = renderer.parse(node.sampled_ids, prompt_ids=tree.prompt_ids(node), tools=node.tools)
    return reply_from(node, parsed, completion, replayed=True)
