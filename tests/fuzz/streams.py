"""What our own gateway promises of a stream beyond what every client needs (`tokentrue.conformance.agents.streams`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentrue.conformance.agents.dialects import ANTHROPIC, CHAT, RESPONSES, Json
from tokentrue.conformance.agents.streams import Unsound, assemble


def assemble_strictly(dialect: str, events: Sequence[Any]) -> Json:
    """The whole answer, after all numbers and names of the events have been compared."""
    whole = assemble(dialect, events)
    if dialect == CHAT and len({(chunk["id"], chunk["model"]) for chunk in events[:-1]}) > 1:
        raise Unsound("chunks of one stream have different ids or models")
    if dialect == ANTHROPIC:
        starts = [event["index"] for event in events if event["type"] == "content_block_start"]
        if starts != list(range(len(starts))):
            raise Unsound("content blocks out of order")
    if dialect == RESPONSES:
        check_responses(events)
    return whole


def check_responses(events: Sequence[Json]) -> None:
    items: list[Json] = []
    pieces: list[str] = []
    for number, event in enumerate(events):
        if event.get("sequence_number", number) != number:
            raise Unsound(f"sequence number {event['sequence_number']} where {number} was due")
        kind = event["type"]
        if kind == "response.output_item.added":
            if event["output_index"] != len(items):
                raise Unsound("output items out of order")
            items.append(event["item"])
            pieces.append("")
            continue
        if "output_index" not in event:
            continue
        at = event["output_index"]
        added = items[at]
        if event.get("item_id", added.get("id")) != added.get("id"):
            raise Unsound(f"{kind} of item {event['item_id']}, and item {at} is {added['id']}")
        if kind.endswith(".delta"):
            pieces[at] += event["delta"]
        elif kind == "response.output_item.done":
            for name in ("type", "id", "call_id", "name", "namespace"):
                if added.get(name) != event["item"].get(name):
                    raise Unsound(f"an item was added as {added} and is done as {event['item']}")
        elif kind.endswith(".done") and not kind.startswith("response.content_part"):
            said = event.get("text", event.get("arguments", event.get("input")))
            if said is not None and said != pieces[at]:
                raise Unsound(f"{kind} says {said!r}, the deltas were {pieces[at]!r}")
            if "name" in event and event["name"] != added["name"]:
                raise Unsound(f"{kind} names {event['name']}, the item was added as {added['name']}")
