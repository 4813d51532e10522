"""Builds training samples from a record: one contiguous sample per surviving leaf, in time linear in its tokens.

Checked: every node's certificate link holds, and each sampled token is trainable in exactly one sample or listed in the
coverage with its reason.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from tokentrue.errors import InputError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.records import record
from tokentrue.routing_replay import empty_rows, join_masks, join_routing
from tokentrue.samples.recorded_turns import node_rows, seal
from tokentrue.sessions.journal import SessionRecord
from tokentrue.sessions.side_requests import SIDE_REQUEST, find_side_requests
from tokentrue.sessions.tree import Node, ServedRef, Tree, format_digest
from tokentrue.types import (
    UNVERSIONED,
    Certificate,
    Coverage,
    Finish,
    RoutedExperts,
    Sample,
    SamplingMask,
    Span,
    TopLogprobs,
    Untrained,
    VersionSpan,
)

PLACEHOLDER = "placeholder"


@record
class Assembly:
    samples: list[Sample]
    coverage: Coverage


def assemble(
    tree: Tree,
    record: SessionRecord,
    *,
    max_tokens: int | None = None,
    include_abandoned: bool = False,
    metadata: JsonMapping | None = None,
) -> Assembly:
    """`max_tokens` cuts a sample after the last sampled span that fits; `include_abandoned` also trains abandoned turns
    and side requests."""
    for node in tree.nodes.values():
        if tree.link(node) != node.chain:
            raise TokenContractError(f"node {node.id}: the record does not fit its certificate")
    owner, drafts, abandoned = _drafts(tree, record, max_tokens, include_abandoned)
    coverage = _coverage(tree, owner, abandoned)
    samples: list[Sample] = []
    for leaf, path in drafts:
        own = _own_metadata(record, leaf, path, coverage)
        asked_for = {node.id: f"asked_for:{abandoned[node.id]}" for node in path if node.id in abandoned}
        mine = {node.id: asked_for.get(node.id, "sampled") for node in path if owner[node.id] == leaf.id}
        sample = _build_sample(tree, record, leaf, path, mine, {**(metadata or {}), "tokentrue": own})
        own["seal"] = seal(sample)
        samples.append(sample)
    return Assembly(samples=samples, coverage=coverage)


def coverage_of(
    tree: Tree, record: SessionRecord, *, max_tokens: int | None = None, include_abandoned: bool = False
) -> Coverage:
    owner, _, abandoned = _drafts(tree, record, max_tokens, include_abandoned)
    return _coverage(tree, owner, abandoned)


def _drafts(
    tree: Tree, record: SessionRecord, max_tokens: int | None, include_abandoned: bool
) -> tuple[dict[str, str], list[tuple[Node, list[Node]]], dict[str, str]]:
    if max_tokens is not None and max_tokens <= 0:
        raise InputError(f"max_tokens must be positive, got {max_tokens}")
    abandoned = find_left_out(tree, record.rewards.leaves)
    if record.side_requests == "leave_out":
        rewarded = record.rewards.leaves
        side = (node for node in find_side_requests(tree) if node not in rewarded)
        abandoned = {**dict.fromkeys(side, SIDE_REQUEST), **abandoned}
    kept = set(tree.nodes) - {node for node, why in abandoned.items() if not include_abandoned or why == PLACEHOLDER}
    owner: dict[str, str] = {}  # node -> the sample that trains it
    drafts: list[tuple[Node, list[Node]]] = []
    for leaf in tree.in_order():
        if leaf.id not in kept or any(child.id in kept for child in tree.children.get(leaf.id, ())):
            continue
        path = [node for node in tree.path(leaf) if max_tokens is None or node.length <= max_tokens]
        fresh = [node for node in path if node.id not in owner]
        if fresh:
            owner.update((node.id, leaf.id) for node in fresh)
            drafts.append((leaf, path))
    return owner, drafts, abandoned


def _coverage(tree: Tree, owner: Mapping[str, str], abandoned: Mapping[str, str]) -> Coverage:
    sampled = trained = 0
    untrained: list[Untrained] = []
    for node in tree.in_order():
        count = len(node.sampled_ids)
        sampled += count
        if node.id in owner:
            trained += count
        else:
            untrained.append(Untrained(node=node.id, tokens=count, why=abandoned.get(node.id, "max_tokens")))
    return Coverage(
        sampled=sampled,
        trained=trained,
        untrained=tuple(untrained),
        pinned_turns=sum(bool(node.replaced) for node in tree.nodes.values()),
        rejoined_turns=sum(bool(node.copies) for node in tree.nodes.values()),
    )


def _build_sample(
    tree: Tree, record: SessionRecord, leaf: Node, path: list[Node], mine: Mapping[str, str], metadata: JsonMapping
) -> Sample:
    parts: list[TokenIds] = []
    length = 0
    loss_mask: list[int] = []
    logprobs: list[float | None] = []
    spans: list[Span] = []
    for turn, node in enumerate(path):
        spans += _spans(node, turn, length, mine.get(node.id))
        given, sampled = len(node.given_ids), len(node.sampled_ids)
        parts += (node.given_ids, node.sampled_ids)
        length += given + sampled
        loss_mask += [0] * given + [int(node.id in mine)] * sampled
        logprobs += [None] * given
        logprobs += node.logprobs.tolist()
    end, rewards = path[-1], record.rewards
    of_leaves = (rewards.leaves[node.id] for node in reversed(path) if node.id in rewards.leaves)
    return Sample(
        sample_id=f"{record.id}-{leaf.id}",
        session_id=record.id,
        group=record.group,
        token_ids=TokenIds.concat(parts),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        spans=tuple(spans),
        reward=next(of_leaves, rewards.session),
        finish_reason=end.finish.value,
        metadata={**record.metadata, **rewards.metadata, **metadata},
        certificate=Certificate(chain=format_digest(end.chain), template=tree.template, tokenizer=tree.tokenizer),
        routed_experts=_join_routing(path),
        sampling_mask=_join_masks(path),
        images=tuple(run for node in path for run in node.shifted_images),
        top_logprobs=_join_tops(path),
    )


def _spans(node: Node, turn: int, start: int, mine: str | None) -> Iterator[Span]:
    copies = {begin for begin, _, _ in node.copies}
    for begin, end, role in _given_roles(node):
        yield Span(
            start=start + begin, end=start + end, kind="given", role=role, turn=turn, policy_version=None,
            trainable=False, why="sampled_elsewhere" if begin in copies else "prompt",
        )  # fmt: skip
    at = start + len(node.given_ids)
    unversioned = VersionSpan(start=0, end=len(node.sampled_ids), version=UNVERSIONED)
    for span in node.versions or (unversioned,):
        if span.end > span.start:
            yield Span(
                start=at + span.start, end=at + span.end, kind="sampled", role="assistant", turn=turn,
                policy_version=span.version, trainable=mine is not None, why=mine or "trained_elsewhere",
            )  # fmt: skip


def _own_metadata(record: SessionRecord, leaf: Node, path: list[Node], coverage: Coverage) -> JsonObject:
    own: JsonObject = {"version": 1, "leaf": leaf.id, "nodes": node_rows(path), "coverage": coverage_to_json(coverage)}
    if record.pin:
        replaced = [turn for turn, node in enumerate(path) if node.replaced]
        own["pin"] = {"prompts": list(record.pin), "replaced_in_turns": replaced}
    if path[-1] is not leaf:
        own["truncated"] = "max_tokens"
    attempts = [
        {
            "turn": turn,
            "status": attempt.status.value,
            "start": node.prompt_length + attempt.start,
            "end": node.prompt_length + attempt.end,
        }
        for turn, node in enumerate(path)
        for attempt in node.attempts
    ]
    if attempts:
        own["malformed_calls"] = attempts
    return own


def coverage_to_json(coverage: Coverage) -> JsonObject:
    return {
        "sampled": coverage.sampled,
        "trained": coverage.trained,
        "ratio": coverage.ratio,
        "untrained": [{"node": item.node, "tokens": item.tokens, "why": item.why} for item in coverage.untrained],
        **({"pinned_turns": coverage.pinned_turns} if coverage.pinned_turns else {}),
        **({"rejoined_turns": coverage.rejoined_turns} if coverage.rejoined_turns else {}),
    }


def _given_roles(node: Node) -> Iterator[tuple[int, int, str]]:
    at, length = 0, len(node.given_ids)
    if length and not node.given_spans:
        roles = {"assistant" if isinstance(item, ServedRef) else str(item.get("role")) for item in node.given}
        yield 0, length, roles.pop() if len(roles) == 1 else "prompt"
        return
    for span in node.given_spans:
        if at < span.start:
            yield at, span.start, "structure"
        if max(span.start, at) < span.end:
            yield max(span.start, at), span.end, span.role
        at = max(at, span.end)
    if at < length:
        yield at, length, "structure"


def _join_routing(path: Sequence[Node]) -> RoutedExperts | None:
    """All positions but the last; None unless every turn has routing."""
    parts = [node.routed_experts for node in path if node.routed_experts is not None]
    if not parts or len(parts) < len(path):
        return None
    _, layers, top_k = parts[0].shape
    first, last = (
        RoutedExperts(shape=(0, layers, top_k), data=b"", start=at, weights=b"")
        for at in (0, max(0, path[-1].length - 1))
    )
    try:
        return join_routing([first, *parts, last])
    except TokenContractError as error:
        raise TokenContractError(f"on the path to node {path[-1].id}: {error}") from error


def _join_masks(path: Sequence[Node]) -> SamplingMask | None:
    """None if no turn has one, or a turn's filters are on and its kept ids unknown."""
    if all(node.sampling_mask is None for node in path) or any(
        node.sampling_mask is None and node.sampling.truncates for node in path
    ):
        return None
    parts: list[SamplingMask] = []
    for node in path:
        parts += [empty_rows(len(node.given_ids)), node.sampling_mask or empty_rows(len(node.sampled_ids))]
    return join_masks(parts)


