"""The record as an administrator sees it, in plain JSON values."""

from __future__ import annotations

import base64
from dataclasses import asdict, fields
from typing import Any

from tokentrue.sessions.journal import SessionRecord
from tokentrue.sessions.tree import Node
from tokentrue.turn import Session
from tokentrue.types import Coverage, Sample


def coverage_json(coverage: Coverage) -> dict[str, Any]:
    untrained = [{"node": span.node, "tokens": span.tokens, "why": span.why} for span in coverage.untrained]
    return {"sampled": coverage.sampled, "trained": coverage.trained, "ratio": coverage.ratio, "untrained": untrained}


def sample_json(sample: Sample) -> dict[str, Any]:
    """A sample as plain JSON; the other formats are the exporters' business."""
    out = {
        field.name: getattr(sample, field.name) for field in fields(sample) if field.name not in {"spans", "certificate", "routed_experts"}
    }
    out["token_ids"], out["loss_mask"] = list(sample.token_ids), list(sample.loss_mask)
    out["rollout_logprobs"] = list(sample.rollout_logprobs)
    out["spans"] = [asdict(span) for span in sample.spans]
    out["certificate"] = asdict(sample.certificate)
    if sample.routed_experts is not None:
        data = base64.b64encode(sample.routed_experts.data).decode()
        out["routed_experts"] = {"shape": list(sample.routed_experts.shape), "data": data}
    return out


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
    return {**record_json(session.record), "in_flight": in_flight, "coverage": coverage_json(coverage), "nodes": nodes}
