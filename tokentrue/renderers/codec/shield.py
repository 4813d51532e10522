"""Content that cannot forge structure: `ContentShield` breaks every added-token literal in it before the template is
rendered.

After rendering, what still reads as a literal is the template's own; `Codec.encode_shielded` takes the marks out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from tokentrue.errors import MessageError
from tokentrue.json_types import is_object
from tokentrue.renderers.codec.codec import Codec

MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDEF))  # noncharacters: never assigned, valid in UTF-8


def needs_shield(codec: Codec, value: Any) -> bool:
    """Whether `ContentShield` would change any string in it."""
    return any(codec.may_touch_literal(text) and _touches_literal(codec, text) for text in _strings_in(value))


def _strings_in(value: Any) -> Iterator[str]:
    waiting: list[Any] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif is_object(item):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += cast("list[Any]", item)


def _touches_literal(codec: Codec, text: str) -> bool:
    return (
        _holds_any(text, MARKS)
        or bool(codec.find_guarded(text))
        or codec.ends_like_literal(text)
        or codec.starts_like_literal(text)
    )


class ContentShield:
    """Breaks literals in the strings of one call. `mark` is a character that none of `values` contains."""

    def __init__(self, codec: Codec, values: Any) -> None:
        self._codec = codec
        self.mark = next((mark for mark in MARKS if not _holds_any(values, (mark,))), "")
        if not self.mark:
            raise MessageError(
                "content holds all of U+FDD0 to U+FDEE, none is left to mark literals with", field="messages"
            )

    def shield(self, value: Any) -> Any:
        """The same JSON value with every string shielded."""
        if isinstance(value, str):
            return self.shield_text(value)
        if is_object(value):
            return {self.shield_text(key): self.shield(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.shield(item) for item in cast("list[Any]", value)]
        return value

    def shield_text(self, text: str) -> str:
        """Marks inside literals, and at an end that the template's own text could complete to one."""
        out, codec, mark = text, self._codec, self.mark
        while found := [
            hit
            for hit in codec.find_guarded(out)
            if not (hit.end - hit.start == 1 and out[max(hit.start - 1, 0)] == mark)
        ]:
            pieces: list[str] = []
            done = 0
            for start, end, literal in found:
                broken = mark.join(literal) if len(literal) > 1 else mark + literal
                pieces += [out[done:start], out[start:end].replace(literal, broken)]
                done = end
            out = "".join([*pieces, out[done:]])
        if codec.ends_like_literal(out):
            bare = out.rstrip()
            out = bare + mark + out[len(bare) :]
        if codec.starts_like_literal(out):
            bare = out.lstrip()
            out = out[: len(out) - len(bare)] + mark + bare
        return out


def _holds_any(value: Any, marks: tuple[str, ...]) -> bool:
    return any(not text.isascii() and any(mark in text for mark in marks) for text in _strings_in(value))
