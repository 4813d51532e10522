"""The record becomes training samples: one contiguous sample per surviving leaf, in time linear in its tokens.

Invariants, checked while it is built: every node's certificate link holds; each sampled token is trainable in exactly
one sample or listed in the coverage with its reason; log-probabilities are the engine's own, and None exactly where
nothing was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokentrue.errors import InputError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.replay import empty_rows, join_masks, join_routing
from tokentrue.samples.seal import node_rows, seal
from tokentrue.samples.survivors import find_left_out
from tokentrue.sessions.certificate import format_digest
from tokentrue.sessions.journal import SessionRecord
from tokentrue.sessions.tree import Node, ServedRef, Tree
from tokentrue.types import UNVERSIONED, Certificate, Coverage, RoutedExperts, Sample, SamplingMask, Span, Untrained


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """All samples of a session, and the account of every token that was sampled in it."""

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
    """`max_tokens` cuts a sample behind the last sampled span that fits. `include_abandoned` trains what was given up
    as well."""
    _check_links(tree)
    owner, drafts, abandoned = _drafts(tree, record, max_tokens, include_abandoned)
    coverage = _coverage(tree, owner, abandoned)
    build = _Builder(tree, record, abandoned, coverage, dict(metadata or {}))
    samples = [
        build.sample(leaf, path, {node.id for node in path if owner[node.id] == leaf.id}) for leaf, path in drafts
    ]
    return Assembly(samples=samples, coverage=coverage)


def coverage_of(
    tree: Tree, record: SessionRecord, *, max_tokens: int | None = None, include_abandoned: bool = False
) -> Coverage:
    """The account alone, in time linear in the nodes; certificates are checked where samples are built."""
    owner, _, abandoned = _drafts(tree, record, max_tokens, include_abandoned)
    return _coverage(tree, owner, abandoned)


def _drafts(
    tree: Tree, record: SessionRecord, max_tokens: int | None, include_abandoned: bool
) -> tuple[dict[str, str], list[tuple[Node, list[Node]]], dict[str, str]]:
    """Which sample trains a node, the leaf and path of each sample, and what was given up."""
    if max_tokens is not None and max_tokens <= 0:
        raise InputError(f"max_tokens must be positive, got {max_tokens}")
    abandoned = find_left_out(tree, record.rewards.leaves)
    kept = set(tree.nodes) if include_abandoned else set(tree.nodes) - set(abandoned)
    owner: dict[str, str] = {}  # node -> the sample that trains it
    drafts: list[tuple[Node, list[Node]]] = []
    for leaf in _leaves(tree, kept):
        path = _cut_to_fit(tree.path(leaf), max_tokens)
        fresh = [node for node in path if node.id not in owner]
        if fresh:
            owner.update((node.id, leaf.id) for node in fresh)
            drafts.append((leaf, path))
    return owner, drafts, abandoned


def _check_links(tree: Tree) -> None:
    for node in tree.nodes.values():
        if tree.link(node) != node.chain:
            raise TokenContractError(f"node {node.id}: the record does not fit its certificate")


def _leaves(tree: Tree, kept: set[str]) -> list[Node]:
    """Kept nodes without a kept child, first committed first."""
    return [
        node
        for node in tree.in_order()
        if node.id in kept and not any(child.id in kept for child in tree.children.get(node.id, ()))
    ]


def _cut_to_fit(path: list[Node], max_tokens: int | None) -> list[Node]:
    return path if max_tokens is None else [node for node in path if node.length <= max_tokens]


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


class _Builder:
    """Builds samples of one session."""

    def __init__(
        self,
        tree: Tree,
        record: SessionRecord,
        abandoned: Mapping[str, str],
        coverage: Coverage,
        metadata: JsonObject,
    ) -> None:
        self.tree, self.record, self.abandoned, self.coverage, self.metadata = (
            tree,
            record,
            abandoned,
            coverage,
            metadata,
        )

    def sample(self, leaf: Node, path: list[Node], mine: set[str]) -> Sample:
        parts: list[TokenIds] = []
        length = 0
        loss_mask: list[int] = []
        logprobs: list[float | None] = []
        spans: list[Span] = []
        for turn, node in enumerate(path):
            spans += self._spans(node, turn, length, node.id in mine)
            given, sampled = len(node.given_ids), len(node.sampled_ids)
            parts += (node.given_ids, node.sampled_ids)
            length += given + sampled
            loss_mask += [0] * given
            loss_mask += [1 if node.id in mine else 0] * sampled
            logprobs += [None] * given
            logprobs += node.logprobs.tolist()
        end = path[-1]
        certificate = Certificate(
            chain=format_digest(end.chain), template=self.tree.template, tokenizer=self.tree.tokenizer
        )
        sample = Sample(
            sample_id=f"{self.record.id}-{leaf.id}",
            session_id=self.record.id,
            group=self.record.group,
            token_ids=TokenIds.concat(parts),
            loss_mask=loss_mask,
            rollout_logprobs=logprobs,
            spans=tuple(spans),
            reward=reward_of_path([node.id for node in path], self.record.rewards.leaves, self.record.rewards.session),
            finish_reason=end.finish.value,
            metadata=self._metadata(leaf, path),
            certificate=certificate,
            routed_experts=_join_routing(path),
            sampling_mask=_join_masks(path),
        )
        own = dict(sample.metadata["tokentrue"])
        return replace(sample, metadata={**sample.metadata, "tokentrue": {**own, "seal": seal(sample)}})

    def _spans(self, node: Node, turn: int, start: int, mine: bool) -> Iterator[Span]:
        copies = {begin for begin, _, _ in node.copies}
        for begin, end, role in _given_roles(node):
            why = "sampled_elsewhere" if begin in copies else "prompt"
            yield _span(start + begin, start + end, "given", role, turn, None, False, why)
        at = start + len(node.given_ids)
        why = "sampled" if mine else "trained_elsewhere"
        if mine and node.id in self.abandoned:
            why = f"asked_for:{self.abandoned[node.id]}"
        versions = [(span.start, span.end, span.version) for span in node.versions] or [
            (0, len(node.sampled_ids), UNVERSIONED)
        ]
        for begin, end, version in versions:
            if end > begin:
                yield _span(at + begin, at + end, "sampled", "assistant", turn, version, mine, why)

    def _metadata(self, leaf: Node, path: list[Node]) -> JsonObject:
        own: JsonObject = {
            "version": 1,
            "leaf": leaf.id,
            "nodes": node_rows(path),
            "coverage": coverage_to_json(self.coverage),
        }
        if self.record.pin:
            own["pin"] = {
                "prompts": list(self.record.pin),
                "replaced_in_turns": [turn for turn, node in enumerate(path) if node.replaced],
            }
        if path[-1] is not leaf:
            own["truncated"] = "max_tokens"
        if attempts := _attempts(path):
            own["malformed_calls"] = attempts
        return {**self.record.metadata, **self.record.rewards.metadata, **self.metadata, "tokentrue": own}


def reward_of_path(path: Sequence[str], leaves: Mapping[str, float], session: float | None) -> float | None:
    """The deepest reward among a path's nodes, else the session's."""
    return next((leaves[node] for node in reversed(path) if node in leaves), session)


def coverage_to_json(coverage: Coverage) -> JsonObject:
    return {
        "sampled": coverage.sampled,
        "trained": coverage.trained,
        "ratio": coverage.ratio,
        "untrained": [{"node": item.node, "tokens": item.tokens, "why": item.why} for item in coverage.untrained],
        **({"pinned_turns": coverage.pinned_turns} if coverage.pinned_turns else {}),
        **({"rejoined_turns": coverage.rejoined_turns} if coverage.rejoined_turns else {}),
    }


def _attempts(path: Sequence[Node]) -> list[JsonObject]:
    """Tool calls that did not parse, by their place in the sample."""
    return [
        {
            "turn": turn,
            "status": attempt.status.value,
            "start": node.prompt_length + attempt.start,
            "end": node.prompt_length + attempt.end,
        }
        for turn, node in enumerate(path)
        for attempt in node.attempts
    ]


def _span(
    start: int, end: int, kind: Any, role: str, turn: int, version: int | None, trainable: bool, why: str
) -> Span:
    return Span(
        start=start, end=end, kind=kind, role=role, turn=turn, policy_version=version, trainable=trainable, why=why
    )


def _given_roles(node: Node) -> Iterator[tuple[int, int, str]]:
    """The given ids of a node as spans without gap: those of the renderer, and `structure` between them."""
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
    """Routing of all positions but the last; present only where every turn has it."""
    parts = [node.routed_experts for node in path]
    whole = [part for part in parts if part is not None]
    if not parts or len(whole) < len(parts):
        return None
    _, layers, top_k = whole[0].shape
    ends = [
        RoutedExperts(shape=(0, layers, top_k), data=b"", start=at, weights=b"")
        for at in (0, max(0, path[-1].length - 1))
    ]
    try:
        return join_routing([ends[0], *whole, ends[1]])
    except TokenContractError as error:
        raise TokenContractError(f"on the path to node {path[-1].id}: {error}") from error


def _join_masks(path: Sequence[Node]) -> SamplingMask | None:
    """A row for each token; None where no turn has one, or where it is not known what a turn's filters kept."""
    if all(node.sampling_mask is None for node in path) or any(
        node.sampling_mask is None and node.sampling.truncates for node in path
    ):
        return None
    parts: list[SamplingMask] = []
    for node in path:
        parts += [empty_rows(len(node.given_ids)), node.sampling_mask or empty_rows(len(node.sampled_ids))]
    return join_masks(parts)
