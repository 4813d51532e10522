"""Engines with faults as users and maintainers of engines and trainers report them, and healthy engines that differ in
kernels alone.

Nothing here uses the doctor's simulations. Numbers (which layer, which base, which filter) come from a seeded generator.
The engine computes in float32, or in bfloat16 with float32 sums inside each product, as GPUs do.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tokentrue.providers.hf import HFProvider, filter_logprobs
from tokentrue.types import Completion, Ids, Sampling

PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.nn.functional.scaled_dot_product_attention,
}


class WideSums(TorchFunctionMode):
    """Products of a bfloat16 or float16 model add up in float32 and are rounded once, as on a GPU; all else is torch's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))

        def wide(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype.itemsize == 2 else value

        kind = args[0].dtype
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()}).to(kind)


class Engine(HFProvider):
    """The hf provider with places where a fault can be: the ids, the positions, the mask, the cache, the logits."""

    def __init__(self, model: Any, dtype: str = "float32") -> None:
        super().__init__(model)
        self.rounded = dtype != "float32"
        if self.rounded:
            model.to(getattr(torch, dtype))
        self.prefix: tuple[int, ...] = ()
        self.cut = 0  # ids dropped from the front
        self.shift = 0  # of decoding positions
        self.window = 0
        self.store: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.on_logits: Callable[[torch.Tensor, list[int], int], torch.Tensor] = lambda logits, ids, sent: logits
        self.sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling
        self.report: Callable[[Completion, list[int]], Completion] | None = None
        self.recompute = False
        self.chunk = 0

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        sent = [*self.prefix, *list(prompt_ids)[self.cut :]]
        found = await super().generate(sent, self.sampling(sampling))
        found = replace(found, prompt_tokens=len(prompt_ids))
        return found if self.report is None else self.report(found, sent)

    @torch.no_grad()
    def _forward(self, inputs: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        ids = inputs["input_ids"][0].tolist()
        history = ids if cache is None else [*cache["ids"], *ids]
        sent = len(ids) if cache is None else cache["sent"]
        given: dict[str, Any] = {}
        run, past = history, None
        if not (self.recompute or self.window or self.shift or self.store):
            run, past = ids, None if cache is None else cache["past"]
        elif self.store:
            from transformers import DynamicCache

            store = self.store

            class Stored(DynamicCache):
                def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
                    return super().update(store(keys), store(values), layer, *args, **kwargs)

            run, past = ids, Stored() if cache is None else cache["past"]
        places = torch.arange(len(history))
        if self.shift:
            # Without a mask, positions that do not rise by 1 are taken for several texts in one row.
            given["position_ids"] = (places + self.shift * (places >= sent))[None]
            given["attention_mask"] = torch.ones(1, len(history), dtype=torch.long)
        if self.window:
            far = places[:, None] - places[None]
            blank = torch.zeros(1, 1, len(history), len(history), dtype=self._model.dtype)
            given["attention_mask"] = blank.masked_fill((far < 0) | (far >= self.window), -1e30)
        with WideSums() if self.rounded else nullcontext():
            if self.chunk and past is None and len(run) > self.chunk:
                out = None
                for start in range(0, len(run), self.chunk):
                    out = self._model(
                        torch.tensor([run[start : start + self.chunk]]), past_key_values=past, use_cache=True
                    )
                    past = out.past_key_values
            else:
                use = not (self.recompute or self.window or self.shift)
                out = self._model(torch.tensor([run]), past_key_values=past, use_cache=use, **given)
        logits = out.logits[0, -1].float()
        return self.on_logits(logits, history, sent), {"ids": history, "sent": sent, "past": out.past_key_values}


@dataclass(kw_only=True)
class Seeded:
    engine: Engine
    names: frozenset[str]  # right answers; empty for a healthy engine
    previous: Any = None  # a model before the update
    adapter: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def trained(model: Any, rng: random.Random, size: float = 0.02) -> Any:
    """The model before an update: every matrix moved by a low-rank step, as an optimiser does."""
    torch.manual_seed(rng.randrange(1 << 30))
    old = copy.deepcopy(model)
    for parameter in old.parameters():
        if parameter.dim() == 2:
            step = torch.randn(parameter.shape[0], 4) @ torch.randn(4, parameter.shape[1]) / 2
            parameter.data += size * parameter.data.std() * step
    return old


def each(model: Any, kind: str) -> list[Any]:
    return [module for name, module in model.named_modules() if kind in type(module).__name__]


def set_all(modules: list[Any], name: str, value: Any) -> None:
    for module in modules:
        setattr(module, name, value)


def build(name: str, model: Any, dtype: str, rng: random.Random) -> Seeded:
    """`model` is a fresh copy that the fault may change."""
    return CASES[name](model, dtype, rng)


def attentions(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "o_proj")]


