"""A third set of engines with faults: those beside a hypothesis, where a wrong name is likeliest, and twenty healthy ones.

`python -m tests.doctor.matrix [MODEL] [DTYPE] --set third` plays it. The author of the hypotheses wrote it to find wrong
names: where no hypothesis computes the fault, `unknown` is right, and so is the name of one of two faults.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from tests.doctor.reported import Engine, Seeded, WideSums, attentions, engined, quantised, set_all, simple, trained
from tests.doctor.second_set import stale
from tokentrue.ids import TokenIds
from tokentrue.providers.hf import filter_logprobs
from tokentrue.types import Completion, Ids, Sampling

Make = Callable[[Any, str, random.Random], Seeded]


def integers(top: int, dim: int = -1, low: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(s: torch.Tensor) -> torch.Tensor:
        step = (s.abs().amax(dim, keepdim=True) / top).clamp(min=1e-12)
        return torch.clamp(torch.round(s / step), -top if low is None else low, top) * step

    return rounded


def grouped(size: int, rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda s: torch.cat([rounding(part) for part in s.split(size, dim=-1)], dim=-1)


def with_zero_point(levels: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(s: torch.Tensor) -> torch.Tensor:
        low, high = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)
        step = ((high - low) / levels).clamp(min=1e-12)
        return torch.round((s - low) / step) * step + low

    return rounded


def cache(rounding: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Make:
    def change(engine: Engine, rng: random.Random) -> None:
        engine.store = rounding

    return engined(*names)(change)


def weights(rounding: Callable[[torch.Tensor], torch.Tensor], *names: str, match: str = "proj") -> Make:
    def change(model: Any, rng: random.Random) -> None:
        quantised(model, rounding, match)

    return simple(*names)(change)


def logits(change: Callable[..., torch.Tensor], *names: str) -> Make:
    """`change(logits, ids, sent)` on the last position's logits."""

    def apply(engine: Engine, rng: random.Random) -> None:
        engine.on_logits = change

    return engined(*names)(apply)


def modules(change: Callable[[Any, random.Random], Any], *names: str) -> Make:
    def apply(model: Any, rng: random.Random) -> None:
        change(model, rng)

    return simple(*names)(apply)


def hooked(module: Any, change: Callable[[Any, Any], Any]) -> None:
    module.register_forward_hook(lambda _, inputs, output: change(inputs, output))


