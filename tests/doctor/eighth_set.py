"""An eighth set: faults as issues and pull requests of engines, trainers and quantisers report them, and healthy engines
that differ as engines may. Its author had read the earlier sets, but not the hypotheses, the rules or their tests.

Every fault and its key were fixed before the doctor was played. Where several names are allowed, the first describes the
fault best; `unknown` is a key only where no name fits exactly. The engine is that of the seventh set.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import linear
from transformers import DynamicCache

from tests.doctor.fifth_set import own_attention, plain_mixing, rotated
from tests.doctor.seventh_set import (
    Make,
    Plain,
    Run,
    Seeded,
    an_adapter,
    before_the_update,
    merged,
    of_engine,
    of_model,
    one_layer,
)
from tokentrue.providers.hf import filter_logprobs
from tokentrue.types import Completion, Ids, Sampling

PAGE = 16
E4M3 = torch.float8_e4m3fn


# --- weights, updates, adapters ---


def groups_read_from_blocks(model: Any, rng: random.Random) -> None:
    """The sender fuses queries, keys and values as three blocks; the receiver reads the matrix as one group after the
    other, each with its query heads, its key head and its value head (NeMo-RL#2802)."""
    for layer in model.model.layers:
        attention = layer.self_attn
        owners = (attention.q_proj, attention.k_proj, attention.v_proj)
        queries = attention.num_key_value_groups
        heads = torch.cat([one.weight.data for one in owners]).unflatten(0, (-1, queries + 2, attention.head_dim))
        parts = (heads[:, :queries], heads[:, queries], heads[:, queries + 1])
        for one, part in zip(owners, parts, strict=True):
            one.weight.data = part.reshape(one.weight.shape).clone()


def gate_up_sharded_before_the_split(model: Any, rng: random.Random) -> None:
    """The fused gate and up matrix is cut for two ranks first and split into gate and up on each rank then (xllm#1616,
    Automodel#1324), here in the layer of one pipeline stage."""
    mlp = one_layer(model, rng).mlp
    quarters = torch.cat((mlp.gate_proj.weight.data, mlp.up_proj.weight.data)).chunk(4)
    mlp.gate_proj.weight.data = torch.cat((quarters[0], quarters[2]))
    mlp.up_proj.weight.data = torch.cat((quarters[1], quarters[3]))


def first_shard_on_both_ranks(model: Any, rng: random.Random) -> None:
    """The loader of merged matrices takes rank 0 for each rank: both hold the first half of queries, keys, values, gates
    and ups (vllm-gguf-plugin#103). Output and down projections are right."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for one in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            first = one.weight.data.chunk(2)[0]
            one.weight.data = torch.cat((first, first))


def sparse_update_of_the_last_step(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """An update sends only the elements that the last optimiser step changed, though two steps were made since the last
    one (trl#5937): half of the changed elements stay old."""
    old = before_the_update(model, rng)
    for mine, before in zip(model.parameters(), old.parameters(), strict=True):
        mine.data = torch.where(torch.rand_like(mine) < 0.5, before.data, mine.data)
    return Seeded(Plain(model, dtype), frozenset({"stale_weights"}), previous=old)


def adapter_merged_and_beside(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The base weights are sent with the adapter merged, and the engine applies the adapter again (miles#1091)."""
    folder, parts = an_adapter(model, rng, rank_stable=False)
    engine = Plain(merged(model, parts, 2 * 16 / 8), dtype)
    return Seeded(engine, frozenset({"adapter_missing", "unknown"}), adapter=Path(folder.name), folder=folder)


def adapter_cached_by_its_name(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The engine finds an adapter of this name in its cache and keeps it: the one before the last step (SkyRL#1606,
    vllm#20149). The weights before the update are at hand."""
    folder, parts = an_adapter(model, rng, rank_stable=False)
    earlier = {name: (down, up + 0.3 * up.std() * torch.randn_like(up)) for name, (down, up) in parts.items()}
    old = merged(model, earlier, 16 / 8)
    engine = Plain(copy.deepcopy(old), dtype)
    return Seeded(engine, frozenset({"stale_weights"}), previous=old, adapter=Path(folder.name), folder=folder)


# --- quantisation ---


def one_scale_for_fused_parts(model: Any, rng: random.Random) -> None:
    """Queries, keys and values are float8 with a scale each, gates and ups, too; the fused matrices use the largest scale
    and are not quantised again for it (the rescaling that vllm#4332 had to add)."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for fused in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            scales = [one.weight.data.abs().max() / 448 for one in fused]
            for one, scale in zip(fused, scales, strict=True):
                one.weight.data = (one.weight.data / scale).to(E4M3).float() * max(scales)


class CacheScaledByWarmUp(Plain):
    """Keys and values are float8 with one scale per layer from a warm-up of 13 dummy tokens (atlas#1008, vllm#11906), so
    larger values are cut; the first layer's cache is not quantised (--kv-cache-dtype-skip-layers)."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        with torch.no_grad():
            warm = self.model(torch.full((1, 13), 9), use_cache=True).past_key_values
        scales = [[float(one.abs().max()) / 448 for one in (layer.keys, layer.values)] for layer in warm.layers]

        class Cache(DynamicCache):
            def update(self, keys: Any, values: Any, layer: int, *args: Any, **given: Any) -> Any:
                if layer:
                    keys, values = map(fp8, (keys, values), scales[layer])
                return super().update(keys, values, layer, *args, **given)

        self.cache = Cache

    def prefill(self, ids: list[int], run: Run) -> Any:
        run.past = self.cache()
        return self.compute(ids, run)


def fp8(values: torch.Tensor, scale: Any) -> torch.Tensor:
    return (values / scale).clamp(-448, 448).to(E4M3).to(values.dtype) * scale


def zero_points_one_too_high(model: Any, rng: random.Random) -> None:
    """4-bit weights whose file has zero points of 8 for a reader that adds 1 (vllm#38966: GPTQ's second format): each
    weight is lower by its group's step. Groups of 128; only feed-forward layers are quantised."""
    for layer in model.model.layers:
        for one in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            groups = one.weight.data.unflatten(1, (-1, 128))
            step = groups.abs().amax(-1, keepdim=True) / 7
            one.weight.data = (((groups / step).round().clamp(-8, 7) - 1) * step).flatten(1)


def attention_in_float8(model: Any, rng: random.Random) -> None:
    """Queries, keys, values and the weights of the softmax are float8 in the attention kernel (vllm#23647,
    flash-attention#1169)."""

    def short(values: torch.Tensor) -> torch.Tensor:
        return fp8(values, float(values.abs().max()) / 448)

    def mixing(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return ((fp8(weights, 1 / 256) @ short(values.float())) / weights.sum(-1, keepdim=True)).to(values.dtype)

    own_attention(model, mixing, rotation=lambda states, cos, sin: short(rotated(states, cos, sin)))


# --- positions, masks, caches ---


def dynamic_base_with_old_keys(model: Any, rng: random.Random) -> None:
    """Dynamic NTK scaling, factor 2: after the original length the base grows with each token, and cached keys keep the
    rotation of the base at their time (transformers#25104). The length is 64 as the prompts are short."""
    rotary = model.model.rotary_emb
    theta, size = model.config.rope_parameters["rope_theta"], model.config.head_dim

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = max(int(position_ids.max()) + 1, 64)
        base = theta * (2 * length / 64 - 1) ** (size / (size - 2))
        frequencies = base ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.cat([position_ids[..., None].float() * frequencies] * 2, -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = forward


class RejectedCounted(Plain):
    """Speculative decoding: after each fourth token a draft is rejected, and the length of the sequence keeps counting it,
    so later positions are one higher each time (vllm-ascend#14883)."""

    def decode(self, ids: list[int], run: Run) -> Any:
        place = len(run.ids) + (len(run.ids) - run.sent) // 4
        return self.compute(ids, run, position_ids=torch.tensor([[place]]))


def best_pages_read(model: Any, rng: random.Random) -> None:
    """Sparse attention while decoding: each head reads the newest page and the three that fit its query best (Quest:
    vllm-ascend#8389). Prompts are computed whole."""

    def mixing(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        if not old or scores.shape[2] > 1:
            return plain_mixing(scores, values, old)
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % PAGE), value=-math.inf)
        best = padded.unflatten(-1, (-1, PAGE)).amax(-1)
        best[..., -1] = math.inf
        least = best.topk(min(4, best.shape[-1])).values[..., -1:]
        unread = (best < least).repeat_interleave(PAGE, -1)[..., : scores.shape[-1]]
        return plain_mixing(scores.masked_fill(unread, -math.inf), values, old)

    own_attention(model, mixing)


def common_length(one: tuple[int, ...], ids: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, ids, strict=False)) if a != b), min(len(one), len(ids)))


def cache_of(stored: list[Any], length: int) -> DynamicCache:
    """The first `length` places of the keys and values in `stored`."""
    past = DynamicCache()
    for at, (keys, values) in enumerate(stored):
        past.update(keys[:, :, :length], values[:, :, :length], at)
    return past


def contents(past: Any) -> list[Any]:
    return [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]


class HitUnread(Plain):
    """Where the prefix cache has the first pages of a prompt, the rest of the prompt attends to itself alone (xllm#2161);
    decoding reads all."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.stored: dict[tuple[int, ...], list[Any]] = {}

    def prefill(self, ids: list[int], run: Run) -> Any:
        key = max(self.stored, key=lambda one: common_length(one, ids), default=())
        hit = min(common_length(key, ids), len(ids) - 1) // PAGE * PAGE
        if hit:
            run.past = cache_of(self.stored[key], hit)
        keys, queries = torch.arange(len(ids))[None], torch.arange(hit, len(ids))[:, None]
        out = self.masked(ids[hit:], run, (keys < hit) | (keys > queries)) if hit else self.compute(ids, run)
        self.stored.setdefault(tuple(ids), contents(out.past_key_values))
        return out


# --- operators ---


def a_layer_without_rotation(model: Any, rng: random.Random) -> None:
    """One layer is taken for one without positions (the schedule of SmolLM3 and Llama 4: rknn-llm#501,
    transformers#43756)."""
    attention = one_layer(model, rng).self_attn
    own = attention.forward

    def forward(*args: Any, position_embeddings: Any, **given: Any) -> Any:
        cos, sin = position_embeddings
        return own(*args, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **given)

    attention.forward = forward


def scores_capped(model: Any, rng: random.Random) -> None:
    """Attention scores pass a soft cap of 30, the default of code that finds none in the configuration (sglang#33915 quotes
    such a line for Grok)."""

    def mixing(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        return plain_mixing(torch.where(scores > -1e20, 30 * torch.tanh(scores / 30), scores), values, old)

    own_attention(model, mixing)


def gated_units_of_gpt_oss(model: Any, rng: random.Random) -> None:
    """The fused kernel has GPT-OSS's gated unit built in: a steeper sigmoid, 1 added to the up values, both clamped at 7
    (onnxruntime#28738)."""
    for layer in model.model.layers:

        def forward(x: torch.Tensor, mlp: Any = layer.mlp) -> torch.Tensor:
            gate, up = mlp.gate_proj(x).clamp(max=7), mlp.up_proj(x).clamp(-7, 7)
            return mlp.down_proj(gate * torch.sigmoid(1.702 * gate) * (up + 1))

        layer.mlp.forward = forward


# --- sampling, reports ---


class NoRepeatedPairs(Plain):
    """A no_repeat_ngram_size of 2 comes with the checkpoint's generation_config.json (verl#7270 has another setting that
    came this way): a token that would repeat a pair of the prompt or the answer is impossible."""

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        logits = logits.clone()
        followers = [after for before, after in itertools.pairwise(run.ids) if before == run.ids[-1]]
        logits[followers] = -math.inf
        return super().drawn(logits, run, sampling)


class TemperatureLast(Plain):
    """Filters see the probabilities of temperature 1, and the temperature comes after them (llama.cpp's order:
    llama.cpp#4091, mlxcel#1379). Reports are of what is drawn from."""

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        if not sampling.temperature:
            return super().drawn(logits, run, sampling)
        kept = filter_logprobs(torch.log_softmax(logits, -1), sampling) > -torch.inf
        return torch.log_softmax((logits / sampling.temperature).masked_fill(~kept, -torch.inf), -1)


class ListsOfTheRowBefore(Plain):
    """Lists of the likeliest tokens are taken from the row before; the sampled tokens' log-probabilities are right
    (maxtext#2103, tabbyAPI#141). The first token's list is right."""

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        drawn = super().drawn(logits, run, sampling)
        self.row_before, run.state["row"] = run.state.get("row", drawn), drawn
        return drawn

    def top(self, told: torch.Tensor, token: int, count: int) -> dict[int, float]:
        return super().top(self.row_before, token, count)


class DraftsOverAThreshold(Plain):
    """Speculative decoding accepts a draft whose probability is over a threshold (SGLang's
    speculative_accept_threshold_single, here 0.3): likely tokens are drawn too often. The draft is the likeliest token."""

    def token(self, drawn: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
        if float(drawn.max()) >= math.log(0.3):
            return int(drawn.argmax())
        return super().token(drawn, sampling, generator)


# --- prompts, answers ---


class SpecialTokensSkipped(Plain):
    """The prompt's ids are decoded without their special tokens, and the text is encoded again (trl#5241)."""

    def received(self, prompt: list[int]) -> list[int]:
        tokenizer = Tokenizer.from_file(str(Path(self.model.config.name_or_path) / "tokenizer.json"))
        text = tokenizer.decode(prompt, skip_special_tokens=True)
        return tokenizer.encode(text, add_special_tokens=False).ids or prompt


class EndCutOff(Plain):
    """A prompt that is too long loses its end, without an error (MEDS_EIC_AR#172: SGLang's allow_auto_truncate). The limit
    is 64 as the prompts are short."""

    def received(self, prompt: list[int]) -> list[int]:
        return prompt[:64]


class AnswersExchanged(Plain):
    """Requests take their answers from a common queue (vllm-omni#293): of two alike in flight at once, the later one gets
    the answer that is ready first."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.waiting: dict[str, list[asyncio.Future[Completion]]] = defaultdict(list)

    async def generate(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, **images: Any
    ) -> Completion:
        waiting = self.waiting[str(replace(sampling, seed=None))]
        waiting.append(mine := asyncio.get_running_loop().create_future())
        try:
            found = await super().generate(prompt_ids, sampling, session=session, **images)
        except BaseException:
            waiting.remove(mine)
            raise
        waiting.pop().set_result(found)
        return replace(await mine, prompt_tokens=len(prompt_ids))


# --- healthy ---


def pages_in_any_order(model: Any, rng: random.Random) -> None:
    """Keys are read page by page in the order of their memory, which is not that of the text."""

    def mixing(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        length = scores.shape[-1]
        pages = list(torch.arange(length).split(PAGE))
        order = torch.cat(random.Random(length).sample(pages, len(pages)))
        return plain_mixing(scores[..., order], values[:, :, order], old)

    own_attention(model, mixing)


class DraftsSampledBack(Plain):
    """Speculative decoding that keeps the distribution: a draft of a flatter model is accepted with probability p / q, and
    a rejected one is replaced by a draw from what p has more than q."""

    def token(self, drawn: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
        if sampling.temperature == 0:
            return int(drawn.argmax())
        tilt = 0.5 * torch.sin(torch.arange(len(drawn)).float())
        wanted, drafted = drawn.exp(), torch.softmax(0.7 * drawn + tilt, -1)
        draft = int(torch.multinomial(drafted, 1, generator=generator))
        if float(torch.rand((), generator=generator)) * float(drafted[draft]) < float(wanted[draft]):
            return draft
        return int(torch.multinomial((wanted - drafted).clamp(min=0), 1, generator=generator))


class RadixCache(Plain):
    """A sound prefix cache without pages: the longest common beginning with any earlier request, its answer too."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.stored: dict[tuple[int, ...], list[Any]] = {}

    def step(self, ids: list[int], run: Run) -> torch.Tensor:
        self.stored.pop(tuple(run.ids), None)
        logits = super().step(ids, run)
        self.stored[tuple(run.ids)] = contents(run.past)
        return logits

    def prefill(self, ids: list[int], run: Run) -> Any:
        key = max(self.stored, key=lambda one: common_length(one, ids), default=())
        hit = min(common_length(key, ids), len(ids) - 1)
        if hit:
            run.past = cache_of(self.stored[key], hit)
        return self.compute(ids[hit:], run)


class PowersOfTwo(Plain):
    """Softmaxes, in attention and of logits, are computed with powers of 2 and logarithms to base 2."""

    def __init__(self, model: Any, dtype: str) -> None:
        def mixing(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
            powers = torch.exp2((scores - scores.amax(-1, keepdim=True)) * math.log2(math.e))
            return ((powers @ values.float()) / powers.sum(-1, keepdim=True)).to(values.dtype)

        own_attention(model, mixing)
        super().__init__(model, dtype)

    def drawn(self, logits: torch.Tensor, run: Run, sampling: Sampling) -> torch.Tensor:
        scaled = logits * (math.log2(math.e) / (sampling.temperature or 1.0))
        most = scaled.max()
        whole = (scaled - most - torch.log2(torch.exp2(scaled - most).sum())) * math.log(2)
        return filter_logprobs(whole, sampling) if sampling.temperature else whole


def neighbours_rotated_with_their_rows(model: Any, rng: random.Random) -> None:
    """Rotary pairs are neighbours (0, 1), (2, 3) …, and rows of queries, keys and their norms are in that order, too."""
    size = model.config.head_dim
    order = torch.arange(size).view(2, -1).t().flatten()
    for layer in model.model.layers:
        attention = layer.self_attn
        for one in (attention.q_proj, attention.k_proj):
            one.weight.data = one.weight.data.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        for one in (attention.q_norm, attention.k_norm):
            one.weight.data = one.weight.data[order]

    def rotation(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        even, odd = states[..., ::2], states[..., 1::2]
        cos, sin = cos[..., : size // 2], sin[..., : size // 2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    own_attention(model, rotation=rotation)


def norms_folded(model: Any, rng: random.Random) -> None:
    """The norms' weights are multiplied into the matrices after them, and are 1 then."""

    def fold(norm: Any, *after: Any) -> None:
        for one in after:
            one.weight = torch.nn.Parameter(one.weight.data * norm.weight.data)
        norm.weight.data = torch.ones_like(norm.weight.data)

    model.config.tie_word_embeddings = False
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        fold(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        fold(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
    fold(model.model.norm, model.lm_head)


def four_ranks(model: Any, rng: random.Random) -> None:
    """Four ranks for two key heads: each key head is held twice, and output and down projections are summed over the
    ranks, in another order in each layer."""
    for at, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for one in (attention.k_proj, attention.v_proj):
            heads = one.weight.data.unflatten(0, (-1, attention.head_dim))
            one.weight.data = heads.repeat_interleave(attention.num_key_value_groups, 0).flatten(0, 1)
        attention.num_key_value_groups = 1
        ranks = random.Random(at).sample(range(4), 4)
        for one in (attention.o_proj, layer.mlp.down_proj):

            def forward(x: torch.Tensor, one: Any = one, ranks: list[int] = ranks) -> torch.Tensor:
                inputs, weights = x.chunk(4, -1), one.weight.chunk(4, -1)
                return torch.stack([linear(inputs[rank], weights[rank]) for rank in ranks]).sum(0)

            one.forward = forward


def adapter_padded_after_an_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The adapter of the last step is beside the weights, padded to the engine's largest rank and with its factor
    multiplied in; the weights with the adapter before it are at hand."""
    folder, parts = an_adapter(model, rng, rank_stable=False)
    earlier = {name: (down, up + 0.3 * up.std() * torch.randn_like(up)) for name, (down, up) in parts.items()}
    old = merged(copy.deepcopy(model), earlier, 16 / 8)
    for name, (down, up) in parts.items():
        rest = 64 - len(down)
        wide_down = torch.nn.functional.pad(down, (0, 0, 0, rest))
        wide_up = torch.nn.functional.pad(up * (16 / 8), (0, rest))

        def add(one: Any, args: Any, out: Any, down: Any = wide_down, up: Any = wide_up) -> Any:
            return out + linear(linear(args[0], down.to(out.dtype)), up.to(out.dtype))

        model.get_submodule(name).register_forward_hook(add)
    return Seeded(Plain(model, dtype), previous=old, adapter=Path(folder.name), folder=folder)


FAULTS: dict[str, Make] = {
    "groups read from blocks": of_model(groups_read_from_blocks, "projection_order"),
    "gate and up sharded before the split": of_model(gate_up_sharded_before_the_split, "projection_order"),
    "first shard on both ranks": of_model(first_shard_on_both_ranks, "projection_order", "unknown"),
    "sparse update of the last step": sparse_update_of_the_last_step,
    "adapter merged and beside": adapter_merged_and_beside,
    "adapter cached by its name": adapter_cached_by_its_name,
    "one scale for fused parts": of_model(one_scale_for_fused_parts, "weight_scale", "fp8_weights"),
    "cache scaled by warm-up": of_engine(CacheScaledByWarmUp, "fp8_kv_cache"),
    "zero points one too high": of_model(zero_points_one_too_high, "int4_weights", "unknown"),
    "attention in float8": of_model(attention_in_float8, "fp8_kv_cache", "unknown"),
    "dynamic base with old keys": of_model(dynamic_base_with_old_keys, "rope", "prefill_decode"),
    "rejected drafts counted": of_engine(RejectedCounted, "decode_positions", "prefill_decode"),
    "best pages read": of_model(best_pages_read, "attention_mask", "prefill_decode"),
    "cached pages unread": of_engine(HitUnread, "prefix_cache", "attention_mask"),
    "a layer without rotation": of_model(a_layer_without_rotation, "rope"),
    "scores capped": of_model(scores_capped, "logit_softcap", "unknown"),
    "gated units of GPT-OSS": of_model(gated_units_of_gpt_oss, "activation"),
    "no repeated pairs": of_engine(NoRepeatedPairs, "sampled_penalty", "logit_bias", "unknown"),
    "temperature last": of_engine(TemperatureLast, "sampled_filters", "filters_ignored", "unknown"),
    "lists of the row before": of_engine(ListsOfTheRowBefore, "off_by_one", "other_reports", "bad_logprobs"),
    "drafts over a threshold": of_engine(DraftsOverAThreshold, "unknown", "temperature_ignored", "sampled_filters"),
    "special tokens skipped": of_engine(SpecialTokensSkipped, "prompt_changed", "special_tokens", "tokenizer"),
    "end cut off": of_engine(EndCutOff, "context_truncated", "prompt_changed"),
    "answers exchanged": of_engine(AnswersExchanged, "batch_variant", "unstable"),
}

HEALTHY: dict[str, Make] = {
    "pages in any order": of_model(pages_in_any_order),
    "drafts sampled back": of_engine(DraftsSampledBack),
    "radix cache": of_engine(RadixCache),
    "powers of two": of_engine(PowersOfTwo),
    "neighbours rotated with their rows": of_model(neighbours_rotated_with_their_rows),
    "norms folded": of_model(norms_folded),
    "four ranks": of_model(four_ranks),
    "adapter padded after an update": adapter_padded_after_an_update,
}

# Cases whose effect in bfloat16 is far above its rounding, and healthy engines that may round otherwise in it.
IN_BFLOAT16 = frozenset(
    {
        "groups read from blocks",
        "gate and up sharded before the split",
        "sparse update of the last step",
        "adapter merged and beside",
        "one scale for fused parts",
        "cache scaled by warm-up",
        "zero points one too high",
        "rejected drafts counted",
        "best pages read",
        "cached pages unread",
        "a layer without rotation",
        "gated units of GPT-OSS",
        "no repeated pairs",
        "drafts over a threshold",
        "special tokens skipped",
        "pages in any order",
        "drafts sampled back",
        "radix cache",
        "powers of two",
    }
)