def mlps(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "act_fn")]


def simple(
    *names: str,
) -> Callable[[Callable[[Any, random.Random], None]], Callable[[Any, str, random.Random], Seeded]]:
    def wrap(change: Callable[[Any, random.Random], None]) -> Callable[[Any, str, random.Random], Seeded]:
        def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
            change(model, rng)
            return Seeded(engine=Engine(model, dtype), names=frozenset(names))

        return make

    return wrap


def engined(
    *names: str,
) -> Callable[[Callable[[Engine, random.Random], None]], Callable[[Any, str, random.Random], Seeded]]:
    def wrap(change: Callable[[Engine, random.Random], None]) -> Callable[[Any, str, random.Random], Seeded]:
        def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
            engine = Engine(model, dtype)
            change(engine, rng)
            return Seeded(engine=engine, names=frozenset(names))

        return make

    return wrap


@simple("rope")
def rope_base(model: Any, rng: random.Random) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_theta": config.rope_parameters["rope_theta"] * rng.uniform(1.5, 40),
    }
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


@simple("rope")
def rope_linear_scaling(model: Any, rng: random.Random) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": rng.choice([2.0, 4.0, 3.0])}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


@simple("rope")
def rope_yarn(model: Any, rng: random.Random) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {
        **config.rope_parameters, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": config.max_position_embeddings // 4,
    }  # fmt: skip
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


@simple("attention_scale")
def head_dim_of_another_model(model: Any, rng: random.Random) -> None:
    for module in attentions(model):
        module.scaling = (module.head_dim * rng.choice([2, 1.5])) ** -0.5


@simple("norm_epsilon")
def norm_epsilon(model: Any, rng: random.Random) -> None:
    set_all(
        [m for m in model.modules() if hasattr(m, "variance_epsilon")],
        "variance_epsilon",
        rng.choice([1e-3, 3e-4, 1e-2]),
    )


@simple("activation")
def gelu_for_silu(model: Any, rng: random.Random) -> None:
    set_all(mlps(model), "act_fn", torch.nn.GELU())


@simple("layer_skipped", "stale_weights")
def a_layer_not_loaded(model: Any, rng: random.Random) -> None:
    """Zeros where the loader silently skipped a layer: its residual branch adds nothing."""
    layer = model.model.layers[rng.randrange(len(model.model.layers))]
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        linear.weight.data.zero_()


@simple("norm_missing", "unknown")
def query_key_norms_off(model: Any, rng: random.Random) -> None:
    for module in attentions(model):
        if hasattr(module, "q_norm"):
            module.q_norm = module.k_norm = torch.nn.Identity()
        else:
            module.q_proj.weight.data *= 1.3


