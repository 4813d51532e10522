"""A fourth set, written by someone who had not read the doctor, its document or the other sets' faults: how engines and
loaders go wrong in practice, and healthy engines that add up in another order.

Each fault was fixed in plain words before the names were looked up.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from tests.doctor.reported import PRODUCTS, Engine, Seeded, WideSums, attentions, engined, simple, trained
from tokentrue.types import Completion, Ids, Sampling

PAGE = 16
HIDDEN = -1e30


class Flexible(Engine):
    """An engine whose prefill and decode steps a fault can replace: `step(ids, past, history, sent)`."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        return self._model(torch.tensor([ids]), past_key_values=past, use_cache=True)

    @torch.no_grad()
    def _forward(self, inputs: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        ids = inputs["input_ids"][0].tolist()
        history = ids if cache is None else [*cache["ids"], *ids]
        sent = len(ids) if cache is None else cache["sent"]
        with WideSums() if self.rounded else nullcontext():
            out = self.step(ids, None if cache is None else cache["past"], history, sent)
        logits = out.logits[0, -1].float()
        return self.on_logits(logits, history, sent), {"ids": history, "sent": sent, "past": out.past_key_values}

    def masked(self, ids: list[int], past: Any, hidden: torch.Tensor) -> Any:
        mask = torch.zeros(1, 1, *hidden.shape, dtype=self._model.dtype).masked_fill(hidden, HIDDEN)
        return self._model(torch.tensor([ids]), past_key_values=past, use_cache=True, attention_mask=mask)


def flexible(kind: type[Engine], *names: str) -> Callable[[Any, str, random.Random], Seeded]:
    return lambda model, dtype, rng: Seeded(engine=kind(model, dtype), names=frozenset(names))


def a_layer(model: Any, rng: random.Random) -> Any:
    return rng.choice(list(model.model.layers))


def untied_head(model: Any, weight: torch.Tensor) -> None:
    """The output matrix is another tensor than the embedding."""
    model.lm_head.weight = torch.nn.Parameter(weight.clone())
    model.config.tie_word_embeddings = False


# --- weights ---


def gate_and_up_swapped(model: Any, rng: random.Random) -> None:
    """One layer's merged gate_up matrix was loaded in the wrong order."""
    mlp = a_layer(model, rng).mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def rows_permuted_for_interleaved_rope(model: Any, rng: random.Random) -> None:
    """A converter permuted the rows of q and k for an interleaved rope (as GGUF files are), the engine rotates halves."""
    for attention in attentions(model):
        for linear in (attention.q_proj, attention.k_proj):
            rows, columns = linear.weight.shape
            size = attention.head_dim
            weight = linear.weight.data.view(rows // size, 2, size // 2, columns)
            linear.weight.data = weight.transpose(1, 2).reshape(rows, columns).clone()


def layers_out_of_order(model: Any, rng: random.Random) -> None:
    """Two neighbouring layers' weights are swapped: pipeline stages mapped wrongly."""
    first = rng.randrange(len(model.model.layers) - 1)
    one, other = model.model.layers[first], model.model.layers[first + 1]
    weights = copy.deepcopy(one.state_dict())
    one.load_state_dict(other.state_dict())
    other.load_state_dict(weights)


def output_shards_swapped(model: Any, rng: random.Random) -> None:
    """One layer's output projection has its two tensor-parallel shards the wrong way round."""
    linear = a_layer(model, rng).self_attn.o_proj
    linear.weight.data = torch.cat(linear.weight.data.chunk(2, dim=1)[::-1], dim=1)


def residual_after_the_norm(model: Any, rng: random.Random) -> None:
    """A fused add-and-norm hands on the normed state as the residual in one layer."""
    layer = a_layer(model, rng)

    def forward(hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        normed = layer.input_layernorm(hidden_states)
        state = normed + layer.self_attn(hidden_states=normed, **given)[0]
        return state + layer.mlp(layer.post_attention_layernorm(state))

    layer.forward = forward


def special_rows_not_loaded(model: Any, rng: random.Random) -> None:
    """The rows of the added tokens (ids 0 to 8), in embedding and output, are their fresh value: the mean of all rows."""
    weight = model.model.embed_tokens.weight.data
    weight[:9] = weight[9:].mean(0)


def head_not_tied_again(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """After an update the embedding is new, and the output matrix, a copy, is still the old one."""
    old = trained(model, rng, 0.05)
    untied_head(model, old.lm_head.weight.data)
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def adapter_at_half_scale(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The trainer's step is added with half its factor (alpha over rank read wrongly)."""
    old = trained(model, rng, 0.05)
    for mine, before in zip(model.parameters(), old.parameters(), strict=True):
        mine.data = (mine.data + before.data) / 2
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights", "unknown"}), previous=old)


def mlps_not_updated(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The update reaches attention, embedding and norms; the merged gate_up and down names did not match."""
    old = trained(model, rng, 0.05)
    for mine, before in zip(model.model.layers, old.model.layers, strict=True):
        mine.mlp.load_state_dict(before.mlp.state_dict())
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


# --- positions, attention ---


class ChunkPositionsRestart(Flexible):
    """Every later chunk of a chunked prefill counts its positions from 0; decoding counts right."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        if past is not None:
            return super().step(ids, past, history, sent)
        out = None
        for start in range(0, len(ids), PAGE):
            part = torch.tensor([ids[start : start + PAGE]])
            places = torch.arange(part.shape[1])[None]
            out = self._model(part, past_key_values=past, use_cache=True, position_ids=places)
            past = out.past_key_values
        return out


class PromptNotCausal(Flexible):
    """The prompt's positions see one another in both directions."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        if past is not None:
            return super().step(ids, past, history, sent)
        return self.masked(ids, past, torch.zeros(len(ids), len(ids), dtype=torch.bool))


def window_in_one_layer(model: Any, rng: random.Random) -> None:
    """One layer is taken for a sliding-window layer."""
    attention, window = a_layer(model, rng).self_attn, rng.choice((8, 12, 16))

    def narrow(module: Any, args: Any, given: dict[str, Any]) -> Any:
        new = given["hidden_states"].shape[1]
        past = given.get("past_key_values")
        old = 0 if past is None else past.get_seq_length(module.layer_idx)
        far = torch.arange(old, old + new)[:, None] - torch.arange(old + new)[None]
        mask = torch.zeros(1, 1, new, old + new, dtype=given["hidden_states"].dtype)
        return args, given | {"attention_mask": mask.masked_fill((far < 0) | (far >= window), HIDDEN)}

    attention.register_forward_pre_hook(narrow, with_kwargs=True)


class FirstTokenEvicted(Flexible):
    """While decoding, the first position is gone from the cache."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        if past is None:
            return super().step(ids, past, history, sent)
        return self.masked(ids, past, (torch.arange(len(history)) == 0)[None])


class NewPageUnread(Flexible):
    """The decode kernel rounds the number of pages down: a page with a single token, the newest, is not read."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        if past is None or len(history) % PAGE != 1:
            return super().step(ids, past, history, sent)
        return self.masked(ids, past, (torch.arange(len(history)) == len(history) - 1)[None])


# --- quantisation, caches ---


def head_in_four_bits(model: Any, rng: random.Random) -> None:
    """The output matrix alone is in 4 bits, groups of 32."""
    weight = model.lm_head.weight.data
    groups = weight.view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 7
    untied_head(model, ((groups / scale).round().clamp(-8, 7) * scale).view_as(weight))


class ValueScaleForgotten(Flexible):
    """Decoding reads the prompt's and earlier tokens' cached values without multiplying by their scale."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        class Unscaled(DynamicCache):
            def update(self, keys: Any, values: Any, layer: int, *args: Any, **given: Any) -> Any:
                keys_all, values_all = super().update(keys, values, layer, *args, **given)
                old = values_all.shape[2] - values.shape[2]
                return keys_all, torch.cat([values_all[:, :, :old] * 0.7, values_all[:, :, old:]], dim=2)

        return super().step(ids, Unscaled() if past is None else past, history, sent)


def activations_clipped(model: Any, rng: random.Random) -> None:
    """Static 8-bit activations: the scales come from a poor calibration (random ids, 99.5 % kept), outliers are cut."""
    torch.manual_seed(rng.randrange(1 << 30))
    linears = [one for name, one in model.named_modules() if name.endswith("_proj")]
    seen: dict[Any, torch.Tensor] = {}
    hooks = [
        one.register_forward_pre_hook(lambda one, args: seen.__setitem__(one, args[0].abs().flatten().quantile(0.995)))
        for one in linears
    ]
    with torch.no_grad():
        model(torch.randint(9, model.config.vocab_size, (1, 64)))
    for hook in hooks:
        hook.remove()

    def quantise(one: Any, args: Any) -> Any:
        scale = float(seen[one]) / 127
        return ((args[0] / scale).round().clamp(-127, 127) * scale,)

    for one in linears:
        one.register_forward_pre_hook(quantise)


class OldPrefix(Flexible):
    """The prompt's full pages were cached before the update; the rest runs with the new weights."""

    old: Any = None

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        full = (len(ids) - 1) // PAGE * PAGE
        if past is not None or not full:
            return super().step(ids, past, history, sent)
        past = self.old(torch.tensor([ids[:full]]), use_cache=True).past_key_values
        return super().step(ids[full:], past, history, sent)


def prefix_cached_before_the_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    engine, old = OldPrefix(model, dtype), trained(model, rng, 0.05)
    engine.old = copy.deepcopy(old).to(model.dtype)
    return Seeded(engine=engine, names=frozenset({"prefix_cache"}), previous=old)


class PageOfAnotherRequest(Flexible):
    """A page freed too early: decoding finds another request's keys and values in one page of the prompt, every third
    request."""

    count = 0
    left: Any = None

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        out = super().step(ids, past, history, sent)
        if past is None and len(ids) > PAGE:
            self.count += 1
            layers = out.past_key_values.layers
            first = (len(ids) // 2) // PAGE * PAGE
            before, self.left = (
                self.left,
                [(one.keys[:, :, :PAGE].clone(), one.values[:, :, :PAGE].clone()) for one in layers],
            )
            if before is not None and self.count % 3 == 0:
                for one, (keys, values) in zip(layers, before, strict=True):
                    size = min(PAGE, len(ids) - first)
                    one.keys[:, :, first : first + size] = keys[:, :, :size]
                    one.values[:, :, first : first + size] = values[:, :, :size]
        return out


# --- logits, reports, prompts ---


def changed_logprobs(found: Completion, change: Callable[[int, int, float], float]) -> Completion:
    """`change(place, id, logprob)` on the sampled and the top ones."""
    top = found.top_logprobs
    return replace(
        found,
        logprobs=tuple(
            change(at, token, value)
            for at, (token, value) in enumerate(zip(list(found.token_ids), found.logprobs, strict=True))
        ),
        top_logprobs=None
        if top is None
        else tuple({token: change(at, token, value) for token, value in row.items()} for at, row in enumerate(top)),
    )


def first_tokens_never_end(engine: Engine, rng: random.Random) -> None:
    """A min_tokens default: the end-of-turn id cannot come among the first tokens."""
    least = rng.choice((16, 32, 64))

    def ban(logits: torch.Tensor, history: list[int], sent: int) -> torch.Tensor:
        logits = logits.clone()
        if len(history) - sent < least:
            logits[2] = -math.inf
        return logits

    engine.on_logits = ban


class VocabularyPadding(Engine):
    """The softmax that the report uses counts the 45 zero rows that pad the vocabulary to a multiple of 64."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.sums: dict[tuple[int, ...], torch.Tensor] = {}
        self.on_logits = self.keep

    def keep(self, logits: torch.Tensor, history: list[int], sent: int) -> torch.Tensor:
        self.sums[tuple(history)] = logits
        return logits

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling)
        ids, heat = list(found.token_ids), sampling.temperature or 1.0
        lost = []
        for at in range(len(ids)):
            logits = self.sums[(*list(prompt_ids), *ids[:at])]
            total = float(torch.logsumexp(logits / heat, -1))
            lost.append(math.log1p((-logits.numel() % 64) * math.exp(-total)))
        return changed_logprobs(found, lambda at, token, value: value - lost[at])


class DraftsReported(Engine):
    """Speculative decoding: of every four tokens, the first three carry the draft model's log-probability. The draft is
    the model without its middle layer."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.draft = copy.deepcopy(self._model)
        del self.draft.model.layers[1]
        for at, layer in enumerate(self.draft.model.layers):
            layer.self_attn.layer_idx = at
        self.draft.config.num_hidden_layers = len(self.draft.model.layers)

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(prompt_ids, sampling)
        prompt, ids = list(prompt_ids), list(found.token_ids)
        with torch.no_grad(), WideSums() if self.rounded else nullcontext():
            logits = self.draft(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        drafted = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), -1)
        return changed_logprobs(
            found, lambda at, token, value: float(drafted[at, token]) if at % 4 != 3 and value > -math.inf else value
        )


def logarithms_to_base_ten(engine: Engine, rng: random.Random) -> None:
    engine.report = lambda found, sent: changed_logprobs(found, lambda at, token, value: value / math.log(10))


class LastNewlineStripped(Engine):
    """The server strips white space from the end of the prompt: its last newline token (id 207) is lost."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        sent = list(prompt_ids)
        while len(sent) > 1 and sent[-1] == 207:
            sent.pop()
        return replace(await super().generate(sent, sampling), prompt_tokens=len(list(prompt_ids)))


# --- healthy ---


class InABatch(Flexible):
    """Each step is computed with two other requests' rows beside it."""

    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        rows = [ids, ids[::-1], [9 + (one * 7) % 600 for one in ids]]
        out = self._model(torch.tensor(rows), past_key_values=past, use_cache=True)
        return out


class DoubleSums(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))

        def wide(value: Any) -> Any:
            return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        kind = args[0].dtype
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()}).to(kind)


class InDoubleSums(Flexible):
    def step(self, ids: list[int], past: Any, history: list[int], sent: int) -> Any:
        with DoubleSums():
            return super().step(ids, past, history, sent)


class Slice(torch.nn.Module):
    """Some rows of one merged product."""

    def __init__(self, merged: torch.nn.Linear, start: int, end: int) -> None:
        super().__init__()
        self.merged, self.start, self.end = merged, start, end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged(x)[..., self.start : self.end]


def merge(owner: Any, *names: str) -> None:
    parts = [getattr(owner, name).weight.data for name in names]
    merged = torch.nn.Linear(parts[0].shape[1], sum(map(len, parts)), bias=False)
    merged.weight.data = torch.cat(parts)
    start = 0
    for name, part in zip(names, parts, strict=True):
        setattr(owner, name, Slice(merged, start, start + len(part)))
        start += len(part)


def fused_projections(model: Any, rng: random.Random) -> None:
    for layer in model.model.layers:
        merge(layer.self_attn, "q_proj", "k_proj", "v_proj")
        merge(layer.mlp, "gate_proj", "up_proj")


def eager_attention(model: Any, rng: random.Random) -> None:
    model.set_attn_implementation("eager")


def chunked_prefill(engine: Engine, rng: random.Random) -> None:
    engine.chunk = PAGE


def no_cache(engine: Engine, rng: random.Random) -> None:
    engine.recompute = True


FAULTS: dict[str, Callable[[Any, str, random.Random], Seeded]] = {
    "gate and up swapped in a layer": simple("projection_order")(gate_and_up_swapped),
    "q and k rows permuted for interleaved rope": simple("rope", "projection_order")(
        rows_permuted_for_interleaved_rope
    ),
    "two layers out of order": simple("layer_order")(layers_out_of_order),
    "output projection shards swapped": simple("projection_order")(output_shards_swapped),
    "residual taken after the norm": simple("unknown")(residual_after_the_norm),
    "special token rows not loaded": simple("unknown")(special_rows_not_loaded),
    "output matrix not tied again": head_not_tied_again,
    "adapter at half scale": adapter_at_half_scale,
    "feed-forward layers not updated": mlps_not_updated,
    "chunk positions restart": flexible(ChunkPositionsRestart, "unknown", "prefill_decode"),
    "prompt not causal": flexible(PromptNotCausal, "unknown", "prefill_decode"),
    "window in one layer": simple("sliding_window")(window_in_one_layer),
    "first token evicted while decoding": flexible(FirstTokenEvicted, "unknown", "prefill_decode"),
    "new page unread": flexible(NewPageUnread, "unknown", "prefill_decode"),
    "output matrix in four bits": simple("int4_weights")(head_in_four_bits),
    "value scale forgotten": flexible(ValueScaleForgotten, "unknown", "prefill_decode"),
    "static activations clipped": simple("unknown")(activations_clipped),
    "prefix cached before the update": prefix_cached_before_the_update,
    "page of another request": flexible(PageOfAnotherRequest, "unstable"),
    "first tokens never end": engined("stop_banned")(first_tokens_never_end),
    "vocabulary padding": flexible(VocabularyPadding, "vocab_padding"),
    "draft logprobs reported": flexible(DraftsReported, "unknown"),
    "logarithms to base ten": engined("unknown")(logarithms_to_base_ten),
    "last newline stripped": flexible(LastNewlineStripped, "prompt_changed"),
}

HEALTHY: dict[str, Callable[[Any, str, random.Random], Seeded]] = {
    "in a batch": flexible(InABatch),
    "eager attention": simple()(eager_attention),
    "chunked prefill": engined()(chunked_prefill),
    "no cache": engined()(no_cache),
    "float64 sums": flexible(InDoubleSums),
    "fused projections": simple()(fused_projections),
}
