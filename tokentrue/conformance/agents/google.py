"""Google GenerateContent: requests from the oracle's messages, answers read back, streamed chunks put together."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from tokentrue.conformance.agents.messages import Call, Message, arguments_from, object_from, visible_text

Json = dict[str, Any]
FIELDS = {
    "temperature": "temperature", "seed": "seed", "max_tokens": "maxOutputTokens", "stop": "stopSequences",
    "top_p": "topP",
}  # fmt: skip


def google_body(
    messages: Sequence[Message], tools: Sequence[Any], signatures: dict[str, str], fields: Json, *, inline: bool
) -> Json:
    """`fields` in the words of Chat Completions; the model and the streaming are in the path."""
    body: Json = {}
    if messages and messages[0].role == "system":
        body["systemInstruction"] = {"parts": [{"text": messages[0].text}]}
        messages = messages[1:]
    body["contents"] = make_contents(messages, signatures, inline=inline)
    if tools:
        declared = [{"name": t.name, "description": t.description, "parametersJsonSchema": t.parameters} for t in tools]
        body["tools"] = [{"functionDeclarations": declared}]
    if "tool_choice" in fields:
        body["toolConfig"] = {"functionCallingConfig": {"mode": "AUTO"}}
    config: Json = {FIELDS[name]: value for name, value in fields.items() if name in FIELDS}
    return {**body, "generationConfig": {**config, "thinkingConfig": {"includeThoughts": True}}}


def make_contents(messages: Sequence[Message], signatures: dict[str, str], *, inline: bool) -> list[Json]:
    names: dict[str, str] = {}
    out: list[Json] = []
    results: list[Json] = []
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        data = [base64.b64encode(image).decode() for image in message.images]
        images: list[Json] = [{"inlineData": {"mimeType": "image/png", "data": one}} for one in data]
        if message.role == "tool":
            if not results:
                out.append({"role": "user", "parts": results})
            told: Json = {"name": names.get(message.answers, "unknown"), "response": {"output": message.text}}
            results.append(
                {"functionResponse": {"id": message.answers, **told, **({"parts": images} if images else {})}}
            )
            continue
        results = []
        if message.role == "assistant":
            out.append({"role": "model", "parts": model_parts(message, signatures, inline=inline)})
        else:
            out.append({"role": "user", "parts": [{"text": message.text}, *images]})
    return out


def model_parts(message: Message, signatures: dict[str, str], *, inline: bool) -> list[Json]:
    text = visible_text(message, inline=inline)
    parts: list[Json] = [{"text": text}] if text else []
    for call in message.calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": object_from(call.arguments)}})
    parts = parts or [{"text": ""}]
    if not message.reasoning or inline:
        return parts
    if (signature := signatures.get(f"google {message.reasoning}")) is not None:
        parts[0]["thoughtSignature"] = signature
        return parts  # the signature holds the reasoning
    return [{"text": message.reasoning, "thought": True}, *parts]


def google_message(parts: Sequence[Json]) -> Message:
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


def google_signatures(whole: Json) -> dict[str, str]:
    """Of an answer whose reasoning one signature holds."""
    parts = whole["candidates"][0]["content"]["parts"]
    found = [part["thoughtSignature"] for part in parts if "thoughtSignature" in part]
    return {f"google {google_message(parts).reasoning}": found[0]} if len(found) == 1 else {}


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
