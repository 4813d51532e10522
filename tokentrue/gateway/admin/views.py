"""The record as an administrator sees it, in plain JSON values."""

from __future__ import annotations

from typing import Any

from tokentrue.samples import coverage_to_json
from tokentrue.sessions.journal import SessionRecord
from tokentrue.sessions.tree import Node
from tokentrue.turn import Session
from tokentrue.types import Coverage


def record_json(record: SessionRecord) -> dict[str, Any]:
    return {
        "session_id": record.id,
        "group": record.group,
        "state": record.state,
        "metadata": record.metadata,
        "sampling": record.sampling,
        "history": record.history,
        "training": record.training,
        "created": record.created,
        "ended": record.ended,
        "reward": record.rewards.session,
        "leaf_rewards": record.rewards.leaves,
    }


def node_json(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "parent": node.parent,
        "origin": node.origin,
        "why": node.why,
        "detail": node.detail,
        "projection": node.projection,
        "dialect": node.dialect,
        "outcome": node.outcome,
        "finish": node.finish.value,
        "prompt_tokens": node.prompt_length,
        "given_tokens": len(node.given_ids),
        "sampled_tokens": len(node.sampled_ids),
        "policy_versions": [[span.start, span.end, span.version] for span in node.versions],
        "attempts": [{"status": attempt.status.value, "start": attempt.start, "end": attempt.end} for attempt in node.attempts],
        "created": node.created,
    }


def session_json(session: Session, coverage: Coverage, *, in_flight: int) -> dict[str, Any]:
    nodes = [node_json(node) for node in session.tree.nodes.values()]
    return {**record_json(session.record), "in_flight": in_flight, "coverage": coverage_to_json(coverage), "nodes": nodes}
