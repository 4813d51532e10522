"""Requests in the four dialects, written from messages, and answers read back."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from tokentrue.conformance.agents.messages import Call, Message, Tool, arguments_from, object_from
from tokentrue.records import record

Json = dict[str, Any]
CHAT, RESPONSES, ANTHROPIC, GOOGLE = "chat", "responses", "anthropic", "google"
PATHS = {CHAT: "v1/chat/completions", RESPONSES: "v1/responses", ANTHROPIC: "v1/messages", GOOGLE: "v1beta"}
FINISHES = {
    CHAT: ("stop", "tool_calls", "length"),
    RESPONSES: ("completed", "completed", "incomplete"),
    ANTHROPIC: ("end_turn", "tool_use", "max_tokens"),
    GOOGLE: ("STOP", "STOP", "MAX_TOKENS"),
}
"""What each dialect calls the end of a text, of a turn with calls, and of one that the limit cut."""
GOOGLE_FIELDS = {
    "temperature": "temperature", "seed": "seed", "max_tokens": "maxOutputTokens", "stop": "stopSequences",
    "top_p": "topP",
}  # fmt: skip


@record
class Wire:
    """How a harness writes what it sends; none of it changes the conversation. `signatures` were served with
    reasoning."""

    inline: bool = False  # reasoning as <think> text
    parts: bool = False
    empty: str = "null"  # null, empty or missing
    extra: bool = False
    signatures: Mapping[str, str] = field(default_factory=dict[str, str])


def write_request(
    dialect: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    wire: Wire,
    fields: Mapping[str, Any],
    *,
    stream: bool,
) -> tuple[str, Json]:
    """What follows the dialect's URL, and the body. `fields` are in the words of Chat Completions for Google, too."""
    body: Json = {}
    if dialect != CHAT and messages and messages[0].role == "system":
        first, *messages = messages
        text = content_from(first, wire, dialect) if dialect == ANTHROPIC else first.text
        name = {RESPONSES: "instructions", ANTHROPIC: "system"}.get(dialect, "systemInstruction")
        body[name] = {"parts": [{"text": text}]} if dialect == GOOGLE else text
    if dialect == CHAT:
        body["messages"] = [chat_message(message, wire) for message in messages]
        declared: list[Json] = [{"type": "function", "function": tool.function()} for tool in tools]
    elif dialect == RESPONSES:
        body["input"] = [item for message in messages for item in responses_items(message, wire)]
        declared = [{"type": "function", **tool.function()} for tool in tools]
        fields = {("max_output_tokens" if name == "max_tokens" else name): value for name, value in fields.items()}
    elif dialect == ANTHROPIC:
        body["max_tokens"] = 100_000
        body["messages"] = write_contents(
            messages, {"tool": "user"}, "content", lambda message: anthropic_content(message, wire)
        )
        declared = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]
    else:
        names: dict[str, str] = {}  # of functions by call: a harness may use an id again in a later turn

        def write(message: Message) -> list[Json]:
            names.update({call.id: call.name for call in message.calls})
            return google_parts(message, names, wire)

        roles = {"tool": "user", "system": "user", "assistant": "model"}
        body["contents"] = write_contents(messages, roles, "parts", write)
        declared = [{"name": t.name, "description": t.description, "parametersJsonSchema": t.parameters} for t in tools]
        declared = [{"functionDeclarations": declared}]
        if "tool_choice" in fields:
            body["toolConfig"] = {"functionCallingConfig": {"mode": "AUTO"}}
        config = {GOOGLE_FIELDS[name]: value for name, value in fields.items() if name in GOOGLE_FIELDS}
        body["generationConfig"] = {**config, "thinkingConfig": {"includeThoughts": True}}
    body |= {"tools": declared} if tools else {}
    if dialect == GOOGLE:
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"/models/{fields.get('model', 'm')}:{method}", body
    return "", {**body, **fields, "stream": stream}


def write_contents(
    messages: Sequence[Message], roles: Mapping[str, str], name: str, write: Callable[[Message], Any]
) -> list[Json]:
    """A content for each message; results that follow one another are one content."""
    out: list[Json] = []
    before = ""
    for message in messages:
        if message.role == before == "tool":
            out[-1][name] += write(message)
        else:
            out.append({"role": roles.get(message.role, message.role), name: write(message)})
        before = message.role
    return out


def content_from(message: Message, wire: Wire, dialect: str) -> Any:
    """Of a message that the model did not write."""
    if not message.images and not wire.parts:
        return message.text
    images = [image_part(image, dialect) for image in message.images]
    return [{"type": "input_text" if dialect == RESPONSES else "text", "text": message.text}, *images]


def image_part(image: bytes, dialect: str) -> Json:
    data = base64.b64encode(image).decode()
    url = f"data:image/png;base64,{data}"
    if dialect == CHAT:
        return {"type": "image_url", "image_url": {"url": url}}
    if dialect == RESPONSES:
        return {"type": "input_image", "image_url": url}
    if dialect == ANTHROPIC:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    return {"inlineData": {"mimeType": "image/png", "data": data}}


def visible_text(message: Message, wire: Wire) -> str:
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if wire.inline and message.reasoning else ""
    return thought + message.text


def chat_message(message: Message, wire: Wire) -> Json:
    if message.role != "assistant":
        answers = {"tool_call_id": message.answers} if message.role == "tool" else {}
        return {"role": message.role, **answers, "content": content_from(message, wire, CHAT)}
    out: Json = {"role": "assistant"}
    text = visible_text(message, wire)
    if text:
        out["content"] = [{"type": "text", "text": text}] if wire.parts else text
    elif wire.empty != "missing" or not message.calls:
        out["content"] = None if wire.empty == "null" and message.calls else ""
    if message.reasoning and not wire.inline:
        out["reasoning_content"] = message.reasoning
    if message.calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if wire.extra:
        out |= {"refusal": None, "annotations": [], "provider_specific_fields": {"trace": "x"}}
    return out


