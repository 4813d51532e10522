"""Interfaces between packages, and plug-ins by entry point."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from tokentrue.errors import ConfigError, EngineContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
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


class PretrainedAdapter(Protocol):
    """peft's configuration of a LoRA adapter."""

    def save_pretrained(self, save_directory: str | Path, /) -> object: ...


NamedWeights = Iterable[tuple[str, Any]]
"""Tensors by name; torch itself is not imported here."""


class TurnParser(Protocol):
    def feed(self, token_ids: Ids) -> list[Delta]:
        """Never returns half a UTF-8 character or half a marker."""
        ...

    def finish(self) -> tuple[list[Delta], Parsed]:
        """The deltas held back, and the whole turn."""
        ...


class Renderer(Protocol):
    """The only kind of object that may encode or decode."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def template_hash(self) -> str: ...

    @property
    def tokenizer_hash(self) -> str: ...

    @property
    def history(self) -> Literal["keep", "template"]:
        """keep: recorded turns stay unchanged. template: they follow a template that rewrites them."""
        ...

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Ids that only the place of an image may have."""
        ...

    def render(
        self, messages: Messages, tools: Tools | None = None, *, template_kwargs: TemplateKwargs | None = None
    ) -> Rendered: ...

    def extend(
        self,
        prefix_ids: Ids,
        messages: Messages,
        new: Messages,
        tools: Tools | None = None,
        *,
        template_kwargs: TemplateKwargs | None = None,
    ) -> Extension | Refusal:
        """`prefix_ids` are the recorded ids of `messages`, whose last one is the sampled assistant turn."""
        ...

    def parse(self, sampled_ids: Ids, *, prompt_ids: Ids = (), tools: Tools | None = None) -> Parsed: ...

    def parser(self, *, prompt_ids: Ids = (), tools: Tools | None = None, early: bool = True) -> TurnParser:
        """`early`: emits calls while they are written."""
        ...

    def decode(self, token_ids: Ids) -> str: ...

    def encode_sampled(self, text: str) -> Sequence[int]:
        """Encodes text as a model would write it, special tokens included; for scripts and probes."""
        ...

    def call_tag(self, tools: Tools, *, name: str | None = None) -> JsonMapping | Refusal:
        """The structural tag that makes an engine sample at least one call of these tools (only of `name`)."""
        ...


class Streaming(Protocol):
    """An engine's `stream`; subclasses inherit the rest."""

    @property
    def bans_tokens(self) -> bool:
        """True if it takes `Sampling.extra["logit_bias"]`."""
        return False

    def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        """Yields chunks of sampled tokens, then one with the whole completion (`final`). Closing the iterator early
        cancels the generation. `session` is a hint for prefix caches; `whole`: one chunk suffices."""
        ...

    async def generate(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, **images: Any
    ) -> Completion:
        final = None
        async for chunk in self.stream(prompt_ids, sampling, session=session, whole=True, **images):
            final = chunk.final or final
        if final is None:
            raise EngineContractError("the engine ended a stream without its final answer")
        return final


class Provider(Streaming, Protocol):
    """An engine: ids in, ids and log-probabilities out."""

    @property
    def name(self) -> str: ...

    @property
    def truthful_filters(self) -> frozenset[str] | None:
        """Filters under which the reported log-probabilities are those of the sampled distribution; None until
        `health()`."""
        ...

    async def health(self) -> JsonMapping:
        """Facts about the engine; raises EngineUnreachable."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Seeing(Protocol):
    """An engine whose `stream` and `generate` also take `images: Sequence[PromptImage]`, in the order of the prompt."""

    async def check_images(self) -> None:
        """Raises an error that says why this engine, as it runs, takes no images."""
        ...


@runtime_checkable
class WeightSink(Protocol):
    async def publish(self, weights: NamedWeights, *, version: int) -> None:
        """Returns when every later token is sampled from these weights and stamped with `version`."""
        ...


@runtime_checkable
class AdapterSink(Protocol):
    async def publish_adapter(
        self, weights: NamedWeights, config: PretrainedAdapter, *, version: int, name: str
    ) -> bool:
        """True when every later token is sampled with this LoRA adapter and stamped with `version`, unless its
        request names another; False if the engine serves none."""
        ...


@runtime_checkable
class Scoring(Protocol):
    async def score(self, token_ids: Ids) -> Sequence[float]:
        """The log-probability of each token but the first, at temperature 1 without filters."""
        ...


@runtime_checkable
class Versioned(Protocol):
    """A remote engine that reports its weight version."""

    url: str

    async def weight_version(self) -> int:
        """0 if nothing was published to the server."""
        ...


@runtime_checkable
class Rejoining(Protocol):
    """A remote engine that can load weights published while it was unreachable."""

    async def rejoin(self) -> None: ...


@runtime_checkable
class Interruptible(Protocol):
    """An engine whose running generations must end before it can load new weights."""

    async def interrupt(self) -> int:
        """Aborts them; each returns the tokens it has. Returns their number."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An embedded engine with metrics for /metrics."""

    def metrics(self) -> Mapping[str, float]: ...


@runtime_checkable
class Adapting(Protocol):
    """An engine with LoRA adapters; a request names one in `Sampling.extra["adapter"]`."""

    @property
    def adapters(self) -> Sequence[str]: ...


@runtime_checkable
class Tokenizing(Protocol):
    """Only used to compare an engine's tokenizer with ours."""

    async def tokenize(self, text: str) -> TokenIds | None:
        """Ids without special tokens; None if this server does not offer it."""
        ...


class EngineControl(Provider, Measured, WeightSink, Protocol):
    """What a gateway calls on its engines besides generating."""

    def pause(self) -> None:
        """New and aborted generations wait until `resume`."""
        ...

    def resume(self) -> None: ...

    async def interrupt(self) -> int:
        """Pauses, and aborts running generations if an engine needs that; they continue after `resume`."""
        ...

    def watch(self) -> None:
        """Starts periodic health checks."""
        ...


class SampleSource(Protocol):
    """Groups of samples for the trainer."""

    def groups(self) -> Iterator[list[Sample]]: ...


def find_plugins(
    group: Literal["providers", "exporters", "families", "vision", "environments"],
) -> dict[str, EntryPoint]:
    found = entry_points(group=f"tokentrue.{group}")
    return {plugin.name: plugin for plugin in sorted(found, key=lambda plugin: plugin.name)}


def load_plugin(plugin: EntryPoint) -> Any:
    try:
        return plugin.load()
    except Exception as error:  # the module is another package's: it may raise anything
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{plugin.group}: {plugin.name} ({plugin.value}) cannot be loaded: {said}; mend or uninstall its package"
        ) from error
