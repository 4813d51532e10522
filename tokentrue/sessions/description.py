"""A node as plain JSON values, without its tokens: what GET /sessions/{id}, the viewer and `tokentrue sessions` show of it."""

from __future__ import annotations

from typing import Any

from tokentrue.sessions.tree import Node


def describe_node(node: Node) -> dict[str, Any]:
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
        **({"replaced": list(node.replaced)} if node.replaced else {}),
    }
