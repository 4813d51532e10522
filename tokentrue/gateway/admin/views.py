"""The record as an administrator sees it, in plain JSON values."""

from __future__ import annotations

from typing import Any

from tokentrue.samples import coverage_to_json
from tokentrue.sessions.description import describe_node
from tokentrue.sessions.journal import SessionRecord
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
        "pin": list(record.pin),
        "created": record.created,
        "ended": record.ended,
        "reward": record.rewards.session,
        "leaf_rewards": record.rewards.leaves,
    }


def session_json(session: Session, coverage: Coverage, *, in_flight: int) -> dict[str, Any]:
    nodes = [describe_node(node) for node in session.tree.nodes.values()]
    return {**record_json(session.record), "in_flight": in_flight, "coverage": coverage_to_json(coverage), "nodes": nodes}
