"""Compares a replayed message with the served one."""

from __future__ import annotations

from collections.abc import Iterator

from tokentrue.conversation.match_keys import (
    calls_of,
    name_and_arguments,
    read_written_calls,
    reasoning_of,
    repeats_arguments,
    text_of,
)
from tokentrue.types import Message

_KNOWN = ("role", "content", "reasoning_content", "reasoning", "tool_calls")
_TAGS = ("think", "thinking", "thought")


def find_changes(served: Message, replayed: Message) -> tuple[str, ...] | None:
    """The changes, sorted, if `replayed` is a known lossy projection of `served`; None if it is an edit. A replay
    that *adds* to what was served is an edit: a wrong match is worse than a fork. A think tag in the served text is
    text that the model wrote: only the replay is searched for inlined reasoning."""
    if served is replayed:
        return ()
    text, calls = _text_changes(served, replayed), _call_changes(served, replayed)
    if text is None or calls is None:
        return _written_changes(served, replayed)
    is_extended = any(name not in _KNOWN and value not in (None, [], "") for name, value in replayed.items())
    return tuple(sorted(text | calls | ({"extra_fields"} if is_extended else set())))


def _written_changes(served: Message, replayed: Message) -> tuple[str, ...] | None:
    """smolagents sends no calls: it writes them into the text."""
    if not calls_of(served) or calls_of(replayed):
        return None
    text, calls = read_written_calls(text_of(replayed.get("content")), ())
    if not calls:
        return None
    found = find_changes(served, {**replayed, "content": text, "tool_calls": calls})
    return None if found is None else tuple(sorted({*found, "calls_as_text"}))


def _text_changes(served: Message, replayed: Message) -> set[str] | None:
    content, content_now = served.get("content"), replayed.get("content")
    was, now = text_of(content), text_of(content_now)
    thought, thought_now = reasoning_of(served), reasoning_of(replayed)
    if thought_now.strip() not in ("", thought.strip()):
        return None
    is_dropped = bool(thought.strip() and not thought_now.strip())
    is_split = isinstance(content_now, (list, tuple)) and not isinstance(content, (list, tuple))
    changes = {"parts"} if is_split else set[str]()
    if was.strip() == now.strip():
        if is_dropped:
            changes.add("reasoning_dropped")
        if was != now or (thought != thought_now and not is_dropped):
            changes.add("whitespace")
        if was == now == "" and content != content_now and not is_split:
            changes.add("empty_content")
        return changes
    inlined = _find_inlined(now.strip(), thought=thought.strip(), text=was.strip())
    if inlined is None:
        return None
    if is_dropped and not inlined:
        return changes | {"reasoning_dropped", "whitespace"}  # an empty block before the text
    return changes | {"reasoning_inlined"}


def _find_inlined(replayed: str, *, thought: str, text: str) -> str | None:
    """The reasoning before `text` in a replay: `thought`, or "" for an empty block."""
    for tag in _TAGS:
        if replayed.startswith(f"<{tag}>"):
            for block, rest in _split_at(replayed[len(tag) + 2 :], f"</{tag}>"):
                if rest == text and block in ("", thought):
                    return block
    if thought and (thought, text) in _split_at(replayed, "</think>"):  # the opening tag was part of the prompt
        return thought
    return None


def _split_at(text: str, mark: str) -> Iterator[tuple[str, str]]:
    at = text.find(mark)
    while at >= 0:
        yield text[:at].strip(), text[at + len(mark) :].strip()
        at = text.find(mark, at + 1)


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


def format_changes(changes: tuple[str, ...], *, ambiguous: bool = False) -> str:
    """`"exact"`, or the changes joined by `+`, marked if siblings fit equally well."""
    names = list(changes) or ["exact"]
    return "+".join([*names, "ambiguous"] if ambiguous else names)
