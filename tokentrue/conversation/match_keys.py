"""Loose keys of messages: hashes of what no known lossy projection changes, chained over a conversation. A key only
finds candidates; `find_changes` compares a replayed message with the served one."""

import json
import math
import re
from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Literal, cast

from tokentrue.errors import MessageError
from tokentrue.json_types import JsonMapping, JsonValue
from tokentrue.plain_json import check_depth, digest
from tokentrue.types import Message, Tools

CallRef = tuple[int, int]
"""The call that a tool result answers: index of the assistant message in the conversation, and of the call in it."""

START_KEY = b""
"""The chained key before the first message."""

_KNOWN = ("role", "content", "reasoning_content", "reasoning", "tool_calls")
_TAGS = ("think", "thinking", "thought")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("thinking", "reasoning", "think")
_CLOSING_TAG = re.compile(r"</(?:think|thinking|thought)>")
_WRITTEN_CALLS = "Calling tools:\n"
_LONGEST_WRITTEN = 1 << 20  # characters
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def text_of(content: JsonValue, field: str = "content") -> str:
    """The text of a string or of parts; a part that is not text becomes NUL and its canonical JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise MessageError(f"must be a string, a list of parts or null, got {type(content).__name__}", field=field)
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, Mapping):
            raise MessageError(f"must be an object, got {type(part).__name__}", field=f"{field}[{index}]")
        elif (kind := part.get("type", "text")) in _TEXT_PARTS:
            texts.append(str(part.get("text") or ""))
        elif kind not in _REASONING_PARTS:
            texts.append("\0" + _canonical_json(part))
    return "".join(texts)


def _canonical_json(value: JsonMapping) -> str:
    return json.dumps({k: v for k, v in value.items() if k != "cache_control"}, sort_keys=True, default=str)


def reasoning_of(message: Message) -> str:
    """Reasoning in fields and parts. Harnesses repeat one text in several places; different texts are joined."""
    texts = [_reasoning_text(message.get(field)) for field in ("reasoning_content", "reasoning")]
    content, in_parts = message.get("content"), ""
    for part in content if isinstance(content, (list, tuple)) else ():
        if isinstance(part, Mapping) and part.get("type") in _REASONING_PARTS:
            names = ("thinking", "text", "reasoning")
            in_parts += next((_reasoning_text(part[name]) for name in names if part.get(name)), "")
    return "".join({text.strip(): text for text in (*texts, in_parts) if text}.values())


def _reasoning_text(value: JsonValue) -> str:
    if value is None or isinstance(value, (str, list, tuple)):
        return text_of(value)
    return json.dumps(value, sort_keys=True, default=str)


def check_calls(message: Message, field: str) -> None:
    calls: JsonValue = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise MessageError(f"must be a list, got {type(calls).__name__}", field=f"{field}.tool_calls")
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function") or {}, Mapping):
            raise MessageError("must be an object with a function object", field=f"{field}.tool_calls[{index}]")


def calls_of(message: Message) -> Sequence[JsonMapping]:
    return message.get("tool_calls") or ()


def name_and_arguments(call: JsonMapping) -> tuple[str, JsonValue]:
    function = call.get("function") or call
    return str(function.get("name") or ""), function.get("arguments")


def read_written_calls(text: str, calls: Sequence[JsonMapping]) -> tuple[str, Sequence[JsonMapping]]:
    """Of a message whose calls smolagents wrote into its text, as Python prints them."""
    before, mark, written = text.rpartition(_WRITTEN_CALLS)
    if calls or not mark or (before and not before.endswith("\n")) or len(written) > _LONGEST_WRITTEN:
        return text, calls
    try:
        found = literal_eval(written)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text, calls
    if not isinstance(found, list) or not found or not all(map(_is_call, cast("list[Any]", found))):
        return text, calls
    return before, cast("list[JsonMapping]", found)


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"id", "type", "function"}:  # pyright: ignore[reportUnknownMemberType]
        return False
    function: Any = value["function"]
    return isinstance(function, dict) and function.keys() == {"name", "arguments"}  # pyright: ignore[reportUnknownMemberType]


def call_ids_of(message: Message) -> tuple[str | None, ...]:
    if message.get("role") != "assistant":
        return ()
    return tuple(call_id if isinstance(call_id := call.get("id"), str) else None for call in calls_of(message))


def note_calls(seen: dict[str, CallRef], index: int, call_ids: tuple[str | None, ...]) -> None:
    for position, call_id in enumerate(call_ids):
        if call_id is not None:
            seen[call_id] = (index, position)


class _NoDouble(str):
    pass


Harness = Literal["same", "python", "javascript", "go", "any"]
"""Decodes arguments and encodes them again; "any" maps all the ways in which a value may come back to one."""


def repeats_arguments(served: JsonValue, replayed: JsonValue) -> bool:
    """True up to key order, spacing, escapes, number format, and empty versus `{}`, which also replaces served text
    that is no JSON."""
    now = _loosen_arguments(replayed, "same")
    if now == "{}" and _loosen_arguments(served, "same").startswith("\0"):
        return True
    return any(_loosen_arguments(served, harness) == now for harness in ("same", "python", "javascript", "go"))


def _respell(value: str, harness: Harness) -> JsonValue:
    """A number beyond all doubles (`1e400`) comes back as `Infinity` from Python and as `null` from JavaScript, a
    lone surrogate as U+FFFD from Go."""
    if not isinstance(value, _NoDouble):
        return _LONE_SURROGATE.sub("\ufffd", value) if harness in ("go", "any") else value
    if harness in ("javascript", "any"):
        return None
    if harness == "python" and value != "NaN":
        return {"\0number": "-Infinity" if value.startswith("-") else "Infinity"}
    return {"\0number": str(value)}


def _loosen_arguments(arguments: JsonValue, harness: Harness) -> str:
    """Text that is not JSON or is nested too deeply is unchanged; "any" makes it `{}`, as pi does."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return "{}"
    if isinstance(arguments, str):
        try:
            decoded = _DECODER.decode(arguments)
            check_depth(decoded, "arguments")
        except (ValueError, RecursionError, MessageError):
            return "{}" if harness == "any" else "\0" + arguments.strip()
        arguments = decoded
    try:
        return _ENCODER.encode(_loosen(arguments, harness))
    except (TypeError, ValueError, RecursionError):
        return "\0" + repr(arguments)


