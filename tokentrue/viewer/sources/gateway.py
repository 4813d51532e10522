"""Sessions of a running gateway, over its public HTTP: `/sessions`, `/sessions/{id}` and `/sessions/{id}/samples`."""

from __future__ import annotations

import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.samples import sample_from_json
from tokentrue.viewer.records import SessionSummary, SessionView, SourceKind, count_forks, view_node
from tokentrue.viewer.sources.samples import view_from_samples

BUDGET_S = 1.0
TIMEOUT_S = 60.0
PAGE = 200


class GatewaySource:
    """`key` is the gateway's admin key."""

    kind: SourceKind = "gateway"
    live = True

    def __init__(self, url: str, *, key: str | None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1").removesuffix("/view")
        self.name = self._base.partition("://")[2]
        self._key = key
        self._summaries: dict[str, tuple[Any, SessionSummary]] = {}
        self._get("/sessions?limit=1")  # a wrong address or key is a start-up error

    def _get(self, path: str) -> Any:
        url = self._base + path
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return orjson.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise SessionNotFound(f"{url}: no such session") from error
            cure = "; set TOKENTRUE_ADMIN_KEY" if error.code in {401, 403} else ""
            raise ConfigError(f"{url}: HTTP {error.code}{cure}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{url}: {error}; is the gateway running?") from error

    def list_sessions(self, *, offset: int, limit: int) -> tuple[list[SessionSummary], int]:
        page = self._get(f"/sessions?offset={offset}&limit={limit}")
        deadline = time.monotonic() + BUDGET_S
        return [self._summary(item, time.monotonic() < deadline) for item in page["sessions"]], page["total"]

    def _summary(self, listed: Mapping[str, Any], in_time: bool) -> SessionSummary:
        name = listed["session_id"]
        known = self._summaries.get(name)
        if known is not None and (not in_time or (known[0] == listed and listed["state"] == "ended")):
            return known[1]
        if not in_time:
            return _summary_from_json({**listed, "nodes": [], "coverage": {"sampled": 0, "trained": 0, "untrained": []}})
        summary = _summary_from_json(self._get(f"/sessions/{urllib.parse.quote(name)}"))
        self._summaries[name] = (listed, summary)
        return summary

    def load_session(self, session_id: str) -> SessionView:
        name = urllib.parse.quote(session_id)
        shown = self._get(f"/sessions/{name}")
        samples = [sample_from_json(item, f"session {session_id}") for item in self._get(f"/sessions/{name}/samples")["samples"]]
        summary, metadata = _summary_from_json(shown), dict(shown["metadata"])
        reasons = {item["node"]: item["why"] for item in shown["coverage"]["untrained"]}
        nodes = tuple(view_node(node, reasons) for node in shown["nodes"])
        branches = view_from_samples(samples).branches if samples else ()
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if rewards:
            summary = replace(summary, reward=sum(rewards) / len(rewards))
        return SessionView(summary=summary, nodes=nodes, branches=branches, metadata=metadata)

    def load_group(self, group: str) -> list[SessionView]:
        found: list[SessionView] = []
        offset = 0
        while page := self._get(f"/sessions?offset={offset}&limit={PAGE}&group={urllib.parse.quote(group)}")["sessions"]:
            offset += len(page)
            found += [self.load_session(item["session_id"]) for item in page if item["group"] == group]
        return found

    def close(self) -> None:
        pass


def _summary_from_json(shown: Mapping[str, Any]) -> SessionSummary:
    nodes, coverage = shown["nodes"], shown["coverage"]
    untrained: dict[str, int] = {}
    for item in coverage["untrained"]:
        untrained[item["why"]] = untrained.get(item["why"], 0) + item["tokens"]
    versions = [version for node in nodes for _, _, version in node["policy_versions"]]
    parents = {node["id"]: node["parent"] for node in nodes}
    abandoned = {item["node"] for item in coverage["untrained"]}
    has_child = {node["parent"] for node in nodes if node["id"] not in abandoned}
    return SessionSummary(
        session_id=shown["session_id"],
        group=shown["group"],
        state=shown["state"],
        created=shown["created"],
        reward=shown["reward"],
        turns=len(nodes),
        branches=sum(node["id"] not in has_child and node["id"] not in abandoned for node in nodes),
        forks=count_forks(parents),
        tokens=sum(node["given_tokens"] + node["sampled_tokens"] for node in nodes),
        sampled=coverage["sampled"],
        trained=coverage["trained"],
        untrained=untrained,
        versions=(min(versions), max(versions)) if versions else None,
        in_flight=shown.get("in_flight", 0),
    )
