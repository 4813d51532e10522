"""Parses sampled ids to an OpenAI message, incrementally. The message does not depend on the chunks; the deltas add up
to it; `raw` is every byte the model wrote. A call that cannot be parsed reaches the client as text and is recorded as
an attempt. With `early`, a stream shows calls while the model writes them: an aborted call keeps the arguments that
were shown, which are not valid JSON. Bytes that are not UTF-8 are lone surrogates in `raw` (`errors="surrogateescape"`)
and `�` in the message."""

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
from tokentrue.renderers.parsing.grammar import BROKEN, CALLS, TEXT_FIELDS, Grammar, TextLayout
from tokentrue.renderers.parsing.scanner import RegionOpened, RegionScanner, RegionText, ScanEvent, Settled, TokenSource
from tokentrue.types import Attempt, Delta, Ended, Ids, Parsed, Status, Tools

_SPACE = " \t\r\n"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ANCHOR_WINDOWS = (8, 48, 1024)  # tokens of the prompt's end that are searched for the turn's opening


@dataclass(slots=True)
class TextField:
    """Whitespace at its ends is structure and dropped; inner whitespace is held until more text follows. With
    `layout.join`, each segment is trimmed and the segments are joined by that string."""

    layout: TextLayout
    parts: list[str] = field(default_factory=list[str])
    held: str = ""
    has_begun: bool = False  # this segment has text

    def add(self, text: str) -> str:
        join = self.layout.join
        if self.layout.strip:
            whole = self.held + text
            if not self.has_begun and (join is not None or not self.parts):
                whole = whole.lstrip(_SPACE)
            text = whole.rstrip(_SPACE)
            self.held = whole[len(text) :]
        if text:
            if join is not None and self.parts and not self.has_begun:
                text = join + text
            self.has_begun = True
            self.parts.append(text)
        return text

    def end_segment(self) -> None:
        self.has_begun = False
        if self.layout.join is not None:
            self.held = ""


class MessageBuilder:
    """The client's message, and every call that the model tried to write."""

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
        self._captures, self._body, self._shown_call, self._shown = captures, [], None, []

    def add_body(self, text: str) -> list[Delta]:
        text = _replace_surrogates(text)
        self._body.append(text)
        arguments = self._reader.feed(text) if self._reader is not None else ""
        if self._reader is None or not arguments or not self._early:
            return []
        deltas: list[Delta] = []
        if self._shown_call is None:
            self._shown_call = len(self._calls)
            deltas.append(self._append_call(self._reader.name, self._reader.call_id, ""))
        self._shown.append(arguments)
        return [*deltas, Delta(call=self._shown_call, arguments=arguments)]

    def close_region(self, field: str, *, closed: bool, raw: str, span: tuple[int, int]) -> list[Delta]:
        """`closed`: by its own marker. `raw`: with markers, `span`: its tokens. A region that is not a call becomes
        text, unless it was already shown as a call."""
        if field not in (CALLS, BROKEN):
            self._extra[field] = "".join(self._body)
            return []
        calls, shown, arguments = self._read(field, closed=closed), self._shown_call, "".join(self._shown)
        self._shown_call = None
        (start, end), deltas = span, list[Delta]()
        if shown is not None:
            function = self._calls[shown]["function"]
            function["arguments"] = arguments
            name = function["name"]
            if not isinstance(calls, CallFailure) and (
                len(calls) != 1 or calls[0].name != name or not calls[0].arguments.startswith(arguments)
            ):
                calls = CallFailure(status=Status.MALFORMED, detail="the call ends as another than it began", name=name)
        if isinstance(calls, CallFailure):
            attempt = Attempt(status=calls.status, raw=raw, start=start, end=end, name=calls.name, detail=calls.detail)
            self.attempts.append(attempt)
            return self.add_text("content", raw) if shown is None else []
        for call in calls:
            is_unknown = self._has_tools and call.name not in self._schemas
            attempt = Attempt(
                status=Status.UNKNOWN_TOOL if is_unknown else Status.OK,
                raw=raw,
                start=start,
                end=end,
                name=call.name,
                arguments=call.values,
                detail=f"no tool is named {call.name!r}" if is_unknown else "",
            )
            self.attempts.append(attempt)
            if shown is None:
                deltas.append(self._append_call(call.name, call.call_id, call.arguments))
                deltas.append(Delta(call=len(self._calls) - 1, arguments=call.arguments))
            else:
                self._calls[shown]["function"]["arguments"] = call.arguments
                deltas.append(Delta(call=shown, arguments=call.arguments[len(arguments) :]))
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
        call = self._reader.end(body) if self._reader is not None else None
        calls = read_whole(declared, body, self._captures, self._schemas) if call is None else call
        if isinstance(calls, CallFailure):
            return calls if closed else unclosed
        return [calls] if isinstance(calls, ParsedCall) else calls

    def _append_call(self, name: str, call_id: str, arguments: str) -> Delta:
        """The call's id is deterministic per turn and differs between turns of a conversation."""
        index = len(self._calls)
        if not call_id:
            digest = hashlib.blake2b(self._seed + index.to_bytes(4, "big"), digest_size=12).hexdigest()
            call_id = digest[:9] if self._grammar.call_ids == "short" else f"call_{digest}"
        self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        return Delta(call=index, call_id=call_id, name=name)


