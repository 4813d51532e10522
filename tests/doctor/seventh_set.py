"""A seventh set: faults as issues and changelogs of engines, quantisers and weight synchronisation tell them, by an
author who had read neither the doctor nor the sets `reported`, `third` and `sixth`, and healthy engines that differ as
engines may.

It stands alone: its engine is a plain loop over a transformers model, so nothing in it comes from the sets before.
Each fault was fixed, with its key, before the doctor was played. `unknown` is a key only where no name of the list fits.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import linear
from transformers import DynamicCache

from tokentrue.ids import TokenIds
from tokentrue.providers.building import CompletionBuilder
from tokentrue.providers.hf import HFProvider, filter_logprobs
from tokentrue.types import Chunk, Completion, Finish, Ids, PromptImage, Sampling

HIDDEN = -1e30


# --- the engine, and what a case is ---


@dataclass
class Seeded:
    engine: Any
    names: frozenset[str] = frozenset()
    previous: Any = None
    adapter: Path | None = None
    folder: TemporaryDirectory[str] | None = None  # of the adapter, kept while the case lives


@dataclass
class Run:
    """One request: `sent` tokens of prompt, the tokens computed so far, their cache."""

    sent: int
    number: int
    ids: list[int] = field(default_factory=list)
    past: Any = None
    state: dict[str, Any] = field(default_factory=dict)


class Plain(HFProvider):
    """Prefill, then one step per token. A case replaces `received`, `prefill`, `decode`, `drawn` or `told`."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model.to(getattr(torch, dtype)))
        self.model, self.requests = self._model, 0

    def received(self, prompt: list[int]) -> list[int]:
        return prompt

    def prefill(self, ids: list[int], run: Run) -> Any:
        return self.compute(ids, run)

    def decode(self, ids: list[int], run: Run) -> Any:
        return self.compute(ids, run)

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        """Log-probabilities that the token is drawn from."""
        heat = sampling.temperature or 1.0
        whole = torch.log_softmax(logits / heat, -1)
        return filter_logprobs(whole, sampling) if sampling.temperature else whole

    def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """Log-probabilities that are reported."""
        return drawn

    def token(self, drawn: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
        if sampling.temperature == 0:
            return int(drawn.argmax())
        return int(torch.multinomial(drawn.exp(), 1, generator=generator))

    def top(self, told: torch.Tensor, token: int, count: int) -> dict[int, float]:
        best = told.topk(min(count, told.numel()))
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def compute(self, ids: list[int], run: Run, model: Any = None, **given: Any) -> Any:
        return (model or self.model)(torch.tensor([ids]), past_key_values=run.past, use_cache=True, **given)

    def masked(self, ids: list[int], run: Run, hidden: torch.Tensor) -> Any:
        """`hidden`: which keys (columns) a query (row) does not see."""
        mask = torch.zeros(1, 1, *hidden.shape, dtype=self.model.dtype).masked_fill(hidden, HIDDEN)
        return self.compute(ids, run, attention_mask=mask)

    @torch.no_grad()
    def step(self, ids: list[int], run: Run) -> torch.Tensor:
        out = (self.decode if run.ids else self.prefill)(ids, run)
        run.ids += ids
        run.past = out.past_key_values
        return out.logits[0, -1].float()

    async def stream(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str | None = None,
        whole: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> AsyncIterator[Chunk]:
        self._refuse(prompt_ids, sampling)
        prompt = self.received(list(prompt_ids))
        self.requests += 1
        run, eos = Run(len(prompt), self.requests), self.model.generation_config.eos_token_id
        stops = {*sampling.stop_token_ids, *([eos] if isinstance(eos, int) else eos or [])}
        generator = torch.Generator().manual_seed(sampling.seed if sampling.seed is not None else torch.seed())
        room = self._most_positions - len(prompt)
        builder = CompletionBuilder(self.name, TokenIds(prompt_ids))
        new, finish, stopped_by = prompt, Finish.LENGTH, None
        for _ in range(min(room, sampling.max_tokens) if sampling.max_tokens is not None else room):
            async with self._lock:
                logits = await asyncio.to_thread(self.step, new, run)
            drawn = self.drawn(logits, run, sampling)
            told = self.told(drawn, logits, sampling)
            token = self.token(drawn, sampling, generator)
            builder.top += [self.top(told, token, sampling.top_logprobs)] if sampling.top_logprobs else []
            possible = drawn > -torch.inf
            kept = [] if bool(possible.all()) else torch.where(possible)[0].tolist()
            yield builder.add(
                (token,),
                (float(told[token]),),
                version=self.version,
                kept=[kept] if sampling.truncates else None,
            )
            new = [token]
            if token in stops:
                finish, stopped_by = Finish.STOP, token
                break
        yield Chunk(final=builder.complete(finish, prompt_tokens=len(prompt_ids), stopped_by=stopped_by))


Make = Callable[[Any, str, random.Random], Seeded]


def of_model(change: Callable[[Any, random.Random], Any], *names: str) -> Make:
    """`change` alters the model in place, or gives another."""

    def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
        return Seeded(Plain(change(model, rng) or model, dtype), frozenset(names))

    return make


def of_engine(kind: type[Plain], *names: str) -> Make:
    return lambda model, dtype, rng: Seeded(kind(model, dtype), frozenset(names))


def one_layer(model: Any, rng: random.Random) -> Any:
    return rng.choice(list(model.model.layers))


def projections(model: Any) -> list[Any]:
    return [one for name, one in model.named_modules() if name.endswith("_proj")]


def before_the_update(model: Any, rng: random.Random) -> Any:
    """The weights some optimiser steps ago: half of the elements moved by one or two per cent of its tensor's size."""
    torch.manual_seed(rng.randrange(1 << 30))
    old = copy.deepcopy(model)
    for parameter in old.parameters():
        size = 0.015 * parameter.data.pow(2).mean().sqrt()
        parameter.data += size * torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.5)
    return old


# --- weights ---


class Replicas(Plain):
    """Requests go round between two replicas; the second did not get the last update (sglang#2050)."""

    stale: Any = None

    def prefill(self, ids: list[int], run: Run) -> Any:
        return self.compute(ids, run, self.stale if run.number % 2 else self.model)

    decode = prefill


def one_replica_not_updated(model: Any, dtype: str, rng: random.Random) -> Seeded:
    old, engine = before_the_update(model, rng), Replicas(model, dtype)
    engine.stale = copy.deepcopy(old).to(engine.model.dtype)
    return Seeded(engine, frozenset({"stale_weights", "unstable"}), previous=old)


def embedding_not_updated(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine keeps two tensors for tied weights; the update reaches the output matrix alone (vllm#51665)."""
    old = before_the_update(model, rng)
    new = model.lm_head.weight.data.clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(new)
    model.model.embed_tokens.weight = torch.nn.Parameter(old.model.embed_tokens.weight.data.clone())
    return Seeded(Plain(model, dtype), frozenset({"stale_weights"}), previous=old)


def bucket_overwritten(model: Any, rng: random.Random) -> None:
    """The sender fills the shared bucket again while it is still copied: the last quarter of a matrix holds the rows of
    the next layer's (ms-swift#10204, slime#929)."""
    layers = list(model.model.layers)
    at = rng.randrange(len(layers) - 1)
    name = rng.choice(("gate_proj", "up_proj", "down_proj"))
    mine, next_one = (getattr(layer.mlp, name).weight.data for layer in layers[at : at + 2])
    start = len(mine) * 3 // 4
    mine[start:] = next_one[start:]


def key_heads_repeated_in_turn(model: Any, rng: random.Random) -> None:
    """For more ranks than key heads, those are repeated 0 1 0 1 instead of 0 0 1 1 (ScaleLLM#213), here in the layer of
    one pipeline stage: the same as query heads in another order."""
    attention = one_layer(model, rng).self_attn
    group, size = attention.num_key_value_groups, attention.head_dim
    heads = torch.arange(attention.q_proj.weight.shape[0] // size).view(-1, group).t().flatten()
    rows = (heads[:, None] * size + torch.arange(size)).flatten()
    attention.q_proj.weight.data = attention.q_proj.weight.data[rows]
    attention.o_proj.weight.data = attention.o_proj.weight.data[:, rows]


def to_fp4(weight: torch.Tensor) -> torch.Tensor:
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat((-half[1:].flip(0), half))
    groups = weight.view(-1, 16)
    largest = groups.abs().amax(1, keepdim=True)
    outer = weight.abs().max() / (6 * 448)
    scale = (largest / 6 / outer).to(torch.float8_e4m3fn).float().clamp(min=2**-9) * outer
    return (levels[((groups / scale)[..., None] - levels).abs().argmin(-1)] * scale).view_as(weight)


def weights_in_nvfp4(model: Any, rng: random.Random) -> None:
    """The 4-bit float of Blackwell: groups of 16 with float8 scales, one float32 scale per matrix (ModelOpt's default)."""
    for one in projections(model):
        one.weight.data = to_fp4(one.weight.data)


def power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.log2(scale.clamp(min=1e-12)).ceil())


def fp8_of_blackwell(model: Any, rng: random.Random) -> None:
    """Weights in float8 by blocks of 128 × 128 and inputs by groups of 128, with scales that are powers of two
    (vllm#38083: the accuracy falls by 12 points)."""

    def short(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype) * scale

    def short_inputs(one: Any, args: Any) -> Any:
        groups = args[0].unflatten(-1, (-1, 128))
        scale = power_of_two_above(groups.abs().amax(-1, keepdim=True).float() / 448).to(groups.dtype)
        return (short(groups, scale).flatten(-2),)

    for one in projections(model):
        weight = one.weight.data
        for top in range(0, weight.shape[0], 128):
            for left in range(0, weight.shape[1], 128):
                block = weight[top : top + 128, left : left + 128]
                block.copy_(short(block, power_of_two_above(block.abs().max() / 448)))
        one.register_forward_pre_hook(short_inputs)


def sums_of_ranks_in_six_bits(model: Any, rng: random.Random) -> None:
    """Two ranks add up their outputs as 6-bit integers in groups of 32 (vllm#19744, recommended in InferenceX#2333)."""

    def six_bits(values: torch.Tensor) -> torch.Tensor:
        groups = values.float().unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 31
        return ((groups / scale).round().clamp(-32, 31) * scale).flatten(-2).to(values.dtype)

    for layer in model.model.layers:
        for one in (layer.self_attn.o_proj, layer.mlp.down_proj):

            def forward(x: torch.Tensor, one: Any = one) -> torch.Tensor:
                parts = zip(x.chunk(2, -1), one.weight.chunk(2, -1), strict=True)
                first, second = (six_bits(linear(some, weight)) for some, weight in parts)
                return six_bits(first + second)

            one.forward = forward


# --- rope, masks ---


def static_yarn(model: Any, rng: random.Random) -> Any:
    """The server is started with YaRN of factor 4 for long prompts; short ones change, too (Qwen3#1567)."""
    config = copy.deepcopy(model.config)
    most = config.max_position_embeddings
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": most,
    }
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    other.generation_config = model.generation_config
    return other


class CyclicCache(Plain):
    """A maximal attention window of 64 tokens, meant to save memory: decoding sees no more (TensorRT-LLM's
    max_attention_window_size); the prompt is computed whole."""

    def decode(self, ids: list[int], run: Run) -> Any:
        total = len(run.ids) + 1
        return self.masked(ids, run, (torch.arange(total) < total - 64)[None])


class ChunksAlignedToTheStart(Plain):
    """The causal mask of a later chunk is aligned to the first key, not to the last (sparkinfer#3, flash-attention before
    2.1). The size of a chunk is 64 as the prompts are short."""

    def prefill(self, ids: list[int], run: Run) -> Any:
        out = None
        for start in range(0, len(ids), 64):
            part = ids[start : start + 64]
            hidden = torch.arange(start + len(part))[None] > torch.arange(len(part))[:, None]
            out = self.masked(part, run, hidden)
            run.past = out.past_key_values
        return out


# --- activations, norms ---


def gated_units_clamped(model: Any, rng: random.Random) -> None:
    """The fused kernel's default limit for gate and up values is used in a model without one (aiter#5271, aiter#4526).
    7.0 there; here 2.5, since this model's values are smaller."""
    for layer in model.model.layers:

        def forward(x: torch.Tensor, mlp: Any = layer.mlp) -> torch.Tensor:
            gate, up = mlp.gate_proj(x).clamp(max=2.5), mlp.up_proj(x).clamp(-2.5, 2.5)
            return mlp.down_proj(torch.nn.functional.silu(gate) * up)

        layer.mlp.forward = forward


def norms_over_all_heads(model: Any, rng: random.Random) -> None:
    """Query and key norms take the mean square over all heads together (vllm#16311, Llama 4)."""
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):

            def forward(x: torch.Tensor, norm: Any = norm) -> torch.Tensor:
                wide = x.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean((-2, -1), keepdim=True) + norm.variance_epsilon)
                return norm.weight * wide.to(x.dtype)

            norm.forward = forward


