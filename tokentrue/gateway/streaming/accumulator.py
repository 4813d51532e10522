"""What a client has been sent of one choice, added up; it must be the message that is in the record.

Worked example: deltas "It is", " 4." and a reply whose message has content "It is 4." pass `check`; any other reply does not.
"""

from __future__ import annotations

from typing import Any

from tokentrue.errors import TokenContractError
from tokentrue.types import Delta, Message


class StreamedMessage:
    """Adds up the deltas of one choice."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of arguments

    def add(self, delta: Delta) -> None:
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.content:
            self._content.append(delta.content)
        if delta.call is not None:
            self._add_call(delta.call, delta)

    def _add_call(self, index: int, delta: Delta) -> None:
        if index == len(self._calls):
            self._calls.append((delta.call_id, delta.name, []))
        elif index != len(self._calls) - 1 or delta.call_id or delta.name:
            raise TokenContractError(f"a delta belongs to call {index}, but {len(self._calls)} calls were begun")
        self._calls[index][2].append(delta.arguments)

    def check(self, served: Message) -> None:
        """Raises where the deltas do not add up to the served message."""
        calls: list[Any] = served.get("tool_calls") or []
        pairs = {
            "reasoning": ("".join(self._reasoning), served.get("reasoning_content") or ""),
            "text": ("".join(self._content), served.get("content") or ""),
            "calls": (
                [(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls],
                [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls],
            ),
        }
        for kind, (streamed, recorded) in pairs.items():
            if streamed != recorded:
                raise TokenContractError(f"the streamed {kind} of this turn are not those in the record")
