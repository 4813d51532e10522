"""One model call through an OpenAI client, merged into one assistant message without its reasoning, as in most
harnesses."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tokentrue.json_types import JsonMapping, JsonObject

Chat = list[JsonObject]


async def ask(
    client: Any, messages: Sequence[JsonMapping], *, tools: Sequence[JsonMapping] = (), stream: bool = True
) -> JsonObject:
    request: JsonObject = {"model": "tokentrue", "messages": list(messages)}
    if tools:
        request["tools"] = list(tools)
    message: JsonObject = {"role": "assistant", "content": ""}
    calls: dict[int, JsonObject] = {}

    def add(part: Any) -> None:
        message["content"] += part.content or ""
        for number, piece in enumerate(part.tool_calls or ()):
            fresh: JsonObject = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(piece.index if stream else number, fresh)
            call["id"] = piece.id or call["id"]
            if piece.function is not None:
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""

    if stream:
        async for chunk in await client.chat.completions.create(**request, stream=True):
            if chunk.choices:
                add(chunk.choices[0].delta)
    else:
        answer = await client.chat.completions.create(**request)
        add(answer.choices[0].message)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


async def work(
    client: Any, chat: Chat, *, tools: Mapping[str, tuple[JsonMapping, Any]], max_turns: int, stream: bool = True
) -> str | None:
    """The answer's text, or None after `max_turns`. `tools`: by name, definition and function from the argument text to
    the result. `chat` grows in place."""
    definitions = [definition for definition, _ in tools.values()]
    for _ in range(max_turns):
        message = await ask(client, chat, tools=definitions, stream=stream)
        chat.append(message)
        if "tool_calls" not in message:
            return message["content"]
        for call in message["tool_calls"]:
            name = call["function"]["name"]
            result = tools[name][1](call["function"]["arguments"]) if name in tools else f"error: no tool {name}"
            chat.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        await asyncio.sleep(0)
    return None
