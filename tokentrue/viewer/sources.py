"""The viewer's sources: a samples file or list, without messages and abandoned branches; a durable store, with both."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from tokentrue.errors import SessionNotFound
from tokentrue.json_types import JsonObject
from tokentrue.samples import assemble, read_samples
from tokentrue.samples.images import ImageFolder
from tokentrue.samples.recorded_turns import TurnRow, read_record
from tokentrue.sessions import Journal, SessionRecord, Tree
from tokentrue.sessions.description import describe_node
from tokentrue.sessions.journal.journal import load_tree
from tokentrue.types import Coverage, Sample, Untrained
from tokentrue.viewer.blocks import readable_message
from tokentrue.viewer.records import (
    Branch,
    RecordSource,
    SessionSummary,
    SessionView,
    SourceKind,
    TurnMessages,
    summarise,
)

STORE_S, GATEWAY_S = 0.5, 0.1  # for summaries in one request; a gateway has other work to do
TASK_CHARS = 120
ACTIVE_S = 60.0


class SessionList(RecordSource):
    live = False

    def __init__(self, views: Iterable[SessionView], *, name: str, kind: SourceKind = "file") -> None:
        self.name, self.kind = name, kind
        # its group, and what returns the view
        self._sessions: dict[str, tuple[str | None, Callable[[], SessionView]]] = {
            view.summary.session_id: (view.summary.group, lambda view=view: view) for view in views
        }

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        page = islice(self._sessions.values(), offset, offset + limit)
        return [load().summary for _, load in page], len(self._sessions)

    def load_session(self, session_id: str) -> SessionView:
        if session_id not in self._sessions:
            raise SessionNotFound(f"no session {session_id!r} in {self.name}")
        return self._sessions[session_id][1]()

    def load_group(self, group: str) -> list[SessionView]:
        return [load() for known, load in self._sessions.values() if known == group]


class SampleList(SessionList):
    def __init__(self, samples: Iterable[Sample], *, name: str) -> None:
        super().__init__((), name=name)
        sessions: dict[str, list[Sample]] = {}
        for sample in samples:
            read_record(sample)  # refuse a malformed one now, not when its page is opened
            sessions.setdefault(sample.session_id, []).append(sample)
        for session_id, rows in sessions.items():
            self._sessions[session_id] = (rows[0].group, partial(view_from_samples, rows))


class FileSource(SampleList):
    """A samples file, its last sessions first. It is read once: the store shows how a run grows."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(read_samples(path), name=Path(path).name)
        self._sessions = dict(reversed(self._sessions.items()))
        self._images = ImageFolder(path)

    def load_image(self, session_id: str, sha256: str) -> bytes:
        return self._images.read(sha256)[0]


def view_from_samples(samples: Sequence[Sample]) -> SessionView:
    first, nodes = samples[0], tuple(nodes_from_samples(samples))
    head = SessionSummary(session_id=first.session_id, group=first.group, state="exported", created=None, reward=None)
    coverage = read_record(first).coverage or _count_coverage(samples)
    summary = summarise(head, nodes, coverage, [sample.reward for sample in samples])
    metadata = {key: value for key, value in first.metadata.items() if key != "tokentrue"}
    branches: list[Branch] = []
    for sample in samples:
        record = read_record(sample)
        projection = record.nodes[-1].projection if record.nodes else None
        branches.append(Branch(sample=sample, leaf=record.leaf or sample.sample_id, projection=projection or ""))
    return SessionView(summary=summary, nodes=nodes, branches=tuple(branches), metadata=metadata)


def _count_coverage(samples: Sequence[Sample]) -> Coverage:
    sampled = sum(value is not None for sample in samples for value in sample.rollout_logprobs)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    rest = (Untrained(node="", tokens=sampled - trained, why="masked"),) if sampled > trained else ()
    return Coverage(sampled=sampled, trained=trained, untrained=rest)


def nodes_from_samples(samples: Sequence[Sample]) -> list[JsonObject]:
    found: dict[str | None, JsonObject] = {}
    for sample in samples:
        parent: str | None = None
        for row in _node_rows(sample):
            found.setdefault(
                row.node,
                {
                    "id": row.node,
                    "why": row.why,
                    "projection": row.projection,
                    "given_tokens": row.given,
                    "sampled_tokens": row.sampled,
                    "policy_versions": [version for *_, version in row.versions],
                    "parent": parent,
                },
            )
            parent = row.node
        if parent is not None:
            found[parent]["finish"] = sample.finish_reason
    return list(found.values())


def _node_rows(sample: Sample) -> list[TurnRow]:
    rows = read_record(sample).nodes
    if rows and all(row.node is not None for row in rows):  # samples of other programs may hold less
        return rows
    turns: dict[int, TurnRow] = {}
    for span in sample.spans:
        row = turns.setdefault(span.turn, TurnRow(node=f"{sample.sample_id}:{span.turn}", given=0, sampled=0))
        size = span.end - span.start
        if span.kind == "given":
            row.given += size
        else:
            row.sampled += size
        if span.policy_version is not None and span.policy_version not in [version for *_, version in row.versions]:
            row.versions.append((span.start, span.end, span.policy_version))
    return [turns[turn] for turn in sorted(turns)]