# --- sampling, reports ---


class UnsetTemperature(Plain):
    """A temperature of 1.0 is taken for unset, and the default of generation_config.json, 0.6, is drawn with; the report
    is of 1.0 (verl#702; vLLM reports raw log-probabilities)."""

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        asked = replace(sampling, temperature=0.6) if sampling.temperature == 1.0 else sampling
        return super().drawn(logits, run, asked)

    def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        return super().drawn(logits, Run(0, 0), sampling)


class FrequencyPenalty(Plain):
    """A server's default frequency penalty of 0.3 on the tokens generated so far (verl#7270 has a repetition penalty that
    came the same way)."""

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        logits = logits.clone()
        for token, count in Counter(run.ids[run.sent :]).items():
            logits[token] -= 0.3 * count
        return super().drawn(logits, run, sampling)


class NormalisedOverTheTop(Plain):
    """Tokens are drawn from all, reports are normalised over the 20 likeliest (llama.cpp#7093: probabilities of the
    candidates add up to more than 1)."""

    def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        return (drawn - drawn.topk(20).values.logsumexp(-1)).clamp(max=0)


class ProbabilitiesInHalf(Plain):
    """The worker sends probabilities as float16, the front end takes logarithms (llama.cpp#10783 sent probabilities)."""

    def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        sent = drawn.exp().half().float()
        return torch.where(drawn > -torch.inf, sent.clamp(min=2**-24), sent).log()


