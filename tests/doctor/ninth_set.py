"""Faults that users of RL stacks report most, written without knowledge of the tool that is to name them.

Drawn by how often a cause is reported in public issues of vLLM, SGLang, TensorRT-LLM, transformers, TRL, verl, slime,
Miles, SkyRL, NeMo-RL, AReaL, prime-rl and OpenRLHF: weights that do not arrive (5), sampling defaults and meanings of
log-probabilities (5), precision (4), adapters (3), caches and batching (4), positions and windows (2), tokens (1).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, pad, silu
from transformers import DynamicCache

from tests.doctor.seventh_set import Make, Plain, Run, Seeded, an_adapter, before_the_update, merged
from tokentrue.providers.hf import filter_logprobs
from tokentrue.types import Sampling

FAULTS: dict[str, Make] = {}
HEALTHY: dict[str, Make] = {}
MIXTURE: dict[str, Make] = {}
MIXTURE_HEALTHY: dict[str, Make] = {}

BLOCK = 16


def case(into: dict[str, Make], *names: str) -> Callable[[Make], Make]:
    """Registers a maker under its name; `names` are the right answers, the best first."""

    def register(make: Make) -> Make:
        def seeded(model: Any, dtype: str, rng: random.Random) -> Seeded:
            return replace(make(model, dtype, rng), names=frozenset(names))

        into[getattr(make, "__name__", "")] = seeded
        return make

    return register


def layers_of(model: Any) -> list[Any]:
    return list(model.model.layers)


def norms_of(model: Any) -> list[Any]:
    return [one for one in model.modules() if type(one).__name__.endswith("RMSNorm")]


def cut(cache: Any, length: int) -> None:
    """Keeps the first `length` positions."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def untie(model: Any) -> None:
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def adapter_folder(seeded: Seeded, folder: Any) -> Seeded:
    return replace(seeded, adapter=Path(folder.name), folder=folder)


