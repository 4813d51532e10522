"""Where the recorded turn ends in a render: a pure decision on the text between the sentinel and the first new content.

The recorded stop id decides, never a model's name: it must stand there exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokentrue.renderers.codec.codec import Codec
from tokentrue.renderers.extending.request import ExtendError, ExtendRequest, Join
from tokentrue.renderers.extending.stops import Stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """`gap` is the part of the region that the recorded turn already has; `literal` is the added token that it ends
    with."""

    join: Join
    gap: str
    literal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedRender:
    """`region` lies between sentinel and first new content, `rest` after that. `render_alone` gives what follows the
    sentinel where nothing follows the turn."""

    region: str
    rest: str
    render_alone: Callable[[], str]


def find_boundary(codec: Codec, stops: Stops, request: ExtendRequest, render: MarkedRender) -> Boundary:
    """Raises ExtendError where the recorded end of the turn does not fit the template's."""
    ends = _list_literals(codec, render.region)
    if not ends:
        raise ExtendError("no_stop", "the template closes the assistant's turn with no token of its own")
    if request.stop is not None:
        hits = [end for literal, end in ends if literal == request.stop]
        own = _find_own_stop(ends, stops, request)
        if not request.is_stop:  # cut off inside the closing: what it already has of it is not written again
            hits = [end for end in hits if end <= own]
        if len(hits) == 1:
            join: Join = "stop" if request.is_stop or hits[0] == own else "open"
            return Boundary(join=join, gap=render.region[: hits[0]], literal=request.stop)
        if hits:
            raise ExtendError(
                "ambiguous_stop",
                f"the template writes {request.stop!r} {len(hits)} times at the end of the assistant's turn",
            )
        if request.is_stop and (alias := _find_alias(codec, ends, request.stop, render)) is not None:
            return alias
    closing = _find_closing(ends, stops, request)
    return Boundary(join="foreign" if request.is_stop else "open", gap=render.region[:closing])


def _list_literals(codec: Codec, text: str) -> list[tuple[str, int]]:
    return [(literal, end) for _, literal, end in codec.split(text) if literal]


def _find_alias(codec: Codec, ends: list[tuple[str, int]], stop: str, render: MarkedRender) -> Boundary | None:
    """The recorded stop closes the turn only while nothing follows it; the token that stands there instead is not
    written again.

    Instead means: at the same place, and the one that closes the new message as well (else it would be the next turn's
    opener).
    """
    after = render.render_alone()
    if after.count(stop) != 1:
        return None
    before = after[: after.index(stop)]
    closer = next((literal for _, literal, _ in codec.split(render.rest) if literal), None)
    for literal, end in ends:
        if literal == closer and render.region[: end - len(literal)] == before:
            return Boundary(join="alias", gap=render.region[:end], literal=literal)
    return None


def _find_own_stop(ends: list[tuple[str, int]], stops: Stops, request: ExtendRequest) -> int:
    own = stops.call if request.last.get("tool_calls") else stops.text
    return next((end for literal, end in ends if literal in own), ends[0][1])


def _find_closing(ends: list[tuple[str, int]], stops: Stops, request: ExtendRequest) -> int:
    """Text turns are closed from the end of the text on; after complete calls only the turn itself is closed."""
    if not request.last.get("tool_calls"):
        return 0
    for candidates in (stops.call or stops.text, stops.all):  # GLM: what follows may open with another stop token
        for literal, end in ends:
            if literal in candidates:
                return end - len(literal)
    raise ExtendError("no_stop", "after the assistant's calls the template writes no token that ends a turn")
