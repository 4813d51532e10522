"""Engines with one fault each: a real tiny model behind the hf provider, behind the SGLang stand-in, or tampered
answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from tests.providers.standin import SGLangStandIn
from tokentrue.doctor.reference import load_model
from tokentrue.ids import TokenIds
from tokentrue.providers.hf import HFProvider
from tokentrue.renderers import load_renderer
from tokentrue.types import Completion, Ids, Sampling

CALCULATOR = Path(__file__).parent.parent.parent / "tokentrue" / "assets" / "calculator"


class TamperedProvider(HFProvider):
    """`before` changes the request, `after` the answer."""

    def __init__(
        self,
        model: Any,
        *,
        before: Callable[[Sequence[int], Sampling], tuple[Sequence[int], Sampling]] | None = None,
        after: Callable[[Completion, Sampling], Completion] | None = None,
        name: str = "hf",
    ) -> None:
        super().__init__(model)
        self._before, self._after, self.name = before, after, name
        self.calls = self.in_flight = 0

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        self.calls += 1
        self.in_flight += 1
        try:
            asked = sampling if self._before is None else self._before(prompt_ids, sampling)[1]
            sent = prompt_ids if self._before is None else self._before(prompt_ids, sampling)[0]
            found = await super().generate(sent, asked)
            found = replace(found, prompt_tokens=len(prompt_ids))
            return found if self._after is None else self._after(found, sampling)
        finally:
            self.in_flight -= 1


def quantising_cache(dtype: torch.dtype) -> Any:
    from transformers import DynamicCache

    class QuantisingCache(DynamicCache):
        def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
            keys, values = (states.to(dtype).to(states.dtype) for states in (keys, values))
            return super().update(keys, values, layer, *args, **kwargs)

    return QuantisingCache()


def quantise(model: Any, rounding: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Every linear layer but the output layer, as weight-only quantisation does it."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.weight.data = rounding(module.weight.data)
    return model


def to_int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def to_fp8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax().clamp(min=1e-12) / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def drop_biases(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            module.bias.data.zero_()
    return model


def tie_head(model: Any) -> Any:
    model.get_output_embeddings().weight.data = model.get_input_embeddings().weight.data
    return model


class QuantisedCacheProvider(TamperedProvider):
    """Keys and values in float8, from the first token on."""

    def _forward(self, inputs: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        return super()._forward(inputs, quantising_cache(torch.float8_e4m3fn) if cache is None else cache)


def with_logprobs(found: Completion, logprobs: Sequence[float]) -> Completion:
    return replace(found, logprobs=tuple(min(0.0, value) for value in logprobs))


def truncated(kept: int) -> Callable[[Sequence[int], Sampling], tuple[Sequence[int], Sampling]]:
    return lambda prompt, sampling: (prompt[-kept:], sampling)


def rounded(found: Completion, sampling: Sampling) -> Completion:
    return with_logprobs(found, [round(value, 3) for value in found.logprobs])


def in_bfloat16(found: Completion, sampling: Sampling) -> Completion:
    return with_logprobs(found, torch.tensor(found.logprobs).bfloat16().double().tolist())


def probabilities_in_half(found: Completion, sampling: Sampling) -> Completion:
    return with_logprobs(found, torch.tensor(found.logprobs).exp().half().float().log().tolist())


def shifted_by_one(found: Completion, sampling: Sampling) -> Completion:
    """Each token gets its predecessor's log-probability, the first one the last's: an engine that indexes from the
    wrong end."""
    return replace(
        with_logprobs(found, [*found.logprobs[-1:], *found.logprobs[:-1]]),
        top_logprobs=None if sampling.max_tokens != 1 else found.top_logprobs,
    )


def raw_top(model: Any) -> Callable[[Completion, Sampling], Completion]:
    """Log-probabilities of temperature 1, whatever was sampled with."""

    def after(found: Completion, sampling: Sampling) -> Completion:
        if sampling.temperature in (0.0, 1.0):
            return found
        tops = (
            None
            if found.top_logprobs is None
            else tuple(_rescaled(top, sampling.temperature) for top in found.top_logprobs)
        )
        logprobs = [value * sampling.temperature for value in found.logprobs]
        return replace(with_logprobs(found, logprobs), top_logprobs=tops)

    return after


def _rescaled(top: Any, temperature: float) -> dict[int, float]:
    """Gaps of temperature 1 again; the normaliser does not matter to a gap."""
    return {token: value * temperature for token, value in top.items()}


class UnfilteredProvider(TamperedProvider):
    """Samples under top-k, reports the log-probabilities before it."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling)
        if not sampling.top_k:
            return found
        whole = await super().generate(
            prompt_ids, Sampling(temperature=sampling.temperature, max_tokens=1, top_logprobs=659)
        )
        assert whole.top_logprobs is not None
        return with_logprobs(found, [whole.top_logprobs[0][found.token_ids[0]]])


class Neighbours(TamperedProvider):
    """A kernel whose result depends on the batch: each other request in flight moves the numbers."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        self.in_flight += 1
        others = self.in_flight > 1 or (sampling.max_tokens == 12 and self.calls > 1)
        found = await HFProvider.generate(self, prompt_ids, sampling)
        others = others or self.in_flight > 1
        self.in_flight -= 1
        return (
            with_logprobs(found, [value * 1.3 for value in found.logprobs])
            if others and sampling.temperature == 0
            else found
        )


class StaleCache(TamperedProvider):
    """A prefix cache that was not flushed at the last weight update: a prompt seen before is answered by the old
    weights."""

    def __init__(self, model: Any, old: Any) -> None:
        super().__init__(model)
        self._old, self._seen = HFProvider(old), set[bytes]()

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        key = TokenIds(prompt_ids).sha256()
        stale = key in self._seen and len(prompt_ids) > 100 and sampling.temperature == 0
        self._seen.add(key)
        return await (self._old.generate(prompt_ids, sampling) if stale else super().generate(prompt_ids, sampling))


class Unstable(TamperedProvider):
    """A data race: every second answer is off."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling)
        return with_logprobs(found, [value * 1.2 for value in found.logprobs]) if self.calls % 2 else found


class RoutedStandIn(SGLangStandIn):
    """The stand-in with the tokenising routes of a real server, over the tokenizer and template of any directory."""

    def __init__(
        self, model: torch.nn.Module, *, tokenizer: Path = CALCULATOR, template: str | None = None, swap: Any = None
    ) -> None:
        super().__init__(model)
        self._renderer = load_renderer(str(tokenizer), template)
        self._swap = swap or {}
        self.every = ""

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes([web.post("/tokenize", self.tokenize), web.get("/v1/models", self.models)])
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "root": str(CALCULATOR), "max_model_len": 2048}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            ids = list(self._renderer.render(body["messages"]).token_ids)
        else:
            ids = list(self._renderer.encode_sampled(body["prompt"]))
        return web.json_response(
            {"tokens": [self._swap.get(i, i) for i in ids], "count": len(ids), "max_model_len": 2048}
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.every:
            self.faults = [self.every]
        return await super().generate(request)


def calculator() -> Any:
    return load_model(CALCULATOR)


def perturbed(model: Any, size: float = 0.05) -> Any:
    """Another checkpoint of the same run: every weight moved a little."""
    torch.manual_seed(1)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data += size * parameter.data.std() * torch.randn_like(parameter)
    return other


def with_rope(model: Any, theta: float) -> Any:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    return other