def responses_items(message: Message, wire: Wire) -> list[Json]:
    if message.role == "tool":
        output = content_from(message, wire, RESPONSES) if message.images else message.text
        return [{"type": "function_call_output", "call_id": message.answers, "output": output}]
    if message.role != "assistant":
        return [{"type": "message", "role": message.role, "content": content_from(message, wire, RESPONSES)}]
    items: list[Json] = []
    if message.reasoning and not wire.inline:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append({"type": "reasoning", "summary": [], "content": [thought]})
    text = visible_text(message, wire)
    if text or not (message.calls or items):
        part = {"type": "output_text", "text": text, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part] if wire.parts or not text else text})
    for call in message.calls:
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items


def anthropic_content(message: Message, wire: Wire) -> Any:
    if message.role != "assistant":
        content = content_from(message, wire, ANTHROPIC)
        result = {"type": "tool_result", "tool_use_id": message.answers, "content": content}
        return [result] if message.role == "tool" else content
    blocks: list[Json] = []
    if message.reasoning and not wire.inline:
        signature = wire.signatures.get(message.reasoning, "")
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if text := visible_text(message, wire):
        blocks.append({"type": "text", "text": text})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": object_from(call.arguments)})
    if len(blocks) == 1 and text and not wire.parts:
        return text
    return blocks or ""


def google_parts(message: Message, names: Mapping[str, str], wire: Wire) -> list[Json]:
    """`names`: of functions, by call."""
    images = [image_part(image, GOOGLE) for image in message.images]
    if message.role == "tool":
        result: Json = {"id": message.answers, "name": names.get(message.answers, "unknown")}
        result["response"] = {"output": message.text}
        return [{"functionResponse": {**result, **({"parts": images} if images else {})}}]
    if message.role != "assistant":
        return [{"text": message.text}, *images]
    text = visible_text(message, wire)
    parts: list[Json] = [{"text": text}] if text else []
    for call in message.calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": object_from(call.arguments)}})
    parts = parts or [{"text": ""}]
    if not message.reasoning or wire.inline:
        return parts
    if (signature := wire.signatures.get(f"google {message.reasoning}")) is not None:
        parts[0]["thoughtSignature"] = signature
        return parts  # the signature holds the reasoning
    return [{"text": message.reasoning, "thought": True}, *parts]


# Answers.


@record
class Answer:
    """`finish` is the dialect's word (`FINISHES`)."""

    message: Message
    finish: str


Piece = tuple[str, str] | Call
"""Text or reasoning ("text" or "reasoning", and what it says), or a call."""


def read_answers(dialect: str, whole: Json) -> list[Answer]:
    if dialect == CHAT:
        choices = sorted(whole["choices"], key=lambda choice: choice["index"])
        return [make_answer(chat_pieces(choice["message"]), choice["finish_reason"]) for choice in choices]
    if dialect == RESPONSES:
        return [make_answer(map(read_item, whole["output"]), whole["status"])]
    if dialect == ANTHROPIC:
        return [make_answer(map(read_block, whole["content"]), whole["stop_reason"])]
    (candidate,) = whole["candidates"]
    return [make_answer(map(read_part, candidate["content"]["parts"]), candidate["finishReason"])]


def make_answer(pieces: Iterable[Piece], finish: str) -> Answer:
    told, calls = {"text": "", "reasoning": ""}, list[Call]()
    for piece in pieces:
        if isinstance(piece, Call):
            calls.append(piece)
        else:
            told[piece[0]] += piece[1]
    message = Message(role="assistant", text=told["text"], reasoning=told["reasoning"], calls=tuple(calls), served=True)
    return Answer(message=message, finish=finish)


def chat_pieces(said: Json) -> list[Piece]:
    pieces: list[Piece] = [("text", said.get("content") or "")]
    pieces.append(("reasoning", said.get("reasoning_content") or said.get("reasoning") or ""))
    for call in said.get("tool_calls") or ():
        pieces.append(Call(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]))
    return pieces


def read_item(item: Json) -> Piece:
    if item["type"] == "reasoning":
        return "reasoning", "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
    if item["type"] == "message":
        return "text", "".join(part["text"] for part in item["content"])
    return Call(id=item["call_id"], name=item["name"], arguments=item["arguments"])


def read_block(block: Json) -> Piece:
    if block["type"] == "thinking":
        return "reasoning", block["thinking"]
    if block["type"] == "text":
        return "text", block["text"]
    return Call(id=block["id"], name=block["name"], arguments=arguments_from(block["input"]))


def read_part(part: Json) -> Piece:
    if "functionCall" in part:
        told = part["functionCall"]
        return Call(id=told["id"], name=told["name"], arguments=arguments_from(told["args"]))
    return "reasoning" if part.get("thought") else "text", part["text"]


def read_signatures(dialect: str, whole: Json) -> dict[str, str]:
    """By reasoning; in Google's dialect, where one signature holds all of it."""
    if dialect == ANTHROPIC:
        blocks = [block for block in whole["content"] if block["type"] == "thinking"]
        return {block["thinking"]: block.get("signature", "") for block in blocks}
    if dialect != GOOGLE:
        return {}
    parts = whole["candidates"][0]["content"]["parts"]
    found = [part["thoughtSignature"] for part in parts if "thoughtSignature" in part]
    reasoning = "".join(part["text"] for part in parts if part.get("thought"))
    return {f"google {reasoning}": found[0]} if len(found) == 1 else {}
