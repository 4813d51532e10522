"""All of an answer that must not depend on how it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentrue.conformance.agents.dialects import CHAT, GOOGLE, RESPONSES, Json, read_answers


def comparable(dialect: str, whole: Json) -> Any:
    if dialect == CHAT:
        choices = sorted(whole["choices"], key=lambda choice: choice["index"])
        names = ("content", "reasoning_content", "tool_calls")
        rows = [(c["index"], c["finish_reason"], *(c["message"].get(name) or "" for name in names)) for c in choices]
        return whole["id"], whole["model"], rows
    if dialect == RESPONSES:
        return whole["id"], whole["status"], whole["incomplete_details"], whole["usage"], by_kind(whole["output"])
    if dialect == GOOGLE:
        return comparable_google(whole)
    return (
        whole["id"],
        whole["stop_reason"],
        whole["stop_sequence"],
        whole["usage"]["output_tokens"],
        by_kind(whole["content"]),
    )


def by_kind(parts: Sequence[Json]) -> tuple[str, str, list[Json]]:
    """All reasoning, all text, and the calls in order. A message has no order between the three: reasoning that follows
    text in a stream stands before it in a whole answer."""
    reasoning = text = ""
    calls: list[Json] = []
    for part in parts:
        if part["type"] in {"reasoning", "thinking"}:
            reasoning += part.get("thinking") or "".join(piece["text"] for piece in part.get("content", ()))
        elif part["type"] in {"message", "text"}:
            text += part.get("text") or "".join(piece["text"] for piece in part.get("content", ()))
        else:
            calls.append(part)
    return reasoning, text, calls


def comparable_google(whole: Json) -> Any:
    (candidate,) = whole["candidates"]
    message = read_answers(GOOGLE, whole)[0].message
    calls = [(call.id, call.name, call.arguments) for call in message.calls]
    return (
        whole["responseId"],
        candidate["finishReason"],
        whole["usageMetadata"],
        message.reasoning,
        message.text,
        calls,
    )
