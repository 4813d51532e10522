"""The seams. Whoever implements one of these fits; nobody needs to inherit from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Protocol

from tokentrue.types import (
    Chunk,
    Completion,
    Delta,
    Extension,
    Ids,
    Messages,
    Parsed,
    Refusal,
    Rendered,
    Sample,
    Sampling,
    TemplateKwargs,
    Tools,
)


class TurnParser(Protocol):
    """Parses one sampled turn while it is being sampled."""

    def feed(self, token_ids: Ids) -> list[Delta]:
        """What these further tokens add for the client; never half a UTF-8 character, never half a marker."""
        ...

    def finish(self) -> tuple[list[Delta], Parsed]:
        """The held-back rest, and the whole turn: as `Renderer.parse` of all ids, plus calls that broke off after they were shown."""
        ...

    def whole(self, token_ids: Ids) -> Parsed:
        """`Renderer.parse` of all ids at once, of a parser that was fed nothing and shows nothing early: made ready before they come."""
        ...


class Renderer(Protocol):
    """Messages to tokens and back; the only kind of object that may encode or decode."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def template_hash(self) -> str: ...

    @property
    def tokenizer_hash(self) -> str: ...

    def render(self, messages: Messages, tools: Tools | None = None, *, template_kwargs: TemplateKwargs | None = None) -> Rendered: ...

    def extend(
        self,
        prefix_ids: Ids,
        messages: Messages,
        new: Messages,
        tools: Tools | None = None,
        *,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Extension | Refusal:
        """`prefix_ids` is the recorded prompt and sampled ids of `messages`, whose last one is the sampled assistant turn."""
        ...

    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed: ...

    def parser(self, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = True) -> TurnParser:
        """`early`: calls are shown while they are written."""
        ...

    def decode(self, token_ids: Ids) -> str: ...


class Provider(Protocol):
    """An engine: ids in, ids and log-probabilities out.

    `prompt_ids` may be kept: a caller that gives an array may append to it later, but never changes what is in it. `sampling` is frozen,
    its `extra` included. Some have more: `foresee(ids, session)` is told, while nobody waits, what a session's next prompt will probably
    begin with; `forget(session)` that a session has left the memory.
    """

    @property
    def name(self) -> str: ...

    @property
    def truthful_filters(self) -> frozenset[str]:
        """The sampling filters under which the reported log-probabilities are those of the distribution sampled from."""
        ...

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion: ...

    def stream(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> AsyncIterator[Chunk]:
        """Closing the iterator early cancels the generation in the engine. `session` is a stickiness hint for prefix caches."""
        ...

    async def health(self) -> Mapping[str, Any]:
        """Facts about the engine (model, version …); raises EngineUnreachable when it is not there."""
        ...

    async def close(self) -> None: ...


class WeightSink(Protocol):
    """Where the trainer publishes weights."""

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Returns when every later token is sampled from these weights and stamped with `version`."""
        ...


class SampleSource(Protocol):
    """Groups of samples for the trainer: a file, a queue or an in-process rollout."""

    def groups(self) -> Iterator[list[Sample]]: ...


def call_if_there(target: object, name: str, *args: object) -> None:
    """What only some providers have: pools hold back what they resume, adapters keep something for a session."""
    method = getattr(target, name, None)
    if method is not None:
        method(*args)