def _join_tops(path: Sequence[Node]) -> TopLogprobs | None:
    if all(node.top_logprobs is None for node in path):
        return None
    tops: list[tuple[Mapping[int, float], int]] = []
    for node in path:
        own, count = node.top_logprobs or (), len(node.sampled_ids)
        tops += [({}, 0)] * len(node.given_ids)
        tops += [(own[i] if len(own) == count else {}, node.sampling.top_logprobs) for i in range(count)]
    return TopLogprobs.from_tops(tops)


def find_left_out(tree: Tree, rewarded: Collection[str] = ()) -> dict[str, str]:
    """Node id -> reason, for every abandoned node that training leaves out.

    * `retried`: the same turn was asked again after this answer was complete, and this answer was never continued.
    * `rolled_back`: it had been continued, then the agent went back and asked the same turn again.
    * `not_chosen`: another answer to the same turn was continued (n > 1, concurrent requests, or an earlier answer).
    * `disconnected`, `engine_failed`, `deleted`, `aborted`: the client never got the whole answer, and nothing follows.
    * `placeholder`: the model sampled a token that only the place of an image may have. Never trained.

    Descendants are abandoned for the same reason, unless a reward on their leaf keeps the path."""
    rewarded_paths = {node.id for leaf in rewarded if leaf in tree.nodes for node in tree.path(tree.nodes[leaf])}
    newest = tree.last_activity()
    reasons: dict[str, str] = {}
    for answers in tree.answers.values():
        if len(answers) > 1:
            reasons |= {
                node_id: why for node_id, why in _losers(tree, answers, newest).items() if node_id not in rewarded_paths
            }
    for node in tree.in_order():  # parents come before children
        given_up = [reasons[before] for before in tree.predecessors(node) if before in reasons]
        if given_up and node.id not in rewarded_paths and node.id not in reasons:
            reasons[node.id] = given_up[0]
    for node in reversed(tree.in_order()):
        alive = any(child.id not in reasons for child in tree.followers.get(node.id, ()))
        if not alive and node.id not in reasons and node.id not in rewarded_paths and (why := _unserved_reason(node)):
            reasons[node.id] = why
    for node in tree.in_order():  # no reward helps: a model cannot compute the place of an image that is none
        if node.outcome == PLACEHOLDER or any(reasons.get(each) == PLACEHOLDER for each in tree.predecessors(node)):
            reasons[node.id] = PLACEHOLDER
    return reasons


def _unserved_reason(node: Node) -> str | None:
    if node.outcome != "served":
        return node.outcome
    return "aborted" if node.finish is Finish.ABORT else None


def _losers(tree: Tree, answers: list[Node], newest: dict[str, int]) -> dict[str, str]:
    """All but the answer with the latest activity and the parallel ones that were continued."""
    served = [node for node in answers if _unserved_reason(node) is None or tree.followers.get(node.id)]
    if not served:
        return {}
    survivor = max(served, key=lambda node: newest[node.id])
    any_followed = any(tree.followers.get(node.id) for node in served)
    losers: dict[str, str] = {}
    for node in answers:
        followed = bool(tree.followers.get(node.id))
        if node is survivor or (not followed and _unserved_reason(node)):
            continue
        if any(later.started > newest[node.id] for later in served):
            losers[node.id] = "rolled_back" if followed else "retried"
        elif any(later.started > node.seq for later in served) and not followed:
            losers[node.id] = "retried"
        elif any_followed and not followed:
            losers[node.id] = "not_chosen"
    return losers
