"""The server-sent events of OpenAI Responses: created, in progress, one item after the other, completed or incomplete.

Every event carries its sequence number. The last one carries the whole response, built from the committed reply, not from the deltas;
where a call broke off and its text followed it, its output is the items as they were streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokentrue.gateway.dialects.base import Problem, Seal, encode
from tokentrue.gateway.dialects.responses_items import CustomInput, Served, call_item, message_item, reasoning_item, text_part
from tokentrue.types import Delta, Reply, TurnEvent

Json = dict[str, Any]


class ResponsesEncoder:
    ping = b": keep-alive\n\n"

    def __init__(
        self,
        *,
        opened: Callable[[str], Json],
        whole: Callable[[Reply], Json],
        served: Mapping[str, Served],
        seal: Seal,
        error: Callable[[Problem], Json],
    ) -> None:
        self._opened, self._whole, self._served, self._seal, self._error = opened, whole, served, seal, error
        self._sequence = -1
        self._node = self._suffix = ""
        self._output = -1
        self._item: Json = {}
        self._kind: tuple[str, int | None] | None = None
        self._text = ""
        self._shown = ""  # the open call's name as the model wrote it
        self._input = CustomInput()
        self._sent = ""  # of a custom tool's input
        self._items: list[Json] = []

    def _event(self, kind: str, **body: Any) -> bytes:
        self._sequence += 1
        data = encode({"type": kind, "sequence_number": self._sequence, **body})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def feed(self, event: TurnEvent) -> bytes:
        out = b""
        if not self._node:
            self._node = event.node
            response = self._opened(event.node)
            out += self._event("response.created", response=response) + self._event("response.in_progress", response=response)
        if event.delta is not None:
            out += self._delta(event.delta)
        if event.reply is not None:
            response = self._whole(event.reply)
            out += self._close(response["status"])
            if [item["type"] for item in self._items] != [item["type"] for item in response["output"]]:
                response["output"] = self._items
            out += self._event("response.completed" if response["status"] == "completed" else "response.incomplete", response=response)
        return out

    def _delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._in(("reasoning", None), {"type": "reasoning", "id": f"rs_{self._node}", "summary": [], "status": "in_progress"})
            out += self._piece("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            if self._kind != ("message", None):
                self._suffix = self._message_suffix()
            message = {"type": "message", "id": f"msg_{self._suffix}", "role": "assistant", "status": "in_progress", "content": []}
            out += self._in(("message", None), message)
            out += self._piece("response.output_text.delta", delta.content, logprobs=[])
        if delta.call is not None:
            out += self._in(("call", delta.call), self._call_item(delta))
            if delta.arguments and self._item["type"] == "custom_tool_call":
                out += self._custom(delta.arguments)
            elif delta.arguments:
                out += self._piece("response.function_call_arguments.delta", delta.arguments)
        return out

    def _message_suffix(self) -> str:
        """A turn has one message, but for the text of a call that broke off."""
        return self._node if all(item["type"] != "message" for item in self._items) else f"{self._node}_{self._output + 1}"

    def _custom(self, arguments: str) -> bytes:
        """The arguments are JSON text around the one string."""
        self._text += arguments
        more = self._input.feed(arguments)
        self._sent += more
        return self._event("response.custom_tool_call_input.delta", **self._at(), delta=more) if more else b""

    def _call_item(self, delta: Delta) -> Json:
        """A call that has only begun: no arguments yet."""
        made = {"id": delta.call_id, "function": {"name": delta.name, "arguments": ""}}
        self._shown = delta.name or self._shown
        return call_item(made, f"{self._node}_{delta.call}", self._served, status="in_progress")

    def _in(self, kind: tuple[str, int | None], item: Json) -> bytes:
        if self._kind == kind:
            return b""
        out = self._close("completed")
        self._kind, self._item, self._text = kind, item, ""
        self._input, self._sent = CustomInput(), ""
        self._output += 1
        out += self._event("response.output_item.added", output_index=self._output, item=item)
        if kind[0] in {"reasoning", "message"}:
            out += self._event("response.content_part.added", **self._at(), content_index=0, part=self._part())
        return out

    def _at(self) -> Json:
        return {"item_id": self._item["id"], "output_index": self._output}

    def _part(self) -> Json:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return text_part(self._text)

    def _piece(self, kind: str, text: str, **more: Any) -> bytes:
        self._text += text
        place = {} if kind.startswith("response.function_call") else {"content_index": 0}
        return self._event(kind, **self._at(), **place, delta=text, **more)

    def _close(self, status: str) -> bytes:
        """Ends the open item: its own last event, then the whole item."""
        if self._kind is None:
            return b""
        item = self._whole_item(status)
        kind, out = item["type"], b""
        if kind == "reasoning":
            out += self._event("response.reasoning_text.done", **self._at(), content_index=0, text=self._text)
        elif kind == "message":
            out += self._event("response.output_text.done", **self._at(), content_index=0, text=self._text, logprobs=[])
        elif kind == "custom_tool_call":
            if not item["input"].startswith(self._sent):  # it broke off: what was sent of it is what there is
                item["input"] = self._sent
            elif item["input"] != self._sent:  # not written as one string: shown as it was written
                out += self._event("response.custom_tool_call_input.delta", **self._at(), delta=item["input"][len(self._sent) :])
            out += self._event("response.custom_tool_call_input.done", **self._at(), input=item["input"])
        else:
            out += self._event("response.function_call_arguments.done", **self._at(), name=item["name"], arguments=self._text)
        if kind in {"reasoning", "message"}:
            out += self._event("response.content_part.done", **self._at(), content_index=0, part=self._part())
        self._kind = None
        self._items.append(item)
        return out + self._event("response.output_item.done", output_index=self._output, item=item)

    def _whole_item(self, status: str) -> Json:
        kind = self._item["type"]
        if kind == "reasoning":
            return reasoning_item(self._node, self._text, self._seal, status=status)
        if kind == "message":
            return message_item(self._suffix, self._text, status=status)
        made = {"id": self._item["call_id"], "function": {"name": self._shown, "arguments": self._text}}
        assert self._kind is not None
        return call_item(made, f"{self._node}_{self._kind[1]}", self._served, status=status)

    def finish(self) -> bytes:
        return b""

    def error(self, problem: Problem) -> bytes:
        error = self._error(problem)["error"]
        if not self._node:
            return self._event("error", code=error["code"], message=error["message"], param=error["param"])
        failed = {**self._opened(self._node), "status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        return self._event("response.failed", response=failed)
