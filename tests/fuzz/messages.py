"""When one conversation is a replay of another.

`fit` is the oracle's own reading of the rule that a replay may lose reasoning, call ids, outer whitespace and the
spelling of arguments, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from tokentrue.conformance.agents.messages import Message, load_finite


class Fit(IntEnum):
    NO = 0
    MAYBE = 1  # the rules leave it open
    YES = 2


Differences = tuple[frozenset[str], ...]


def fit(path: Sequence[Message], sent: Sequence[Message]) -> tuple[Fit, Differences]:
    """Does `sent` begin with a replay of `path`? And in what each assistant message differs."""
    if len(sent) < len(path):
        return Fit.NO, ()
    verdict, differences = Fit.YES, list[frozenset[str]]()
    refs, sent_refs = references(path), references(sent)
    for index, (was, now) in enumerate(zip(path, sent, strict=False)):
        if was.role != now.role:
            return Fit.NO, ()
        if was.role != "assistant":
            if was.text != now.text or refs[index] != sent_refs[index]:
                return Fit.NO, ()
            continue
        one, different = fit_assistant(was, now)
        verdict = min(verdict, one)
        differences.append(different)
        if verdict is Fit.NO:
            return Fit.NO, ()
    return verdict, tuple(differences)


def fit_assistant(was: Message, now: Message) -> tuple[Fit, frozenset[str]]:
    same_calls = [(call.name, plain_json(call.arguments)) for call in was.calls] == [
        (call.name, plain_json(call.arguments)) for call in now.calls
    ]
    kept, given = was.reasoning.strip(), now.reasoning.strip()
    if was.text.strip() != now.text.strip() or not same_calls:
        return Fit.NO, frozenset()
    if given and given != kept:  # of a client's own message, a template may leave it out
        return (Fit.NO, frozenset()) if was.served else (Fit.MAYBE, frozenset({"reasoning"}))
    aspects = {
        "reasoning": kept != given,
        "text": was.text != now.text,
        "ids": [call.id for call in was.calls] != [call.id for call in now.calls],
        "arguments": [call.arguments for call in was.calls] != [call.arguments for call in now.calls],
    }
    different = frozenset(name for name, differs in aspects.items() if differs)
    if any(call.partial for call in was.calls) and not (was.served and is_same_input(was, now)):
        return Fit.MAYBE, different
    if was.served or not (different or was.inline != now.inline):
        return Fit.YES, different
    return Fit.MAYBE, different  # a message of the client's own, spelled otherwise


def is_same_input(was: Message, now: Message) -> bool:
    """Partial calls come back under their ids, as the inputs that were served."""
    return all(
        other.custom and (one.id, one.arguments) == (other.id, other.arguments)
        for one, other in zip(was.calls, now.calls, strict=True)
        if one.partial
    )


def references(messages: Sequence[Message]) -> list[tuple[int, int] | str | None]:
    """Where each tool result points: (message, call), or the raw id where it points nowhere."""
    places: dict[str, tuple[int, int]] = {}
    out: list[tuple[int, int] | str | None] = []
    for index, message in enumerate(messages):
        for place, call in enumerate(message.calls):
            places[call.id] = (index, place)
        out.append(places.get(message.answers, message.answers) if message.role == "tool" else None)
    return out


def plain_json(text: str) -> Any:
    """Arguments up to spelling."""
    if not text.strip():
        return "{}"
    try:
        value = load_finite(text)
    except ValueError:
        return "\0" + text.strip()
    return json.dumps(canonical(value), sort_keys=True)


def canonical(value: Any) -> Any:
    """Numbers as a JavaScript harness keeps them."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    return [canonical(item) for item in value]