# --- caches ---


class CacheInE5M2(Plain):
    """Keys and values are kept as float8 with two bits of mantissa (--kv-cache-dtype fp8_e5m2); the prompt's own pass
    uses them before they are shortened."""

    class Cache(DynamicCache):
        def update(self, keys: Any, values: Any, layer: int, *args: Any, **given: Any) -> Any:
            short = (one.to(torch.float8_e5m2).to(one.dtype) for one in (keys, values))
            found = super().update(*short, layer, *args, **given)
            return (keys, values) if found[0].shape[2] == keys.shape[2] > 1 else found

    def prefill(self, ids: list[int], run: Run) -> Any:
        run.past = self.Cache()
        return self.compute(ids, run)


class CacheInFourBits(Plain):
    """Old keys (per channel) and values (per token) in 4 bits, groups of 32; the last 32 tokens and more are exact (KIVI,
    transformers' QuantizedCache with its residual length)."""

    class Cache(DynamicCache):
        def update(self, keys: Any, values: Any, layer: int, *args: Any, **given: Any) -> Any:
            found = super().update(keys, values, layer, *args, **given)
            done = max(found[0].shape[2] - 32, 0) // 32 * 32
            if found[0].shape[2] == keys.shape[2] > 1 or not done:
                return found
            old_keys, old_values = (one[:, :, :done].float() for one in found)
            old_keys = four_bits(old_keys.unflatten(2, (-1, 32)), 3).flatten(2, 3)
            old = (old_keys, four_bits(old_values, 3))
            return tuple(
                torch.cat((short.to(one.dtype), one[:, :, done:]), 2) for short, one in zip(old, found, strict=True)
            )

    def prefill(self, ids: list[int], run: Run) -> Any:
        run.past = self.Cache()
        return self.compute(ids, run)


