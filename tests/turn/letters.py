"""A renderer small enough for thousands of runs: one id per character, one per role, 1 ends a turn. Same contract as
the real ones.

A sampled turn reads `reasoning~content~arguments`; a third field makes it a tool call.
"""

from __future__ import annotations

import json
from typing import Any

from tokentrue.types import Delta, Ended, Extension, Ids, Messages, Parsed, Refusal, Rendered, Tools

STOP = 1
ROLES = {"system": 2, "user": 3, "assistant": 4, "tool": 5}
GLUE = 6  # what the template puts after a stop: given, never sampled


def letters(text: str) -> list[int]:
    return [ord(char) + 16 for char in text]


def sampled(reasoning: str, content: str, arguments: str | None = None) -> tuple[int, ...]:
    return (*letters("~".join([reasoning, content, *([] if arguments is None else [arguments])])), STOP)


class Letters:
    """See the module. `refuse` makes it refuse to extend, as a template would that rewrites history."""

    stop_token_ids = (STOP,)
    template_hash = "sha256:letters"
    tokenizer_hash = "sha256:letters"
    history = "keep"
    placeholder_ids = ()

    def __init__(self) -> None:
        self.refuse = False

    def _message(self, message: Any) -> list[int]:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        return [ROLES[message["role"]], *letters(text + json.dumps(message.get("tool_calls") or "")), STOP, GLUE]

    def render(self, messages: Messages, tools: Tools | None = None, *, template_kwargs: Any = None) -> Rendered:
        ids = letters(json.dumps(tools or "") + json.dumps(template_kwargs or ""))
        for message in messages:
            ids += self._message(message)
        return Rendered(token_ids=(*ids, ROLES["assistant"]))

    def extend(
        self, prefix_ids: Ids, messages: Messages, new: Messages, tools: Any = None, *, template_kwargs: Any = None
    ) -> Extension | Refusal:
        if self.refuse:
            return Refusal(why="history_rewritten", detail="told to")
        if not new:
            return Refusal(why="nothing_new", detail="")
        ids = [GLUE] if prefix_ids[-1] == STOP else [STOP, GLUE]
        for message in new:
            ids += self._message(message)
        return Extension(prefix_ids=prefix_ids, added_ids=(*ids, ROLES["assistant"]))

    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Any = None) -> Parsed:
        ended = bool(len(sampled_ids)) and sampled_ids[-1] == STOP
        text = "".join(chr(i - 16) for i in sampled_ids if i != STOP)
        parts = [*text.split("~"), "", ""][:3] if "~" in text else [text, "", ""]
        message: dict[str, Any] = {"role": "assistant", "content": parts[1]}
        if parts[0]:
            message["reasoning_content"] = parts[0]
        if parts[2]:
            message["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": parts[2]}}]
        return Parsed(
            message=message, ended=Ended.STOP if ended else Ended.OPEN, stop_id=STOP if ended else None, raw=text
        )

    def parser(self, *, prompt_ids: Ids = (), tools: Any = None, early: bool = True) -> Any:
        return _Parser(self)

    def decode(self, token_ids: Ids) -> str:
        return "".join(chr(i - 16) for i in token_ids if i > 16)


class _Parser:
    def __init__(self, renderer: Letters) -> None:
        self._renderer, self._ids = renderer, list[int]()

    def feed(self, token_ids: Ids) -> list[Any]:
        self._ids += token_ids
        return []

    def finish(self) -> tuple[list[Any], Parsed]:
        parsed = self.whole(self._ids)
        said = parsed.message
        deltas = [Delta(reasoning=said.get("reasoning_content") or "", content=said.get("content") or "")]
        for index, call in enumerate(said.get("tool_calls") or ()):
            deltas.append(Delta(call=index, **call["function"]))
        return deltas, parsed

    def whole(self, token_ids: Ids) -> Parsed:
        return self._renderer.parse(token_ids)
