"""Google contents as messages in the OpenAI shape. The protocol's JSON may spell each field in camelCase or in
snake_case.

Calls and results may come without ids. The k-th call of a function in one turn is then `name#k`, and the matcher
restores the id that was served; `pair_results` finds the call of a result. Reasoning travels sealed in
`thoughtSignature`; a thought that comes back changed is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import arguments_text, echo, encode, object_of, text_field
from tokentrue.gateway.dialects.google.signatures import read_signature
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.types import Message

SEALED = "sealed_reasoning"  # in a part of a turn, before `join_model_turn`: the reasoning that its signatures hold
KINDS = ("text", "functionCall", "functionResponse")
HINTS = ("thought", "thoughtSignature", "partMetadata")
CALL_FIELDS = ("id", "name", "args")
RESULT_FIELDS = ("id", "name", "response", "willContinue", "scheduling")
PLAIN_RESULTS = ("output", "result", "error")  # the SDKs wrap a result that is no object under one of these
_SNAKE = re.compile(r"_([a-z])")


def camel_keys(fields: JsonMapping, path: str) -> JsonObject:
    """One level of an object with its keys in camelCase."""
    out: JsonObject = {}
    for name, value in fields.items():
        camel = _SNAKE.sub(lambda match: match[1].upper(), name)
        if camel in out:
            raise MessageError(
                f"is given twice, as {camel} and in snake_case", field=f"{path}.{name}" if path else name
            )
        out[camel] = value
    return out


def messages_from_content(item: Any, path: str, signer: ReasoningSigner) -> tuple[Message, ...]:
    fields = camel_keys(object_of(item, path), path)
    role = fields.get("role") or "user"
    parts = parts_of(fields, path)
    if role == "model":
        return (model_message(parts, signer),)
    if role in ("user", "function"):
        return tuple(user_messages(parts))
    raise MessageError(f"role {echo(role)} is not supported; use 'user' or 'model'", field=f"{path}.role")


def parts_of(fields: JsonObject, path: str) -> list[tuple[str, str, JsonObject]]:
    """Place, kind and fields of each part."""
    parts: Any = fields.get("parts")
    if not isinstance(parts, list) or not parts:
        raise MessageError("must be a list with at least one part", field=f"{path}.parts")
    out: list[tuple[str, str, JsonObject]] = []
    for index, part in enumerate(cast("list[Any]", parts)):
        where = f"{path}.parts[{index}]"
        part_fields = camel_keys(object_of(part, where), where)
        kinds = [name for name, value in part_fields.items() if name not in HINTS and value is not None]
        for name in kinds:
            if name not in KINDS:
                raise MessageError(f"is not supported; this gateway takes {', '.join(KINDS)}", field=f"{where}.{name}")
        if len(kinds) > 1:
            raise MessageError(f"holds {' and '.join(kinds)}; a part has one of them", field=where)
        if not kinds and "thoughtSignature" not in part_fields:
            raise MessageError(f"must have one of {', '.join(KINDS)}", field=where)
        out.append((where, kinds[0] if kinds else "text", part_fields))
    return out


def system_text(content: Any, path: str) -> str:
    """The text of `systemInstruction`: a content of text parts, or a plain string."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for where, kind, part in parts_of(camel_keys(object_of(content, path), path), path):
        if kind != "text":
            raise MessageError("must be text", field=f"{where}.{kind}")
        texts.append(text_field(part, "text", where))
    return "\n\n".join(texts)


# The model's own turns.
def model_message(parts: Sequence[tuple[str, str, JsonObject]], signer: ReasoningSigner) -> Message:
    """One content of a turn; a client that keeps the chunks of a stream sends a turn as several (`join_model_turn`)."""
    texts: list[str] = []
    thoughts: list[str] = []
    sealed: list[str] = []
    calls: list[JsonObject] = []
    for where, kind, part in parts:
        if kind == "functionCall":
            calls.append(call_from_part(part, where))
        elif kind == "functionResponse":
            raise MessageError("belongs in a content of the user", field=f"{where}.functionResponse")
        elif part.get("text") is not None:
            (thoughts if part.get("thought") else texts).append(text_field(part, "text", where))
        held = read_signature(signer, signature_of(part, where))
        if held is not None:
            sealed.append(held)
    message: JsonObject = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if sealed:
        message[SEALED] = "".join(sealed)
    if calls:
        message["tool_calls"] = calls
    return message