def _read_number(text: str) -> float | str:
    number = float(text)  # what a JavaScript harness keeps of it
    return number if math.isfinite(number) else _NoDouble(text)


_DECODER = json.JSONDecoder(parse_float=_read_number, parse_int=_read_number, parse_constant=_NoDouble)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _loosen(value: JsonValue, harness: Harness) -> JsonValue:
    if isinstance(value, str):
        return _respell(value, harness)
    if isinstance(value, dict):
        return {_respell(key, harness): _loosen(item, harness) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_loosen(item, harness) for item in value]
    if value is None or isinstance(value, bool):
        return value
    try:
        return float(value) or 0.0  # -0.0 comes back as 0
    except OverflowError:
        return _respell(_NoDouble(value), harness)


def read_role(message: Message, field: str = "messages[]") -> str:
    """`developer` is a synonym of `system`."""
    role = message.get("role") if isinstance(message, (dict, Mapping)) else None
    if not isinstance(role, str) or not role:
        raise MessageError("a message needs a role", field=field)
    return "system" if role == "developer" else role


def count_system(roles: Iterable[str]) -> int:
    return sum(takewhile(bool, (role == "system" for role in roles)))


def message_key(message: Message) -> bytes:
    """Covers the speaker's name: distinguishes sub-agents."""
    return candidate_key(message) + _hash([str(message.get("name") or "")])


def candidate_key(message: Message, field: str = "messages[]") -> bytes:
    role, text = read_role(message, field), text_of(message.get("content"), f"{field}.content")
    check_calls(message, field)
    if role != "assistant":
        return _hash([role, text])
    # In a replay, reasoning may precede a closing tag, and served text may contain such a tag: what follows the
    # last is in both.
    text, calls = read_written_calls(_CLOSING_TAG.split(text)[-1], calls_of(message))
    fields = [role, text.strip()]
    for call in calls:
        name, arguments = name_and_arguments(call)
        fields += [name, _loosen_arguments(arguments, "any")]
    return _hash(fields)


def chain_key(previous: bytes, key: bytes, reference: CallRef | str | None) -> bytes:
    """`reference`: the call that a tool result answers, or its raw id."""
    return blake2b(previous + key + (b"" if reference is None else repr(reference).encode()), digest_size=16).digest()


def tools_key(tools: Tools | None) -> bytes:
    """Equal for tool sets that differ only in order or JSON formatting."""
    return _hash(sorted(map(_canonical_json, tools or ())))


def _hash(fields: Iterable[str]) -> bytes:
    return digest(*(field.encode("utf-8", "surrogatepass") for field in fields))


def find_changes(served: Message, replayed: Message) -> tuple[str, ...] | None:
    """The changes, sorted, if `replayed` is a known lossy projection of `served`; None if it is an edit. A replay that
    *adds* to what was served is an edit: a wrong match is worse than a fork. A think tag in the served text is the
    model's own: only the replay is searched for inlined reasoning."""
    if served is replayed:
        return ()
    text, calls = _text_changes(served, replayed), _call_changes(served, replayed)
    if text is None or calls is None:
        return _written_changes(served, replayed)
    is_extended = any(name not in _KNOWN and value not in (None, [], "") for name, value in replayed.items())
    return tuple(sorted(text | calls | ({"extra_fields"} if is_extended else set())))


def _written_changes(served: Message, replayed: Message) -> tuple[str, ...] | None:
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
