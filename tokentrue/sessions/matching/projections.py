"""Is a replayed assistant message a known lossy projection of what was served? Pure; the answer names every loss or
says no.

The changes that harnesses are known to cause: `reasoning_dropped`, `reasoning_inlined`, `call_ids`, `arguments`,
`parts`, `empty_content`, `whitespace`, `extra_fields`. Anything else is an edit. A wrong match is worse than a fork, so
a replay that
*adds* to what was served (reasoning that was not there, one more call) is an edit too.
The served text is never taken apart: a think tag in it is text that the model wrote. Only the replay is searched for
the served reasoning, inlined before the served text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokentrue.conversation.match_keys import (
    calls_of,
    name_and_arguments,
    reasoning_of,
    repeats_arguments,
    text_of,
)
from tokentrue.types import Message

_KNOWN = ("role", "content", "reasoning_content", "reasoning", "tool_calls")
_TAGS = ("think", "thinking", "thought")


def find_changes(served: Message, replayed: Message) -> tuple[str, ...] | None:
    """The changes, sorted; `()` where nothing visible differs; None where this is not a replay of `served`."""
    if served is replayed:
        return ()
    text, calls = _text_changes(served, replayed), _call_changes(served, replayed)
    if text is None or calls is None:
        return None
    return tuple(sorted(text | calls | _extra_changes(replayed)))


def _text_changes(served: Message, replayed: Message) -> set[str] | None:
    """Of reasoning and visible text."""
    was, now = text_of(served.get("content")), text_of(replayed.get("content"))
    thought, given = reasoning_of(served), reasoning_of(replayed)
    if given.strip() and given.strip() != thought.strip():
        return None
    changes: set[str] = set()
    if isinstance(replayed.get("content"), (list, tuple)) and not isinstance(served.get("content"), (list, tuple)):
        changes.add("parts")
    if was.strip() == now.strip():
        if thought.strip() and not given.strip():
            changes.add("reasoning_dropped")
        elif thought != given:
            changes.add("whitespace")
        return changes | _content_changes(served.get("content"), replayed.get("content"), was, now, changes)
    inlined = _find_inlined(now, thought=thought.strip(), text=was.strip())
    if inlined is None:
        return None
    if thought.strip() and not inlined and not given.strip():
        return changes | {"reasoning_dropped", "whitespace"}  # an empty block before the text
    return changes | {"reasoning_inlined"}


def _find_inlined(replayed: str, *, thought: str, text: str) -> str | None:
    """The reasoning that stands before `text` in a replay: `thought`, or nothing in an empty block; None where neither
    does."""
    for block, rest in _inlined_blocks(replayed.strip()):
        if rest.strip() == text and block.strip() in ("", thought):
            return block.strip()
    for block, rest in _split_at(replayed.strip(), "</think>"):  # the opening tag was part of the prompt
        if thought and rest.strip() == text and block.strip() == thought:
            return thought
    return None


def _inlined_blocks(replayed: str) -> Iterator[tuple[str, str]]:
    for tag in _TAGS:
        if replayed.startswith(f"<{tag}>"):
            yield from _split_at(replayed[len(tag) + 2 :], f"</{tag}>")


def _split_at(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """Every way to cut `text` at `mark`."""
    at = text.find(mark)
    while at >= 0:
        yield text[:at], text[at + len(mark) :]
        at = text.find(mark, at + 1)


def _content_changes(served: Any, replayed: Any, was: str, now: str, changes: set[str]) -> set[str]:
    if not was and not now:
        return {"empty_content"} if served != replayed and "parts" not in changes else set()
    return {"whitespace"} if was != now else set()


def _call_changes(served: Message, replayed: Message) -> set[str] | None:
    was, now = calls_of(served), calls_of(replayed)
    if len(was) != len(now):
        return None
    changes: set[str] = set()
    for one, other in zip(was, now, strict=True):
        (name, arguments), (name_now, arguments_now) = name_and_arguments(one), name_and_arguments(other)
        if name != name_now:
            return None
        if arguments != arguments_now or type(arguments) is not type(arguments_now) or not isinstance(arguments, str):
            if not repeats_arguments(arguments, arguments_now):
                return None
            if arguments != arguments_now:
                changes.add("arguments")
        if one.get("id") != other.get("id"):
            changes.add("call_ids")
    return changes


def _extra_changes(replayed: Message) -> set[str]:
    for key, value in replayed.items():
        if key not in _KNOWN and value not in (None, [], ""):
            return {"extra_fields"}
    return set()


def format_changes(changes: tuple[str, ...], *, ambiguous: bool = False) -> str:
    """`"exact"`, or the changes joined by `+`; an ambiguous choice between siblings says so."""
    names = list(changes) or ["exact"]
    return "+".join([*names, "ambiguous"] if ambiguous else names)
