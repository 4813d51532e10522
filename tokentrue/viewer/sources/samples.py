"""Sessions from samples alone: what a samples file holds, and what a gateway's `/sessions/{id}/samples` returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokentrue.errors import SessionNotFound
from tokentrue.json_types import JsonObject
from tokentrue.samples import read_samples
from tokentrue.samples.recorded_turns import read_record
from tokentrue.types import Coverage, Sample, Untrained
from tokentrue.viewer.records import Branch, RecordSource, SessionSummary, SessionView, SourceKind, summarise


class SampleList:
    """Samples that a program holds in memory, as a source: what reports are written from."""

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
    """A samples file in any of the formats of `tokentrue samples`. The file is read again when it changes."""

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
    """Some sessions of another source, in the order given: rollouts to read in a report."""

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
        read_record(sample)  # a malformed one is refused now, not when its page is opened
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
        summary=summary, nodes=nodes, branches=tuple(_branch_of(sample) for sample in samples), metadata=metadata
    )


def _branch_of(sample: Sample) -> Branch:
    record = read_record(sample)
    projection = record.nodes[-1].projection if record.nodes else None
    return Branch(sample=sample, leaf=record.leaf or sample.sample_id, projection=projection or "")


def _count_coverage(samples: Sequence[Sample]) -> Coverage:
    """Coverage of samples that carry none: a sampled token is one with a log-probability."""
    sampled = sum(value is not None for sample in samples for value in sample.rollout_logprobs)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    rest = (Untrained(node="", tokens=sampled - trained, why="masked"),) if sampled > trained else ()
    return Coverage(sampled=sampled, trained=trained, untrained=rest)


def nodes_from_samples(samples: Sequence[Sample]) -> list[JsonObject]:
    """The tree as the samples' node rows tell it: each path gives its nodes in order."""
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
