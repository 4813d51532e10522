"""Faults drawn from public threads on RL stacks, written without knowledge of the tool that is to name them.

Drawn by how often a cause is reported in 86 threads of vLLM, SGLang, FlashInfer, flash-attention, transformers, TRL, verl,
slime, Miles, vime, SkyRL, NeMo-RL, prime-rl, ms-swift and others. Threads by cause, and the faults seeded for them:
weights that do not arrive 12 (5), sampling defaults and meanings of log-probabilities 13 (5), precision 18 (5), adapters 6
(3), caches and chunks 8 (2), settings of the model class 6 (2), tokens 8 (2), mixtures of experts 16 (6). One thread is of
two causes. Each fault names its threads.

In bfloat16 four are no faults (FLOAT32_ONLY): the reference rounds its head, its router and all else as these engines do,
and the other epsilon changes less than rounding.
"""

from __future__ import annotations

import copy
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import linear, silu
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from tests.doctor.engines import CALCULATOR
from tests.doctor.ninth_set import (
    adapter_folder,
    as_float8,
    blocks_as_float8,
    case,
    cut,
    layers_of,
    looked_up_draft,
    norms_of,
    untie,
)
from tests.doctor.seventh_set import HIDDEN, Make, Plain, Run, Seeded, an_adapter, before_the_update, merged
from tokentrue.types import Chunk, Sampling

FAULTS: dict[str, Make] = {}
HEALTHY: dict[str, Make] = {}
MIXTURE: dict[str, Make] = {}
MIXTURE_HEALTHY: dict[str, Make] = {}
FLOAT32_ONLY = frozenset({"rollout_in_bfloat16", "head_in_bfloat16", "router_in_bfloat16", "epsilon_of_the_class"})

BLOCK = 16  # tokens in a block of the KV cache
CHUNK = 32  # tokens in a chunk of prefill
ALPHA_OVER_RANK = 2.0  # of the adapters of `an_adapter`


# --- weights that do not arrive ---


