"""Parses sampled ids to an OpenAI message, incrementally; a complete turn is fed at once and finished.

ids → bytes → text (never half a character) → regions (never half a marker) → reasoning, content and tool calls. The
message does not depend on the chunks; the deltas add up to it; `raw` is every byte the model wrote. A call that cannot
be parsed reaches the client as text and is recorded as an attempt. With `early`, a stream shows calls while the model
writes them and cannot retract them: an aborted call keeps the arguments that were shown, which are not valid JSON.
Bytes that are not UTF-8 are lone surrogates in `raw` (`errors="surrogateescape"`) and `�` in the message.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokentrue.json_types import JsonObject
from tokentrue.renderers.parsing.calls import (
    CallFailure,
    CallReader,
    ParsedCall,
    list_parameter_schemas,
    read_whole,
    start_call,
)
from tokentrue.renderers.parsing.grammar import (
    BROKEN,
    CALLS,
    TEXT_FIELDS,
    Grammar,
    ShieldedOffsets,
    TextLayout,
    unshield,
)
from tokentrue.renderers.parsing.scanner import (
    RegionClosed,
    RegionOpened,
    RegionScanner,
    RegionText,
    ScanEvent,
    TextEnded,
    TokenSource,
)
from tokentrue.types import Attempt, Delta, Ended, Ids, Parsed, Status, Tools

_SPACE = " \t\r\n"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class TextField:
    """One text field of the message. Whitespace at its ends is structure and dropped; inner whitespace is kept, and
    held until more text follows.

    With `layout.join`, each segment is trimmed and the segments are joined by that string.
    """

    layout: TextLayout
    parts: list[str] = field(default_factory=list[str])
    held: str = ""
    has_begun: bool = False  # this segment has text

    def add(self, text: str) -> str:
        join = self.layout.join
        shown = self._trim(text, join) if self.layout.strip else text
        if shown and not self.has_begun and self.parts and join is not None:
            shown = join + shown
        self.has_begun = self.has_begun or bool(shown)
        if shown:
            self.parts.append(shown)
        return shown

    def _trim(self, text: str, join: str | None) -> str:
        text = self.held + text
        if not self.has_begun and (join is not None or not self.parts):
            text = text.lstrip(_SPACE)
        shown = text.rstrip(_SPACE)
        self.held = text[len(shown) :]
        return shown

    def end_segment(self) -> None:
        self.has_begun = False
        if self.layout.join is not None:
            self.held = ""


class MessageBuilder:
    """The client's message, and every call that the model tried to write. `early`: shows calls while they are
    written.
    """

    def __init__(self, grammar: Grammar, tools: Tools | None, *, prompt_ids: Ids, early: bool) -> None:
        self._grammar = grammar
        self._has_tools = tools is not None
        self._schemas = list_parameter_schemas(tools)
        # seeds call ids: the prompt's length and end
        self._seed = len(prompt_ids).to_bytes(8, "big") + array("q", prompt_ids[-32:]).tobytes()
        self._texts: dict[str, TextField] = {}
        self._calls: list[JsonObject] = []
        self._extra: JsonObject = {}
        self._early = early
        self._captures: Mapping[str, str] = {}  # of the open region
        self._body: list[str] = []
        self._reader: CallReader | None = None  # of the call being written
        self._shown_call: int | None = None  # index of the call being written, once shown
        self._shown: list[str] = []  # its arguments shown so far
        self.attempts: list[Attempt] = []

    def build(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": None if self._calls else ""}
        for name, text in self._texts.items():
            if text.parts:
                message[name] = "".join(text.parts)
        message |= self._extra
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    # text

    def add_text(self, name: str, text: str) -> list[Delta]:
        shown = self._get_text(name).add(_replace_surrogates(text))
        if not shown:
            return []
        return [Delta(content=shown) if name == "content" else Delta(reasoning=shown)]

    def end_segment(self, name: str) -> None:
        self._get_text(name).end_segment()

    def _get_text(self, name: str) -> TextField:
        if name not in self._texts:
            self._texts[name] = TextField(self._grammar.layouts.get(name, TextLayout()))
        return self._texts[name]

    # calls

    def open_region(self, field: str, captures: Mapping[str, str]) -> None:
        call_format = self._grammar.call_format if field == CALLS else None
        self._reader = start_call(call_format, captures, self._schemas) if call_format is not None else None
        self._captures, self._body, self._shown_call = captures, [], None

    def add_body(self, text: str) -> list[Delta]:
        text = _replace_surrogates(text)
        self._body.append(text)
        arguments = self._reader.feed(text) if self._reader is not None else ""
        if self._reader is None or not arguments or not self._early:
            return []
        deltas: list[Delta] = []
        if self._shown_call is None:
            self._shown_call, self._shown = len(self._calls), []
            deltas += self._append_call(self._reader.name, self._reader.call_id, "")
        self._shown.append(arguments)
        return [*deltas, Delta(call=self._shown_call, arguments=arguments)]

    def close_region(self, field: str, *, closed: bool, raw: str, span: tuple[int, int]) -> list[Delta]:
        """Ends the open region; `closed`: by its own marker. `raw` is its text with markers, `span` the tokens of that.

        A region that is not a call becomes text, unless it was already shown as a call.
        """
        if field not in (CALLS, BROKEN):
            self._extra[field] = "".join(self._body)
            return []
        calls = self._read(field, closed=closed)
        shown, self._shown_call = self._shown_call, None
        if shown is not None:
            self._calls[shown]["function"]["arguments"] = "".join(self._shown)
            calls = self._check_shown(shown, calls)
        start, end = span
        if isinstance(calls, CallFailure):
            self.attempts.append(
                Attempt(status=calls.status, raw=raw, start=start, end=end, name=calls.name, detail=calls.detail)
            )
            return self.add_text("content", raw) if shown is None else []
        deltas: list[Delta] = []
        for call in calls:
            is_unknown = self._has_tools and call.name not in self._schemas
            status, detail = (Status.UNKNOWN_TOOL, f"no tool is named {call.name!r}") if is_unknown else (Status.OK, "")
            self.attempts.append(
                Attempt(
                    status=status, raw=raw, start=start, end=end, name=call.name, arguments=call.values, detail=detail
                )
            )
            deltas += self._add_call(call, shown)
        return deltas

    def _read(self, field: str, *, closed: bool) -> list[ParsedCall] | CallFailure:
        declared, name = self._grammar.fields[field], self._captures.get("name")
        unclosed = CallFailure(status=Status.UNCLOSED, detail="the turn ended inside the call", name=name)
        if not closed and (field == BROKEN or declared.close_re is not None):
            return unclosed
        body = "".join(self._body)
        if field == BROKEN:
            status = Status.MALFORMED if body.strip() else Status.MISSING_NAME
            return CallFailure(status=status, detail="not written as this model writes a call")
        call = self._reader.end() if self._reader is not None else None
        calls = read_whole(declared, body, self._captures, self._schemas) if call is None else call
        if isinstance(calls, CallFailure):
            return calls if closed else unclosed
        return [calls] if isinstance(calls, ParsedCall) else calls

    def _check_shown(self, shown: int, calls: list[ParsedCall] | CallFailure) -> list[ParsedCall] | CallFailure:
        function = self._calls[shown]["function"]
        if isinstance(calls, CallFailure):
            return calls
        if (
            len(calls) == 1
            and calls[0].name == function["name"]
            and calls[0].arguments.startswith(function["arguments"])
        ):
            return calls
        return CallFailure(
            status=Status.MALFORMED, detail="the call ends as another than it began", name=function["name"]
        )

    def _add_call(self, call: ParsedCall, shown: int | None) -> list[Delta]:
        if shown is None:
            index = len(self._calls)
            return [
                *self._append_call(call.name, call.call_id, call.arguments),
                Delta(call=index, arguments=call.arguments),
            ]
        function = self._calls[shown]["function"]
        rest, function["arguments"] = call.arguments[len(function["arguments"]) :], call.arguments
        return [Delta(call=shown, arguments=rest)]

    def _append_call(self, name: str, call_id: str, arguments: str) -> list[Delta]:
        index = len(self._calls)
        call_id = call_id or self._make_id(index)
        self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        return [Delta(call=index, call_id=call_id, name=name)]

    def _make_id(self, index: int) -> str:
        """Deterministic per turn; differs between turns of a conversation."""
        digest = hashlib.blake2b(self._seed + index.to_bytes(4, "big"), digest_size=12).hexdigest()
        return digest[:9] if self._grammar.call_ids == "short" else f"call_{digest}"


def _replace_surrogates(text: str) -> str:
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


_ANCHOR_WINDOWS = (
    8,
    48,
    1024,
)  # tokens of the prompt's end that are searched for the opening of the turn, which is a few tokens long


def parse_turn(grammar: Grammar, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed:
    parser = Parser(grammar, prompt_ids=prompt_ids, tools=tools)
    parser.feed(sampled_ids)
    return parser.finish()[1]


class Parser:
    """`protocols.TurnParser` for one sampled turn. `early`: shows calls while they are written."""

    def __init__(
        self, grammar: Grammar, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = False
    ) -> None:
        self._grammar = grammar
        prompt_ids = prompt_ids if len(prompt_ids) else grammar.generation_ids
        self._message = MessageBuilder(grammar, tools, prompt_ids=prompt_ids, early=early)
        self._scanner = RegionScanner(grammar, prefix=_find_opening(grammar, prompt_ids))
        self._source = TokenSource(grammar)
        self._offsets = ShieldedOffsets()
        self._held_stop: int | None = (
            None  # the last id if it is a stop token: it ends the turn only if nothing follows
        )
        self._reasoning_tokens = 0

    def feed(self, token_ids: Ids) -> list[Delta]:
        if not len(token_ids):
            return []
        ids = [*([] if self._held_stop is None else [self._held_stop]), *token_ids]
        self._held_stop = ids.pop() if ids[-1] in self._grammar.stop_ids else None
        return self._scan(self._source.add(ids))

    def finish(self) -> tuple[list[Delta], Parsed]:
        stop = self._held_stop
        deltas = self._scan(self._source.flush())
        if stop is not None:
            text = self._source.add((stop,))
            if stop in self._grammar.closing_stop_ids and self._scanner.is_inside:
                deltas += self._scan(text)
        deltas += self._apply(self._scanner.finish(stopped=stop is not None))
        parsed = Parsed(
            message=self._message.build(),
            attempts=tuple(self._message.attempts),
            ended=Ended.OPEN if stop is None else Ended.STOP,
            stop_id=stop,
            raw=self._source.raw,
            reasoning_tokens=self._reasoning_tokens,
        )
        return deltas, parsed

    def _scan(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._offsets.add(text)
        return self._apply(self._scanner.feed(text))

    def _apply(self, events: list[ScanEvent]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if isinstance(event, RegionText):
                text = unshield(event.text)
                name = TEXT_FIELDS.get(event.field)
                deltas += self._message.add_body(text) if name is None else self._message.add_text(name, text)
            elif isinstance(event, RegionOpened):
                captures = {name: unshield(value) for name, value in event.captures.items()}
                self._message.open_region(event.field, captures)
            elif isinstance(event, TextEnded):
                self._end_text(event)
            else:
                deltas += self._close(event)
        return deltas

    def _end_text(self, event: TextEnded) -> None:
        name = TEXT_FIELDS[event.field]
        self._message.end_segment(name)
        start, end = self._offsets.true_offset(event.start), self._offsets.true_offset(event.end)
        if name == "reasoning_content" and end > start:
            first, last = self._source.find_tokens(start, end)
            self._reasoning_tokens += last - first

    def _close(self, event: RegionClosed) -> list[Delta]:
        start, end = self._offsets.true_offset(event.start), self._offsets.true_offset(event.end)
        return self._message.close_region(
            event.field,
            closed=event.closed,
            raw=self._source.slice(start, end),
            span=self._source.find_tokens(start, end),
        )


def _find_opening(grammar: Grammar, prompt_ids: Ids) -> str:
    """Returns the (shielded) prompt text after the turn's last opening. Reads only the prompt's end."""
    if len(grammar.fields) == 1:
        return ""
    for window in _ANCHOR_WINDOWS:
        source = TokenSource(grammar)
        text = source.add(prompt_ids[-window:]) + source.flush()
        place: int | None = None
        for match in grammar.anchor.finditer(text):
            place = match.end()
        if place is not None:
            return text[place:]
        if window >= len(prompt_ids):
            break
    return ""
