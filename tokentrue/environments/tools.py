"""The tools that the environments offer, as OpenAI tool definitions, and what they answer."""

from __future__ import annotations

import json
import re

from tokentrue.environments.problems import apply
from tokentrue.json_types import JsonObject

CALCULATOR: JsonObject = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "one step",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
PRICES: JsonObject = {
    "type": "function",
    "function": {"name": "prices", "description": "all prices", "parameters": {"type": "object", "properties": {}}},
}
EXPRESSION = re.compile(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*")


def calculate(arguments: str) -> str:
    """The value of `{"expression": "12 + 5"}`, or a sentence that the model can read: a bad call is an answer, not a
    crash."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "error: give an expression"
    found = EXPRESSION.fullmatch(expression) if isinstance(expression, str) else None
    if found is None:
        return "error: write a number, an operator and a number"
    return str(apply(found[2], int(found[1]), int(found[3])))


def last_number(text: str) -> int | None:
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None