def looked_up_draft(ids: list[int], length: int) -> list[int]:
    """What followed the last two tokens, else the last one, where they stood before."""
    for size in (2, 1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                return ids[start + size : start + size + length]
    return []


def as_float8(values: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scaled = (values.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return (scaled.float() * scale).to(values.dtype)


def blocks_as_float8(weight: torch.Tensor, size: int = 128) -> torch.Tensor:
    """Each block of `size` by `size` has its own scale."""
    new, largest = weight.clone(), torch.finfo(torch.float8_e4m3fn).max
    for row in range(0, weight.shape[0], size):
        for column in range(0, weight.shape[1], size):
            block = weight[row : row + size, column : column + size]
            new[row : row + size, column : column + size] = as_float8(block, block.abs().max().float() / largest)
    return new


def groups_as_float8(values: torch.Tensor, size: int = 128) -> torch.Tensor:
    largest = torch.finfo(torch.float8_e4m3fn).max
    parts = values.split(size, -1)
    return torch.cat(
        [as_float8(one, one.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / largest) for one in parts], -1
    )


# --- weights that do not arrive ---


@case(FAULTS, "stale_weights")
def update_never_applied(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The update fails on the engine, the trainer only logs it and raises the version; all weights are those before it
    (trl#5932)."""
    old = before_the_update(model, rng)
    return Seeded(Plain(copy.deepcopy(old), dtype), previous=old)


@case(FAULTS, "stale_weights")
def bucket_of_the_update_lost(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The update is sent in buckets, and each bucket's end restores the layers that it does not hold: the weights of a
    run of parameters are those before the update (SkyRL#1737)."""
    old = before_the_update(model, rng)
    names = [name for name, _ in model.named_parameters()]
    size = rng.randint(len(names) // 4, len(names) // 2)
    start = rng.randrange(len(names) - size)
    for name in names[start : start + size]:
        model.get_parameter(name).data.copy_(old.get_parameter(name).data)
    return Seeded(Plain(model, dtype), previous=old)


@case(FAULTS, "weights_missing", "layer_skipped")
def fused_projection_keeps_dummy_weights(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Halves of a fused attention projection come in two chunks, and the loader forgets the first: one layer keeps the
    small random numbers that it was initialised with (sglang#38298, vllm#58142)."""
    torch.manual_seed(rng.randrange(1 << 30))
    attention = rng.choice(layers_of(model)).self_attn
    for one in (attention.q_proj, attention.k_proj, attention.v_proj):
        one.weight.data.uniform_(-1e-3, 1e-3)
    return Seeded(Plain(model, dtype))


@case(FAULTS, "stale_weights")
def tied_head_is_a_stale_clone(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The receiver cloned the tied embedding into a head, later updates name the embedding only: the head is that
    before the update (prime-rl#2823)."""
    old = before_the_update(model, rng)
    untie(model)
    model.lm_head.weight.data.copy_(old.lm_head.weight.data)
    return Seeded(Plain(model, dtype))


@case(FAULTS, "projection_order")
def gate_and_up_joined_rank_by_rank(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Each trainer rank holds its part of gate and of up in one matrix; the export joins ranks in order and halves the
    result, so that gate and up hold rows of each other (Megatron-Bridge#2013, slime#1840)."""
    ranks = rng.choice((2, 4))
    for layer in layers_of(model):
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        pairs = zip(gate.data.chunk(ranks), up.data.chunk(ranks), strict=True)
        first, second = torch.cat([part for pair in pairs for part in pair]).chunk(2)
        gate.data, up.data = first.clone(), second.clone()
    return Seeded(Plain(model, dtype))


# --- sampling, and what is reported ---


class SilentFilters(Plain):
    """Draws under filters where a request asks for none, and reports without them."""

    def __init__(self, model: Any, dtype: str, *, top_k: int, top_p: float) -> None:
        super().__init__(model, dtype)
        self.top_k, self.top_p = top_k, top_p

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        wide = sampling.top_p if sampling.top_p < 1 else self.top_p
        return super().drawn(logits, run, replace(sampling, top_k=sampling.top_k or self.top_k, top_p=wide))

    def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        return torch.log_softmax(logits / (sampling.temperature or 1.0), -1)


@case(FAULTS, "sampled_filters")
def filters_of_generation_config(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Top-k and top-p that a request leaves off are taken from generation_config.json; what is reported is without them
    (NeMo-RL#3497, slime#2197)."""
    top_k, top_p = rng.choice(((20, 0.95), (20, 0.8), (50, 0.9)))
    return Seeded(SilentFilters(model, dtype, top_k=top_k, top_p=top_p))


@case(FAULTS, "sampled_filters")
def top_p_of_the_server_renormalised(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """A top-p of the server's configuration cuts the distribution, and processed log-probabilities are normalised over
    what is left (trl#6789, ms-swift#8442, verl#6240)."""
    top_p = rng.choice((0.8, 0.9, 0.95))

    class Engine(Plain):
        def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
            wide = sampling.top_p if sampling.top_p < 1 else top_p
            return super().drawn(logits, run, replace(sampling, top_p=wide))

    return Seeded(Engine(model, dtype))


@case(FAULTS, "sampled_penalty")
def repetition_penalty_of_generation_config(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The repetition penalty of generation_config.json is applied to all tokens of prompt and answer though no request
    asks for it; log-probabilities are after it (NeMo-RL#3497, prime-rl#886)."""
    penalty = rng.choice((1.05, 1.1))

    class Engine(Plain):
        def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
            seen = torch.tensor(sorted(set(run.ids)))
            logits = logits.clone()
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
            return super().drawn(logits, run, sampling)

    return Seeded(Engine(model, dtype))


@case(FAULTS, "raw_logprobs", "sampled_temperature", "filters_ignored")
def raw_log_probabilities(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Log-probabilities are reported before temperature and filters, the engine's default (trl#4159, vime#64)."""

    class Engine(Plain):
        def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
            return torch.log_softmax(logits, -1)

    return Seeded(Engine(model, dtype))


@case(FAULTS, "temperature_ignored")
def temperature_of_one_is_taken_for_unset(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """A temperature of 1.0 equals the library's default, is taken for not given, and generation_config.json's is used
    (trl#5783, transformers#42762)."""
    heat = rng.choice((0.6, 0.7))

    class Engine(Plain):
        def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
            given = replace(sampling, temperature=heat) if sampling.temperature == 1.0 else sampling
            return super().drawn(logits, run, given)

    return Seeded(Engine(model, dtype))


# --- precision ---


@case(FAULTS, "fp8_weights")
def float8_weights_and_inputs(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """All linear layers but the head compute with 8-bit weights (blocks of 128 by 128) and 8-bit inputs (groups of
    128), the trainer in its own type (verl#4415, verl#7519)."""
    for name, one in model.named_modules():
        if name.endswith("_proj"):
            one.weight.data = blocks_as_float8(one.weight.data)
            one.register_forward_pre_hook(lambda _, given: (groups_as_float8(given[0]), *given[1:]))
    return Seeded(Plain(model, dtype))


class Float8Cache(DynamicCache):
    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(as_float8(key_states), as_float8(value_states), layer_idx, *args, **kwargs)


@case(FAULTS, "fp8_kv_cache", "dtype_kv_cache")
def float8_cache_without_scales(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Keys and values are kept in 8 bits with all scales at 1.0 (NeMo-RL#3008, sglang#6518)."""

    class Engine(Plain):
        def prefill(self, ids: list[int], run: Run) -> Any:
            run.past = Float8Cache()
            return self.compute(ids, run)

    return Seeded(Engine(model, dtype))


@case(FAULTS, "head_dtype", "wire_precision")
def log_softmax_in_bfloat16(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Logits, their division by temperature and the log-softmax are in bfloat16 (sglang#26955, slime#892,
    genlm-backend#66)."""

    class Engine(Plain):
        def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
            heated = logits.bfloat16().div(sampling.temperature or 1.0)
            whole = torch.log_softmax(heated, -1).float()
            return filter_logprobs(whole, sampling) if sampling.temperature else whole

    return Seeded(Engine(model, dtype))


@case(FAULTS, "rope")
def rotary_angles_in_bfloat16(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """A cast of the whole model takes rotary frequencies with it; positions times frequencies are computed in bfloat16
    (transformers#25681, Automodel#2549, modalities#462)."""
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.float().bfloat16()

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].bfloat16() * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = forward
    return Seeded(Plain(model, dtype))


# --- adapters ---


@case(FAULTS, "adapter_missing")
def adapter_never_arrives(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Each sync sends the frozen base weights again and never the adapter (verl#7495)."""
    folder, _ = an_adapter(model, rng, False)
    return adapter_folder(Seeded(Plain(model, dtype)), folder)


@case(FAULTS, "adapter_missing")
def adapter_modules_of_other_names_dropped(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Modules of the adapter whose names the engine does not match are left out without a word: those of the attention,
    or those of the feed-forward part (vllm#34186)."""
    folder, parts = an_adapter(model, rng, False)
    kept = rng.choice((".mlp.", ".self_attn."))
    merged(model, {name: part for name, part in parts.items() if kept in name}, 2.0)
    return adapter_folder(Seeded(Plain(model, dtype)), folder)


@case(FAULTS, "adapter_missing")
def adapter_applied_to_merged_weights(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The base weights that are sent have the adapter merged already, and the engine applies it once more
    (miles#1087)."""
    folder, parts = an_adapter(model, rng, False)
    return adapter_folder(Seeded(Plain(merged(merged(model, parts, 2.0), parts, 2.0), dtype)), folder)


# --- caches and batching ---


@case(FAULTS, "prefix_cache")
def prefix_cache_survives_the_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Blocks of a shared beginning were cached before the update and are used after it (NeMo-RL#4018,
    lmdeploy#4917)."""
    old, most = before_the_update(model, rng), BLOCK * rng.randint(1, 4)

    class Engine(Plain):
        def prefill(self, ids: list[int], run: Run) -> Any:
            cached = min(most, (len(ids) - 1) // BLOCK * BLOCK)
            if cached:
                run.past = self.compute(ids[:cached], run, served).past_key_values
            return self.compute(ids[cached:], run)

    engine = Engine(model, dtype)
    served = copy.deepcopy(old).to(getattr(torch, dtype)).eval()
    return Seeded(engine, previous=old)


@case(FAULTS, "attention_mask", "prompt_changed")
def left_padding_is_attended(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Prompts are padded on the left to a common length and the attention mask is not passed on (trl#2708,
    OpenRLHF#217)."""
    length = rng.choice((32, 48, 64))

    class Engine(Plain):
        def prefill(self, ids: list[int], run: Run) -> Any:
            filler = self.model.config.pad_token_id or 0
            return self.compute([filler] * (-len(ids) % length) + ids, run)

    return Seeded(Engine(model, dtype))


@case(FAULTS, "attention_mask", "unstable")
def freed_block_is_overwritten(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Under pressure a cache block of a running request is freed and written by another one: some requests read keys
    and values of other tokens in one block of their prompt (vllm#37076, vllm#39146)."""
    every = rng.choice((2, 3))

    class Engine(Plain):
        other: Any = None

        def prefill(self, ids: list[int], run: Run) -> Any:
            out = self.compute(ids, run)
            blocks = len(ids) // BLOCK
            before, Engine.other = Engine.other, copy.deepcopy(out.past_key_values)
            if before is not None and blocks and run.number % every == 0:
                start = BLOCK * (blocks // 2 if blocks > 1 else 0)
                end = min(start + BLOCK, before.get_seq_length())
                for mine, theirs in zip(out.past_key_values.layers, before.layers, strict=True):
                    mine.keys[..., start:end, :] = theirs.keys[..., start:end, :]
                    mine.values[..., start:end, :] = theirs.values[..., start:end, :]
            return out

    return Seeded(Engine(model, dtype))


@case(FAULTS, "other_reports", "bad_logprobs")
def accepted_drafts_are_reported_as_certain(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """With speculation by looking up n-grams, a token that equals its draft is reported with log-probability 0
    (vllm#17876, llama.cpp#27972)."""

    class Engine(Plain):
        draft: list[int]

        def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
            self.draft = looked_up_draft(run.ids, 1)
            return super().drawn(logits, run, sampling)

        def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
            told = drawn.clone()
            told[self.draft] = 0.0
            return told

    return Seeded(Engine(model, dtype))


# --- positions, windows and tokens ---


@case(FAULTS, "rope")
def yarn_in_the_engine_only(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """A YaRN scaling for long contexts is set for the engine and does not reach the trainer's model (SkyRL#976,
    SkyRL#561)."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": rng.choice((2.0, 4.0)),
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return Seeded(Plain(model, dtype))


@case(FAULTS, "sliding_window")
def window_though_switched_off(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Attention is limited to a sliding window though the configuration's use_sliding_window is false
    (lmdeploy#3614)."""
    window = rng.choice((64, 96))

    class Engine(Plain):
        def prefill(self, ids: list[int], run: Run) -> Any:
            return self.seen(ids, run)

        def decode(self, ids: list[int], run: Run) -> Any:
            return self.seen(ids, run)

        def seen(self, ids: list[int], run: Run) -> Any:
            end = len(run.ids) + len(ids)
            distance = torch.arange(len(run.ids), end)[:, None] - torch.arange(end)[None]
            return self.masked(ids, run, (distance < 0) | (distance >= window))

    return Seeded(Engine(model, dtype))


@case(FAULTS, "bos_added", "prompt_changed")
def first_token_doubled(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The template writes the token that begins a text and the engine's tokenizer adds it once more (trl#3853,
    vllm#27486)."""

    class Engine(Plain):
        def received(self, prompt: list[int]) -> list[int]:
            return [prompt[0], *prompt]

    return Seeded(Engine(model, dtype))


# --- engines that differ by rounding, or not at all ---


@case(HEALTHY)
def noise_instead_of_inverse_sampling(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Tokens are drawn as the largest of log-probability plus Gumbel noise."""

    class Engine(Plain):
        def token(self, drawn: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
            if sampling.temperature == 0:
                return int(drawn.argmax())
            noise = torch.empty_like(drawn).exponential_(generator=generator)
            return int((drawn - noise.log()).argmax())

    return Seeded(Engine(model, dtype))


@case(HEALTHY)
def eager_attention(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Attention as products and a softmax, one after the other."""
    model.set_attn_implementation("eager")
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def chunked_prefill(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The prompt is computed in chunks."""
    size = rng.choice((7, 16, 33))

    class Engine(Plain):
        def prefill(self, ids: list[int], run: Run) -> Any:
            out = None
            for start in range(0, len(ids), size):
                out = self.compute(ids[start : start + size], run)
                run.past = out.past_key_values
            return out

    return Seeded(Engine(model, dtype))


@case(HEALTHY)
def fused_projections(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Query, key and value come of one product, gate and up of another."""

    def fuse(parts: list[Any]) -> None:
        sizes = [one.weight.shape[0] for one in parts]

        def part(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda x: linear(x, torch.cat([one.weight for one in parts])).split(sizes, -1)[number]

        for number, one in enumerate(parts):
            one.forward = part(number)

    for layer in layers_of(model):
        fuse([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        fuse([layer.mlp.gate_proj, layer.mlp.up_proj])
    return Seeded(Plain(model, dtype))


class PrefixCaching(Plain):
    """Whole blocks of earlier prompts are used again."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.kept: list[tuple[list[int], Any]] = []

    def prefill(self, ids: list[int], run: Run) -> Any:
        shared, cache = 0, None
        for before, kept in self.kept:
            same = next((n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
            same = min(same, len(ids) - 1) // BLOCK * BLOCK
            if same > shared:
                shared, cache = same, kept
        if cache is not None:
            run.past = copy.deepcopy(cache)
            cut(run.past, shared)
        out = self.compute(ids[shared:], run)
        self.kept = [*self.kept[-3:], (ids, copy.deepcopy(out.past_key_values))]
        return out


@case(HEALTHY)
def prefix_cache(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Whole blocks of earlier prompts are used again."""
    return Seeded(PrefixCaching(model, dtype))


class PagedCache(DynamicCache):
    """A step reads blocks in another order than that of their tokens."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[-2] > 1:
            return keys, values
        return tuple(torch.cat(one.split(BLOCK, -2)[::-1], -2) for one in (keys, values))


@case(HEALTHY)
def paged_cache(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Keys and values lie in blocks, which a step reads in another order."""

    class Engine(Plain):
        def prefill(self, ids: list[int], run: Run) -> Any:
            run.past = PagedCache()
            return self.compute(ids, run)

    return Seeded(Engine(model, dtype))


@case(HEALTHY)
def head_in_float32(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The head multiplies and sums in float32."""
    head = model.lm_head
    head.forward = lambda x: linear(x.float(), head.weight.float())
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def left_padding_with_its_mask(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Prompts are padded on the left, masked, with positions that count from the first token."""
    length = rng.choice((32, 64))

    class Engine(Plain):
        def prefill(self, ids: list[int], run: Run) -> Any:
            run.state["pads"] = -len(ids) % length
            positions = torch.tensor([[0] * run.state["pads"] + list(range(len(ids)))])
            return self.behind(run, [0] * run.state["pads"] + ids, positions)

        def decode(self, ids: list[int], run: Run) -> Any:
            return self.behind(run, ids, torch.tensor([[len(run.ids)]]))

        def behind(self, run: Run, ids: list[int], positions: torch.Tensor) -> Any:
            mask = torch.ones(1, run.state["pads"] + int(positions[0, -1]) + 1, dtype=torch.long)
            mask[:, : run.state["pads"]] = 0
            return self.compute(ids, run, attention_mask=mask, position_ids=positions)

    return Seeded(Engine(model, dtype))


@case(HEALTHY)
def sums_over_ranks(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Products that end a block are sums of rounded parts, one of each rank."""
    ranks = rng.choice((2, 4))

    def split(one: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            parts = zip(x.chunk(ranks, -1), one.weight.chunk(ranks, -1), strict=True)
            return torch.stack([linear(a, b) for a, b in parts]).sum(0)

        return forward

    for layer in layers_of(model):
        for one in (layer.self_attn.o_proj, layer.mlp.down_proj):
            one.forward = split(one)
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def norms_folded_into_projections(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The weights of norms are multiplied into the matrices that follow."""
    untie(model)
    pairs = [(model.model.norm, [model.lm_head])]
    for layer in layers_of(model):
        attention = layer.self_attn
        pairs += [
            (layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        ]
    for norm, followers in pairs:
        for one in followers:
            one.weight.data *= norm.weight.data
        norm.weight.data.fill_(1.0)
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def neurons_in_another_order(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The neurons of each feed-forward part are permuted."""
    torch.manual_seed(rng.randrange(1 << 30))
    for layer in layers_of(model):
        order = torch.randperm(layer.mlp.down_proj.weight.shape[1])
        for one in (layer.mlp.gate_proj, layer.mlp.up_proj):
            one.weight.data = one.weight.data[order]
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, order]
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def adapter_merged(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The adapter is merged into the weights with its right factor."""
    folder, parts = an_adapter(model, rng, False)
    return adapter_folder(Seeded(Plain(merged(model, parts, 2.0), dtype)), folder)


@case(HEALTHY)
def adapter_beside_the_weights(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The adapter is computed beside each product and added."""
    folder, parts = an_adapter(model, rng, False)
    kind = getattr(torch, dtype)

    def beside(down: torch.Tensor, up: torch.Tensor) -> Callable[[Any, Any, torch.Tensor], torch.Tensor]:
        down, up = down.to(kind), (2.0 * up).to(kind)
        return lambda _, given, out: out + linear(linear(given[0], down), up)

    for name, (down, up) in parts.items():
        model.get_submodule(name).register_forward_hook(beside(down, up))
    return adapter_folder(Seeded(Plain(model, dtype)), folder)


@case(HEALTHY)
def verified_speculation(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Drafts are computed along with a token and used as far as the tokens drawn equal them."""
    count = rng.randint(2, 4)

    class Engine(Plain):
        @torch.no_grad()
        def step(self, ids: list[int], run: Run) -> torch.Tensor:
            if not run.ids:
                return super().step(ids, run)
            ahead: list[tuple[int, torch.Tensor]] = run.state.pop("ahead", [])
            if ahead and ahead[0][0] == ids[0]:
                run.ids, run.state["ahead"] = run.ids + ids, ahead[1:]
                return ahead[0][1]
            cut(run.past, len(run.ids))
            drafts = looked_up_draft(run.ids + ids, count)
            out = self.compute(ids + drafts, run)
            logits = out.logits[0].float()
            run.past, run.ids = out.past_key_values, run.ids + ids
            run.state["ahead"] = list(zip(drafts, logits[1:], strict=True))
            return logits[0]

    return Seeded(Engine(model, dtype))


@case(HEALTHY)
def complete_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Every weight arrived; those before the update are at hand."""
    old = before_the_update(model, rng)
    return Seeded(Plain(model, dtype), previous=old)


@case(HEALTHY)
def prefix_cache_emptied_by_the_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Prefixes are cached, but none from before the update; the weights before it are at hand."""
    old = before_the_update(model, rng)
    return Seeded(PrefixCaching(model, dtype), previous=old)


@case(HEALTHY)
def norms_rounded_once(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Norms multiply by their weights in float32 and round at the end."""

    def once(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return (wide * norm.weight.float()).to(x.dtype)

        return forward

    for norm in norms_of(model):
        norm.forward = once(norm)
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def whole_sequence_each_step(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """No cache: each step computes all tokens again."""

    class Engine(Plain):
        def decode(self, ids: list[int], run: Run) -> Any:
            run.past = None
            return self.compute(run.ids + ids, run)

    return Seeded(Engine(model, dtype))


@case(HEALTHY)
def rows_of_other_requests(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Each forward pass has rows of other requests below this one."""
    rows, others = rng.randint(1, 5), random.Random(rng.random())

    class Engine(Plain):
        def compute(self, ids: list[int], run: Run, model: Any = None, **given: Any) -> Any:
            size = self.model.config.vocab_size
            batch = [ids, *([others.randrange(3, size) for _ in ids] for _ in range(rows))]
            return self.model(torch.tensor(batch), past_key_values=run.past, use_cache=True, **given)

    return Seeded(Engine(model, dtype))


@case(HEALTHY)
def padded_vocabulary_masked(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The head has rows of padding, which are masked before the softmax."""
    untie(model)
    size = model.lm_head.weight.shape[0]
    model.lm_head.weight = torch.nn.Parameter(pad(model.lm_head.weight.detach(), (0, 0, 0, -size % 64)))

    class Engine(Plain):
        def step(self, ids: list[int], run: Run) -> torch.Tensor:
            logits = super().step(ids, run)
            logits[size:] = -torch.inf
            return logits

    return Seeded(Engine(model, dtype))


# --- mixtures of experts ---


def mixtures_of(model: Any) -> list[Any]:
    return [layer.mlp for layer in layers_of(model) if hasattr(layer.mlp, "experts")]


@case(MIXTURE, "expert_weights")
def weights_of_experts_normalised_or_not(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine does not read norm_topk_prob: it normalises the chosen experts' weights where the model does not, or
    the other way round (torchtitan#1448, flashinfer#2889)."""
    for mixture in mixtures_of(model):
        mixture.gate.norm_topk_prob = not mixture.gate.norm_topk_prob
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "expert_order")
def experts_of_one_rank_sent_twice(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Experts of another rank's group are filled with those of the first: global and local numbers are mixed up
    (vime#388)."""
    for mixture in mixtures_of(model):
        for weight in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
            half = weight.shape[0] // 2
            weight.data[half : 2 * half] = weight.data[:half].clone()
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "projection_order")
def gate_and_up_of_experts_swapped(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The second load writes expert weights into the kernel's layout as if it were the checkpoint's: gate and up are
    exchanged (vllm#42821, sglang#25692)."""
    for mixture in mixtures_of(model):
        weight = mixture.experts.gate_up_proj
        weight.data = torch.cat(weight.data.chunk(2, 1)[::-1], 1)
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "stale_weights")
def experts_left_out_of_the_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The update reaches all weights but the fused experts' (SkyRL#1680)."""
    old = before_the_update(model, rng)
    for mixture, before in zip(mixtures_of(model), mixtures_of(old), strict=True):
        mixture.experts.load_state_dict(before.experts.state_dict())
    return Seeded(Plain(model, dtype), previous=old)


@case(MIXTURE, "fp8_weights")
def experts_in_float8(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The experts' weights are kept in 8 bits with a scale for each block (verl#4415, SkyRL#1898)."""
    for mixture in mixtures_of(model):
        for weight in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
            weight.data = torch.stack([blocks_as_float8(one) for one in weight.data])
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "router_dtype")
def router_in_low_precision(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Router scores are rounded to bfloat16 on the way to the choice of experts: logits, softmax and weights
    (prime-rl#2952, AstrAI#57, Automodel#3650)."""

    def rounded(gate: Any) -> Callable[[torch.Tensor], Any]:
        def forward(hidden: torch.Tensor) -> Any:
            hidden = hidden.reshape(-1, gate.hidden_dim)
            logits = linear(hidden.bfloat16(), gate.weight.bfloat16())
            weights, chosen = torch.softmax(logits, -1).topk(gate.top_k, -1)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits.to(hidden.dtype), weights.to(hidden.dtype), chosen

        return forward

    for mixture in mixtures_of(model):
        mixture.gate.forward = rounded(mixture.gate)
    return Seeded(Plain(model, dtype))


@case(MIXTURE_HEALTHY)
def all_experts_computed(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """All experts compute every token; those not chosen have weight zero."""

    def dense(experts: Any) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            share = torch.zeros(len(hidden), experts.num_experts, dtype=hidden.dtype).scatter(1, chosen, weights)
            gate, up = torch.einsum("th,eih->tei", hidden, experts.gate_up_proj).chunk(2, -1)
            out = torch.einsum("tei,ehi->teh", silu(gate) * up, experts.down_proj)
            return torch.einsum("teh,te->th", out, share)

        return forward

    for mixture in mixtures_of(model):
        mixture.experts.forward = dense(mixture.experts)
    return Seeded(Plain(model, dtype))


@case(MIXTURE_HEALTHY)
def experts_numbered_anew(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Experts are placed in another order, the router's rows with them."""
    torch.manual_seed(rng.randrange(1 << 30))
    for mixture in mixtures_of(model):
        order = torch.randperm(mixture.gate.weight.shape[0])
        for weight in (mixture.gate.weight, mixture.experts.gate_up_proj, mixture.experts.down_proj):
            weight.data = weight.data[order]
    return Seeded(Plain(model, dtype))
