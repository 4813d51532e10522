"""The embedded exact engine: log-probabilities equal the trainer's, bit for bit, under every filter."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from torch import nn

from tokentrue.engine import ExactEngine, ScheduleLimits
from tokentrue.errors import EngineRejected, EngineUnreachable
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import NamedWeights, PretrainedAdapter, Streaming
from tokentrue.providers.building import refuse_constraints
from tokentrue.types import FILTERS, UNVERSIONED, Chunk, Ids, PromptImage, Sampling


class ExactProvider(Streaming):
    """`model`: a directory, a hub id or a model object; `decode` (a renderer's) is needed only for stop strings."""

    name = "exact"
    truthful_filters = FILTERS

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        pipeline: int = 1,
        tensor: int = 1,
        leaves: int | None = None,
        version: int = UNVERSIONED,
        decode: Callable[[Sequence[int]], str] | None = None,
        limits: ScheduleLimits | None = None,
        max_len: int | None = None,
        kv_tokens: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """`adapters`: by name, directories saved by peft."""
        self.engine = ExactEngine(
            model, device, dtype, pipeline, tensor, leaves=leaves, limits=limits, max_len=max_len, kv_tokens=kv_tokens, version=version, read=decode
        )  # fmt: skip
        for name, folder in (adapters or {}).items():
            self.engine.load_adapter(name, folder)
        self._adapter: JsonMapping = {}  # the published one, of requests that name none

    @property
    def adapters(self) -> Sequence[str]:
        return self.engine.adapters

    async def check_images(self) -> None:
        if not self.engine.sees:
            raise EngineRejected(f"{type(self.engine.model).__name__} takes no images: it has no vision tower")
        await asyncio.to_thread(self.engine.reader.processor)

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> AsyncIterator[Chunk]:  # fmt: skip
        refuse_constraints(self.name, sampling.extra)
        if self._adapter:
            sampling = replace(sampling, extra={**self._adapter, **sampling.extra})
        # Never `whole`: a turn that is cancelled keeps the tokens that were sampled until then.
        async with aclosing(self.engine.stream(prompt_ids, sampling, images=images)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def score(self, token_ids: Ids) -> Sequence[float]:
        asked = Sampling(max_tokens=1, extra={"prompt_logprobs": True, **self._adapter})
        found = (await self.engine.generate(token_ids, asked)).prompt_logprobs
        assert found is not None
        return found

    async def publish(self, weights: NamedWeights, *, version: int) -> None:
        await self.engine.publish(weights, version=version)
        self._adapter = {}

    async def publish_adapter(
        self, weights: NamedWeights, config: PretrainedAdapter, *, version: int, name: str
    ) -> bool:
        state = {key: weight.detach().clone() for key, weight in weights}
        await asyncio.to_thread(self.engine.load_adapter, name, state, config=config, version=version)
        self._adapter = {"adapter": name}
        return True

    def metrics(self) -> Mapping[str, float]:
        return self.engine.metrics()

    async def health(self) -> JsonMapping:
        if self.engine.core.broken:
            raise EngineUnreachable(self.engine.core.broken)
        return {
            "engine": self.name,
            "model": self.engine.model.config.name_or_path,
            "version": self.engine.version,
            "fingerprint": self.engine.fingerprint,
            "fallbacks": list(self.engine.contract.fallbacks),
        }

    async def close(self) -> None:
        self.engine.close()