@simple("projection_order", "unknown")
def grouped_heads_tiled(model: Any, rng: random.Random) -> None:
    """Key heads repeated as 0 1 0 1 instead of 0 0 1 1: the same as query heads in another order."""
    for module in attentions(model):
        groups, size = module.num_key_value_groups, module.head_dim
        heads = module.q_proj.weight.shape[0] // size
        order = torch.arange(heads).view(groups, heads // groups).t().reshape(-1)
        if torch.equal(order, torch.arange(heads)):
            order = order.flip(0)
        module.q_proj.weight.data = module.q_proj.weight.data.view(heads, size, -1)[order].reshape(heads * size, -1)


@simple("partial_sum", "unknown")
def a_rank_left_out_of_the_sum(model: Any, rng: random.Random) -> None:
    """Tensor parallelism without its all-reduce in one layer: half of the inner size is missing."""
    layer = model.model.layers[rng.randrange(len(model.model.layers))]
    linear = layer.self_attn.o_proj
    linear.weight.data[:, linear.weight.shape[1] // 2 :] = 0


def int8_row(w: torch.Tensor) -> torch.Tensor:
    step = w.abs().amax(dim=1, keepdim=True) / 127.0
    return torch.clamp(torch.round(w / step), -128, 127) * step


def quantised(model: Any, rounding: Callable[[torch.Tensor], torch.Tensor], match: str = "proj") -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and match in name:
            module.weight.data = rounding(module.weight.data)


@simple("int8_weights")
def weights_int8(model: Any, rng: random.Random) -> None:
    quantised(model, int8_row)


@simple("fp8_weights")
def weights_fp8_block(model: Any, rng: random.Random) -> None:
    def block(w: torch.Tensor) -> torch.Tensor:
        out = w.clone()
        for i in range(0, w.shape[0], 128):
            for j in range(0, w.shape[1], 128):
                part = w[i : i + 128, j : j + 128]
                scale = part.abs().max() / 448
                out[i : i + 128, j : j + 128] = (part / scale).to(torch.float8_e4m3fn).float() * scale
        return out

    quantised(model, block)


@simple("fp8_weights")
def weights_fp8_row_and_activations(model: Any, rng: random.Random) -> None:
    def row(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "proj" in name:
            module.weight.data = row(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (row(inputs[0]),))


@simple("int4_weights")
def weights_int4_groups(model: Any, rng: random.Random) -> None:
    size = rng.choice([32, 64, 128])

    def grouped(w: torch.Tensor) -> torch.Tensor:
        out = []
        for part in w.split(size, dim=1):
            low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
            low, high = torch.minimum(low, torch.zeros(1)), torch.maximum(high, torch.zeros(1))
            step = (high - low) / 15
            zero = torch.round(-low / step)
            out.append((torch.clamp(torch.round(part / step + zero), 0, 15) - zero) * step)
        return torch.cat(out, dim=1)

    quantised(model, grouped)


@engined("int8_kv_cache")
def cache_int8(engine: Engine, rng: random.Random) -> None:
    engine.store = lambda s: (
        torch.round(s / (s.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12))
        * (s.abs().amax(-1, keepdim=True) / 127)
    )


@engined("fp8_kv_cache")
def cache_fp8(engine: Engine, rng: random.Random) -> None:
    engine.store = lambda s: s.to(torch.float8_e4m3fn).to(s.dtype)


@engined("sliding_window")
def window_applied(engine: Engine, rng: random.Random) -> None:
    engine.window = rng.choice([48, 64, 100, 128])


@engined("decode_positions")
def decoding_one_position_off(engine: Engine, rng: random.Random) -> None:
    engine.shift = rng.choice([1, -1, 2])


@engined("bos_added")
def a_first_token_that_no_configuration_names(engine: Engine, rng: random.Random) -> None:
    engine.prefix = (rng.choice([0, 1]),)


@engined("prompt_changed", "context_truncated")
def first_token_dropped(engine: Engine, rng: random.Random) -> None:
    engine.cut = 1


@engined("vocab_padding")
def padded_vocabulary(engine: Engine, rng: random.Random) -> None:
    """The padded rows are never drawn, and weigh in the softmax."""
    rows, value = rng.choice([64, 128, 500]), rng.uniform(3, 7)

    def report(found: Completion, sent: list[int]) -> Completion:
        with torch.no_grad(), WideSums() if engine.rounded else nullcontext():
            logits = engine._model(torch.tensor([[*sent, *found.token_ids]])).logits[0, len(sent) - 1 : -1].double()
        padding = torch.full((len(found.token_ids), rows), value, dtype=torch.float64)
        less = (torch.cat((logits, padding), 1).logsumexp(-1) - logits.logsumexp(-1)).tolist()
        tops = found.top_logprobs
        if tops is not None:
            tops = tuple({k: v - by for k, v in top.items()} for top, by in zip(tops, less, strict=True))
        logprobs = tuple(v - by for v, by in zip(found.logprobs, less, strict=True))
        return replace(found, logprobs=logprobs, top_logprobs=tops)

    engine.report = report


@engined("sampled_filters")
def silent_top_p(engine: Engine, rng: random.Random) -> None:
    p = rng.choice([0.8, 0.9, 0.93, 0.95])
    engine.on_logits = lambda logits, ids, sent: filter_logprobs(logits.log_softmax(0), Sampling(top_p=p))


@engined("sampled_filters")
def silent_top_k(engine: Engine, rng: random.Random) -> None:
    k = rng.choice([3, 5, 20])
    engine.on_logits = lambda logits, ids, sent: filter_logprobs(logits.log_softmax(0), Sampling(top_k=k))


@engined("sampled_penalty")
def silent_repetition_penalty(engine: Engine, rng: random.Random) -> None:
    by = rng.choice([1.05, 1.1, 1.2])

    def penalised(logits: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
        seen = torch.tensor(sorted(set(ids)))
        out = logits.clone()
        out[seen] = torch.where(out[seen] > 0, out[seen] / by, out[seen] * by)
        return out

    engine.on_logits = penalised


@engined("sampled_temperature")
def logit_scale(engine: Engine, rng: random.Random) -> None:
    by = rng.choice([0.9, 1.1, 1.05])
    engine.on_logits = lambda logits, ids, sent: logits * by


def stale_layer(model: Any, dtype: str, rng: random.Random) -> Seeded:
    old = trained(model, rng)
    at = rng.randrange(len(model.model.layers))
    model.model.layers[at].load_state_dict(old.model.layers[at].state_dict())
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def stale_half(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """A publish that stopped in the middle."""
    old = trained(model, rng)
    for at in range(len(model.model.layers) // 2 + 1, len(model.model.layers)):
        model.model.layers[at].load_state_dict(old.model.layers[at].state_dict())
    model.model.norm.load_state_dict(old.model.norm.state_dict())
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def stale_head(model: Any, dtype: str, rng: random.Random) -> Seeded:
    """The tied embedding was updated where tokens are read, not where logits are made."""
    old = trained(model, rng)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight = torch.nn.Parameter(old.model.embed_tokens.weight.data.clone())
    return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)


def stale_layer_without_previous(model: Any, dtype: str, rng: random.Random) -> Seeded:
    case = stale_layer(model, dtype, rng)
    return Seeded(engine=case.engine, names=frozenset({"unknown"}))


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


@simple("router_dtype", "unknown")
def router_in_bfloat16(model: Any, rng: random.Random) -> None:
    for router in routers(model):
        own = router.forward

        def forward(hidden: torch.Tensor, own: Any = own, router: Any = router) -> Any:
            with WideSums():
                router.bfloat16()
                logits, weights, experts = own(hidden.bfloat16())
            return logits.to(hidden.dtype), weights.to(hidden.dtype), experts

        router.forward = forward


@simple("experts_per_token")
def one_expert_less(model: Any, rng: random.Random) -> None:
    set_all(routers(model), "top_k", routers(model)[0].top_k - 1)


@simple("expert_weights")
def expert_weights_not_normalised(model: Any, rng: random.Random) -> None:
    set_all(routers(model), "norm_topk_prob", not routers(model)[0].norm_topk_prob)


@simple("unknown")
def two_experts_exchanged(model: Any, rng: random.Random) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.down_proj.data[[0, 1]] = module.down_proj.data[[1, 0]]


DENSE: dict[str, Callable[[Any, str, random.Random], Seeded]] = {
    "stale layer, previous given": stale_layer,
    "half-taken publish, previous given": stale_half,
    "stale tied head, previous given": stale_head,
    "stale layer, nothing given": stale_layer_without_previous,
    "rope base": rope_base,
    "rope linear scaling": rope_linear_scaling,
    "rope yarn": rope_yarn,
    "attention scale": head_dim_of_another_model,
    "norm epsilon": norm_epsilon,
    "gelu for silu": gelu_for_silu,
    "layer not loaded": a_layer_not_loaded,
    "query and key norms off": query_key_norms_off,
    "grouped heads tiled": grouped_heads_tiled,
    "a rank left out of the sum": a_rank_left_out_of_the_sum,
    "int8 weights": weights_int8,
    "fp8 weights in blocks": weights_fp8_block,
    "fp8 weights and activations": weights_fp8_row_and_activations,
    "int4 weights": weights_int4_groups,
    "int8 KV cache": cache_int8,
    "fp8 KV cache": cache_fp8,
    "window applied": window_applied,
    "decoding position off": decoding_one_position_off,
    "unnamed first token": a_first_token_that_no_configuration_names,
    "first token dropped": first_token_dropped,
    "vocabulary padding": padded_vocabulary,
    "silent top-p": silent_top_p,
    "silent top-k": silent_top_k,
    "silent repetition penalty": silent_repetition_penalty,
    "logit scale": logit_scale,
}
MIXTURE = {
    "router in bfloat16": router_in_bfloat16,
    "one expert less": one_expert_less,
    "expert weights not normalised": expert_weights_not_normalised,
    "two experts exchanged": two_experts_exchanged,
}
CASES = {**DENSE, **MIXTURE}


def healthy(kind: str, model: Any, dtype: str) -> Engine:
    engine = Engine(model, dtype)
    if kind == "eager attention":
        model.set_attn_implementation("eager")
    elif kind == "no cache":
        engine.recompute = True
    elif kind == "chunked prefill":
        engine.chunk = 64
    elif kind == "more precise":
        engine.rounded = False
        engine._model = model.double() if dtype == "float32" else model.float()
    return engine


def sound(healthy: Callable[[str, Any, str], Engine], kind: str) -> Callable[[Any, str, random.Random], Seeded]:
    return lambda model, dtype, rng: Seeded(engine=healthy(kind, model, dtype), names=frozenset())


KINDS = ("plain", "eager attention", "no cache", "chunked prefill", "more precise")
HEALTHY = {kind: sound(healthy, kind) for kind in KINDS}


def mixture(folder: Path, tokenizer: Path) -> Path:
    """A random mixture of 8 experts whose router decides with clear margins."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    shape: dict[str, Any] = {
        "vocab_size": 659, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 1024, "initializer_range": 0.12, "eos_token_id": 2, "bos_token_id": None, "norm_topk_prob": True,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(tokenizer)).save_pretrained(folder)
    return folder
