"""Is a replayed assistant message a known lossy projection of what was served? Pure; the answer names every loss or says no.

The losses that harnesses are known to cause: `reasoning_dropped`, `reasoning_inlined`, `call_ids`, `arguments`, `parts`,
`empty_content`, `whitespace`, `extra_fields`. Anything else is an edit. A wrong match is worse than a fork, so a replay that
*adds* to what was served (reasoning that was not there, one more call) is an edit too.
"""

from __future__ import annotations

from typing import Any

from tokentrue.sessions.keys import calls_of, loose_arguments, reasoning_of, said, text_of
from tokentrue.types import Message

_KNOWN = ("role", "content", "reasoning_content", "reasoning", "tool_calls")


def projection(served: Message, replayed: Message) -> tuple[str, ...] | None:
    """The losses, sorted; `()` where nothing visible differs; None where this is not a replay of `served`."""
    if served is replayed:
        return ()
    for name in _KNOWN:
        if served.get(name) != replayed.get(name):
            break
    else:  # most come back as they went out
        return tuple(_extras(replayed))
    # A model may write a stray tag into its visible text: where the text came back as served, no reasoning was inlined into it.
    literal = text_of(served.get("content")).strip() == text_of(replayed.get("content")).strip()
    was, now = said(served, tags=not literal), said(replayed, tags=not literal)
    if was.content.strip() != now.content.strip() or len(was.calls) != len(now.calls):
        return None
    kept, given = was.reasoning.strip(), now.reasoning.strip()
    if given and given != kept:
        return None
    losses: set[str] = set()
    if kept and not given:
        losses.add("reasoning_dropped")
    elif now.inlined and not was.inlined:
        losses.add("reasoning_inlined")
    elif reasoning_of(served) != reasoning_of(replayed) and not now.inlined:
        losses.add("whitespace")
    for (name, arguments), (name_now, arguments_now) in zip(was.calls, now.calls, strict=True):
        if name != name_now:
            return None
        if arguments != arguments_now:
            if loose_arguments(arguments) != loose_arguments(arguments_now):
                return None
            losses.add("arguments")
    if any(a.get("id") != b.get("id") for a, b in zip(calls_of(served), calls_of(replayed), strict=True)):
        losses.add("call_ids")
    text_now = was.content if "reasoning_inlined" in losses else now.content  # the blank lines after </think> are part of the inlining
    losses |= _content_losses(served.get("content"), replayed.get("content"), was.content, text_now)
    return tuple(sorted(losses | _extras(replayed)))


def _content_losses(served: Any, replayed: Any, was: str, now: str) -> set[str]:
    losses: set[str] = set()
    if isinstance(replayed, (list, tuple)) and not isinstance(served, (list, tuple)):
        losses.add("parts")
    if not text_of(served) and not text_of(replayed):
        if served != replayed and not losses:
            losses.add("empty_content")
    elif was != now:
        losses.add("whitespace")
    return losses


def _extras(replayed: Message) -> set[str]:
    for key, value in replayed.items():
        if key not in _KNOWN and value not in (None, [], ""):
            return {"extra_fields"}
    return set()


def label(losses: tuple[str, ...], *, ambiguous: bool = False) -> str:
    """`"exact"`, or the losses joined by `+`; an ambiguous choice between siblings says so."""
    names = list(losses) or ["exact"]
    return "+".join([*names, "ambiguous"] if ambiguous else names)
