"""Google GenerateContent: requests from the oracle's messages, answers read back, streamed chunks put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentrue.conformance.agents.messages import Call, Message, arguments_from, object_from

Json = dict[str, Any]
FIELDS = {"temperature": "temperature", "seed": "seed", "max_tokens": "maxOutputTokens", "stop": "stopSequences"}


def google_body(
    messages: Sequence[Message],
    tools: Sequence[Any],
    signatures: dict[str, str],
    fields: Json,
    *,
    inline: bool,
    bare: bool,
) -> Json:
    """`fields` in the words of Chat Completions; the model and the streaming are in the path."""
    body: Json = {}
    if messages and messages[0].role == "system":
        body["systemInstruction"] = {"parts": [{"text": messages[0].text}]}
        messages = messages[1:]
    body["contents"] = contents_of(messages, signatures, inline=inline, bare=bare)
    if tools:
        declared = [{"name": t.name, "description": t.description, "parametersJsonSchema": t.parameters} for t in tools]
        body["tools"] = [{"functionDeclarations": declared}]
    if "tool_choice" in fields:
        body["toolConfig"] = {"functionCallingConfig": {"mode": "AUTO"}}
    config: Json = {FIELDS[name]: value for name, value in fields.items() if name in FIELDS}
    return {**body, "generationConfig": {**config, "thinkingConfig": {"includeThoughts": True}}}


def contents_of(messages: Sequence[Message], signatures: dict[str, str], *, inline: bool, bare: bool) -> list[Json]:
    """`bare`: results without ids, a content each, where their order says which call each one answers."""
    names: dict[str, str] = {}
    out: list[Json] = []
    results: list[Json] = []
    told_apart = False
    for index, message in enumerate(messages):
        names |= {call.id: call.name for call in message.calls}
        if message.role == "assistant":
            told_apart = bare and is_in_order(message, messages[index + 1 :])
        if message.role == "tool":
            told: Json = {"name": names.get(message.answers, "unknown"), "response": {"output": message.text}}
            if told_apart:
                out.append({"role": "user", "parts": [{"functionResponse": told}]})
                continue
            if not results:
                out.append({"role": "user", "parts": results})
            results.append({"functionResponse": {"id": message.answers, **told}})
            continue
        results = []
        parts = (
            model_parts(message, signatures, inline=inline) if message.role == "assistant" else [{"text": message.text}]
        )
        out.append({"role": "model" if message.role == "assistant" else "user", "parts": parts})
    return out


def is_in_order(turn: Message, after: Sequence[Message]) -> bool:
    """Whether the results that follow a turn answer the calls of each function from the first on."""
    answered: list[str] = []
    for message in after:
        if message.role == "assistant":
            break
        if message.role == "tool":
            answered.append(message.answers)
    ids = [call.id for call in turn.calls]
    if len(set(ids)) < len(ids) or not set(answered) <= set(ids):
        return False
    for name in {call.name for call in turn.calls}:
        own = [call.id for call in turn.calls if call.name == name]
        given = [answer for answer in answered if answer in own]
        if given != own[: len(given)]:
            return False
    return True


def model_parts(message: Message, signatures: dict[str, str], *, inline: bool) -> list[Json]:
    inlined = inline and bool(message.reasoning)
    text = f"<think>\n{message.reasoning}\n</think>\n\n{message.text}" if inlined else message.text
    parts: list[Json] = [{"text": text}] if text else []
    for call in message.calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": object_from(call.arguments)}})
    parts = parts or [{"text": ""}]
    if not message.reasoning or inlined:
        return parts
    if (signature := signatures.get(f"google {message.reasoning}")) is not None:
        parts[0]["thoughtSignature"] = signature
        return parts  # the signature holds the reasoning
    return [{"text": message.reasoning, "thought": True}, *parts]


def message_of(parts: Sequence[Json]) -> Message:
    text = reasoning = ""
    calls: list[Call] = []
    for part in parts:
        if "functionCall" in part:
            told = part["functionCall"]
            calls.append(Call(id=told["id"], name=told["name"], arguments=arguments_from(told["args"])))
        elif part.get("thought"):
            reasoning += part["text"]
        else:
            text += part["text"]
    return Message(role="assistant", text=text, reasoning=reasoning, calls=tuple(calls), served=True)


def signatures_in(whole: Json) -> dict[str, str]:
    """Of an answer whose reasoning one signature holds."""
    parts = whole["candidates"][0]["content"]["parts"]
    found = [part["thoughtSignature"] for part in parts if "thoughtSignature" in part]
    return {f"google {message_of(parts).reasoning}": found[0]} if len(found) == 1 else {}


def assemble_google(events: Sequence[Any]) -> Json | str:
    """The whole answer, or why there is none: the stream broke."""
    parts: list[Json] = []
    whole: Json = {}
    for event in events:
        (candidate,) = event["candidates"]
        parts += candidate["content"]["parts"]
        if "finishReason" in candidate:
            whole = {**event, "candidates": [{**candidate, "content": {"role": "model", "parts": parts}}]}
    return whole or "no finish reason"