def four_bits(values: torch.Tensor, dim: int) -> torch.Tensor:
    least, most = values.amin(dim, keepdim=True), values.amax(dim, keepdim=True)
    step = ((most - least) / 15).clamp(min=1e-12)
    return ((values - least) / step).round() * step + least


class LastSlotUnwritten(Plain):
    """Of a finished request the prefix cache takes prompt and answer, with the slot of the last sampled token, which was
    never computed (sglang#16521: what counts as committed): the next turn reads zeros there."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.running: dict[tuple[int, ...], Any] = {}
        self.stored: dict[tuple[int, ...], Any] = {}

    def step(self, ids: list[int], run: Run) -> torch.Tensor:
        self.running.pop(tuple(run.ids), None)
        logits = super().step(ids, run)
        self.running[tuple(run.ids)] = run.past
        return logits

    async def generate(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, **images: Any
    ) -> Completion:
        found = await super().generate(prompt_ids, sampling, session=session, **images)
        whole = (*list(prompt_ids), *list(found.token_ids))
        past = self.running.pop(whole[:-1], None)
        if past is not None:
            self.stored[whole] = [
                tuple(torch.cat((one, torch.zeros_like(one[:, :, :1])), 2) for one in (layer.keys, layer.values))
                for layer in past.layers
            ]
        return found

    def prefill(self, ids: list[int], run: Run) -> Any:
        fitting = [key for key in self.stored if len(key) < len(ids) and tuple(ids[: len(key)]) == key]
        if not fitting:
            return self.compute(ids, run)
        key = max(fitting, key=len)
        run.past = DynamicCache()
        for at, (keys, values) in enumerate(self.stored[key]):
            run.past.update(keys, values, at)
        return self.compute(ids[len(key) :], run)


# --- prompts ---


class Retokenised(Plain):
    """The server decodes the ids it gets to text and encodes that again (sglang#26555, trl#5224)."""

    def received(self, prompt: list[int]) -> list[int]:
        tokenizer = Tokenizer.from_file(str(Path(self.model.config.name_or_path) / "tokenizer.json"))
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        return tokenizer.encode(text, add_special_tokens=False).ids or prompt


class EndAppended(Plain):
    """The tokenizer is set to end each text with the end token (add_eos_token), so the prompt ends with one."""

    def received(self, prompt: list[int]) -> list[int]:
        return [*prompt, self.model.generation_config.eos_token_id]


# --- decoding alone ---


class StaleGraph(Plain):
    """A graph captured for decoding keeps the memory of key and value matrices from before the update, which were
    replaced and not copied into (local-inference-lab/vllm#148: absorbed matrices); the prompt is computed right."""

    captured: Any = None

    def decode(self, ids: list[int], run: Run) -> Any:
        return self.compute(ids, run, self.captured)


def decoding_with_old_matrices(model: Any, dtype: str, rng: random.Random) -> Seeded:
    old, engine = before_the_update(model, rng), StaleGraph(model, dtype)
    engine.captured = copy.deepcopy(engine.model)
    for mine, before in zip(engine.captured.model.layers, old.model.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            getattr(mine.self_attn, name).weight.data = getattr(before.self_attn, name).weight.data.to(
                engine.model.dtype
            )
    return Seeded(engine, frozenset({"stale_weights", "prefill_decode"}), previous=old)


# --- adapters ---


def an_adapter(model: Any, rng: random.Random, rank_stable: bool) -> tuple[TemporaryDirectory[str], dict[str, Any]]:
    """A low-rank adapter of every projection in a folder, and its matrices by the modules' names."""
    torch.manual_seed(rng.randrange(1 << 30))
    folder, parts, tensors = TemporaryDirectory(), {}, {}
    rank, alpha = 8, 16
    scale = alpha / (math.sqrt(rank) if rank_stable else rank)
    for name, one in model.named_modules():
        if not name.endswith("_proj"):
            continue
        rows, columns = one.weight.shape
        down = torch.randn(rank, columns) / math.sqrt(columns)
        up = 0.08 * one.weight.data.std() * math.sqrt(columns / rank) * torch.randn(rows, rank) / scale
        parts[name] = (down, up)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, Path(folder.name) / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rank_stable,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in parts}),
    }
    (Path(folder.name) / "adapter_config.json").write_text(json.dumps(config))
    return folder, parts