def narrow(value: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return value.to(dtype).to(value.dtype)


def raw_report(engine: Engine) -> None:
    """Reports are of temperature 1 and without filters, whatever the draws came from."""

    def report(found: Completion, sent: list[int]) -> Completion:
        with torch.no_grad(), WideSums() if engine.rounded else nullcontext():
            rows = engine._model(torch.tensor([[*sent, *found.token_ids]])).logits[0, len(sent) - 1 : -1].float()
        raw = rows.log_softmax(-1)
        tops = found.top_logprobs and tuple(
            {k: float(row[k]) for k in top} for row, top in zip(raw, found.top_logprobs, strict=True)
        )
        values = tuple(float(row[token]) for row, token in zip(raw, found.token_ids, strict=True))
        return replace(found, logprobs=values, top_logprobs=tops)

    engine.report = report


def drawn(change: Callable[..., torch.Tensor], *names: str) -> Make:
    """In the draws alone."""

    def apply(engine: Engine, rng: random.Random) -> None:
        engine.on_logits = change
        raw_report(engine)

    return engined("raw_logprobs", *names)(apply)


def filtered(**how: Any) -> Callable[..., torch.Tensor]:
    return lambda rows, ids, sent: filter_logprobs(rows.log_softmax(0), Sampling(**how))


def cold_and_filtered(by: float, **how: Any) -> Callable[..., torch.Tensor]:
    return lambda rows, ids, sent: filter_logprobs((rows / by).log_softmax(0), Sampling(**how))


def reported(change: Callable[[float], float]) -> Make:
    """Another number for every log-probability, in the lists too."""

    def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
        engine = Engine(model, dtype)

        def report(found: Completion, sent: list[int]) -> Completion:
            tops = found.top_logprobs and tuple({k: change(v) for k, v in top.items()} for top in found.top_logprobs)
            return replace(found, logprobs=tuple(map(change, found.logprobs)), top_logprobs=tops)

        engine.report = report
        return Seeded(engine=engine, names=frozenset({"unknown", "wire_precision", "sampled_temperature"}))

    return make


class Edited(Engine):
    """`edit` changes the ids that were sent."""

    edit: Callable[[list[int]], list[int]]

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(self.edit(list(prompt_ids)), sampling)
        return replace(found, prompt_tokens=len(prompt_ids))


def sent(edit: Callable[[list[int]], list[int]], *names: str) -> Make:
    def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
        engine = Edited(model, dtype)
        engine.edit = edit
        return Seeded(engine=engine, names=frozenset(names))

    return make


class WarmPrefix(Engine):
    """A prompt that was seen before decodes one position off."""

    def __init__(self, model: Any, dtype: str) -> None:
        super().__init__(model, dtype)
        self.seen: set[bytes] = set()

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        key = TokenIds(prompt_ids).sha256()
        self.shift = int(key in self.seen)
        self.seen.add(key)
        return await super().generate(prompt_ids, sampling)


class Boundary(Engine):
    """After the first 64 tokens of a prompt, the last one before the boundary cannot be seen."""

    @torch.no_grad()
    def _forward(self, inputs: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        ids = inputs["input_ids"][0].tolist()
        history = ids if cache is None else [*cache["ids"], *ids]
        blank = torch.full((len(history), len(history)), -1e30).triu(1)
        blank[64:, 63:64] = -1e30
        with WideSums() if self.rounded else nullcontext():
            mask = blank.to(self._model.dtype)[None, None]
            rows = self._model(torch.tensor([history]), attention_mask=mask, use_cache=False).logits[0, -1]
        return rows.float(), {"ids": history, "sent": 0}


def of(kind: type[Engine], *names: str) -> Make:
    return lambda model, dtype, rng: Seeded(engine=kind(model, dtype), names=frozenset(names))


def low_rank(model: Any, rng: random.Random) -> tuple[dict[str, torch.Tensor], Path]:
    """An adapter of the query and value projections: what it adds to each, and its directory."""
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(rng.randrange(1 << 30))
    deltas, tensors = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            out, given = module.weight.shape
            a, b = torch.randn(4, given) * 0.1, torch.randn(out, 4) * 0.1
            tensors |= {f"base_model.model.{name}.lora_{k}.weight": t for k, t in (("A", a), ("B", b))}
            deltas[name] = 2.0 * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    return deltas, folder


def adapted(change: Callable[[str, random.Random], float], *names: str) -> Make:
    """`change` is the engine's multiple of each delta."""

    def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
        deltas, folder = low_rank(model, rng)
        for name, delta in deltas.items():
            model.get_submodule(name).weight.data += change(name, rng) * delta
        return Seeded(engine=Engine(model, dtype), names=frozenset(names), adapter=folder)

    return make


def one_head_zeroed(model: Any, rng: random.Random) -> None:
    module = rng.choice(attentions(model))
    module.o_proj.weight.data[:, : module.head_dim] = 0


def swap_gate_and_up(model: Any, rng: random.Random) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def scale_one_layer(model: Any, rng: random.Random) -> None:
    rng.choice(attentions(model)).scaling *= 1.4


def scale_each_layer(model: Any, rng: random.Random) -> None:
    for module in attentions(model):
        module.scaling *= rng.uniform(0.7, 1.4)


def half_rotary(model: Any, rng: random.Random) -> None:
    """Half of the dimensions turn."""
    own = model.model.rotary_emb.inv_freq
    own[len(own) // 2 :] = 0


def epsilon_of_one_layer(model: Any, rng: random.Random) -> None:
    layer = rng.choice(model.model.layers)
    set_all([m for m in layer.modules() if hasattr(m, "variance_epsilon")], "variance_epsilon", 1e-2)


def attention_skipped(model: Any, rng: random.Random) -> None:
    rng.choice(attentions(model)).o_proj.weight.data.zero_()


def layer_twice(model: Any, rng: random.Random) -> None:
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda hidden, *args, **kwargs: own(own(hidden, *args, **kwargs), *args, **kwargs)


def final_norm_missing(model: Any, rng: random.Random) -> None:
    model.model.norm.weight.data.fill_(1.0)


def noise(model: Any, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(99))
    for parameter in model.parameters():
        parameter.data *= 1 + 2**-9 * torch.randn_like(parameter)


def residual_in_bfloat16(model: Any, rng: random.Random) -> None:
    for layer in model.model.layers:
        hooked(layer, lambda inputs, output: narrow(output))


def head_in_bfloat16(model: Any, rng: random.Random) -> None:
    hooked(model.lm_head, lambda inputs, output: narrow(linear(narrow(inputs[0]), narrow(model.lm_head.weight))))


def activations_int8(model: Any, rng: random.Random) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "proj" in name:
            module.register_forward_pre_hook(lambda _, inputs: (integers(127)(inputs[0]),))


def values_alone(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The values of the cache in float8, the keys exact."""
    for module in attentions(model):
        hooked(module.v_proj, lambda inputs, output: narrow(output, torch.float8_e4m3fn))
    return Seeded(engine=Engine(model, dtype), names=frozenset({"fp8_kv_cache", "unknown"}))


def first_tensors(*ends: str) -> Callable[[Any, random.Random], list[Any]]:
    return lambda model, rng: [next(m for n, m in reversed(list(model.named_modules())) if n.endswith(e)) for e in ends]


def stale_embedding_fresh_head(model: Any, dtype: str, rng: random.Random) -> Seeded:
    old = trained(model, rng)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
    model.model.embed_tokens.weight = torch.nn.Parameter(old.model.embed_tokens.weight.data.clone())
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def stale_norm(model: Any, dtype: str, rng: random.Random) -> Seeded:
    old = copy.deepcopy(trained(model, rng))
    torch.manual_seed(rng.randrange(99))
    for name, parameter in old.named_parameters():
        if "norm" in name:
            parameter.data *= 1 + 0.02 * torch.randn_like(parameter)
    layer = rng.randrange(len(model.model.layers))
    norm = "input_layernorm"
    getattr(model.model.layers[layer], norm).load_state_dict(getattr(old.model.layers[layer], norm).state_dict())
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def half_of_the_update(model: Any, dtype: str, rng: random.Random) -> Seeded:
    old = trained(model, rng)
    for new, before in zip(model.parameters(), old.parameters(), strict=True):
        new.data = (new.data + before.data) / 2
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def another_old_version(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """Weights of two versions ago, where --previous is the last one."""
    old = trained(model, rng)
    return Seeded(engine=Engine(trained(old, rng), dtype), names=frozenset({"unknown"}), previous=old)


def rope_and_filter(engine: Engine, rng: random.Random) -> None:
    own = engine._model.model.rotary_emb
    own.inv_freq = own.inv_freq * 0.8
    engine.on_logits = filtered(top_k=5)


def scale_and_cache(engine: Engine, rng: random.Random) -> None:
    for module in attentions(engine._model):
        module.scaling *= 1.2
    engine.store = integers(127)


def int8_and_stale(model: Any, dtype: str, rng: random.Random) -> Seeded:
    case = stale(lambda m, r: [m.model.layers[1]])(model, dtype, rng)
    quantised(model, integers(127))
    return replace(case, names=frozenset({"stale_weights", "int8_weights", "unknown"}))


def typical(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    """Locally typical sampling at 0.9."""
    logp = rows.log_softmax(0)
    strange = (logp + (logp.exp() * logp).sum()).abs()
    order = strange.argsort()
    before = logp.exp()[order].cumsum(0) - logp.exp()[order]
    return rows.index_fill(0, order[before >= 0.9], -torch.inf)


def biased(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    return rows + torch.where(torch.arange(len(rows)) % 97 == 5, 2.0, 0.0)


def frequency(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    return rows - 0.3 * torch.bincount(torch.tensor(ids[sent:], dtype=torch.long), minlength=len(rows))


def least_length(rows: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
    """No stop token among the first ten."""
    return rows.index_fill(0, torch.tensor([2]), -torch.inf) if len(ids) - sent < 10 else rows


E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn
FAULTS: dict[str, Make] = {
    "int4 KV, groups of 16 with zero points": cache(grouped(16, with_zero_point(15)), "int4_kv_cache"),
    "int4 KV per tensor": cache(lambda s: torch.round(s / (s.abs().max() / 7)) * (s.abs().max() / 7), "int4_kv_cache"),
    "int3 KV": cache(integers(3), "unknown"),
    "int8 KV in groups of 8": cache(grouped(8, integers(127)), "int8_kv_cache", "unknown"),
    "int8 KV per channel": cache(integers(127, -2), "int8_kv_cache", "unknown"),
    "int8 KV with zero points": cache(with_zero_point(255), "int8_kv_cache", "unknown"),
    "e5m2 KV": cache(lambda s: narrow(s, E5M2), "fp8_kv_cache"),
    "fp8 values alone": values_alone,
    "int3 weights": weights(grouped(32, integers(3)), "unknown"),
    "int6 weights": weights(integers(31), "unknown"),
    "int8 weights of the MLPs": weights(integers(127), "int8_weights", match="mlp"),
    "int4 weights per row, one part": weights(integers(7), "int4_weights", "unknown", match="down_proj"),
    "e5m2 weights per row": weights(
        lambda w: narrow(w / w.abs().amax(-1, keepdim=True), E5M2) * w.abs().amax(-1, keepdim=True),
        "fp8_weights", "unknown",
    ),
    "fp4 weights without groups": weights(lambda w: narrow(w * 64, E5M2) / 64, "fp8_weights", "unknown"),
    "int8 activations": modules(activations_int8, "unknown"),
    "temperature and top-p": logits(cold_and_filtered(0.8, top_p=0.9), "sampled_temperature", "sampled_filters", "unknown"),
    "temperature and top-p, drawn alone": drawn(cold_and_filtered(0.7, top_p=0.9), "temperature_ignored", "sampled_filters"),
    "cold draws, raw reports": drawn(lambda rows, ids, sent: rows / 0.5, "temperature_ignored"),
    "top-k draws, raw reports": drawn(filtered(top_k=4), "sampled_filters"),
    "min-p draws, raw reports": drawn(filtered(min_p=0.15), "sampled_filters", "unknown"),
    "typical sampling": logits(typical, "unknown", "sampled_filters"),
    "a bias on seven tokens": logits(biased, "unknown"),
    "frequency penalty": logits(frequency, "sampled_penalty"),
    "no stop before ten tokens": logits(least_length, "stop_banned", "unknown"),
    "common logarithms": reported(lambda value: value / 2.302585),
    "log-probabilities cut at -4": reported(lambda value: max(value, -4.0)),
    "rope base and top-k": engined("rope", "sampled_filters", "unknown")(rope_and_filter),
    "attention scale and int8 KV": engined("attention_scale", "int8_kv_cache", "unknown")(scale_and_cache),
    "int8 weights and a stale layer": int8_and_stale,
    "one head zeroed": modules(one_head_zeroed, "unknown"),
    "gate and up exchanged": modules(swap_gate_and_up, "unknown", "projection_order"),
    "attention scale of one layer": modules(scale_one_layer, "attention_scale", "unknown"),
    "attention scale by layer": modules(scale_each_layer, "attention_scale", "unknown"),
    "half of the rotary dimensions": modules(half_rotary, "rope", "unknown"),
    "norm epsilon of one layer": modules(epsilon_of_one_layer, "norm_epsilon", "unknown"),
    "attention of one layer skipped": modules(attention_skipped, "layer_skipped", "unknown"),
    "a layer twice": modules(layer_twice, "unknown"),
    "last norm without weights": modules(final_norm_missing, "unknown", "norm_missing"),
    "noise of the size of bfloat16": modules(noise, "unknown"),
    "residual stream in bfloat16": modules(residual_in_bfloat16, "unknown", "dtype_bfloat16"),
    "head in bfloat16": modules(head_in_bfloat16, "head_dtype", "dtype_bfloat16"),
    "KV cache in bfloat16": cache(narrow, "dtype_kv_cache"),
    "adapter at half its scale": adapted(lambda name, rng: 0.5, "adapter_missing"),
    "adapter in all layers but one": adapted(lambda name, rng: float("layers.1." not in name), "adapter_missing", "unknown"),
    "another adapter": adapted(lambda name, rng: rng.uniform(-1, 2), "unknown"),
    "stale embedding, fresh head, previous given": stale_embedding_fresh_head,
    "stale down projection, previous given": stale(first_tensors("layers.1.mlp.down_proj")),
    "stale query projection, previous given": stale(first_tensors("layers.2.self_attn.q_proj")),
    "stale key and value, previous given": stale(first_tensors("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj")),
    "two stale layers, previous given": stale(lambda model, rng: [model.model.layers[0], model.model.layers[2]]),
    "stale norm, previous given": stale_norm,
    "stale attention, previous given": stale(lambda model, rng: list(attentions(model))),
    "half of the update, previous given": half_of_the_update,
    "two versions old, previous given": another_old_version,
    "warm prefix one position off": of(WarmPrefix, "prefix_cache"),
    "boundary of a chunk": of(Boundary, "unknown"),
    "twelve first tokens dropped": sent(lambda ids: ids[12:], "prompt_changed"),
    "last three tokens dropped": sent(lambda ids: ids[:-3], "prompt_changed"),
    "last token twice": sent(lambda ids: [*ids, ids[-1]], "unknown", "prompt_changed"),
    "five tokens dropped after the second": sent(lambda ids: [*ids[:2], *ids[7:]], "prompt_changed", "unknown"),
    "a token dropped in the middle": sent(lambda ids: [*ids[: len(ids) // 2], *ids[len(ids) // 2 + 1 :]], "unknown", "prompt_changed"),
    "two first tokens": sent(lambda ids: [1, 1, *ids], "unknown", "bos_added", "prompt_changed"),
    "a system message inserted": sent(lambda ids: [*ids[:1], 40, 41, 42, 43, *ids], "unknown", "prompt_changed"),
}  # fmt: skip


class Padded(Engine):
    """Beside a longer request in one batch, padded on the left or the right, without a cache."""

    is_left = True

    @torch.no_grad()
    def _forward(self, inputs: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        ids = inputs["input_ids"][0].tolist()
        history = ids if cache is None else [*cache["ids"], *ids]
        pad = [0] * 9
        rows = [pad + history if self.is_left else history + pad, [*range(3, 12), *history]]
        mask = torch.ones(2, len(rows[0]), dtype=torch.long)
        places = torch.arange(len(rows[0])).repeat(2, 1)
        if self.is_left:
            mask[0, :9], places[0] = 0, (places[0] - 9).clamp(min=0)
        else:
            mask[0, len(history) :] = 0
        with WideSums() if self.rounded else nullcontext():
            out = self._model(torch.tensor(rows), attention_mask=mask, position_ids=places, use_cache=False).logits[0]
        return out[-1 if self.is_left else len(history) - 1].float(), {"ids": history}


class RightPadded(Padded):
    is_left = False


def fuse(model: Any) -> None:
    """One product for query, key and value, and one for gate and up, as fused kernels have them."""

    def share(owner: Any, names: tuple[str, ...]) -> None:
        parts = [getattr(owner, name) for name in names]
        sizes, kept = [part.weight.shape[0] for part in parts], dict[str, torch.Tensor]()

        def forward(hidden: torch.Tensor, at: int) -> torch.Tensor:
            if at == 0:
                bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
                kept["all"] = linear(hidden, torch.cat([part.weight for part in parts]), bias)
            return kept["all"].split(sizes, dim=-1)[at]

        for at, part in enumerate(parts):
            part.forward = lambda hidden, at=at: forward(hidden, at)

    for layer in model.model.layers:
        share(layer.self_attn, ("q_proj", "k_proj", "v_proj"))
        share(layer.mlp, ("gate_proj", "up_proj"))


def cut_sums(model: Any) -> None:
    """Products add up in two halves, as two ranks do."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("o_proj", "down_proj")):

            def forward(hidden: torch.Tensor, module: Any = module) -> torch.Tensor:
                half = hidden.shape[-1] // 2
                first = linear(hidden[..., :half], module.weight[:, :half])
                return first + linear(hidden[..., half:], module.weight[:, half:], module.bias)

            module.forward = forward


def wide_norms(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):

            def forward(hidden: torch.Tensor, module: Any = module) -> torch.Tensor:
                wide = hidden.double()
                scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
                return (scaled * module.weight.double()).to(hidden.dtype)

            module.forward = forward


def unmerged(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The adapter beside the weights rather than in them."""
    deltas, folder = low_rank(model, rng)
    for name, delta in deltas.items():
        hooked(model.get_submodule(name), lambda i, o, d=delta: o + linear(i[0].float(), d).to(o.dtype))
    return Seeded(engine=Engine(model, dtype), names=frozenset(), adapter=folder)


def sound(change: Callable[[Engine], Any], kind: type[Engine] = Engine) -> Make:
    def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
        engine = kind(model, dtype)
        change(engine)
        return Seeded(engine=engine, names=frozenset())

    return make


def eager(engine: Engine) -> None:
    engine._model.set_attn_implementation("eager")


def more_precise(engine: Engine) -> None:
    engine._model = engine._model.float() if engine.rounded else engine._model.double()
    engine.rounded = False


HEALTHY: dict[str, Make] = {
    "plain": sound(lambda engine: None),
    "eager": sound(eager),
    "no cache": sound(lambda engine: setattr(engine, "recompute", True)),
    "eager, no cache": sound(lambda engine: (eager(engine), setattr(engine, "recompute", True))),
    "chunks of 16": sound(lambda engine: setattr(engine, "chunk", 16)),
    "chunks of 64, eager": sound(lambda engine: (eager(engine), setattr(engine, "chunk", 64))),
    "chunks of 7": sound(lambda engine: setattr(engine, "chunk", 7)),
    "left padding": sound(lambda engine: None, Padded),
    "right padding": sound(lambda engine: None, RightPadded),
    "left padding, eager": sound(eager, Padded),
    "fused products": sound(lambda engine: fuse(engine._model)),
    "fused products, eager": sound(lambda engine: (fuse(engine._model), eager(engine))),
    "sums of two ranks": sound(lambda engine: cut_sums(engine._model)),
    "sums of two ranks, fused": sound(lambda engine: (fuse(engine._model), cut_sums(engine._model))),
    "norms in float64": sound(lambda engine: wide_norms(engine._model)),
    "more precise": sound(more_precise),
    "cache in the model's dtype": sound(lambda engine: setattr(engine, "store", lambda s: s.to(engine._model.dtype))),
    "every key visible by a mask": sound(lambda engine: setattr(engine, "window", 4096)),
    "adapter merged": adapted(lambda name, rng: 1.0),
    "adapter unmerged": unmerged,
}