def _replace_surrogates(text: str) -> str:
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def parse_turn(grammar: Grammar, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed:
    parser = Parser(grammar, prompt_ids=prompt_ids, tools=tools)
    parser.feed(sampled_ids)
    return parser.finish()[1]


class Parser:
    """`early`: shows calls while they are written."""

    def __init__(
        self, grammar: Grammar, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = False
    ) -> None:
        self._grammar = grammar
        prompt_ids = prompt_ids if len(prompt_ids) else grammar.generation_ids
        self._message = MessageBuilder(grammar, tools, prompt_ids=prompt_ids, early=early)
        self._scanner = RegionScanner(grammar, prefix=_find_opening(grammar, prompt_ids))
        self._source = TokenSource(grammar)
        self._held_stop: int | None = None  # the last id if it is a stop token: more ids may still follow
        self._reasoning_tokens = 0

    def feed(self, token_ids: Ids) -> list[Delta]:
        if not len(token_ids):
            return []
        ids = [*token_ids] if self._held_stop is None else [self._held_stop, *token_ids]
        self._held_stop = ids.pop() if ids[-1] in self._grammar.stop_ids else None
        return self._scan(self._source.add(ids))

    def finish(self) -> tuple[list[Delta], Parsed]:
        stop = self._held_stop
        deltas = self._scan(self._source.flush())
        if stop is not None:
            settled = self._source.add((stop,))
            if stop in self._grammar.closing_stop_ids and self._scanner.is_inside:
                deltas += self._scan(settled)
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

    def _scan(self, settled: Settled) -> list[Delta]:
        return self._apply(self._scanner.feed(settled)) if settled.text else []

    def _apply(self, events: list[ScanEvent]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            name = TEXT_FIELDS.get(event.field)
            if isinstance(event, RegionText):
                deltas += self._message.add_text(name, event.text) if name else self._message.add_body(event.text)
            elif isinstance(event, RegionOpened):
                self._message.open_region(event.field, event.captures)
            elif name is None:
                raw, span = self._source.raw[event.start : event.end], self._source.find_tokens(event.start, event.end)
                deltas += self._message.close_region(event.field, closed=event.closed, raw=raw, span=span)
            else:
                self._message.end_segment(name)
                if name == "reasoning_content" and event.end > event.start:
                    first, last = self._source.find_tokens(event.start, event.end)
                    self._reasoning_tokens += last - first
        return deltas


def _find_opening(grammar: Grammar, prompt_ids: Ids) -> Settled:
    """The prompt's text after the turn's last opening. Reads only the prompt's end."""
    if len(grammar.fields) > 1:
        for window in _ANCHOR_WINDOWS:
            source = TokenSource(grammar)
            (text, safe), (text_end, safe_end) = source.add(prompt_ids[-window:]), source.flush()
            text, safe = text + text_end, safe + safe_end
            ends = [match.end() for match in grammar.anchor.finditer(safe)]
            if ends:
                return Settled(text[ends[-1] :], safe[ends[-1] :])
            if window >= len(prompt_ids):
                break
    return Settled("", "")
