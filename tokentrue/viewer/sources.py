"""The viewer's sources: a samples file or list, a durable store, a running gateway.

A samples file has neither messages nor abandoned branches; a store has both, and what the engine reported for each
token; a gateway is read over its public HTTP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from tokentrue.errors import ConfigError, GatewayError, SessionNotFound
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.samples import assemble, read_samples
from tokentrue.samples.assemble import reward_of_path
from tokentrue.samples.images import ImageFolder
from tokentrue.samples.recorded_turns import read_record
from tokentrue.samples.shape import decode
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
    view_node,
)

STORE_S, OWN_GATEWAY_S, GATEWAY_S = 0.5, 0.1, 1.0  # for summaries in one request; a gateway has other work to do
TASK_CHARS = 120
ACTIVE_S = 60.0
TIMEOUT_S = 60.0  # of one call to a gateway
GATEWAY_PAGE = 200


class SessionList(RecordSource):
    """Sessions that are loaded already."""

    live = False

    def __init__(self, views: Iterable[SessionView], *, name: str, kind: SourceKind = "file") -> None:
        self.name, self.kind = name, kind
        # its group, and what returns the view
        self._sessions: dict[str, tuple[str | None, Callable[[], SessionView]]] = {
            view.summary.session_id: (view.summary.group, lambda view=view: view) for view in views
        }

    def _refresh(self) -> None:
        pass

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        self._refresh()
        page = islice(self._sessions.values(), offset, offset + limit)
        return [load().summary for _, load in page], len(self._sessions)

    def load_session(self, session_id: str) -> SessionView:
        self._refresh()
        if session_id not in self._sessions:
            raise SessionNotFound(f"no session {session_id!r} in {self.name}")
        return self._sessions[session_id][1]()

    def load_group(self, group: str) -> list[SessionView]:
        self._refresh()
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
    """A samples file in any format, its last sessions first; reloaded when it changes."""

    live = True

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._stamp = self._stat()
        self._load(self._path.name)

    def _load(self, name: str) -> None:
        super().__init__(read_samples(self._path), name=name)
        self._sessions = dict(reversed(self._sessions.items()))

    def is_active(self) -> bool:
        return is_recent(self._path)

    def load_image(self, session_id: str, sha256: str) -> bytes:
        return ImageFolder(self._path).read(sha256)[0]

    def _stat(self) -> tuple[int, int] | None:
        if not self._path.is_file():
            return None
        facts = self._path.stat()
        return facts.st_mtime_ns, facts.st_size

    def _refresh(self) -> None:
        stamp = self._stat()
        if stamp is not None and stamp != self._stamp:
            self._load(self.name)
            self._stamp = stamp


def is_recent(*paths: Path) -> bool:
    """Whether one of the files was written within a minute; True if there is none, as for PostgreSQL."""
    there = [path.stat().st_mtime for path in paths if path.is_file()]
    return not there or time.time() - max(there) < ACTIVE_S


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
    """For samples without coverage: a sampled token is one with a log-probability."""
    sampled = sum(value is not None for sample in samples for value in sample.rollout_logprobs)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    rest = (Untrained(node="", tokens=sampled - trained, why="masked"),) if sampled > trained else ()
    return Coverage(sampled=sampled, trained=trained, untrained=rest)


def nodes_from_samples(samples: Sequence[Sample]) -> list[JsonObject]:
    found: dict[str, JsonObject] = {}
    for sample in samples:
        parent: str | None = None
        for row in _node_rows(sample):
            found.setdefault(row["id"], {**row, "parent": parent})
            parent = row["id"]
        if parent is not None:
            found[parent]["finish"] = sample.finish_reason
    return list(found.values())


def _node_rows(sample: Sample) -> list[JsonObject]:
    rows = read_record(sample).nodes
    if rows and all(row.node is not None for row in rows):  # samples of other programs may hold less
        return [
            {
                "id": row.node,
                "why": row.why,
                "projection": row.projection,
                "given_tokens": row.given,
                "sampled_tokens": row.sampled,
                "policy_versions": [version for _, _, version in row.versions],
            }
            for row in rows
        ]
    turns: dict[int, JsonObject] = {}
    for span in sample.spans:
        fresh: JsonObject = {"given_tokens": 0, "sampled_tokens": 0, "policy_versions": []}
        names = {"id": f"{sample.sample_id}:{span.turn}", "why": None, "projection": None}
        node = turns.setdefault(span.turn, {**names, **fresh})
        node[f"{span.kind}_tokens"] += span.end - span.start
        if span.policy_version is not None and span.policy_version not in node["policy_versions"]:
            node["policy_versions"].append(span.policy_version)
    return [turns[turn] for turn in sorted(turns)]


class SummaryCache:
    """A summary is kept until its session changes, and refreshed within a time budget per request, so that a store with
    thousands of sessions responds quickly and catches up over the next requests."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._known: dict[str, tuple[float, object, SessionSummary]] = {}  # when it was computed, and from what

    def read(
        self, listed: Sequence[tuple[SessionSummary, object]], load: Callable[[str], SessionSummary]
    ) -> list[SessionSummary]:
        """`listed` has the head of each summary, and what changes with the session."""
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
    """`kind` is "gateway" if the journal belongs to a running gateway, which closes it."""

    def __init__(self, journal: Journal, *, name: str, kind: SourceKind = "store") -> None:
        self.name, self.kind, self._journal = name, kind, journal
        self._summaries = SummaryCache(STORE_S if kind == "store" else OWN_GATEWAY_S)

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        total, records = self._journal.count(), self._journal.sessions(offset=offset, limit=limit)
        heads = [(summary_head(record), record) for record in records]
        return self._summaries.read(heads, lambda name: self.load_session(name).summary), total

    def is_active(self) -> bool:
        path = self._journal.target.removeprefix("sqlite:")
        return self.kind == "gateway" or is_recent(Path(path), Path(f"{path}-wal"))

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
    nodes = tuple(view_node(describe_node(node), reasons) for node in tree.in_order())
    head = replace(summary_head(record), task=first_question(tree))
    summary = summarise(head, nodes, made.coverage, [sample.reward for sample in made.samples])
    metadata = {**record.metadata, **record.rewards.metadata}
    return SessionView(summary=summary, nodes=nodes, branches=tuple(branches), metadata=metadata)


