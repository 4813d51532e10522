"""A fifth set: faults as changelogs and bug reports of engines, quantisers and weight synchronisation tell them, none of
which the fourth set has, and healthy engines that compute the same in pieces.

Where several names are allowed, the first describes the fault best.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear

from tests.doctor.fourth_set import HIDDEN, PAGE, Flexible, a_layer, changed_logprobs, flexible
from tests.doctor.reported import Engine, Seeded, attentions, engined, quantised, simple, trained
from tests.doctor.third_set import low_rank
from tokentrue.providers.hf import filter_logprobs
from tokentrue.types import Completion, Ids, Sampling

Mixing = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PREFILL_CHUNK = 32


# --- one attention that faults and healthy engines change ---


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = states.chunk(2, -1)
    return states * cos + torch.cat((-high, low), -1) * sin


def plain_mixing(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
    return torch.softmax(scores, -1).to(values.dtype) @ values


def own_attention(
    model: Any, mixing: Mixing = plain_mixing, rotation: Rotation = rotated, norm_is_last: bool = False
) -> None:
    """Every attention written out. `mixing(scores, values, old)` makes the output of causal float32 scores; the first
    `old` keys come from the cache. `norm_is_last`: query and key norms after the rotation."""
    for module in attentions(model):

        def forward(
            hidden_states: torch.Tensor,
            position_embeddings: Any,
            attention_mask: Any = None,
            past_key_values: Any = None,
            module: Any = module,
            **given: Any,
        ) -> tuple[torch.Tensor, None]:
            shape = (*hidden_states.shape[:-1], -1, module.head_dim)
            q, k, v = (
                getattr(module, f"{name}_proj")(hidden_states).view(shape).transpose(1, 2) for name in ("q", "k", "v")
            )
            cos, sin = (one[:, None] for one in position_embeddings)
            if norm_is_last:
                q, k = module.q_norm(rotation(q, cos, sin)), module.k_norm(rotation(k, cos, sin))
            else:
                q, k = rotation(module.q_norm(q), cos, sin), rotation(module.k_norm(k), cos, sin)
            old, new = 0, q.shape[2]
            if past_key_values is not None:
                old = past_key_values.get_seq_length(module.layer_idx)
                k, v = past_key_values.update(k, v, module.layer_idx)
            k, v = (one.repeat_interleave(module.num_key_value_groups, 1) for one in (k, v))
            later = torch.arange(old + new)[None] > torch.arange(old, old + new)[:, None]
            scores = (q @ k.transpose(2, 3)).float() * module.scaling
            out = mixing(scores.masked_fill(later, HIDDEN), v, old)
            return module.o_proj(out.transpose(1, 2).flatten(2)), None

        module.forward = forward


def merged_parts(scores: torch.Tensor, values: torch.Tensor, cuts: list[int], factor: float) -> torch.Tensor:
    """Attention over each part of the keys, merged by the parts' log-sums times `factor`; 1 is right."""
    outs, sums = [], []
    for start, end in zip([0, *cuts], [*cuts, scores.shape[-1]], strict=True):
        if start < end:
            part = scores[..., start:end]
            outs.append((torch.softmax(part, -1).to(values.dtype) @ values[:, :, start:end]).float())
            sums.append(torch.logsumexp(part, -1, keepdim=True))
    weights = torch.softmax(torch.cat(sums, -1) * factor, -1)
    return (torch.stack(outs, -1) * weights[..., None, :]).sum(-1).to(values.dtype)


# --- quantisation ---


def weights_in_six_bits(model: Any, rng: random.Random) -> None:
    """GGUF's Q6_K: groups of 16 with an 8-bit scale each, which share a scale per row."""

    def six_bits(weight: torch.Tensor) -> torch.Tensor:
        groups = weight.view(weight.shape[0], -1, 16)
        scale = groups.abs().amax(-1, keepdim=True) / 31
        step = scale.amax(1, keepdim=True) / 127
        scale = (scale / step).round().clamp(min=1) * step
        return ((groups / scale).round().clamp(-32, 31) * scale).view_as(weight)

    quantised(model, six_bits)


