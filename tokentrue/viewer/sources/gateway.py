"""Sessions of a running gateway, over its public HTTP: `/sessions`, `/sessions/{id}` and `/sessions/{id}/samples`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tokentrue.errors import ConfigError, GatewayError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.samples.assemble import reward_of_path
from tokentrue.samples.shape import decode
from tokentrue.types import Coverage
from tokentrue.viewer.records import SessionSummary, SessionView, SourceKind, summarise, view_node
from tokentrue.viewer.sources.samples import view_from_samples

BUDGET_S = 1.0
TIMEOUT_S = 60.0
PAGE = 200


class GatewaySource:
    """`key` is the gateway's admin key."""

    kind: SourceKind = "gateway"
    live = True

    def __init__(self, url: str, *, key: str | None) -> None:
        from tokentrue.client import Client

        address = url.rstrip("/").removesuffix("/v1").removesuffix("/view")
        self.name = address.partition("://")[2]
        self._client = Client(address, key, timeout_s=TIMEOUT_S)
        self._summaries: dict[str, tuple[Any, SessionSummary]] = {}
        try:
            self._client.sessions(limit=1)
        except (ConfigError, GatewayError) as error:  # a wrong address or key is a start-up error
            self._client.close()
            raise ConfigError(str(error)) from error

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        page = self._client.call("GET", f"/sessions?offset={offset}&limit={limit}")
        deadline = time.monotonic() + BUDGET_S
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
        while page := self._client.sessions(limit=PAGE, group=group, after=page[-1] if page else None):
            found += [self.load_session(item["session_id"]) for item in page if item["group"] == group]
        return found

    def close(self) -> None:
        self._client.close()


def _view_from_json(shown: JsonMapping) -> SessionView:
    """Without its branches, which are in its samples."""
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
    """The node ids of each sample, root to leaf."""
    parents = {node["id"]: node["parent"] for node in nodes}
    trained = [node["id"] for node in nodes if node["untrained"] is None]
    continued = {parents[node] for node in trained}
    for leaf in trained:
        if leaf not in continued:
            path = [leaf]
            while (parent := parents[path[-1]]) is not None:
                path.append(parent)
            yield path[::-1]
