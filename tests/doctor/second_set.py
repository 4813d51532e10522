"""A second set of engines with faults, by another author than that of the hypotheses, who had not read them.

`python -m tests.doctor.matrix [MODEL] [DTYPE] --set second` plays it. The right answers are the names of docs/doctor.md;
where the page has none, `unknown` is right, and a name that says less than the fault (`rope` for its pairing) is right, too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from tests.doctor.reported import (
    Engine,
    Seeded,
    WideSums,
    attentions,
    engined,
    mlps,
    quantised,
    set_all,
    simple,
    sound,
    trained,
)
from tokentrue.providers.hf import filter_logprobs
from tokentrue.types import Completion, Sampling


@simple("rope", "unknown")
def frequencies_in_bfloat16(model: Any, rng: random.Random) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


@simple("rope", "unknown")
def pairs_of_neighbours(model: Any, rng: random.Random) -> None:
    """Rotary pairs (0, 1), (2, 3) … instead of halves: query and key rows in another order."""
    for module in attentions(model):
        size = module.head_dim
        order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
        for linear in (module.q_proj, module.k_proj):
            rows = linear.weight.data
            linear.weight.data = rows.view(-1, size, rows.shape[1])[:, order].reshape(rows.shape)


@engined("logit_softcap")
def capped_logits(engine: Engine, rng: random.Random) -> None:
    cap = rng.choice([8.0, 12.0, 15.0])
    engine.on_logits = lambda logits, ids, sent: cap * torch.tanh(logits / cap)


@simple("embedding_scale")
def scaled_embeddings(model: Any, rng: random.Random) -> None:
    by = rng.uniform(1.05, 1.2)
    model.model.embed_tokens.register_forward_hook(lambda *given: given[2] * by)


@simple("layer_order")
def two_layers_exchanged(model: Any, rng: random.Random) -> None:
    layers = model.model.layers
    first, second = rng.sample(range(len(layers)), 2)
    one, two = (copy.deepcopy(layers[at].state_dict()) for at in (first, second))
    layers[first].load_state_dict(two)
    layers[second].load_state_dict(one)


@simple("unknown")
def an_old_adapter_merged(model: Any, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(1 << 30))
    for module in attentions(model):
        for linear in (module.q_proj, module.v_proj):
            out, given = linear.weight.shape
            linear.weight.data += 0.02 * linear.weight.std() * torch.randn(out, 8) @ torch.randn(8, given)


@simple("int8_weights")
def int8_one_scale(model: Any, rng: random.Random) -> None:
    def rounded(w: torch.Tensor) -> torch.Tensor:
        step = w.abs().max() / 127
        return torch.round(w / step) * step

    quantised(model, rounded)


@simple("fp8_weights")
def fp8_one_scale(model: Any, rng: random.Random) -> None:
    def rounded(w: torch.Tensor) -> torch.Tensor:
        scale = w.abs().max() / 448
        return (w / scale).to(torch.float8_e4m3fn).float() * scale

    quantised(model, rounded)


@simple("int4_weights")
def int4_symmetric(model: Any, rng: random.Random) -> None:
    size = rng.choice([32, 64])

    def rounded(w: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in w.split(size, dim=1):
            step = part.abs().amax(1, keepdim=True) / 7
            parts.append(torch.clamp(torch.round(part / step), -8, 7) * step)
        return torch.cat(parts, dim=1)

    quantised(model, rounded)


@simple("attention_scale")
def scale_a_tenth_off(model: Any, rng: random.Random) -> None:
    by = rng.choice([1.1, 0.9])
    for module in attentions(model):
        module.scaling *= by


@simple("norm_epsilon")
def larger_epsilon(model: Any, rng: random.Random) -> None:
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    set_all(norms, "variance_epsilon", rng.uniform(1e-3, 2e-2))


@simple("activation")
def tanh_gelu(model: Any, rng: random.Random) -> None:
    set_all(mlps(model), "act_fn", torch.nn.GELU(approximate="tanh"))


@engined("sampled_filters")
def silent_min_p(engine: Engine, rng: random.Random) -> None:
    least = rng.choice([0.05, 0.1, 0.2])
    engine.on_logits = lambda logits, ids, sent: filter_logprobs(logits.log_softmax(0), Sampling(min_p=least))


@engined("sampled_temperature")
def slightly_cold(engine: Engine, rng: random.Random) -> None:
    by = 1 / rng.choice([0.95, 0.97])
    engine.on_logits = lambda logits, ids, sent: logits * by


@engined("sampled_penalty", "unknown")
def silent_presence_penalty(engine: Engine, rng: random.Random) -> None:
    by = rng.uniform(0.3, 0.8)

    def penalised(logits: torch.Tensor, ids: list[int], sent: int) -> torch.Tensor:
        out = logits.clone()
        out[torch.tensor(sorted(set(ids[sent:])), dtype=torch.long)] -= by
        return out

    engine.on_logits = penalised


@engined("temperature_ignored", "sampled_temperature", "sampled_filters")
def warm_draws_raw_reports(engine: Engine, rng: random.Random) -> None:
    """Draws at another temperature than the one that is reported: only the draws can show it."""
    engine.on_logits = lambda logits, ids, sent: logits / 1.6

    def report(found: Completion, sent: list[int]) -> Completion:
        with torch.no_grad(), WideSums() if engine.rounded else nullcontext():
            logits = engine._model(torch.tensor([[*sent, *found.token_ids]])).logits[0, len(sent) - 1 : -1].float()
        raw = logits.log_softmax(-1)
        logprobs = tuple(float(row[token]) for row, token in zip(raw, found.token_ids, strict=True))
        tops = found.top_logprobs
        if tops is not None:
            tops = tuple({k: float(row[k]) for k in top} for row, top in zip(raw, tops, strict=True))
        return replace(found, logprobs=logprobs, top_logprobs=tops)

    engine.report = report


@engined("prompt_changed", "context_truncated")
def eight_tokens_dropped(engine: Engine, rng: random.Random) -> None:
    engine.cut = 8


@engined("int4_kv_cache")
def cache_int4(engine: Engine, rng: random.Random) -> None:
    def rounded(s: torch.Tensor) -> torch.Tensor:
        step = (s.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-12)
        return torch.round(s / step) * step

    engine.store = rounded


@engined("sliding_window")
def short_window(engine: Engine, rng: random.Random) -> None:
    engine.window = rng.choice([24, 40])


def stale(parts: Callable[[Any, random.Random], list[Any]]) -> Callable[[Any, str, random.Random], Seeded]:
    """The chosen parts of the model keep their weights of before the update."""

    def make(model: Any, dtype: str, rng: random.Random) -> Seeded:
        old = trained(model, rng)
        state = rng.getstate()
        wanted = parts(model, rng)
        rng.setstate(state)
        for new, before in zip(wanted, parts(old, rng), strict=True):
            new.load_state_dict(before.state_dict())
        return Seeded(engine=Engine(model, dtype), names=frozenset({"stale_weights"}), previous=old)

    return make


FAULTS: dict[str, Callable[[Any, str, random.Random], Seeded]] = {
    "frequencies in bfloat16": frequencies_in_bfloat16,
    "rotary pairs of neighbours": pairs_of_neighbours,
    "capped logits": capped_logits,
    "scaled embeddings": scaled_embeddings,
    "two layers exchanged": two_layers_exchanged,
    "an old adapter merged": an_old_adapter_merged,
    "int8 weights, one scale": int8_one_scale,
    "fp8 weights, one scale": fp8_one_scale,
    "int4 weights, symmetric": int4_symmetric,
    "attention scale a tenth off": scale_a_tenth_off,
    "larger norm epsilon": larger_epsilon,
    "gelu by tanh": tanh_gelu,
    "silent min-p": silent_min_p,
    "slightly cold": slightly_cold,
    "silent presence penalty": silent_presence_penalty,
    "warm draws, raw reports": warm_draws_raw_reports,
    "eight tokens dropped": eight_tokens_dropped,
    "int4 KV cache": cache_int4,
    "short window": short_window,
    "stale MLP, previous given": stale(lambda model, rng: [rng.choice(model.model.layers).mlp]),
    "stale query projections, previous given": stale(
        lambda model, rng: [module.q_proj for module in attentions(model)]
    ),
    "publish not taken, previous given": stale(lambda model, rng: [model]),
}


def healthy(kind: str, model: Any, dtype: str) -> Engine:
    engine = Engine(model, dtype)
    if kind == "positions begin at 7":  # rotary positions are relative
        own = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids: own(x, position_ids + 7)
    elif kind == "short chunks":
        engine.chunk = 16
    elif kind == "eager without cache":
        model.set_attn_implementation("eager")
        engine.recompute = True
    elif kind == "head in float64":
        head = model.lm_head
        model.lm_head.forward = lambda x: torch.nn.functional.linear(x.double(), head.weight.double()).to(x.dtype)
    elif kind == "wide cache":
        engine.store = lambda s: s.double().to(s.dtype)
    return engine


KINDS = ("positions begin at 7", "short chunks", "eager without cache", "head in float64", "wide cache")
HEALTHY = {kind: sound(healthy, kind) for kind in KINDS}
