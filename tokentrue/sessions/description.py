"""Sessions and nodes as JSON, without tokens."""

from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.sessions.journal import SessionRecord
from tokentrue.sessions.side_requests import find_side_requests
from tokentrue.sessions.tree import Node, Tree


def describe_session(record: SessionRecord, tree: Tree, coverage: JsonMapping) -> JsonObject:
    side = find_side_requests(tree)
    nodes = [describe_node(node) for node in tree.in_order()]
    for node in nodes:
        if node["id"] in side:
            node["side_request"] = side[node["id"]]
    return {**summarise_session(record, tree, coverage), "nodes": nodes}


def summarise_session(record: SessionRecord, tree: Tree, coverage: JsonMapping) -> JsonObject:
    return {**describe_record(record), "turns": len(tree), "coverage": coverage}


def describe_record(record: SessionRecord) -> JsonObject:
    same = ("group", "state", "metadata", "sampling", "history", "training", "side_requests", "created", "ended")
    return {
        "session_id": record.id,
        **{name: getattr(record, name) for name in same},
        "pin": list(record.pin),
        "reward": record.rewards.session,
        "leaf_rewards": record.rewards.leaves,
    }


def describe_node(node: Node) -> JsonObject:
    same = ("id", "parent", "origin", "detail", "projection", "dialect", "model", "outcome", "created")
    return {
        **{name: getattr(node, name) for name in same},
        "why": node.edge_reason,
        "finish": node.finish.value,
        "prompt_tokens": node.prompt_length,
        "given_tokens": len(node.given_ids),
        "sampled_tokens": len(node.sampled_ids),
        "policy_versions": [[span.start, span.end, span.version] for span in node.versions],
        "attempts": [
            {"status": attempt.status.value, "start": attempt.start, "end": attempt.end} for attempt in node.attempts
        ],
        **({"replaced": list(node.replaced)} if node.replaced else {}),
    }
