"""The whole application without sockets: requests go straight into the ASGI callable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tests.gateway.world import renderer
from tests.parts import whole_chunks
from tokentrue.conversation import Conversation, Conversations
from tokentrue.gateway import Gateway, GatewayConfig, GatewayLimits
from tokentrue.gateway.dialects.base import DecodedBody, Dialect
from tokentrue.gateway.serving.forwarding import Peers
from tokentrue.gateway.serving.processes import AdminState
from tokentrue.providers.scripted import invent_logprob
from tokentrue.sessions.journal import Journal
from tokentrue.types import Chunk, Completion, Finish, Ids, Sampling

SAID = "<think>\nhm\n</think>\n\nok"


class Parrot:
    """Says the same thing at once, whatever it is asked; takes every sampling setting."""

    name = "parrot"
    bans_tokens = False
    truthful_filters = frozenset(
        {"top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    )

    def __init__(self, text: str = SAID) -> None:
        self.ids = (*renderer().encode_sampled(text), renderer().stop_token_ids[0])
        self.finish = Finish.STOP  # of the whole text

    def _completion(self, prompt_ids: Ids, sampling: Sampling) -> Completion:
        ids = self.ids[: sampling.max_tokens]
        logprobs = tuple(invent_logprob(index, token) for index, token in enumerate(ids))
        finish = self.finish if len(ids) == len(self.ids) else Finish.LENGTH
        return Completion(token_ids=ids, logprobs=logprobs, finish=finish, prompt_tokens=len(prompt_ids))

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        return self._completion(prompt_ids, sampling)

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        if whole:
            for chunk in whole_chunks(await self.generate(prompt_ids, sampling, session=session)):
                yield chunk
            return
        done = self._completion(prompt_ids, sampling)
        for token, logprob in zip(done.token_ids, done.logprobs, strict=True):
            yield Chunk(token_ids=(token,), logprobs=(logprob,))
        yield Chunk(final=done)

    async def health(self) -> Mapping[str, Any]:
        return {}

    # The engine's control, of which this one needs nothing.
    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def watch(self) -> None: ...

    async def interrupt(self) -> int:
        return 0

    async def publish(self, weights: Any, *, version: int) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        pass


def gateway(
    provider: Any = None,
    *,
    store: str = "memory",
    peers: Peers | None = None,
    admin_state: AdminState | None = None,
    **limits: Any,
) -> Gateway:
    config = GatewayConfig(model="m", admin_key="boss", limits=GatewayLimits(**limits))
    parts = {"provider": provider or Parrot(), "journal": Journal(store), "peers": peers}
    return Gateway(config=config, renderer_for=lambda _: renderer(), admin_state=admin_state, **parts)


async def ask(
    app: Gateway, method: str, path: str, body: bytes = b"", *, key: str | None = "boss", **headers: str
) -> tuple[int, bytes]:
    """Status and body; fails where the application raises or never answers."""
    sent: list[Any] = []
    raw = [
        (b"host", b"localhost"),
        *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()),
    ]
    if key is not None:
        raw.append((b"authorization", b"Bearer " + key.encode("utf-8", "replace")))

    delivered = False

    async def receive() -> dict[str, Any]:
        nonlocal delivered
        if delivered:
            await asyncio.Event().wait()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    where, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": where,
        "raw_path": where.encode("utf-8", "replace"),
        "query_string": query.encode(),
    }
    await app(
        {
            **scope,
            "headers": raw,
            "scheme": "http",
            "server": ("localhost", 80),
            "root_path": "",
            "http_version": "1.1",
        },
        receive,
        send,
    )
    assert sent and sent[0]["type"] == "http.response.start"
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def read_conversation(dialect: Dialect, decoded: DecodedBody, earlier: Conversations | None = None) -> Conversation:
    kept = earlier or Conversations(0)
    return kept.add(dialect.parse_conversation(decoded, kept))


async def new_session(app: Gateway, **settings: Any) -> dict[str, str]:
    status, body = await ask(app, "POST", "/sessions", json.dumps(settings).encode())
    assert status == 201, body
    return json.loads(body)