def signature_of(part: JsonObject, where: str) -> str:
    signature = part.get("thoughtSignature", "")
    if not isinstance(signature, str):
        raise MessageError("must be a string", field=f"{where}.thoughtSignature")
    return signature


def join_model_turn(parts: Sequence[Message]) -> Message:
    """One assistant message from the contents of a turn, with the reasoning that its signatures hold."""
    texts = [part["content"] for part in parts if part["content"] is not None]
    message: JsonObject = {"role": "assistant", "content": "".join(texts) if texts else None}
    shown = "".join(part.get("reasoning_content", "") for part in parts)
    sealed = "".join(part.get(SEALED, "") for part in parts)
    if shown and sealed and shown != sealed:
        raise MessageError(
            "thoughtSignature: does not fit the thoughts of its turn; send the parts back as they came",
            field="contents",
        )
    if shown or sealed:
        message["reasoning_content"] = shown or sealed
    calls = number_calls([call for part in parts for call in part.get("tool_calls", ())])
    if calls:
        message["tool_calls"] = calls
    return message


def number_calls(calls: Sequence[JsonObject]) -> list[JsonObject]:
    """Calls without ids count over the whole turn, also where it came as several contents."""
    counts: Counter[str] = Counter()
    out: list[JsonObject] = []
    for call in calls:
        name = call["function"]["name"]
        out.append(call if call["id"] else {**call, "id": f"{name}#{counts[name]}"})
        counts[name] += not call["id"]
    return out


def call_from_part(part: JsonObject, where: str) -> JsonObject:
    where = f"{where}.functionCall"
    fields = known_fields(part["functionCall"], CALL_FIELDS, where)
    arguments = arguments_text(object_of(fields.get("args") or {}, f"{where}.args"))
    function = {"name": text_field(fields, "name", where), "arguments": arguments}
    return {"id": call_id(fields, where), "type": "function", "function": function}


def call_id(fields: JsonObject, where: str) -> str:
    """Empty where there is none."""
    return text_field(fields, "id", where) if fields.get("id") is not None else ""


def known_fields(value: Any, known: Sequence[str], where: str) -> JsonObject:
    fields = camel_keys(object_of(value, where), where)
    for name, given in fields.items():
        if name not in known and given is not None:
            raise MessageError("is not supported by this gateway; leave it out", field=f"{where}.{name}")
    return fields


# What the user and the tools say.
def user_messages(parts: Sequence[tuple[str, str, JsonObject]]) -> list[Message]:
    """Results become tool messages, in order; the text between them becomes user messages."""
    out: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            out.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for where, kind, part in parts:
        if kind == "text":
            texts.append(text_field(part, "text", where))
        elif kind == "functionResponse":
            flush()
            out.append(result_message(part["functionResponse"], f"{where}.functionResponse"))
        else:
            raise MessageError("belongs in a content of the model", field=f"{where}.{kind}")
    flush()
    return out


def result_message(value: Any, where: str) -> Message:
    """Without an id it has the name of its function: `pair_results` finds the call."""
    fields = known_fields(value, RESULT_FIELDS, where)
    name, answered = text_field(fields, "name", where), call_id(fields, where)
    response = object_of(fields.get("response") or {}, f"{where}.response")
    message: JsonObject = {"role": "tool", **({"tool_call_id": answered} if answered else {"name": name})}
    message["content"] = result_text(response)
    if response.keys() == {"error"}:
        message["is_error"] = True
    return message


def result_text(response: JsonObject) -> str:
    """A result under `output`, `result` or `error` alone is that text; every other object is its JSON."""
    if len(response) == 1 and next(iter(response)) in PLAIN_RESULTS:
        value = next(iter(response.values()))
        return value if isinstance(value, str) else encode(value).decode()
    return encode(response).decode()