def first_question(tree: Tree) -> str:
    """How the first user message of the session begins."""
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
        # in nats, over the alternatives that the engine reported: a lower bound of the full entropy
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


class GatewaySource(RecordSource):
    """`key` is the gateway's admin key."""

    kind = "gateway"

    def __init__(self, url: str, *, key: str | None) -> None:
        from tokentrue.client import Client

        address = url.rstrip("/").removesuffix("/v1").removesuffix("/view")
        self.name = address.partition("://")[2]
        self._client = Client(address, key, timeout_s=TIMEOUT_S)
        self._summaries = SummaryCache(GATEWAY_S)
        try:
            self._client.sessions(limit=1)
        except (ConfigError, GatewayError) as error:  # a wrong address or key is a start-up error
            self.close()
            raise ConfigError(str(error)) from error

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        page = self._client.call("GET", f"/sessions?offset={offset}&limit={limit}")
        heads = [(summary_head_from_json(listed), listed) for listed in page["sessions"]]

        def load(name: str) -> SessionSummary:
            return view_from_json(self._client.session_state(name)).summary

        return self._summaries.read(heads, load), page["total"]

    def load_session(self, session_id: str) -> SessionView:
        view = view_from_json(self._client.session_state(session_id))
        samples = self._client.session_samples(session_id).samples
        return replace(view, branches=view_from_samples(samples).branches) if samples else view

    def load_group(self, group: str) -> list[SessionView]:
        found: list[SessionView] = []
        page: list[JsonObject] = []
        while page := self._client.sessions(limit=GATEWAY_PAGE, group=group, after=page[-1] if page else None):
            found += [self.load_session(item["session_id"]) for item in page if item["group"] == group]
        return found

    def load_image(self, session_id: str, sha256: str) -> bytes:
        return self._client.session_image(session_id, sha256)

    def close(self) -> None:
        self._client.close()


def summary_head_from_json(shown: JsonMapping) -> SessionSummary:
    known = {name: shown[name] for name in ("session_id", "group", "state", "created", "reward")}
    return SessionSummary(**known, in_flight=shown.get("in_flight", 0))


def view_from_json(shown: JsonMapping) -> SessionView:
    coverage = decode(shown["coverage"], Coverage, f"session {shown['session_id']}: coverage")
    reasons = {item.node: item.why for item in coverage.untrained}
    nodes = tuple(view_node(node, reasons) for node in shown["nodes"])
    rewards = [reward_of_path(path, shown["leaf_rewards"], shown["reward"]) for path in trained_paths(nodes)]
    summary = summarise(summary_head_from_json(shown), nodes, coverage, rewards)
    return SessionView(summary=summary, nodes=nodes, branches=(), metadata=dict(shown["metadata"]))


def trained_paths(nodes: Sequence[JsonMapping]) -> Iterator[list[str]]:
    parents = {node["id"]: node["parent"] for node in nodes}
    trained = [node["id"] for node in nodes if node["untrained"] is None]
    continued = {parents[node] for node in trained}
    for leaf in trained:
        if leaf not in continued:
            path = [leaf]
            while (parent := parents[path[-1]]) is not None:
                path.append(parent)
            yield path[::-1]