def weights_in_mxfp4(model: Any, rng: random.Random) -> None:
    """The 4-bit float of MX formats: groups of 32, whose scales are powers of 2."""
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat((-half[1:].flip(0), half))

    def four_bits(weight: torch.Tensor) -> torch.Tensor:
        groups = weight.view(-1, 32)
        scale = torch.exp2(torch.log2(groups.abs().amax(1, keepdim=True).clamp(min=1e-12)).floor() - 2)
        nearest = ((groups / scale)[..., None] - levels).abs().argmin(-1)
        return (levels[nearest] * scale).view_as(weight)

    quantised(model, four_bits)


def smoothing_in_a_norm_alone(model: Any, rng: random.Random) -> None:
    """One layer's norm is divided by smoothing factors (as AWQ and SmoothQuant do), the linears after it are not
    multiplied."""
    torch.manual_seed(rng.randrange(1 << 30))
    norm = a_layer(model, rng).post_attention_layernorm
    norm.weight.data /= torch.exp(0.2 * torch.randn_like(norm.weight))


# --- weight synchronisation, adapters ---


def fp8_with_the_scales_before_the_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """New weights are written as float8 with the scales (one per matrix) of the weights before."""
    old = trained(model, rng, 0.05)
    before = dict(old.named_modules())
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            scale = before[name].weight.abs().max() / 448
            short = (module.weight.data / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            module.weight.data = short.float() * scale
    return Seeded(engine=Engine(model, dtype), names=frozenset({"fp8_weights"}), previous=old)


def one_rank_not_updated(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The second of two tensor-parallel ranks missed the update of the layers: it has half of each matrix."""
    old = trained(model, rng, 0.05)
    before = dict(old.named_modules())
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            weight, stale = module.weight.data, before[name].weight.data
            if name.endswith(("o_proj", "down_proj")):
                weight, stale = weight.t(), stale.t()
            weight[len(weight) // 2 :] = stale[len(weight) // 2 :]
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def update_added_twice(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Weights travel as differences, and one publish was retried after it had been added."""
    old = trained(model, rng, 0.05)
    for mine, before in zip(model.parameters(), old.parameters(), strict=True):
        mine.data = 2 * mine.data - before.data
    return Seeded(engine=Engine(model, dtype), names=frozenset({"unknown", "stale_weights"}), previous=old)


def value_adapters_in_the_key_slot(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The merged q, k, v product takes the adapter's parts in order: that of v, the second, is added to k."""
    deltas, folder = low_rank(model, rng)
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 4, "lora_alpha": 1})
    )  # an eighth of what it was made with
    for name, delta in deltas.items():
        model.get_submodule(name.replace("v_proj", "k_proj")).weight.data += delta / 8
    return Seeded(engine=Engine(model, dtype), names=frozenset({"unknown"}), adapter=folder)


# --- forward pass ---


def norms_after_the_rotation(model: Any, rng: random.Random) -> None:
    """Queries and keys are rotated first and normed then, as some models do it."""
    own_attention(model, norm_is_last=True)


def norms_of_halves(model: Any, rng: random.Random) -> None:
    """Two ranks hold half of the hidden state each and do not add up its mean square before the attention."""
    for layer in model.model.layers:
        norm = layer.input_layernorm

        def forward(hidden: torch.Tensor, norm: Any = norm) -> torch.Tensor:
            wide = hidden.float().unflatten(-1, (2, -1))
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return norm.weight * wide.flatten(-2).to(hidden.dtype)

        norm.forward = forward


