"""A stand-in for the OpenAI client: answers from a list, with the client's own call and shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace as Shape
from typing import Any


class FakeClient:
    """`answers` are assistant messages: a string, or (name, argument text) for a tool call."""

    def __init__(self, *answers: str | tuple[str, str]) -> None:
        self.answers = list(answers)
        self.seen: list[list[dict[str, Any]]] = []
        self.chat = Shape(completions=self)

    async def create(self, *, messages: list[dict[str, Any]], stream: bool = False, **rest: Any) -> Any:
        assert "temperature" not in rest and "seed" not in rest, "the session pins sampling, not the agent"
        self.seen.append([dict(message) for message in messages])
        answer = self.answers.pop(0)
        return self._streamed(answer) if stream else Shape(choices=[Shape(message=whole(answer))])

    async def _streamed(self, answer: str | tuple[str, str]) -> AsyncIterator[Any]:
        yield Shape(choices=[])  # a chunk with usage alone
        if isinstance(answer, str):
            for letter in answer:
                yield chunk(content=letter)
            return
        yield chunk(tool_calls=[Shape(index=0, id="call_1", function=Shape(name=answer[0], arguments=""))])
        for letter in answer[1]:
            yield chunk(tool_calls=[Shape(index=0, id=None, function=Shape(name=None, arguments=letter))])


def chunk(content: str | None = None, tool_calls: Any = None) -> Any:
    return Shape(choices=[Shape(delta=Shape(content=content, tool_calls=tool_calls))])


def whole(answer: str | tuple[str, str]) -> Any:
    if isinstance(answer, str):
        return Shape(content=answer, tool_calls=None)
    return Shape(content=None, tool_calls=[Shape(id="call_1", function=Shape(name=answer[0], arguments=answer[1]))])
