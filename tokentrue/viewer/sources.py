"""The viewer's sources: a samples file or list, a durable store, a running gateway.

A samples file has neither messages nor abandoned branches; a store has both, and what the engine reported for each
token; a gateway is read over its public HTTP. Session summaries are cached until the session changes. Open sessions
are refreshed within a time budget per request, so that a store with thousands of sessions responds quickly and
catches up over the next requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tokentrue.errors import ConfigError, GatewayError, SessionNotFound
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.samples import assemble, read_samples
from tokentrue.samples.assemble import reward_of_path
from tokentrue.samples.recorded_turns import read_record
from tokentrue.samples.shape import decode
from tokentrue.sessions import Journal, Node, SessionRecord, Tree
from tokentrue.sessions.description import describe_node
from tokentrue.sessions.journal.journal import load_tree
from tokentrue.types import Coverage, Sample, Untrained
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

BUDGET_S: Mapping[SourceKind, float] = {"store": 0.5, "gateway": 0.1}  # a gateway has other work to do
ANSWER_S, TIMEOUT_S = 1.0, 60.0  # of a gateway over HTTP: for summaries, and for one call
GATEWAY_PAGE = 200
NOTHING = Coverage(sampled=0, trained=0)


class SampleList:
    kind: SourceKind = "file"
    live = False

    def __init__(self, samples: Iterable[Sample], *, name: str) -> None:
        self.name = name
        self._sessions = _by_session(samples)

    def _refresh(self) -> None:
        pass

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        self._refresh()
        names = list(self._sessions)[offset : offset + limit]
        return [view_from_samples(self._sessions[name]).summary for name in names], len(self._sessions)

    def load_session(self, session_id: str) -> SessionView:
        self._refresh()
        if session_id not in self._sessions:
            raise SessionNotFound(f"no session {session_id!r} in {self.name}")
        return view_from_samples(self._sessions[session_id])

    def load_group(self, group: str) -> list[SessionView]:
        self._refresh()
        return [view_from_samples(samples) for samples in self._sessions.values() if samples[0].group == group]

    def close(self) -> None:
        pass


class FileSource(SampleList):
    """A samples file in any format; reloaded when it changes."""

    live = True

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._stamp = self._stat()
        super().__init__(read_samples(self._path), name=self._path.name)

    def _stat(self) -> tuple[int, int] | None:
        if not self._path.is_file():
            return None
        facts = self._path.stat()
        return facts.st_mtime_ns, facts.st_size

    def _refresh(self) -> None:
        stamp = self._stat()
        if stamp is not None and stamp != self._stamp:
            self._sessions = _by_session(read_samples(self._path))
            self._stamp = stamp


class ChosenSessions:
    live = False

    def __init__(self, source: RecordSource, session_ids: Sequence[str]) -> None:
        self._source, self._ids = source, list(session_ids)
        self.kind: SourceKind = source.kind
        self.name = source.name

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        return [self._source.load_session(one).summary for one in self._ids[offset : offset + limit]], len(self._ids)

    def load_session(self, session_id: str) -> SessionView:
        if session_id not in self._ids:
            raise SessionNotFound(f"session {session_id!r} is not among those chosen of {self.name}")
        return self._source.load_session(session_id)

    def load_group(self, group: str) -> list[SessionView]:
        return [view for view in self._source.load_group(group) if view.summary.session_id in self._ids]

    def close(self) -> None:
        self._source.close()


def _by_session(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        read_record(sample)  # refuse a malformed one now, not when its page is opened
        found.setdefault(sample.session_id, []).append(sample)
    return found


def view_from_samples(samples: Sequence[Sample]) -> SessionView:
    first, nodes = samples[0], tuple(nodes_from_samples(samples))
    summary = summarise(
        nodes,
        read_record(first).coverage or _count_coverage(samples),
        session_id=first.session_id,
        group=first.group,
        state="exported",
        created=None,
        rewards=[sample.reward for sample in samples],
    )
    metadata = {key: value for key, value in first.metadata.items() if key != "tokentrue"}
    return SessionView(
        summary=summary,
        nodes=nodes,
        branches=tuple(_branch_from_sample(sample) for sample in samples),
        metadata=metadata,
    )


def _branch_from_sample(sample: Sample) -> Branch:
    record = read_record(sample)
    projection = record.nodes[-1].projection if record.nodes else None
    return Branch(sample=sample, leaf=record.leaf or sample.sample_id, projection=projection or "")


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
        fresh: JsonObject = {
            "id": f"{sample.sample_id}:{span.turn}",
            "given_tokens": 0,
            "sampled_tokens": 0,
            "policy_versions": [],
        }
        node = turns.setdefault(span.turn, {**fresh, "why": None, "projection": None})
        node[f"{span.kind}_tokens"] += span.end - span.start
        if span.policy_version is not None and span.policy_version not in node["policy_versions"]:
            node["policy_versions"].append(span.policy_version)
    return [turns[turn] for turn in sorted(turns)]


class StoreSource:
    """`kind` is "gateway" if the journal belongs to a running gateway, which closes it."""

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
        """The longest waiting first, until the budget is spent."""
        deadline = time.monotonic() + BUDGET_S[self.kind]
        stale = [record for record in records if not self._is_settled(record)]
        for record in sorted(
            stale, key=lambda record: self._summaries[record.id][0] if record.id in self._summaries else 0.0
        ):
            with suppress(SessionNotFound):  # purged since it was listed
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
    """In nats, over the alternatives that the engine reported: a lower bound of the full entropy."""
    tops = node.top_logprobs
    if not tops:
        return [None] * len(node.sampled_ids)
    return [-sum(math.exp(value) * value for value in top.values()) if len(top) > 1 else None for top in tops]


class GatewaySource:
    """`key` is the gateway's admin key."""

    kind: SourceKind = "gateway"
    live = True

    def __init__(self, url: str, *, key: str | None) -> None:
        from tokentrue.client import Client

        address = url.rstrip("/").removesuffix("/v1").removesuffix("/view")
        self.name = address.partition("://")[2]
        self._client = Client(address, key, timeout_s=TIMEOUT_S)
        self._summaries: dict[str, tuple[JsonMapping, SessionSummary]] = {}
        try:
            self._client.sessions(limit=1)
        except (ConfigError, GatewayError) as error:  # a wrong address or key is a start-up error
            self._client.close()
            raise ConfigError(str(error)) from error

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        page = self._client.call("GET", f"/sessions?offset={offset}&limit={limit}")
        deadline = time.monotonic() + ANSWER_S
        return [self._summary(item, time.monotonic() < deadline) for item in page["sessions"]], page["total"]

    def _summary(self, listed: JsonMapping, in_time: bool) -> SessionSummary:
        name = listed["session_id"]
        known = self._summaries.get(name)
        if known is not None and (not in_time or (known[0] == listed and listed["state"] == "ended")):
            return known[1]
        if not in_time:
            return _view_from_json({**listed, "nodes": [], "coverage": {"sampled": 0, "trained": 0}}).summary
        summary = _view_from_json(self._client.session_state(name)).summary
        self._summaries[name] = (listed, summary)
        return summary

    def load_session(self, session_id: str) -> SessionView:
        view = _view_from_json(self._client.session_state(session_id))
        samples = self._client.session_samples(session_id).samples
        return replace(view, branches=view_from_samples(samples).branches) if samples else view

    def load_group(self, group: str) -> list[SessionView]:
        found: list[SessionView] = []
        page: list[JsonObject] = []
        while page := self._client.sessions(limit=GATEWAY_PAGE, group=group, after=page[-1] if page else None):
            found += [self.load_session(item["session_id"]) for item in page if item["group"] == group]
        return found

    def close(self) -> None:
        self._client.close()


def _view_from_json(shown: JsonMapping) -> SessionView:
    coverage = decode(shown["coverage"], Coverage, f"session {shown['session_id']}: coverage")
    reasons = {item.node: item.why for item in coverage.untrained}
    nodes = tuple(view_node(node, reasons) for node in shown["nodes"])
    summary = summarise(
        nodes,
        coverage,
        session_id=shown["session_id"],
        group=shown["group"],
        state=shown["state"],
        created=shown["created"],
        rewards=[reward_of_path(path, shown["leaf_rewards"], shown["reward"]) for path in _trained_paths(nodes)],
        session_reward=shown["reward"],
        in_flight=shown.get("in_flight", 0),
    )
    return SessionView(summary=summary, nodes=nodes, branches=(), metadata=dict(shown["metadata"]))


def _trained_paths(nodes: Sequence[JsonMapping]) -> Iterator[list[str]]:
    parents = {node["id"]: node["parent"] for node in nodes}
    trained = [node["id"] for node in nodes if node["untrained"] is None]
    continued = {parents[node] for node in trained}
    for leaf in trained:
        if leaf not in continued:
            path = [leaf]
            while (parent := parents[path[-1]]) is not None:
                path.append(parent)
            yield path[::-1]
