"""The output items of OpenAI Responses. Whole answers and streams build their items here and nowhere else, so that they
are equal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from tokentrue.gateway.dialects.base import RequestHead, TextOf, is_cut
from tokentrue.gateway.dialects.chat_answers import logprobs_of
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonObject
from tokentrue.types import Reply

_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]+)(?:_\d+)?")
_INPUT_OPENS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_DECODABLE = re.compile(  # whole characters and escapes; of a surrogate pair both halves
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTool:
    """How the calls of a tool are served: under which name, in which namespace, as a custom tool or as a function."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputItem:
    """One output item, complete or as far as it has come. `text` is its reasoning, its text or its arguments as the
    model wrote them."""

    kind: str  # "reasoning", "message" or "call"
    suffix: str  # of the item's id
    text: str = ""
    call_id: str = ""
    tool: ServedTool | None = None  # of a call
    logprobs: Sequence[JsonObject] = ()

    def build(self, signer: ReasoningSigner, *, status: str) -> JsonObject:
        """`status` is that of reasoning or text; a call has its own."""
        if self.kind == "reasoning":
            return reasoning_item(self.suffix, self.text, signer, status=status)
        if self.kind == "message":
            return message_item(self.suffix, self.text, self.logprobs, status=status)
        assert self.tool is not None
        return call_item(self.tool, self.call_id, self.suffix, self.text, status=call_status(self.text))

    def build_opening(self) -> JsonObject:
        """The item of `output_item.added`: nothing of its text yet."""
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{self.suffix}", "summary": [], "status": "in_progress"}
        if self.kind == "message":
            return {
                "type": "message",
                "id": f"msg_{self.suffix}",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
        assert self.tool is not None
        return call_item(self.tool, self.call_id, self.suffix, "", status="in_progress")


class ItemName(msgspec.Struct):
    """What of an item says who wrote it; the rest, which may be long, is skipped."""

    id: Any = None
    role: Any = "assistant"
    type: Any = None

    @property
    def is_given(self) -> bool:
        """False for what a model wrote."""
        return self.role != "assistant" or str(self.type).endswith("_output")


def node_from_item_id(item_id: object) -> str | None:
    """The node that an item's id names, if it has the form of ours."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return found[1] if found else None


def reasoning_item(suffix: str, text: str, signer: ReasoningSigner, *, status: str) -> JsonObject:
    return {
        "type": "reasoning",
        "id": f"rs_{suffix}",
        "summary": [],
        "content": [reasoning_part(text)],
        "encrypted_content": signer.wrap(text),
        "status": status,
    }


def reasoning_part(text: str) -> JsonObject:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: Sequence[JsonObject] = ()) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(suffix: str, text: str, logprobs: Sequence[JsonObject] = (), *, status: str) -> JsonObject:
    return {
        "type": "message",
        "id": f"msg_{suffix}",
        "role": "assistant",
        "status": status,
        "content": [text_part(text, logprobs)],
    }


def part_of(item: OutputItem) -> JsonObject:
    return reasoning_part(item.text) if item.kind == "reasoning" else text_part(item.text, item.logprobs)


def status_of(reply: Reply) -> str:
    return "incomplete" if is_cut(reply.completion.finish) else "completed"


def text_status(item: OutputItem, items: Sequence[OutputItem], status: str) -> str:
    """Of the reasoning or the text of a turn that ended in `status`: incomplete is the last item of a turn without
    calls. Text that was sampled after a call stands before it in a whole answer, so that beside calls the place says
    nothing."""
    return status if item is items[-1] and all(one.kind != "call" for one in items) else "completed"


def call_status(arguments: str) -> str:
    """Of a call: incomplete where its arguments broke off, however the turn ended."""
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "incomplete"
    return "completed"


def logprobs_for(head: RequestHead, reply: Reply, text_of: TextOf) -> list[JsonObject]:
    """Of every sampled token of the turn, where the client asked for them."""
    if not head.options.logprobs:
        return []
    done = reply.completion
    return logprobs_of(done.token_ids, done.logprobs, done.top_logprobs, text_of)["content"]


def model_name(namespace: str | None, name: str) -> str:
    """The tool's name as the model sees it."""
    return f"{namespace}__{name}" if namespace else name


def served_tool(name: str, served: Mapping[str, ServedTool]) -> ServedTool:
    return served.get(name) or ServedTool(name=name)


def call_item(tool: ServedTool, call_id: str, suffix: str, arguments: str, *, status: str) -> JsonObject:
    item: JsonObject = {"call_id": call_id, "name": tool.name}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.custom:
        return {"type": "custom_tool_call", "id": f"ctc_{suffix}", **item, "input": custom_input(arguments)}
    return {"type": "function_call", "id": f"fc_{suffix}", **item, "arguments": arguments, "status": status}


def custom_input(arguments: str) -> str:
    """The one string of a custom tool's call; arguments that are not `{"input": "…` are served as the model wrote
    them."""
    decoder = CustomInput()
    return decoder.feed(arguments) + decoder.finish()


class CustomInput:
    """Decodes the arguments of a custom tool's call as they are sampled: `feed` returns what more of the string is
    certain."""

    def __init__(self) -> None:
        self._text = ""
        self._place: int | None = None  # in `_text`, of what is not decoded yet; None before the string has begun

    def feed(self, arguments: str) -> str:
        self._text += arguments
        if self._place is None:
            opened = _INPUT_OPENS.match(self._text)
            if opened is None:
                return ""
            self._place = opened.end()
        found = _DECODABLE.match(self._text, self._place)
        assert found is not None
        self._place = found.end()
        return orjson.loads(f'"{found[0]}"') if found[0] else ""

    def finish(self) -> str:
        """The rest, when no more comes."""
        return self._text if self._place is None else ""
