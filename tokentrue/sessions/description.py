"""Sessions and nodes as JSON, without tokens, for GET /sessions, the viewer and `tokentrue sessions`."""

from __future__ import annotations

from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.journal import SessionRecord
from tokentrue.sessions.tree import Node, Tree


def describe_session(record: SessionRecord, tree: Tree, coverage: JsonMapping) -> JsonObject:
    return {**summarise_session(record, tree, coverage), "nodes": [describe_node(node) for node in tree.in_order()]}


def summarise_session(record: SessionRecord, tree: Tree, coverage: JsonMapping) -> JsonObject:
    return {**describe_record(record), "turns": len(tree), "coverage": coverage}


def describe_record(record: SessionRecord) -> JsonObject:
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


def describe_node(node: Node) -> JsonObject:
    return {
        "id": node.id,
        "parent": node.parent,
        "origin": node.origin,
        "why": node.edge_reason,
        "detail": node.detail,
        "projection": node.projection,
        "dialect": node.dialect,
        "outcome": node.outcome,
        "finish": node.finish.value,
        "prompt_tokens": node.prompt_length,
        "given_tokens": len(node.given_ids),
        "sampled_tokens": len(node.sampled_ids),
        "policy_versions": [[span.start, span.end, span.version] for span in node.versions],
        "attempts": [
            {"status": attempt.status.value, "start": attempt.start, "end": attempt.end} for attempt in node.attempts
        ],
        "created": node.created,
        **({"replaced": list(node.replaced)} if node.replaced else {}),
    }
