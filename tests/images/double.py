"""A renderer and an engine that take images, without any model: one id per UTF-8 byte, `COUNT` ids per image.

A turn is `role`, its text, END. `@name {…}` is a call of a tool.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from PIL import Image

from tests.gateway.inside import Parrot
from tokentrue.gateway import Gateway, GatewayConfig
from tokentrue.gateway.config import GatewayLimits
from tokentrue.ids import TokenIds
from tokentrue.images import ImageSettings
from tokentrue.sessions.journal import Journal, open_journal
from tokentrue.types import Chunk, Delta, Extension, Ids, ImageRun, Parsed, PromptImage, PromptSpan, Rendered, Sampling

END, PAD, OPEN = 256, 257, 258
ROLES = {"system": 260, "user": 261, "assistant": 262, "tool": 263}
PROCESSOR = "double/1"


def count_tokens(width: int, height: int) -> int:
    return -(-width // 28) * -(-height // 28)


class Seer:
    stop_token_ids = (END,)
    template_hash, tokenizer_hash, history = "sha256:t", "sha256:k", "keep"
    placeholder_ids = ()

    def _turns(self, messages: Any, first: int = 0) -> tuple[list[int], list[PromptSpan], list[ImageRun]]:
        ids: list[int] = []
        spans: list[PromptSpan] = []
        images: list[ImageRun] = []
        for index, message in enumerate(messages, first):
            start = len(ids)
            ids.append(ROLES[message["role"]])
            content = message["content"] or ""
            for part in [content] if isinstance(content, str) else content:
                if isinstance(part, str) or part["type"] == "text":
                    ids += (part if isinstance(part, str) else part["text"]).encode()
                    continue
                assert part.keys() == {"type", "sha256", "media_type", "width", "height"}, part
                count, grid = count_tokens(part["width"], part["height"]), (1, part["height"], part["width"])
                images.append(
                    ImageRun(sha256=part["sha256"], start=len(ids), count=count, grid=grid, processor=PROCESSOR)
                )
                ids += [PAD] * count
            for call in message.get("tool_calls") or ():
                ids += f"@{call['function']['name']} {call['function']['arguments']}".encode()
            ids.append(END)
            spans.append(PromptSpan(start=start, end=len(ids), role=message["role"], message=index))
        return ids, spans, images

    def render(self, messages: Any, tools: Any = None, *, template_kwargs: Any = None) -> Rendered:
        ids, spans, images = self._turns(messages)
        head = list(json.dumps(tools).encode()) if tools else []
        moved = [
            PromptSpan(start=s.start + len(head), end=s.end + len(head), role=s.role, message=s.message) for s in spans
        ]
        runs = tuple(
            ImageRun(sha256=r.sha256, start=r.start + len(head), count=r.count, grid=r.grid, processor=r.processor)
            for r in images
        )
        return Rendered(token_ids=TokenIds([*head, *ids, ROLES["assistant"]]), spans=tuple(moved), images=runs)

    def extend(
        self, prefix_ids: Ids, messages: Any, new: Any, tools: Any = None, *, template_kwargs: Any = None
    ) -> Any:
        ids, spans, images = self._turns(new)
        added = TokenIds([*ids, ROLES["assistant"]])
        return Extension(prefix_ids=TokenIds(prefix_ids), added_ids=added, spans=tuple(spans), images=tuple(images))

    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Any = None) -> Parsed:
        text = bytes(token for token in sampled_ids if token < 256).decode()
        if not text.startswith("@"):
            return Parsed(message={"role": "assistant", "content": text})
        name, _, arguments = text[1:].partition(" ")
        call = {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}}
        return Parsed(message={"role": "assistant", "content": None, "tool_calls": [call]})

    def parser(self, *, prompt_ids: Ids = (), tools: Any = None, early: bool = True) -> Any:
        outer, seen = self, list[int]()

        class Late:
            def feed(self, token_ids: Ids) -> list[Delta]:
                seen.extend(token_ids)
                return []

            def finish(self) -> tuple[list[Delta], Parsed]:
                parsed = outer.parse(seen)
                calls = parsed.message.get("tool_calls") or ()
                if calls:
                    function = calls[0]["function"]
                    return [Delta(call=0, name=function["name"], arguments=function["arguments"])], parsed
                return [Delta(content=parsed.message["content"])], parsed

        return Late()

    def decode(self, token_ids: Ids) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def encode_sampled(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def call_tag(self, tools: Any, *, name: str | None = None) -> Any:
        return {}


class Eyes(Parrot):
    """Says `text`, and remembers the prompts and images that it was sent."""

    name = "eyes"

    def __init__(self, text: str = "I see") -> None:
        self.ids = (*text.encode(), END)
        from tokentrue.types import Finish

        self.finish = Finish.STOP
        self.seen: list[tuple[TokenIds, list[PromptImage]]] = []

    async def check_images(self) -> None: ...

    async def stream(  # type: ignore[override]
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str | None = None,
        whole: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> AsyncIterator[Chunk]:
        self.seen.append((TokenIds(prompt_ids), list(images)))
        await asyncio.sleep(0)
        async for chunk in super().stream(prompt_ids, sampling, session=session, whole=whole):
            yield chunk


def seeing_gateway(
    engine: Any = None, *, store: str = "memory", images: ImageSettings | None = None, journal: Journal | None = None
) -> Gateway:
    config = GatewayConfig(model="m", admin_key="boss", limits=GatewayLimits(), images=images or ImageSettings())
    seer = Seer()
    return Gateway(
        config=config,
        renderer_for=lambda _: seer,  # type: ignore[arg-type,return-value]
        provider=engine or Eyes(),
        journal=journal or open_journal(store),
    )


def picture(
    width: int = 56, height: int = 28, format: str = "PNG", color: Any = (10, 20, 30), mode: str = "RGB", **options: Any
) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), color).save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, media_type: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, media_type), **more}}


def ask_about(*parts: Any, text: str = "what?") -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