@case(FAULTS, "stale_weights")
def woken_with_old_weights(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Sleep drops the weights after the update was sent, and waking loads earlier ones from a file or a copy (trl#5312,
    vllm#32718)."""
    old = before_the_update(model, rng)
    return Seeded(Plain(copy.deepcopy(old), dtype), previous=old)


@case(FAULTS, "stale_weights")
def copy_of_the_tied_head_kept(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine keeps a copy of the tied embedding as its output layer (in float32, or in the receiver of a sparse
    update); the update reaches the embedding alone (prime-rl#2823, prime-rl#2438)."""
    old = before_the_update(model, rng)
    untie(model)
    model.lm_head.weight.data = old.lm_head.weight.data.clone()
    return Seeded(Plain(model, dtype), previous=old)


@case(FAULTS, "stale_weights")
def second_rank_not_updated(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Two tensor-parallel ranks, and only the first one joins the update's group; the matrices in the shards of the
    second are the old ones (tokenspeed#1373, vime#161)."""
    old = before_the_update(model, rng)
    for name, weight in model.named_parameters():
        before = old.get_parameter(name).data
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            half = weight.shape[1] // 2
            weight.data[:, half:] = before[:, half:]
        elif name.endswith("_proj.weight"):
            half = weight.shape[0] // 2
            weight.data[half:] = before[half:]
        elif weight.dim() == 2:  # the vocabulary, split after padding to a multiple of 64
            half = (weight.shape[0] + 63) // 64 * 32
            weight.data[half:] = before[half:]
    return Seeded(Plain(model, dtype), previous=old)


class TwoModels(Plain):
    """Decodes with `other`."""

    other: Any = None

    def decode(self, ids: list[int], run: Run) -> Any:
        return self.compute(ids, run, self.other)


@case(FAULTS, "stale_weights", "prefill_decode")
def decode_graph_reads_old_memory(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Processing after the update allocates the feed-forward weights anew; the graphs captured for decoding read the
    old memory, prefill reads the new (NeMo-RL#2895, sglang#4961)."""
    old = before_the_update(model, rng)
    captured = copy.deepcopy(model)
    for layer, before in zip(layers_of(captured), layers_of(old), strict=True):
        layer.mlp.load_state_dict(before.mlp.state_dict())
    engine = TwoModels(model, dtype)
    engine.other = captured.to(engine.model.dtype)
    return Seeded(engine, previous=old)


# Without rotation and without scores all keys weigh the same: so do a scale of 0 and query weights of 0.
@case(FAULTS, "rope", "attention_scale", "weights_missing")
def rotary_tables_lost_in_sleep(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Sleep discards buffers with the weights, and the update sends only weights: the tables of cosines and sines are
    memory of zeros (vllm#16564, vllm#29341, vllm-ascend#17217, vime#446)."""
    tables = model.model.rotary_emb.forward

    def zeros(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(table) for table in tables(x, position_ids))

    model.model.rotary_emb.forward = zeros
    return Seeded(Plain(model, dtype))


# --- sampling defaults, and what is reported ---


class RawReported(Plain):
    def told(self, drawn: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        return torch.log_softmax(logits, -1)


@case(FAULTS, "raw_logprobs", "filters_ignored")
def logprobs_before_processors(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The default mode reports log-probabilities before temperature and filters (vime#64, verl#6240, trl#4159)."""
    return Seeded(RawReported(model, dtype))


class CheckpointFilters(Plain):
    top_k, top_p = 20, 0.95

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        top_k, top_p = sampling.top_k or self.top_k, sampling.top_p if sampling.top_p < 1 else self.top_p
        return super().drawn(logits, run, replace(sampling, top_k=top_k, top_p=top_p))


@case(FAULTS, "sampled_filters")
def filters_of_generation_config(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """A request without filters gets the top-k and top-p of the checkpoint's generation_config.json, as Qwen ships
    them (tpu-inference#1386, ms-swift#8442, trl#6789)."""
    engine = CheckpointFilters(model, dtype)
    engine.top_p = rng.choice((0.8, 0.95))
    return Seeded(engine)


class CheckpointPenalty(Plain):
    penalty = 1.05

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        seen = torch.tensor(sorted(set(run.ids)))
        logits = logits.clone()
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / self.penalty, logits[seen] * self.penalty)
        return super().drawn(logits, run, sampling)


@case(FAULTS, "sampled_penalty")
def penalty_of_generation_config(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The repetition penalty of the checkpoint's generation_config.json applies to prompt and answer (prime-rl#886,
    verl#7270)."""
    engine = CheckpointPenalty(model, dtype)
    engine.penalty = rng.choice((1.05, 1.1))
    return Seeded(engine)


class DefaultTemperature(Plain):
    default = 0.7

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        heat = self.default if sampling.temperature == 1.0 else sampling.temperature
        return super().drawn(logits, run, replace(sampling, temperature=heat))


@case(FAULTS, "temperature_ignored", "sampled_temperature")
def omitted_temperature_is_another(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The client does not send a temperature of 1, which is its default; the server's default is lower
    (tinker-cloud#26, marin#1879)."""
    engine = DefaultTemperature(model, dtype)
    engine.default = rng.choice((0.6, 0.7))
    return Seeded(engine)


class OneLate(Plain):
    """The list begins with the last prompt token's log-probability."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.first: dict[tuple[int, ...], float] = {}

    def prefill(self, ids: list[int], run: Run) -> Any:
        out = self.compute(ids, run)
        if len(ids) > 1:
            self.first[tuple(ids)] = float(torch.log_softmax(out.logits[0, -2].float(), -1)[ids[-1]])
        return out

    async def stream(self, prompt_ids: Any, sampling: Sampling, **given: Any) -> AsyncIterator[Chunk]:
        before: float | None = None
        async for chunk in super().stream(prompt_ids, sampling, **given):
            first = self.first.get(tuple(prompt_ids), 0.0)
            if chunk.final is not None:
                late = (first, *chunk.final.logprobs)[: len(chunk.final.logprobs)]
                yield replace(chunk, final=replace(chunk.final, logprobs=late))
            else:
                (after,) = chunk.logprobs
                yield replace(chunk, logprobs=(first if before is None else before,))
                before = after


@case(FAULTS, "off_by_one")
def logprobs_one_late(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The slice of the answer begins at the last prompt token (maxtext#2103, ms-swift#8196, prime-rl#1525)."""
    return Seeded(OneLate(model, dtype))


# --- precision ---


@case(FAULTS, "dtype_bfloat16")
def rollout_in_bfloat16(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The trainer computes in float32, the engine has its default (verl#3694, trl#6688, transformers#31267)."""
    return Seeded(Plain(model, "bfloat16"))


@case(FAULTS, "head_dtype")
def head_in_bfloat16(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The output layer multiplies and rounds its logits in bfloat16, the trainer's in float32 (sglang#10490, trl#4303,
    prime-rl#2438, NeMo-RL#3936, vllm#48390)."""
    weight = model.lm_head.weight.data.bfloat16()
    model.lm_head.forward = lambda hidden: linear(hidden.bfloat16(), weight)
    return Seeded(Plain(model, dtype))


def rows_as_float8(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    """Each token has its own scale."""
    (rows,) = given
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (as_float8(rows, scale),)


@case(FAULTS, "fp8_weights")
def quantised_to_float8_while_loading(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The rollout quantises what it loads: one scale for each fused matrix, one for each token's activations
    (verl#2809, verl#1803, Flash-RL#26, miles#1678)."""
    for layer in layers_of(model):
        attention, gated = layer.self_attn, layer.mlp
        fused = (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (gated.gate_proj, gated.up_proj),
            (gated.down_proj,),
        )
        for parts in fused:
            scale = max(float(one.weight.data.abs().max()) for one in parts) / torch.finfo(torch.float8_e4m3fn).max
            for one in parts:
                one.weight.data = as_float8(one.weight.data, scale)
                one.register_forward_pre_hook(rows_as_float8)
    return Seeded(Plain(model, dtype))


class Float8Cache(DynamicCache):
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        return super().update(as_float8(key_states), as_float8(value_states), *given, **named)


class CacheInFloat8(Plain):
    def prefill(self, ids: list[int], run: Run) -> Any:
        run.past = Float8Cache(config=self.model.config)
        return self.compute(ids, run)


@case(FAULTS, "fp8_kv_cache", "dtype_kv_cache")
def float8_cache_without_scales(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Keys and values are kept in float8, and the scales that the trainer measured are not sent on: all are 1
    (NeMo-RL#3226, sglang#25790, NeMo-RL#1212)."""
    return Seeded(CacheInFloat8(model, dtype))


# The rotation is another at all positions, but by no setting: `unknown` is right, too.
@case(FAULTS, "rope", "unknown")
def rotary_phases_in_bfloat16(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """A cast of the whole module rounds the frequencies, and the phases with them (transformers#25681,
    transformers#29496, transformers#29285, UNI-D2#6)."""
    rotary = model.model.rotary_emb

    def rounded(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].bfloat16() * rotary.inv_freq.bfloat16()
        phases = torch.cat((phases, phases), -1).float()
        return phases.cos().to(x.dtype), phases.sin().to(x.dtype)

    rotary.forward = rounded
    return Seeded(Plain(model, dtype))


# --- adapters ---


@case(FAULTS, "adapter_missing")
def only_the_base_is_sent(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Each update sends the frozen base; the engine's slot for the adapter stays empty (verl#7495, verl-omni#552,
    SkyRL#1776)."""
    folder, _ = an_adapter(model, rng, rank_stable=False)
    return adapter_folder(Seeded(Plain(model, dtype)), folder)


@case(FAULTS, "adapter_missing")
def merged_base_and_adapter(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The base is exported while the adapter is merged into it, and the engine adds the adapter once more
    (miles#1087)."""
    folder, parts = an_adapter(model, rng, rank_stable=False)
    return adapter_folder(Seeded(Plain(merged(model, parts, 2 * ALPHA_OVER_RANK), dtype)), folder)


@case(FAULTS, "adapter_missing")
def alpha_lost_on_the_way(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The tensors are sent without alpha; the engine takes the rank for it, so that the factor is 1 (UniRL#161,
    sglang#17086)."""
    folder, parts = an_adapter(model, rng, rank_stable=False)
    return adapter_folder(Seeded(Plain(merged(model, parts, 1.0), dtype)), folder)


# --- caches and chunks ---


class StaleBlocks(Plain):
    """Full blocks of every prompt are in the cache since `old` computed them."""

    old: Any = None

    def prefill(self, ids: list[int], run: Run) -> Any:
        known = (len(ids) - 1) // BLOCK * BLOCK
        if known:
            run.past = self.compute(ids[:known], run, self.old).past_key_values
        return self.compute(ids[known:], run)


@case(FAULTS, "prefix_cache", "stale_weights")
def prefix_cache_outlives_the_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Prompts return every epoch, and the update does not flush the prefix cache: their full blocks are those of the
    old weights (lmdeploy#4917, NeMo-RL#4018, vllm#9744, prime-rl#2270)."""
    old = before_the_update(model, rng)
    engine = StaleBlocks(model, dtype)
    engine.old = copy.deepcopy(old).to(engine.model.dtype)
    return Seeded(engine, previous=old)


class ChunksMaskedFromTheLeft(Plain):
    def prefill(self, ids: list[int], run: Run) -> Any:
        out = None
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            queries, keys = torch.arange(len(chunk))[:, None], torch.arange(start + len(chunk))[None]
            out = self.masked(chunk, run, keys > queries)
            run.past = out.past_key_values
        return out


@case(FAULTS, "attention_mask", "prefill_decode")
def causal_mask_of_chunks_aligned_left(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The causal mask of a chunk counts keys from the first one in the cache, not from the chunk's own (pytorch#108108,
    flash-attention#517, executorch#21749, sparkinfer#3)."""
    return Seeded(ChunksMaskedFromTheLeft(model, dtype))


# --- settings of the model class ---


@case(FAULTS, "rope")
def rotary_base_of_the_class(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine looks for the base where another version of transformers writes it, and takes its class's default
    (MarinFold#184, tpu-inference#2838, mini-sglang#13)."""
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": rng.choice((500_000.0, 1_000_000.0))}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return Seeded(Plain(model, dtype))


@case(FAULTS, "norm_epsilon")
def epsilon_of_the_class(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The norms are built without the configuration's epsilon (transformers#38025, torchtune#29, candle#271)."""
    for norm in norms_of(model):
        norm.variance_epsilon = 1e-5 if norm.variance_epsilon < 5e-6 else 1e-6
    return Seeded(Plain(model, dtype))


# --- other tokens ---


class SecondBos(Plain):
    def received(self, prompt: list[int]) -> list[int]:
        return [0, *prompt]


@case(FAULTS, "bos_added")
def first_token_added(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine puts its first token before a prompt that the template finished already (vllm#9519, NeMo-RL#855,
    vllm#27517)."""
    return Seeded(SecondBos(model, dtype))


class Retokenising(Plain):
    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.tokenizer = Tokenizer.from_file(str(CALCULATOR / "tokenizer.json"))

    def received(self, prompt: list[int]) -> list[int]:
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@case(FAULTS, "prompt_changed")
def prompt_decoded_and_encoded(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The server decodes the ids that it is sent and encodes the text: sampled ids of earlier turns become others
    (sglang#26555, trl#5224, rllm#272, SkyRL#123, slime#117)."""
    return Seeded(Retokenising(model, dtype))


# --- mixtures of experts ---


def experts_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in layers_of(model)]


def routers_of(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in layers_of(model)]


@case(MIXTURE, "stale_weights")
def experts_not_updated(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The fused loader takes no stacked experts, and the rest of the update goes on (SkyRL#1680, NeMo-RL#3403,
    maxtext#4925)."""
    old = before_the_update(model, rng)
    for new, before in zip(experts_of(model), experts_of(old), strict=True):
        new.load_state_dict(before.state_dict())
    return Seeded(Plain(model, dtype), previous=old)


@case(MIXTURE, "router_dtype")
def router_in_bfloat16(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine multiplies and rounds router logits in bfloat16, the trainer in float32 (prime-rl#2952, vllm#58076,
    sglang#30323, AstrAI#57)."""

    def rounded(router: Any, given: tuple[torch.Tensor, ...], found: Any) -> Any:
        logits = linear(given[0].reshape(-1, router.hidden_dim).bfloat16(), router.weight.bfloat16()).float()
        values, indices = torch.softmax(logits, -1).topk(router.top_k, -1)
        if router.norm_topk_prob:
            values = values / values.sum(-1, keepdim=True)
        return logits, values.to(found[1].dtype), indices

    for router in routers_of(model):
        router.register_forward_hook(rounded)
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "projection_order")
def gate_and_up_exchanged(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The kernel wants the halves of the fused experts in the other order, and after an update they are exchanged once
    more or not at all (vllm#46276, maxtext#4925)."""
    for experts in experts_of(model):
        experts.gate_up_proj.data = torch.cat(experts.gate_up_proj.data.chunk(2, 1)[::-1], 1)
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "expert_weights")
def renormalisation_not_passed_on(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """norm_topk_prob does not reach the kernel, whose default is the other (flashinfer#2889, sglang#35160)."""
    for router in routers_of(model):
        router.norm_topk_prob = not router.norm_topk_prob
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "expert_order")
def experts_of_ranks_in_turn(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Two expert-parallel ranks: the update deals experts out in turn, the expert map gives each rank its half
    (vllm-gaudi#1796, vllm-ascend#13012)."""
    for experts in experts_of(model):
        count = experts.num_experts
        order = [*range(0, count, 2), *range(1, count, 2)]
        experts.gate_up_proj.data = experts.gate_up_proj.data[order]
        experts.down_proj.data = experts.down_proj.data[order]
    return Seeded(Plain(model, dtype))


@case(MIXTURE, "fp8_weights")
def experts_in_float8(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The experts alone are served in float8, in blocks (verl#7519, SkyRL#1898, NeMo-RL#1887, vime#133)."""
    for experts in experts_of(model):
        for stack in (experts.gate_up_proj, experts.down_proj):
            stack.data = torch.stack([blocks_as_float8(one) for one in stack.data])
    return Seeded(Plain(model, dtype))


@case(MIXTURE_HEALTHY)
def experts_in_batches(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """All tokens of all experts in one product, summed in another order."""
    model.set_experts_implementation("batched_mm")
    return Seeded(Plain(model, dtype))


@case(MIXTURE_HEALTHY)
def chunks_through_experts(model: Any, dtype: str, rng: random.Random) -> Seeded:
    return Seeded(Chunked(model, dtype))


# --- healthy engines ---


@case(HEALTHY)
def eager_attention(model: Any, dtype: str, rng: random.Random) -> Seeded:
    model.set_attn_implementation("eager")
    return Seeded(Plain(model, dtype))


def attention_in_blocks(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """A running softmax over blocks of keys; heads that share keys are read in groups."""
    batch, heads, length, width = query.shape
    shared = key.shape[1]
    groups = query.float().view(batch, shared, heads // shared, length, width)
    highest = torch.full((*groups.shape[:-1], 1), HIDDEN)
    total, mixed = torch.zeros_like(highest), torch.zeros_like(groups)
    for start in range(0, key.shape[2], BLOCK):
        keys, values = (one[:, :, None, start : start + BLOCK].float() for one in (key, value))
        scores = groups @ keys.transpose(-1, -2) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask[:, :, None, :, start : start + BLOCK].float()
        best = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, keep = (scores - best).exp(), (highest - best).exp()
        total, mixed, highest = total * keep + weights.sum(-1, keepdim=True), mixed * keep + weights @ values, best
    found = (mixed / total).view(batch, heads, length, width).transpose(1, 2)
    return found.to(query.dtype).contiguous(), None


@case(HEALTHY)
def running_softmax(model: Any, dtype: str, rng: random.Random) -> Seeded:
    AttentionInterface.register("tenth_set_blocks", attention_in_blocks)
    AttentionMaskInterface.register("tenth_set_blocks", eager_mask)
    model.set_attn_implementation("tenth_set_blocks")
    return Seeded(Plain(model, dtype))


class Chunked(Plain):
    def prefill(self, ids: list[int], run: Run) -> Any:
        out = None
        for start in range(0, len(ids), CHUNK):
            out = self.compute(ids[start : start + CHUNK], run)
            run.past = out.past_key_values
        return out


@case(HEALTHY)
def chunked_prefill(model: Any, dtype: str, rng: random.Random) -> Seeded:
    return Seeded(Chunked(model, dtype))


class PrefixCache(Plain):
    """Full blocks of earlier prompts are read again; whole prompts are kept, by their ids."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.kept: dict[tuple[int, ...], Any] = {}

    def prefill(self, ids: list[int], run: Run) -> Any:
        for known in range((len(ids) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            if (found := self.kept.get(tuple(ids[:known]))) is not None:
                run.past = copy.deepcopy(found)
                break
        else:
            known = 0
        out = self.compute(ids[known:], run)
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            if tuple(ids[:end]) not in self.kept:
                part = copy.deepcopy(out.past_key_values)
                cut(part, end)
                self.kept[tuple(ids[:end])] = part
        return out


@case(HEALTHY)
def prefix_cache_in_blocks(model: Any, dtype: str, rng: random.Random) -> Seeded:
    return Seeded(PrefixCache(model, dtype))


class Preempted(Plain):
    """Every few tokens the cache is lost and the sequence computed again."""

    every = 4

    def decode(self, ids: list[int], run: Run) -> Any:
        if (len(run.ids) - run.sent) % self.every == self.every - 1:
            run.past = None
            return self.compute([*run.ids, *ids], run)
        return self.compute(ids, run)


@case(HEALTHY)
def preempted_and_computed_again(model: Any, dtype: str, rng: random.Random) -> Seeded:
    engine = Preempted(model, dtype)
    engine.every = rng.randint(2, 6)
    return Seeded(engine)


def part_of_fused(fused: torch.Tensor, start: int, end: int) -> Any:
    return lambda x: linear(x, fused.to(x.dtype))[..., start:end]


def fuse(modules: list[Any]) -> None:
    """One product for all modules, each of which returns its own columns."""
    fused, start = torch.cat([one.weight.data for one in modules]), 0
    for one in modules:
        one.forward = part_of_fused(fused, start, start + one.weight.shape[0])
        start += one.weight.shape[0]


@case(HEALTHY)
def query_key_value_fused(model: Any, dtype: str, rng: random.Random) -> Seeded:
    for layer in layers_of(model):
        attention = layer.self_attn
        fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def gate_and_up_fused(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """As a fused kernel does, the product of both is rounded once."""

    def gated(module: Any, fused: torch.Tensor) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            gate, up = linear(x, fused.to(x.dtype)).float().chunk(2, -1)
            return module.down_proj((silu(gate) * up).to(x.dtype))

        return forward

    for layer in layers_of(model):
        mlp = layer.mlp
        mlp.forward = gated(mlp, torch.cat((mlp.gate_proj.weight.data, mlp.up_proj.weight.data)))
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def sums_of_two_ranks(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Tensor parallelism: each rank multiplies half of the columns, and the sums are added."""

    def summed(one: Any) -> Any:
        half = one.weight.shape[1] // 2

        def forward(x: torch.Tensor) -> torch.Tensor:
            return linear(x[..., :half], one.weight[:, :half]) + linear(x[..., half:], one.weight[:, half:])

        return forward

    for layer in layers_of(model):
        for one in (layer.self_attn.o_proj, layer.mlp.down_proj):
            one.forward = summed(one)
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def logits_in_shards(model: Any, dtype: str, rng: random.Random) -> Seeded:
    head, rows = model.lm_head, rng.choice((64, 128, 352))
    head.forward = lambda x: torch.cat([linear(x, part) for part in head.weight.split(rows)], -1)
    return Seeded(Plain(model, dtype))


class PaddedVocabulary(Plain):
    def step(self, ids: list[int], run: Run) -> torch.Tensor:
        logits = super().step(ids, run)
        return logits.masked_fill(torch.arange(logits.numel()) >= self.model.config.vocab_size, -torch.inf)


@case(HEALTHY)
def padded_rows_masked(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The output layer has rows up to a multiple of 64; those of no token are masked before the softmax."""
    untie(model)
    weight = model.lm_head.weight.data
    missing = -weight.shape[0] % 64
    torch.manual_seed(rng.randrange(1 << 30))
    rows = torch.cat((weight, weight.std() * torch.randn(missing, weight.shape[1])))
    model.lm_head.weight = torch.nn.Parameter(rows)
    return Seeded(PaddedVocabulary(model, dtype))


class SoftmaxInFloat64(Plain):
    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        return super().drawn(logits.double(), run, sampling).float()


@case(HEALTHY)
def softmax_in_float64(model: Any, dtype: str, rng: random.Random) -> Seeded:
    return Seeded(SoftmaxInFloat64(model, dtype))


class FilteredLogits(Plain):
    """Filters mask logits that are sorted in ascending order, and the softmax follows."""

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        if sampling.temperature == 0:
            return torch.log_softmax(logits, -1)
        ordered, order = (logits / sampling.temperature).sort()
        if sampling.top_k:
            ordered[: max(0, ordered.numel() - sampling.top_k)] = -torch.inf
        if sampling.top_p < 1:
            low = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
            low[-1] = False
            ordered[low] = -torch.inf
        if sampling.min_p:
            ordered[ordered < ordered[-1] + torch.tensor(sampling.min_p).log()] = -torch.inf
        return torch.log_softmax(torch.empty_like(ordered).scatter_(0, order, ordered), -1)


@case(HEALTHY)
def requested_filters_on_logits(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Top-k and top-p that the request asks for are in the log-probabilities."""
    return Seeded(FilteredLogits(model, dtype))


@case(HEALTHY)
def adapter_beside_the_base(model: Any, dtype: str, rng: random.Random) -> Seeded:
    folder, parts = an_adapter(model, rng, rank_stable=False)

    def beside(down: torch.Tensor, up: torch.Tensor) -> Any:
        def add(module: Any, given: tuple[torch.Tensor, ...], found: torch.Tensor) -> torch.Tensor:
            (x,) = given
            return found + ALPHA_OVER_RANK * linear(linear(x, down.to(x.dtype)), up.to(x.dtype))

        return add

    for name, part in parts.items():
        model.get_submodule(name).register_forward_hook(beside(*part))
    return adapter_folder(Seeded(Plain(model, dtype)), folder)


@case(HEALTHY)
def adapter_merged_once(model: Any, dtype: str, rng: random.Random) -> Seeded:
    folder, parts = an_adapter(model, rng, rank_stable=False)
    return adapter_folder(Seeded(Plain(merged(model, parts, ALPHA_OVER_RANK), dtype)), folder)


class LeftPadded(Plain):
    """As in a batch with a longer sequence: `width` hidden tokens stand first."""

    width = 5

    def padded(self, ids: list[int], run: Run) -> Any:
        past, given = len(run.ids), [0] * (0 if run.ids else self.width) + ids
        mask = torch.ones(1, self.width + past + len(ids), dtype=torch.long)
        mask[:, : self.width] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -len(given) :]
        return self.compute(given, run, attention_mask=mask, position_ids=positions)

    prefill = decode = padded


@case(HEALTHY)
def padded_on_the_left(model: Any, dtype: str, rng: random.Random) -> Seeded:
    engine = LeftPadded(model, dtype)
    engine.width = rng.randint(3, 20)
    return Seeded(engine)


class Batched(Plain):
    """Other sequences of the same length are in the batch."""

    others = 3

    def compute(self, ids: list[int], run: Run, model: Any = None, **given: Any) -> Any:
        rows = [ids] + [[*ids[turn:], *ids[:turn]] for turn in range(1, self.others + 1)]
        return self.model(torch.tensor(rows), past_key_values=run.past, use_cache=True, **given)


@case(HEALTHY)
def with_others_in_the_batch(model: Any, dtype: str, rng: random.Random) -> Seeded:
    engine = Batched(model, dtype)
    engine.others = rng.randint(1, 6)
    return Seeded(engine)


class Speculative(Plain):
    """Drafts what followed the same tokens before; all of them are scored in one pass of the model itself."""

    @torch.no_grad()
    def step(self, ids: list[int], run: Run) -> torch.Tensor:
        if not run.ids:
            return super().step(ids, run)
        (token,) = ids
        draft, rows = run.state.get("draft", []), run.state.get("rows", [])
        run.ids.append(token)
        if draft and draft[0] == token:
            run.state = {"draft": draft[1:], "rows": rows[1:]}
            return rows[0]
        cut(run.past, len(run.ids) - 1)
        draft = looked_up_draft(run.ids, 3)
        out = self.compute([token, *draft], run)
        run.past = out.past_key_values
        run.state = {"draft": draft, "rows": list(out.logits[0, 1:].float())}
        return out.logits[0, 0].float()


@case(HEALTHY)
def drafts_verified(model: Any, dtype: str, rng: random.Random) -> Seeded:
    return Seeded(Speculative(model, dtype))


@case(HEALTHY)
def rotary_tables_made_once(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Tables in float32 for all positions, from phases in float64."""
    rotary, most = model.model.rotary_emb, model.config.max_position_embeddings
    phases = torch.arange(most).double()[:, None] * rotary.inv_freq.double()
    phases = torch.cat((phases, phases), -1)
    cosines, sines = phases.cos().float(), phases.sin().float()
    rotary.forward = lambda x, positions: (cosines[positions].to(x.dtype), sines[positions].to(x.dtype))
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def norms_scaled_before_rounding(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The norm divides by a root, and rounds after its weight."""

    def normed(norm: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            root = (wide.pow(2).sum(-1, keepdim=True) / wide.shape[-1] + norm.variance_epsilon).sqrt()
            return (wide / root * norm.weight.float()).to(x.dtype)

        return forward

    for norm in norms_of(model):
        norm.forward = normed(norm)
    return Seeded(Plain(model, dtype))


@case(HEALTHY)
def update_arrived_in_buckets(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine had the weights before, and took each tensor of the update in two parts, the tied one once."""
    old = before_the_update(model, rng)
    served = copy.deepcopy(old)
    for name, weight in served.named_parameters():
        new = model.get_parameter(name).data
        half = new.shape[0] // 2
        weight.data[half:] = new[half:]
        weight.data[:half] = new[:half]
    return Seeded(Plain(served, dtype), previous=old)