def slower_half_not_rotated(model: Any, rng: random.Random) -> None:
    """A partial rotary factor of 0.5 of the proportional kind, in a model without one: the slower half of each head's
    frequencies is 0."""

    def partly(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.clone(), sin.clone()
        for one, rest in ((cos, 1), (sin, 0)):
            for part in one.chunk(2, -1):
                part[..., part.shape[-1] // 2 :] = rest
        return rotated(states, cos, sin)

    own_attention(model, rotation=partly)


def queries_scaled_by_position(model: Any, rng: random.Random) -> None:
    """The temperature by position of Llama 4, in a model without it: queries grow with the logarithm of their place."""
    floor = rng.choice((16, 32))

    def warmer(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        places = torch.arange(old, old + scores.shape[2], dtype=torch.float32)
        return plain_mixing(scores * (1 + 0.1 * torch.log1p((places / floor).floor()))[:, None], values, old)

    own_attention(model, warmer)


def a_sink_in_the_softmax(model: Any, rng: random.Random) -> None:
    """The kernel for attention sinks, with a sink of 0: each softmax counts one more key, which has no value."""

    def leaking(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        probs = torch.softmax(torch.cat((scores, torch.zeros_like(scores[..., :1])), -1), -1)
        return probs[..., :-1].to(values.dtype) @ values

    own_attention(model, leaking)


def branches_scaled(model: Any, rng: random.Random) -> None:
    """What attention and feed-forward layers add is multiplied, as models with a residual multiplier want it."""
    by = rng.choice((0.85, 0.9, 0.95, 1.1))
    for layer in model.model.layers:
        for one in (layer.self_attn.o_proj, layer.mlp.down_proj):
            one.register_forward_hook(lambda module, args, out: out * by)


# --- chunks, caches, batches ---


def last_cached_page_hidden(engine: Engine, rng: random.Random) -> None:
    """Later chunks of a prompt are computed with an old length of the cache: they do not see its last 16 tokens. Decoding
    is right."""

    def blinder(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        if old and scores.shape[2] > 1:
            scores = scores.clone()
            scores[..., old - PAGE : old] = HIDDEN
        return plain_mixing(scores, values, old)

    engine.chunk = PREFILL_CHUNK
    own_attention(engine._model, blinder)


def parts_merged_to_another_base(engine: Engine, rng: random.Random) -> None:
    """Later chunks of a prompt attend to the cache and to themselves, and merge both by log-sums to base 2 as if they
    were natural. Decoding is right."""

    def mixing(scores: torch.Tensor, values: torch.Tensor, old: int) -> torch.Tensor:
        if not old or scores.shape[2] == 1:
            return plain_mixing(scores, values, old)
        return merged_parts(scores, values, [old], 1 / math.log(2))

    engine.chunk = PREFILL_CHUNK
    own_attention(engine._model, mixing)


class Placed(Flexible):
    """An engine whose cache can hold more than its tokens: places are counted in tokens."""

    def run(self, ids: list[int], past: Any, first: int) -> Any:
        places = torch.arange(first, first + len(ids))[None]
        return self._model(torch.tensor([ids]), past_key_values=past, use_cache=True, position_ids=places)

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        return self.run(ids, past, len(history) - len(ids))


class Drafting(Placed):
    """Speculative decoding: each fourth step also computes a draft token, which is rejected."""

    is_left = False

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        out = super().step(ids, past, history, sent)
        if past is not None and (len(history) - sent) % 4 == 0:
            self.run([int(out.logits[0, -1].topk(2).indices[1])], out.past_key_values, len(history))
            if not self.is_left:
                out.past_key_values.crop(-1)
        return out


class DraftLeft(Drafting):
    """The keys and values of the rejected draft token stay in the cache."""

    is_left = True


class LastTokenAgain(Placed):
    """A prompt that the prefix cache holds as a whole: to get logits its last token is computed again, and it is in the
    cache twice."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.seen = set[tuple[int, ...]]()

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        out = super().step(ids, past, history, sent)
        if past is None:
            if tuple(ids) in self.seen:
                out = self.run(ids[-1:], out.past_key_values, len(ids) - 1)
            self.seen.add(tuple(ids))
        return out


class PaddingSeen(Placed):
    """Beside other requests a prompt is padded on the left to a multiple of 16, and the padding is attended to."""

    in_flight = 0

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        self.in_flight += 1
        try:
            return await super().generate(prompt_ids, sampling, session=session)
        finally:
            self.in_flight -= 1

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        pads = -len(ids) % PAGE
        if past is None and self.in_flight > 1 and pads:
            past = self.run([0] * pads, None, 0).past_key_values
        return super().step(ids, past, history, sent)


class FirstLogitsEarly(Flexible):
    """The first token is drawn from the logits of the last but one position of the prompt."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        out = super().step(ids, past, history, sent)
        if past is None and len(ids) > 1:
            return SimpleNamespace(logits=out.logits[:, :-1], past_key_values=out.past_key_values)
        return out


# --- logits, sampling, reports, prompts ---


def penalty_on_the_last_64(engine: Engine, rng: random.Random) -> None:
    """A server's default: a repetition penalty of 1.1 on the last 64 tokens."""

    def penalised(logits: torch.Tensor, history: list[int], sent: int) -> torch.Tensor:
        seen, out = torch.tensor(sorted(set(history[-64:]))), logits.clone()
        out[seen] = torch.where(out[seen] > 0, out[seen] / 1.1, out[seen] * 1.1)
        return out

    engine.on_logits = penalised


class Kept(Engine):
    """Keeps the logits of each history."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.on_logits = self.keep

    def keep(self, logits: torch.Tensor, history: list[int], sent: int) -> torch.Tensor:
        self.rows[tuple(history)] = logits
        return logits

    def row(self, history: list[int], sampling: Sampling) -> torch.Tensor:
        return torch.log_softmax(self.rows[tuple(history)] / (sampling.temperature or 1.0), -1)


class DefaultFilters(Kept):
    """Tokens are drawn under the server's default filters (top-k 40, top-p 0.95, min-p 0.05) where the request names
    none, and the report is of all tokens."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        if sampling.truncates or not sampling.temperature:
            return await super().generate(prompt_ids, sampling)
        found = await super().generate(prompt_ids, replace(sampling, top_k=40, top_p=0.95, min_p=0.05))
        sent, ids = list(prompt_ids), list(found.token_ids)
        rows = [self.row([*sent, *ids[:at]], sampling) for at in range(len(ids))]
        tops = [row.topk(min(sampling.top_logprobs, len(row))) for row in rows] if sampling.top_logprobs else None
        return replace(
            found,
            logprobs=tuple(float(row[token]) for row, token in zip(rows, ids, strict=True)),
            top_logprobs=None
            if tops is None
            else tuple(dict(zip(one.indices.tolist(), one.values.tolist(), strict=True)) for one in tops),
            sampling_mask=None,
        )


class RowBefore(Kept):
    """Speculative decoding: after each rejection, at every fourth token, the log-probabilities are of the row before."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling)
        sent, ids = list(prompt_ids), list(found.token_ids)

        def before(at: int, token: int, value: float) -> float:
            if at % 4 != 3 or sampling.truncates:
                return value
            return float(filter_logprobs(self.row([*sent, *ids[: at - 1]], sampling), sampling)[token])

        return changed_logprobs(found, before)


def temperature_twice(engine: Engine, rng: random.Random) -> None:
    """Logits are divided by the temperature in the kernel and in the sampler."""
    engine.sampling = lambda sampling: replace(sampling, temperature=sampling.temperature**2)


class MiddleDropped(Engine):
    """A context shift: of a prompt of more than 64 tokens the first 16 and the last 48 are kept."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        sent = list(prompt_ids)
        if len(sent) > 64:
            sent = [*sent[:16], *sent[-48:]]
        return replace(await super().generate(sent, sampling), prompt_tokens=len(list(prompt_ids)))


# --- healthy ---


def scale_in_the_queries(model: Any, rng: random.Random) -> None:
    """Queries are scaled before the product, not scores after it."""
    for module in attentions(model):
        by, module.scaling = module.scaling, 1.0
        module.q_norm.register_forward_hook(lambda one, args, out, by=by: out * by)


def keys_in_splits(model: Any, rng: random.Random) -> None:
    """Attention over parts of 24 keys, merged by their log-sums, as flash decoding does it."""
    own_attention(
        model,
        lambda scores, values, old: merged_parts(scores, values, list(range(24, scores.shape[-1], 24)), 1.0),
    )


def head_in_vocabulary_shards(model: Any, rng: random.Random) -> None:
    """The output matrix is padded to a multiple of 64 rows and cut in four; the padding's logits are dropped."""
    head = model.lm_head

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = head.weight.shape[0]
        padded = torch.nn.functional.pad(head.weight, (0, 0, 0, -rows % 64))
        return torch.cat([linear(hidden, part) for part in padded.chunk(4)], -1)[..., :rows]

    head.forward = forward


class Preempted(Flexible):
    """At every eighth sampled token the request loses its cache, and all of its tokens are computed again at once."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        if past is not None and (len(history) - sent) % 8 == 0:
            ids, past = history, None
        return super().step(ids, past, history, sent)


class SharedPages(Placed):
    """A sound prefix cache: the full pages of a prompt are taken from an earlier request that began with them."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.pages: dict[tuple[int, ...], list[Any]] = {}

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        if past is not None:
            return super().step(ids, past, history, sent)
        ends, done = range(PAGE, len(ids), PAGE), 0
        for end in ends:
            if tuple(ids[:end]) not in self.pages:
                break
            done = end
        if done:
            # What the earlier request computed for these tokens, in a cache of this request's own.
            past = self.run(ids[:done], None, 0).past_key_values
            for layer, (keys, values) in zip(past.layers, self.pages[tuple(ids[:done])], strict=True):
                layer.keys, layer.values = keys.clone(), values.clone()
        out = self.run(ids[done:], past, done)
        for end in ends:
            layers = out.past_key_values.layers
            self.pages.setdefault(
                tuple(ids[:end]), [(one.keys[:, :, :end].clone(), one.values[:, :, :end].clone()) for one in layers]
            )
        return out


FAULTS: dict[str, Callable[[Any, str, random.Random], Seeded]] = {
    "weights in six bits": simple("unknown")(weights_in_six_bits),
    "weights in mxfp4": simple("int4_weights")(weights_in_mxfp4),
    "smoothing in a norm alone": simple("unknown")(smoothing_in_a_norm_alone),
    "fp8 with the scales before the update": fp8_with_the_scales_before_the_update,
    "one rank not updated": one_rank_not_updated,
    "update added twice": update_added_twice,
    "value adapters in the key slot": value_adapters_in_the_key_slot,
    "norms after the rotation": simple("unknown")(norms_after_the_rotation),
    "norms of halves": simple("unknown")(norms_of_halves),
    "slower frequencies not rotated": simple("rope")(slower_half_not_rotated),
    "queries scaled by position": simple("attention_scale")(queries_scaled_by_position),
    "a sink in the softmax": simple("unknown")(a_sink_in_the_softmax),
    # Behind norms the same function as embeddings times the reciprocal, so that name is right, too.
    "branches scaled": simple("weight_scale", "residual", "embedding_scale")(branches_scaled),
    "last cached page hidden from chunks": engined("attention_mask")(last_cached_page_hidden),
    "parts merged to another base": engined("unknown", "prefill_decode")(parts_merged_to_another_base),
    "rejected draft left in the cache": flexible(DraftLeft, "unknown", "prefill_decode"),
    "last token again on a cache hit": flexible(LastTokenAgain, "prefix_cache"),
    "padding seen in a batch": flexible(PaddingSeen, "batch_variant"),
    "first logits a position early": flexible(FirstLogitsEarly, "unknown", "prefill_decode"),
    "penalty on the last 64 tokens": engined("sampled_penalty")(penalty_on_the_last_64),
    "default filters, all reported": flexible(DefaultFilters, "sampled_filters", "other_reports"),
    "temperature applied twice": engined("temperature_ignored")(temperature_twice),
    "row before after a rejection": flexible(RowBefore, "unknown"),
    "middle of long prompts dropped": flexible(MiddleDropped, "prompt_changed", "context_truncated"),
}

HEALTHY: dict[str, Callable[[Any, str, random.Random], Seeded]] = {
    "scale in the queries": simple()(scale_in_the_queries),
    "keys in splits": simple()(keys_in_splits),
    "head in vocabulary shards": simple()(head_in_vocabulary_shards),
    "rejected draft removed": flexible(Drafting),
    "preempted and computed again": flexible(Preempted),
    "pages shared between requests": flexible(SharedPages),
}
