"""Tool definitions and results, as every dialect checks and pairs them: in the words of Chat Completions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import object_of
from tokentrue.types import Message


def check_function(value: Any, where: str) -> None:
    function = object_of(value, where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError("must be a non-empty string", field=f"{where}.name")
    if not isinstance(function.get("description") or "", str):
        raise MessageError("must be a string", field=f"{where}.description")
    if not isinstance(function.get("parameters") or {}, dict):
        raise MessageError("must be a JSON schema object", field=f"{where}.parameters")


def pair_results(messages: list[Message], first: int) -> None:
    """Gives results from index `first` on that name a function and no call (Google's may) the id of their call: the
    first one of that function, in the turn before them, that no other result answers."""
    for index in range(first, len(messages)):
        if messages[index]["role"] != "tool" or "tool_call_id" in messages[index]:
            continue
        turn = next((place for place in range(index, -1, -1) if messages[place]["role"] == "assistant"), 0)
        answered = Counter(message["tool_call_id"] for message in messages[turn:] if "tool_call_id" in message)
        result = dict(messages[index])
        name = result.pop("name")
        found = f"{name}#{answered.total()}"  # of no call, where none is left
        for call in messages[turn].get("tool_calls", ()):
            if answered[call["id"]]:
                answered[call["id"]] -= 1
            elif call["function"]["name"] == name:
                found = call["id"]
                break
        messages[index] = {"role": "tool", "tool_call_id": found, **result}
