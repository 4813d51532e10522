"""The records of one extension: what was asked, where to cut, and why it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.renderers.messages import normalise_messages, normalise_tools
from tokentrue.renderers.template import InputFormat
from tokentrue.types import Message, Tools

ContextKind: TypeAlias = Literal["light", "dummy", "history"]
"""What precedes the assistant's turn in a render: the kept messages; the real system message and tools as well; the
whole history."""

SentinelPlace: TypeAlias = Literal["content", "argument"]

Join: TypeAlias = Literal["stop", "alias", "foreign", "open"]
"""How the recorded turn ended, seen from the template: at a token it writes there itself; at one that it writes only
while nothing follows (harmony's <|return|>); at a stop token that it does not write there; at no stop token at all. The
last two get the template's own closing."""


class ExtendError(Exception):
    """Becomes a `Refusal` at the door of `Extender.extend`."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why, self.detail = why, detail


@dataclass(frozen=True, kw_only=True)
class ExtendRequest:
    """One call of `extend`, normalised for the template; tools and `system`, the real leading system message, only
    where a render asks for them. `kept` are the earlier messages that the new text depends on, None where that is the
    whole history."""

    last: JsonObject  # the recorded assistant turn
    new: Sequence[JsonObject]
    given_tools: Tools | None
    kwargs: JsonMapping
    given_system: Message | None
    inputs: InputFormat
    kept: Sequence[JsonObject] | None
    needs_tools: bool  # the new text depends on the tools or the system message
    stop: str | None  # the literal of the last recorded id, where it is an added token
    is_stop: bool
    in_reasoning: bool = False  # the turn was cut off while reasoning
    shows_text: bool = False  # the sentinel follows the turn's own text, which the new text depends on

    @cached_property
    def tools(self) -> list[JsonObject] | None:
        return normalise_tools(self.given_tools, self.inputs)

    @cached_property
    def system(self) -> JsonObject | None:
        return None if self.given_system is None else normalise_messages([self.given_system], self.inputs)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendPlan:
    """Where to cut in a render: after `gap`, which follows the sentinel; `closing` is inserted before what the template
    has there. `gap` has the marks of `mark_ids` for the ids of the turn's calls."""

    context: ContextKind
    place: SentinelPlace
    gap: str
    literal: str  # the added token that the gap ends with; empty where it ends in text
    join: Join
    closing: str = ""
    template_texts: tuple[str, ...] = ()  # what the template writes around the new contents, `closing` included


def mark_ids(text: str, last: JsonObject, *, back: bool = False) -> str:
    """`text` with a mark for each call id of the turn `last`; `back`: the marks are replaced by the ids."""
    for index, call in enumerate(last.get("tool_calls") or ()):
        pair = call["id"], f"\0{index}\0"
        if call["id"]:
            text = text.replace(*(reversed(pair) if back else pair))
    return text