def merged(model: Any, parts: dict[str, Any], scale: float) -> Any:
    for name, (down, up) in parts.items():
        model.get_submodule(name).weight.data += scale * up @ down
    return model


def rank_stable_scale_ignored(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The adapter's factor is alpha over rank, though it was trained with alpha over the rank's root (vllm#6909,
    TensorRT-LLM#1668)."""
    folder, parts = an_adapter(model, rng, rank_stable=True)
    engine = Plain(merged(model, parts, 16 / 8), dtype)
    return Seeded(engine, frozenset({"adapter_missing", "unknown"}), adapter=Path(folder.name), folder=folder)


class PrefillWithoutAdapter(Plain):
    """The graph captured for prefill applies no adapter; decoding does (sglang#32703)."""

    base: Any = None

    def prefill(self, ids: list[int], run: Run) -> Any:
        return self.compute(ids, run, self.base)


def adapter_in_decoding_alone(model: Any, dtype: str, rng: random.Random) -> Seeded:
    folder, parts = an_adapter(model, rng, rank_stable=False)
    base = copy.deepcopy(model)
    engine = PrefillWithoutAdapter(merged(model, parts, 16 / 8), dtype)
    engine.base = base.to(engine.model.dtype)
    names = frozenset({"adapter_missing", "prefill_decode"})
    return Seeded(engine, names, adapter=Path(folder.name), folder=folder)


# --- healthy ---


class PlacesShifted(Plain):
    """Positions are counted from 11: rotations are relative."""

    def prefill(self, ids: list[int], run: Run) -> Any:
        first = 11 + len(run.ids)
        return self.compute(ids, run, position_ids=torch.arange(first, first + len(ids))[None])

    decode = prefill


def sums_in_four_parts(model: Any, rng: random.Random) -> None:
    """Each product is summed over four parts of its inputs, the last first."""
    for one in [*projections(model), model.lm_head]:

        def forward(x: torch.Tensor, one: Any = one) -> torch.Tensor:
            parts = list(zip(x.float().chunk(4, -1), one.weight.float().chunk(4, -1), strict=True))
            return torch.stack([linear(some, weight) for some, weight in reversed(parts)]).sum(0).to(x.dtype)

        one.forward = forward


class PaddedOnTheLeft(Plain):
    """Beside each request runs a longer one; the shorter row is padded on the left, hidden and counted right."""

    def rows(self, ids: list[int], other: list[int], run: Run, start: int) -> Any:
        pads, length = run.state["pads"], start + len(ids)
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :pads] = 0
        places = torch.arange(start, length).repeat(2, 1)
        places[0] = (places[0] - pads).clamp(min=0)
        return self.model(
            torch.tensor([ids, other]),
            past_key_values=run.past,
            use_cache=True,
            attention_mask=mask,
            position_ids=places,
        )

    def prefill(self, ids: list[int], run: Run) -> Any:
        run.state["pads"] = 13
        row = [0] * 13 + ids
        return self.rows(row, [9 + (7 * one) % 600 for one in range(len(row))], run, 0)

    def decode(self, ids: list[int], run: Run) -> Any:
        return self.rows(ids, [17], run, len(run.ids) + run.state["pads"])


class SharedBudget(Plain):
    """Chunks of a prompt as a token budget shared with other requests cuts them, attention by the eager kernel."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.model.set_attn_implementation("eager")

    def prefill(self, ids: list[int], run: Run) -> Any:
        out, start = None, 0
        sizes = random.Random(run.number)
        while start < len(ids):
            size = sizes.choice((5, 13, 29, 48))
            out = self.compute(ids[start : start + size], run)
            run.past, start = out.past_key_values, start + size
        return out


class OtherDraws(Plain):
    """Draws by Gumbel noise; of the top log-probabilities one more is given, the sampled one's, in the order of ids."""

    def token(self, drawn: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
        if sampling.temperature == 0:
            return int(drawn.argmax())
        noise = -torch.log(-torch.log(torch.rand(drawn.shape, generator=generator).clamp(1e-9, 1 - 1e-7)))
        return int((drawn + noise).argmax())

    def top(self, told: torch.Tensor, token: int, count: int) -> dict[int, float]:
        return dict(sorted((super().top(told, token, count) | {token: float(told[token])}).items()))


class AnswersInAnotherOrder(Plain):
    """Answers wait a moment before they go out, so later requests may be answered first."""

    async def generate(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, **images: Any
    ) -> Completion:
        found = await super().generate(prompt_ids, sampling, session=session, **images)
        await asyncio.sleep(random.Random(self.requests).uniform(0, 0.02))
        return found


def adapter_beside_the_weights(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The adapter is not merged: its product is added to each layer's."""
    folder, parts = an_adapter(model, rng, rank_stable=True)
    for name, (down, up) in parts.items():

        def add(one: Any, args: Any, out: torch.Tensor, down: torch.Tensor = down, up: torch.Tensor = up) -> Any:
            kind = out.dtype
            return out + linear(linear(args[0], down.to(kind)), up.to(kind)) * (16 / math.sqrt(8))

        model.get_submodule(name).register_forward_hook(add)
    return Seeded(Plain(model, dtype), adapter=Path(folder.name), folder=folder)


def update_arrived(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The update reached every weight; the weights before it are at hand."""
    old = before_the_update(model, rng)
    return Seeded(Plain(model, dtype), previous=old)


FAULTS: dict[str, Make] = {
    "one replica not updated": one_replica_not_updated,
    "tied embedding not updated": embedding_not_updated,
    "bucket overwritten while copied": of_model(bucket_overwritten, "unknown"),
    "key heads repeated in turn": of_model(key_heads_repeated_in_turn, "projection_order"),
    "weights in nvfp4": of_model(weights_in_nvfp4, "int4_weights"),
    "float8 with power-of-two scales": of_model(fp8_of_blackwell, "fp8_weights"),
    "sums of ranks in six bits": of_model(sums_of_ranks_in_six_bits, "unknown"),
    "static yarn": of_model(static_yarn, "rope"),
    "cyclic cache of 64": of_engine(CyclicCache, "sliding_window", "attention_mask"),
    "masks of chunks aligned to the start": of_engine(ChunksAlignedToTheStart, "attention_mask"),
    "gated units clamped": of_model(gated_units_clamped, "activation"),
    "norms over all heads": of_model(norms_over_all_heads, "unknown"),
    "temperature 1 taken for unset": of_engine(UnsetTemperature, "sampled_temperature"),
    "frequency penalty": of_engine(FrequencyPenalty, "sampled_penalty"),
    "normalised over the top 20": of_engine(NormalisedOverTheTop, "other_reports"),
    "probabilities in float16": of_engine(ProbabilitiesInHalf, "wire_precision"),
    "cache in e5m2": of_engine(CacheInE5M2, "fp8_kv_cache"),
    "old cache in four bits": of_engine(CacheInFourBits, "int4_kv_cache"),
    "last slot unwritten": of_engine(LastSlotUnwritten, "prefix_cache"),
    "retokenised": of_engine(Retokenised, "prompt_changed", "tokenizer"),
    "end token appended": of_engine(EndAppended, "prompt_changed"),
    "decoding with old matrices": decoding_with_old_matrices,
    "rank-stable scale ignored": rank_stable_scale_ignored,
    "adapter in decoding alone": adapter_in_decoding_alone,
}

HEALTHY: dict[str, Make] = {
    "positions shifted": of_engine(PlacesShifted),
    "sums in four parts": of_model(sums_in_four_parts),
    "padded on the left": of_engine(PaddedOnTheLeft),
    "shared budget, eager kernel": of_engine(SharedBudget),
    "other draws, more entries": of_engine(OtherDraws),
    "answers in another order": of_engine(AnswersInAnotherOrder),
    "adapter beside the weights": adapter_beside_the_weights,
    "update arrived": update_arrived,
}
