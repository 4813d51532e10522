"""The message that a client sees, put together region by region, and every call that the model tried to write."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokentrue.renderers.parsing_calls import Call, NoCall, parameter_schemas, parameter_value, read_calls
from tokentrue.renderers.parsing_early import Early, early
from tokentrue.renderers.parsing_regions import BROKEN, CALLS
from tokentrue.types import Attempt, Delta, Ids, Status, Tools

if TYPE_CHECKING:
    from tokentrue.renderers.parsing import Grammar

_CALL_FIELDS = (CALLS, BROKEN)
_SPACE = " \t\r\n"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class TextOut:
    """One text field of the message. Whitespace at its ends is structure and dropped; inside it is kept, and held until more text follows.

    With `join`, each segment is trimmed by itself and the segments are joined by that string.
    """

    strip: bool
    join: str | None
    parts: list[str] = field(default_factory=list[str])
    held: str = ""
    begun: bool = False  # this segment has text

    def add(self, text: str) -> str:
        if not self.strip:
            shown = text
        else:
            text = self.held + text
            if not self.begun and (self.join is not None or not self.parts):
                text = text.lstrip(_SPACE)
            shown = text.rstrip(_SPACE)
            self.held = text[len(shown) :]
        if shown and not self.begun and self.parts and self.join is not None:
            shown = self.join + shown
        self.begun = self.begun or bool(shown)
        if shown:
            self.parts.append(shown)
        return shown

    def end(self) -> None:
        self.begun = False
        if self.join is not None:
            self.held = ""


class Message:
    """The message that the client sees, and every call that the model tried to write."""

    def __init__(self, grammar: Grammar, tools: Tools | None, *, prompt_ids: Ids) -> None:
        self._grammar = grammar
        self._tools, self._prompt_ids = tools, prompt_ids
        self._known_schemas: Mapping[str, Any] | None = None
        self._known_seed = b""
        self._texts: dict[str, TextOut] = {}
        self._calls: list[dict[str, Any]] = []
        self._extra: dict[str, Any] = {}
        self._early: Early | None = None  # the call that is being written, where it can be shown meanwhile
        self._begun: int | None = None  # its index, once it has been shown
        self._shown: list[str] = []  # of its arguments
        self.attempts: list[Attempt] = []

    def _schemas(self) -> Mapping[str, Any]:
        if self._known_schemas is None:
            self._known_schemas = parameter_schemas(self._tools)
        return self._known_schemas

    def _seed(self) -> bytes:
        """Of call ids: how long the prompt is, and how it ends."""
        if not self._known_seed:
            self._known_seed = len(self._prompt_ids).to_bytes(8, "big") + array("q", self._prompt_ids[-32:]).tobytes()
        return self._known_seed

    def make_ready(self) -> None:
        """Works out what calls need before there is one."""
        self._schemas()
        self._seed()

    def add_text(self, name: str, text: str) -> list[Delta]:
        shown = self._text(name).add(_presentable(text))
        if not shown:
            return []
        return [Delta(content=shown) if name == "content" else Delta(reasoning=shown)]

    def end_segment(self, name: str) -> None:
        self._text(name).end()

    def add_segment(self, name: str, text: str) -> None:
        """A whole segment of a turn that nobody is shown while it is written."""
        out = self._text(name)
        if text:
            out.add(_presentable(text))
        out.end()

    def _text(self, name: str) -> TextOut:
        out = self._texts.get(name)
        if out is None:
            strip, join = self._grammar.layouts.get(name, (True, None))
            out = self._texts[name] = TextOut(strip=strip, join=join)
        return out

    def open_call(self, captures: Mapping[str, str]) -> None:
        assert self._grammar.shape is not None
        self._early = early(self._grammar.shape, captures, self._typed)
        self._begun = None

    def more_of_call(self, text: str) -> list[Delta]:
        """More of the body of the open call."""
        if self._early is None:
            return []
        arguments = self._early.feed(_presentable(text))
        if not arguments:
            return []
        deltas: list[Delta] = []
        if self._begun is None:
            self._begun, self._shown = len(self._calls), []
            deltas += self._open(self._early.name, self._early.call_id, "")
        self._shown.append(arguments)
        return [*deltas, Delta(call=self._begun, arguments=arguments)]

    def _typed(self, name: str, match: Any) -> Any:
        return parameter_value(match, self._schemas().get(name, {}).get(match["key"]))

    def add_region(
        self, field: str, body: str, *, captures: Mapping[str, str], closed: bool, raw: str, span: tuple[int, int]
    ) -> list[Delta]:
        """A region that has ended, `closed` by its own marker or not; `raw` is its text with its markers, `span` the tokens of that."""
        if field not in _CALL_FIELDS:
            self._extra[field] = _presentable(body)
            return []
        calls = self._read(field, _presentable(body), captures, closed=closed)
        begun, self._begun, self._early = self._begun, None, None
        if begun is not None:
            self._calls[begun]["function"]["arguments"] = "".join(self._shown)
            calls = self._as_shown(begun, calls)
        start, end = span
        if isinstance(calls, NoCall):
            self.attempts.append(Attempt(status=calls.status, raw=raw, start=start, end=end, name=calls.name, detail=calls.detail))
            return self.add_text("content", raw)
        deltas: list[Delta] = []
        for call in calls:
            unknown = self._tools is not None and call.name not in self._schemas()
            status, detail = (Status.UNKNOWN_TOOL, f"no tool is named {call.name!r}") if unknown else (Status.OK, "")
            self.attempts.append(
                Attempt(status=status, raw=raw, start=start, end=end, name=call.name, arguments=call.values, detail=detail)
            )
            deltas += self._add_call(call, begun)
        return deltas

    def _as_shown(self, begun: int, calls: list[Call] | NoCall) -> list[Call] | NoCall:
        """What has been read must be what has been shown."""
        shown = self._calls[begun]["function"]
        if isinstance(calls, NoCall):
            return calls
        if len(calls) == 1 and calls[0].name == shown["name"] and calls[0].arguments.startswith(shown["arguments"]):
            return calls
        return NoCall(status=Status.MALFORMED, detail="the call ends as another than it began", name=shown["name"])

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None if self._calls else ""}
        for name, out in self._texts.items():
            if out.parts:
                message[name] = "".join(out.parts)
        message |= self._extra
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _read(self, field: str, body: str, captures: Mapping[str, str], *, closed: bool) -> list[Call] | NoCall:
        declared = self._grammar.template.fields[field]
        if not closed and (field == BROKEN or declared.close_re is not None):
            return self._unclosed(captures)
        if field == BROKEN:
            status = Status.MALFORMED if body.strip() else Status.MISSING_NAME
            return NoCall(status=status, detail="not written as this model writes a call")
        calls = read_calls(declared, body, captures, self._schemas(), shape=self._grammar.shape)
        return self._unclosed(captures) if isinstance(calls, NoCall) and not closed else calls

    def _unclosed(self, captures: Mapping[str, str]) -> NoCall:
        return NoCall(status=Status.UNCLOSED, detail="the turn ended inside the call", name=captures.get("name"))

    def _add_call(self, call: Call, begun: int | None) -> list[Delta]:
        if begun is None:
            index = len(self._calls)
            return [*self._open(call.name, call.call_id, call.arguments), Delta(call=index, arguments=call.arguments)]
        function = self._calls[begun]["function"]
        rest, function["arguments"] = call.arguments[len(function["arguments"]) :], call.arguments
        return [Delta(call=begun, arguments=rest)]

    def _open(self, name: str, call_id: str, arguments: str) -> list[Delta]:
        index = len(self._calls)
        call_id = call_id or self._new_id(index)
        self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        return [Delta(call=index, call_id=call_id, name=name)]

    def _new_id(self, index: int) -> str:
        """The same turn gives the same id, another turn of the conversation another one."""
        digest = hashlib.blake2b(self._seed() + index.to_bytes(4, "big"), digest_size=12).hexdigest()
        return digest[:9] if self._grammar.call_ids == "short" else f"call_{digest}"


def _presentable(text: str) -> str:
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
