"""The server-sent events of OpenAI Responses: created, in progress, the items, completed or incomplete.

Every event carries its sequence number. Each item of the stream is an `OutputItem` that holds everything of its own;
its `done` event and the final response are built from it by the functions that build a whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tokentrue.gateway.dialects.base import Problem, RequestHead, TextOf, encode
from tokentrue.gateway.dialects.responses_items import (
    CustomInput,
    OutputItem,
    custom_input,
    logprobs_for,
    part_of,
    served_tool,
    status_of,
    text_status,
)
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.json_types import JsonObject
from tokentrue.types import Delta, Reply, TurnEvent


class BuildResponse(Protocol):
    def __call__(self, reply: Reply, items: Sequence[OutputItem], created: int) -> JsonObject: ...


class StreamedItem:
    """An item of the stream, open or closed. `item` has its text when it is closed; until then the text is in
    pieces."""

    def __init__(self, item: OutputItem, output_index: int) -> None:
        self.item, self.is_open, self.opening = item, True, item.build_opening()
        self.place: JsonObject = {"item_id": self.opening["id"], "output_index": output_index}
        self.custom = CustomInput() if item.tool is not None and item.tool.custom else None
        self._pieces: list[str] = []

    def append(self, text: str) -> None:
        self._pieces.append(text)

    def close(self, logprobs: Sequence[JsonObject]) -> None:
        self.is_open = False
        self.item = replace(
            self.item, text="".join(self._pieces), logprobs=logprobs if self.item.kind == "message" else ()
        )


class ResponsesEncoder:
    ping = b": keep-alive\n\n"

    def __init__(
        self,
        head: RequestHead,
        *,
        signer: ReasoningSigner,
        text_of: TextOf,
        build_opening: Callable[[str], JsonObject],
        build_response: BuildResponse,
        build_error: Callable[[Problem], JsonObject],
    ) -> None:
        self._head, self._signer, self._text_of = head, signer, text_of
        self._build_opening, self._build_response, self._build_error = build_opening, build_response, build_error
        self._opening: JsonObject = {}
        self._node = ""
        self._sequence = -1
        self._items: list[StreamedItem] = []

    def feed(self, event: TurnEvent) -> bytes:
        out = b""
        if not self._node:
            self._node, self._opening = event.node, self._build_opening(event.node)
            out += self._event("response.created", response=self._opening) + self._event(
                "response.in_progress", response=self._opening
            )
        if event.delta is not None:
            out += self._feed_delta(event.delta)
        if event.reply is not None:
            out += self._finish(event.reply)
        return out

    def _event(self, kind: str, **body: Any) -> bytes:
        self._sequence += 1
        data = encode({"type": kind, "sequence_number": self._sequence, **body})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    # Deltas.
    def _feed_delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._enter("reasoning", self._suffix("reasoning"))
            out += self._append("response.reasoning_text.delta", delta.reasoning, content_index=0)
        if delta.content:
            out += self._enter("message", self._suffix("message"))
            out += self._append("response.output_text.delta", delta.content, content_index=0, logprobs=[])
        if delta.call is not None:
            out += self._enter("call", f"{self._node}_{delta.call}", delta)
            out += self._append_arguments(delta.arguments)
        return out

    def _suffix(self, kind: str) -> str:
        """A turn has one message, but for the text of a call that broke off."""
        last = self._items[-1] if self._items else None
        if last is not None and last.is_open and last.item.kind == kind:
            return last.item.suffix
        return self._node if all(one.item.kind != kind for one in self._items) else f"{self._node}_{len(self._items)}"

    def _enter(self, kind: str, suffix: str, delta: Delta | None = None) -> bytes:
        """Makes the item that this delta belongs to the open one; opens it where it is new."""
        last = self._items[-1] if self._items else None
        if last is not None and last.is_open and (last.item.kind, last.item.suffix) == (kind, suffix):
            return b""
        out = self._close_finished()
        item = OutputItem(kind=kind, suffix=suffix)
        if delta is not None:
            item = replace(item, call_id=delta.call_id, tool=served_tool(delta.name, self._head.options.served))
        entry = StreamedItem(item, len(self._items))
        self._items.append(entry)
        out += self._event("response.output_item.added", output_index=entry.place["output_index"], item=entry.opening)
        if kind != "call":
            out += self._event("response.content_part.added", **entry.place, content_index=0, part=part_of(item))
        return out

    def _append(self, kind: str, text: str, **more: Any) -> bytes:
        entry = self._items[-1]
        entry.append(text)
        return self._event(kind, **entry.place, delta=text, **more)

    def _append_arguments(self, arguments: str) -> bytes:
        entry = self._items[-1]
        if not arguments:
            return b""
        if entry.custom is None:
            return self._append("response.function_call_arguments.delta", arguments)
        entry.append(arguments)
        return self._custom_delta(entry, entry.custom.feed(arguments))

    def _custom_delta(self, entry: StreamedItem, text: str) -> bytes:
        return self._event("response.custom_tool_call_input.delta", **entry.place, delta=text) if text else b""

    # Ends.
    def _close_finished(self) -> bytes:
        """Closes what is open before the next item begins. A message with log-probabilities stays open: they cover the
        whole turn."""
        waits = self._head.options.logprobs
        return b"".join(
            self._close(entry, "completed") for entry in self._items if not (waits and entry.item.kind == "message")
        )

    def _close(self, entry: StreamedItem, status: str, logprobs: Sequence[JsonObject] = ()) -> bytes:
        """The item's own last event, then the whole item."""
        if not entry.is_open:
            return b""
        entry.close(logprobs)
        item, place, out = entry.item, entry.place, b""
        if item.kind == "reasoning":
            out += self._event("response.reasoning_text.done", **place, content_index=0, text=item.text)
        elif item.kind == "message":
            out += self._event(
                "response.output_text.done", **place, content_index=0, text=item.text, logprobs=list(logprobs)
            )
        elif entry.custom is not None:
            out += self._custom_delta(entry, entry.custom.finish())
            out += self._event("response.custom_tool_call_input.done", **place, input=custom_input(item.text))
        else:
            assert item.tool is not None
            out += self._event(
                "response.function_call_arguments.done", **place, name=item.tool.name, arguments=item.text
            )
        if item.kind != "call":
            out += self._event("response.content_part.done", **place, content_index=0, part=part_of(item))
        built = item.build(self._signer, status=status)
        return out + self._event("response.output_item.done", output_index=place["output_index"], item=built)

    def _finish(self, reply: Reply) -> bytes:
        out, logprobs, status = b"", logprobs_for(self._head, reply, self._text_of), status_of(reply)
        if all(
            entry.item.kind == "reasoning" for entry in self._items
        ):  # as in a whole answer: an empty message has an id, too
            out += self._enter("message", self._suffix("message"))
        items = [entry.item for entry in self._items]
        for entry in self._items:
            out += self._close(entry, text_status(entry.item, items, status), logprobs)
        response = self._build_response(reply, [entry.item for entry in self._items], self._opening["created_at"])
        return out + self._event(
            "response.completed" if status == "completed" else "response.incomplete", response=response
        )

    def finish(self) -> bytes:
        return b""

    def error(self, problem: Problem) -> bytes:
        error = self._build_error(problem)["error"]
        if not self._node:
            return self._event("error", code=error["code"], message=error["message"], param=error["param"])
        failed = {**self._opening, "status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        return self._event("response.failed", response=failed)