class SummaryCache:
    """A summary is kept until its session changes, and refreshed within a time budget per request: a store with
    thousands of sessions catches up over the next requests."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._known: dict[str, tuple[float, object, SessionSummary]] = {}  # when it was computed, and from what

    def read(
        self, listed: Sequence[tuple[SessionSummary, object]], load: Callable[[str], SessionSummary]
    ) -> list[SessionSummary]:
        known, deadline = self._known, time.monotonic() + self._budget_s
        stale: list[tuple[float, str, object]] = []
        for head, stamp in listed:
            computed, before, _ = known.get(head.session_id, (0.0, None, head))
            if head.state != "ended" or before != stamp:
                stale.append((computed, head.session_id, stamp))
        for _, name, stamp in sorted(stale, key=lambda item: item[0]):  # the longest waiting first
            with suppress(SessionNotFound):  # purged since it was listed
                known[name] = (time.monotonic(), stamp, load(name))
            if time.monotonic() > deadline:
                break
        return [known[head.session_id][2] if head.session_id in known else head for head, _ in listed]


class StoreSource(RecordSource):
    """`kind`: "gateway" if the journal belongs to a running gateway, which closes it."""

    def __init__(self, journal: Journal, *, name: str, kind: SourceKind = "store") -> None:
        self.name, self.kind, self._journal = name, kind, journal
        self._summaries = SummaryCache(STORE_S if kind == "store" else GATEWAY_S)

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        total, records = self._journal.count(), self._journal.sessions(offset=offset, limit=limit)
        heads = [(summary_head(record), record) for record in records]
        return self._summaries.read(heads, lambda name: self.load_session(name).summary), total

    def is_active(self) -> bool:
        """Whether it is a gateway's, was written within a minute, or is no file (PostgreSQL)."""
        path = self._journal.target.removeprefix("sqlite:")
        written = [each.stat().st_mtime for each in (Path(path), Path(f"{path}-wal")) if each.is_file()]
        return self.kind == "gateway" or not written or time.time() - max(written) < ACTIVE_S

    def load_session(self, session_id: str) -> SessionView:
        return view_from_tree(*load_tree(self._journal, session_id))

    def load_group(self, group: str) -> list[SessionView]:
        found: list[SessionView] = []
        for record in self._journal.all_sessions(group=group):
            with suppress(SessionNotFound):
                found.append(self.load_session(record.id))
        return found

    def load_image(self, session_id: str, sha256: str) -> bytes:
        return self._journal.read_image(session_id, sha256)[0]

    def close(self) -> None:
        if self.kind == "store":
            self._journal.close()


def summary_head(record: SessionRecord) -> SessionSummary:
    return SessionSummary(
        session_id=record.id,
        group=record.group,
        state=record.state,
        created=record.created,
        reward=record.rewards.session,
    )


def view_from_tree(record: SessionRecord, tree: Tree) -> SessionView:
    made = assemble(tree, record)
    reasons = {item.node: item.why for item in made.coverage.untrained}
    branches = [branch_from_tree(tree, sample, None) for sample in made.samples]
    if reasons:
        trained_leaves = {branch.leaf for branch in branches}
        for sample in assemble(tree, record, include_abandoned=True).samples:
            leaf = sample.metadata["tokentrue"]["leaf"]
            if leaf in trained_leaves:
                continue
            path = tree.path(tree.get(leaf))
            spans = tuple(
                replace(span, trainable=False, why=reasons.get(path[span.turn].id, "trained_elsewhere"))
                if span.kind == "sampled"
                else span
                for span in sample.spans
            )
            untrained = replace(sample, spans=spans, loss_mask=[0] * len(sample.token_ids))
            branches.append(branch_from_tree(tree, untrained, reasons.get(leaf, "trained_elsewhere")))
    nodes = tuple(
        {
            **describe_node(node),
            "policy_versions": [span.version for span in node.versions],
            "malformed_calls": [attempt.status.value for attempt in node.attempts],
            "untrained": reasons.get(node.id),
        }
        for node in tree.in_order()
    )
    head = replace(summary_head(record), task=first_question(tree))
    summary = summarise(head, nodes, made.coverage, [sample.reward for sample in made.samples])
    metadata = {**record.metadata, **record.rewards.metadata}
    return SessionView(summary=summary, nodes=nodes, branches=tuple(branches), metadata=metadata)


def first_question(tree: Tree) -> str:
    for message in (message for node in tree.in_order()[:1] for message in tree.given_messages(node)):
        if message.get("role") == "user":
            return readable_message(message)["content"][:TASK_CHARS]
    return ""


def branch_from_tree(tree: Tree, sample: Sample, abandoned: str | None) -> Branch:
    leaf = sample.metadata["tokentrue"]["leaf"]
    path = [node for node in tree.path(tree.get(leaf)) if node.length <= len(sample.token_ids)]
    inserted: list[tuple[int, int]] = []
    entropy: list[float | None] = []
    for node in path:
        start = node.prompt_length - len(node.given_ids)
        inserted += [(start + span.start, start + span.end) for span in node.given_spans if span.message is None]
        entropy += [None] * len(node.given_ids)
        # in nats, over the reported alternatives: a lower bound
        entropy += [
            -sum(math.exp(value) * value for value in top.values()) if len(top) > 1 else None
            for top in node.top_logprobs or [dict[int, float]()] * len(node.sampled_ids)
        ]
    return Branch(
        sample=sample,
        leaf=leaf,
        turns=tuple(TurnMessages(given=tuple(tree.given_messages(node)), served=node.served) for node in path),
        tools=next((node.tools for node in path if node.parent is None), None),
        template_kwargs=path[-1].template_kwargs,
        inserted=tuple(inserted),
        entropy=entropy if any(value is not None for value in entropy) else None,
        projection=path[-1].projection,
        abandoned=abandoned,
    )
