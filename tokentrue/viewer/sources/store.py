"""Sessions from the durable store: with their messages, abandoned branches and what the engine said beside each token.

Summaries of a session are computed once and kept until the session changes; open sessions are looked at again, within a
time budget per request, so that a store with thousands of sessions answers quickly and catches up over the next
requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tokentrue.errors import SessionNotFound
from tokentrue.json_types import JsonMapping
from tokentrue.samples import assemble
from tokentrue.sessions import Journal, Node, SessionRecord, Tree
from tokentrue.sessions.description import describe_node
from tokentrue.sessions.store import load_tree
from tokentrue.types import Coverage, Sample
from tokentrue.viewer.records import Branch, SessionSummary, SessionView, SourceKind, TurnMessages, summarise, view_node

BUDGET_S: Mapping[SourceKind, float] = {"store": 0.5, "gateway": 0.1}  # a gateway has other work to do
NOTHING = Coverage(sampled=0, trained=0)


class StoreSource:
    """`kind` is "gateway" where the journal belongs to a running gateway; its owner closes it then."""

    live = True

    def __init__(self, journal: Journal, *, name: str, kind: SourceKind = "store") -> None:
        self._journal, self.name = journal, name
        self.kind: SourceKind = kind
        self._summaries: dict[
            str, tuple[float, SessionRecord, SessionSummary]
        ] = {}  # when it was computed, and from what

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        total = self._journal.count()
        records = self._journal.sessions(offset=offset, limit=limit)
        self._catch_up(records)
        return [
            self._summaries[record.id][2] if record.id in self._summaries else _summary(record) for record in records
        ], total

    def _catch_up(self, records: Sequence[SessionRecord]) -> None:
        """Summarises what is new or may have changed, the longest waiting first, until the budget is spent."""
        deadline = time.monotonic() + BUDGET_S[self.kind]
        stale = [record for record in records if not self._is_settled(record)]
        for record in sorted(
            stale, key=lambda record: self._summaries[record.id][0] if record.id in self._summaries else 0.0
        ):
            with suppress(SessionNotFound):  # it was purged since it was listed
                self._summaries[record.id] = (time.monotonic(), record, self._view(record.id).summary)
            if time.monotonic() > deadline:
                return

    def _is_settled(self, record: SessionRecord) -> bool:
        return record.state == "ended" and record.id in self._summaries and self._summaries[record.id][1] == record

    def load_session(self, session_id: str) -> SessionView:
        return self._view(session_id)

    def load_group(self, group: str) -> list[SessionView]:
        found: list[SessionView] = []
        for record in self._journal.all_sessions(group=group):
            with suppress(SessionNotFound):
                found.append(self._view(record.id))
        return found

    def _view(self, session_id: str) -> SessionView:
        record, tree = load_tree(self._journal, session_id)
        return view_from_tree(record, tree)

    def close(self) -> None:
        if self.kind == "store":
            self._journal.close()


def _summary(
    record: SessionRecord,
    nodes: Sequence[JsonMapping] = (),
    coverage: Coverage = NOTHING,
    rewards: Sequence[float | None] = (),
) -> SessionSummary:
    """Of the record alone where its tree is not read yet."""
    return summarise(
        nodes,
        coverage,
        session_id=record.id,
        group=record.group,
        state=record.state,
        created=record.created,
        rewards=rewards,
        session_reward=record.rewards.session,
    )


def view_from_tree(record: SessionRecord, tree: Tree) -> SessionView:
    made = assemble(tree, record)
    reasons = {item.node: item.why for item in made.coverage.untrained}
    branches = [_branch(tree, sample, None) for sample in made.samples]
    if reasons:
        trained_leaves = {branch.leaf for branch in branches}
        for sample in assemble(tree, record, include_abandoned=True).samples:
            leaf = _leaf(sample)
            if leaf not in trained_leaves:
                branches.append(
                    _branch(tree, _mark_untrained(sample, tree, reasons), reasons.get(leaf, "trained_elsewhere"))
                )
    nodes = tuple(view_node(describe_node(node), reasons) for node in tree.in_order())
    metadata = {**record.metadata, **record.rewards.metadata}
    summary = _summary(record, nodes, made.coverage, [sample.reward for sample in made.samples])
    return SessionView(summary=summary, nodes=nodes, branches=tuple(branches), metadata=metadata)


def _leaf(sample: Sample) -> str:
    return sample.metadata["tokentrue"]["leaf"]


def _mark_untrained(sample: Sample, tree: Tree, reasons: Mapping[str, str]) -> Sample:
    """An abandoned branch as it is: nothing of it is trained, and its sampled spans say why."""
    path = tree.path(tree.get(_leaf(sample)))
    spans = tuple(
        replace(span, trainable=False, why=reasons.get(path[span.turn].id, "trained_elsewhere"))
        if span.kind == "sampled"
        else span
        for span in sample.spans
    )
    return replace(sample, spans=spans, loss_mask=[0] * len(sample.token_ids))


def _branch(tree: Tree, sample: Sample, abandoned: str | None) -> Branch:
    path = [node for node in tree.path(tree.get(_leaf(sample))) if node.length <= len(sample.token_ids)]
    inserted: list[tuple[int, int]] = []
    entropy: list[float | None] = []
    for node in path:
        start = node.prompt_length - len(node.given_ids)
        inserted += [(start + span.start, start + span.end) for span in node.given_spans if span.message is None]
        entropy += [None] * len(node.given_ids)
        entropy += _entropies(node)
    turns = tuple(TurnMessages(given=tuple(tree.given_messages(node)), served=node.served) for node in path)
    tools = next((node.tools for node in path if node.parent is None), None)
    return Branch(
        sample=sample,
        leaf=_leaf(sample),
        turns=turns,
        tools=tools,
        template_kwargs=path[-1].template_kwargs,
        inserted=tuple(inserted),
        entropy=entropy if any(value is not None for value in entropy) else None,
        projection=path[-1].projection,
        abandoned=abandoned,
    )


def _entropies(node: Node) -> Sequence[float | None]:
    """Of the alternatives that the engine reported for each token, in nats: a lower bound of the whole
    distribution's."""
    tops = node.top_logprobs
    if not tops:
        return [None] * len(node.sampled_ids)
    return [-sum(math.exp(value) * value for value in top.values()) if len(top) > 1 else None for top in tops]
