"""Hugging Face transformers, one forward pass per token: the ground truth for tests. Log-probabilities are those
after temperature and filters; greedy reports temperature 1."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch

from tokentrue.errors import ConfigError, EngineRejected, SamplingError
from tokentrue.hub import load_causal_model
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.pixels import PixelReader, check_runs, plain_inputs
from tokentrue.protocols import NamedWeights, Streaming
from tokentrue.providers.building import CompletionBuilder, refuse_constraints, refuse_unknown_extra
from tokentrue.types import TRUNCATIONS, UNVERSIONED, Chunk, Finish, Ids, PromptImage, Sampling


class HFProvider(Streaming):
    """`decode` (a renderer's) is needed only for stop strings."""

    name = "hf"
    truthful_filters = frozenset(TRUNCATIONS)

    def __init__(
        self,
        model: str | torch.nn.Module,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        version: int = UNVERSIONED,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._model: Any = model
        if not isinstance(model, torch.nn.Module):
            self._model = load_causal_model(model, dtype=dtype).to(device)
        if "past_key_values" not in signature(self._model.forward).parameters:
            raise ConfigError(
                f"engine 'hf' needs a key-value cache, and {type(self._model).__name__} has none; use vllm or sglang"
            )
        self._model.eval()
        self._pixels = PixelReader(self._model.config.name_or_path)
        self._decode = decode
        self._lock = asyncio.Lock()
        self.version = version

    async def check_images(self) -> None:
        if not hasattr(self._model.config, "vision_config"):
            raise EngineRejected(f"{type(self._model).__name__} takes no images: it has no vision tower")
        await asyncio.to_thread(self._pixels.processor)

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> AsyncIterator[Chunk]:  # fmt: skip
        self._refuse(prompt_ids, sampling)
        check_runs(prompt_ids, images, self._model.config)
        eos = self._model.generation_config.eos_token_id
        stops = {*sampling.stop_token_ids, *([eos] if isinstance(eos, int) else eos or [])}
        generator = torch.Generator().manual_seed(sampling.seed if sampling.seed is not None else torch.seed())
        room = self._most_positions - len(prompt_ids)
        limit = min(room, sampling.max_tokens) if sampling.max_tokens is not None else room
        builder = CompletionBuilder(self.name, TokenIds(prompt_ids))
        inputs, cache = await asyncio.to_thread(self._inputs, builder.prompt_ids.tolist(), images), None
        finish, stopped_by = Finish.LENGTH, None
        for _ in range(limit):
            async with self._lock:  # one forward at a time; other requests, and new weights, run between tokens
                logits, cache = await asyncio.to_thread(self._forward, inputs, cache)
                version = self.version
            token, logprob, top, kept = pick(logits, sampling, generator)
            builder.top += [top] if sampling.top_logprobs else []
            yield builder.add((token,), (logprob,), version=version, kept=[kept] if sampling.truncates else None)
            inputs = self._next(token, inputs)
            stopped_by = token if token in stops else self._stop_string(builder.ids, sampling.stop)
            if stopped_by is not None:
                finish = Finish.STOP
                break
        yield Chunk(final=builder.complete(finish, prompt_tokens=len(prompt_ids), stopped_by=stopped_by))

    async def publish(self, weights: NamedWeights, *, version: int) -> None:
        async with self._lock:
            self._model.load_state_dict(dict(weights), strict=False)
            self.version = version

    async def health(self) -> JsonMapping:
        return {"engine": self.name, "model": self._model.config.name_or_path, "version": self.version}

    async def close(self) -> None:
        pass

    def _refuse(self, prompt_ids: Ids, sampling: Sampling) -> None:
        refuse_constraints(self.name, sampling.extra)
        refuse_unknown_extra(self.name, sampling, frozenset())
        if odd := sorted(set(sampling.filters) - self.truthful_filters):
            raise SamplingError(f"engine 'hf' has no {odd[0]}")
        if sampling.stop and self._decode is None:
            raise SamplingError("engine 'hf' needs decode= (a renderer's) for stop strings")
        if not prompt_ids:
            raise SamplingError("the prompt is empty")
        if len(prompt_ids) >= self._most_positions:
            raise SamplingError(f"{len(prompt_ids)} prompt tokens do not fit {self._most_positions} positions")

    @property
    def _most_positions(self) -> int:
        return self._model.config.get_text_config().max_position_embeddings

    def _inputs(self, ids: list[int], images: Sequence[PromptImage]) -> dict[str, torch.Tensor]:
        ids_BT = torch.tensor([ids], device=next(self._model.parameters()).device)
        return {"input_ids": ids_BT, **plain_inputs(self._model, ids_BT, [images], self._pixels)}

    def _next(self, token: int, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs of the next token; images shift its position."""
        inputs = {"input_ids": torch.full_like(before["input_ids"][:, :1], token)}
        if "position_ids" in before:
            inputs["position_ids"] = before["position_ids"].amax((0, 2), keepdim=True).expand(3, 1, 1) + 1
        return inputs

    @torch.no_grad()
    def _forward(self, inputs: Mapping[str, torch.Tensor], cache: Any) -> tuple[torch.Tensor, Any]:
        out = self._model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].float().cpu(), out.past_key_values

    def _stop_string(self, sampled: Sequence[int], stops: Sequence[str]) -> str | None:
        if not stops or self._decode is None:
            return None
        tail = self._decode(sampled[-max(map(len, stops)) - 8 :])
        return next((stop for stop in stops if stop in tail), None)


def pick(
    logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, float, Mapping[int, float], list[int]]:
    """A token, its log-probability, the top few, and the ids that filters kept (none: all)."""
    if sampling.temperature == 0:
        logprobs_V = torch.log_softmax(logits_V, dim=-1)
        token = int(logprobs_V.argmax())
    else:
        logprobs_V = filter_logprobs(torch.log_softmax(logits_V / sampling.temperature, dim=-1), sampling)
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    top: Any = torch.topk(logprobs_V, min(sampling.top_logprobs, logprobs_V.numel())) if sampling.top_logprobs else None
    chosen: dict[int, float] = {} if top is None else dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    possible = logprobs_V > -torch.inf
    places: Any = possible.nonzero().squeeze(-1)
    kept: list[int] = [] if bool(possible.all()) else places.tolist()
    return token, float(logprobs_V[token]), chosen, kept


def filter_logprobs(logprobs_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Top-k, then top-p, then min-p, renormalised."""
    keep = torch.ones_like(logprobs_V, dtype=torch.bool)
    ordered, order = torch.sort(logprobs_V, descending=True, stable=True)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        probs = ordered.exp() * keep[order]
        before = probs.cumsum(0) - probs
        keep[order[before >= sampling.top_p * probs.sum()]] = False
    if sampling.min_p:
        keep &= logprobs_V >= ordered[0] + torch.log(torch.tensor(sampling.min_p))
    if bool(keep.all()):
        return logprobs_V
    return torch.log_softmax(logprobs_V.masked_fill(~keep, float("-inf")), dim=-1)
