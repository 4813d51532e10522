"""One HTTP exchange of an agent: a whole answer, or the events of a stream as they come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True, kw_only=True)
class Heard:
    """What a client got: a status with a whole answer or the events of a stream; `broken` where the connection ended
    early."""

    status: int
    whole: Any = None
    events: list[Any] = field(default_factory=list[Any])
    broken: str = ""
    kind: str = ""


async def read_events(answer: aiohttp.ClientResponse, heard: Heard) -> AsyncIterator[Any]:
    """The events of a stream as they come, gathered in `heard`; nothing for a whole answer."""
    try:
        if answer.content_type != "text/event-stream":
            heard.whole = decoded(await answer.read())
            return
        rest = b""
        async for block in answer.content.iter_any():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    heard.events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
                    yield heard.events[-1]
                elif line.startswith(b"{"):  # an error in Google's dialect is bare JSON
                    heard.events.append(json.loads(line))
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        heard.broken = repr(error)


def decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
