"""Known causes as changes of the reference, each with at most one fitted number.

A hypothesis says what a wrong engine computes; `naming` decides whether that is what the engine computed. Causes that
no measurement of log-probabilities can separate share a name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from tokentrue.doctor.reference import (
    Observation,
    Reference,
    Rounding,
    Trial,
    WideSums,
    adapter_deltas,
    load_model,
    rounding_cache,
)

Apply: TypeAlias = Callable[[Trial, float], object]
Units: TypeAlias = Mapping[str, Apply]
FAR = (0.5, 0.25, 0.8, 2.0, 4.0, 1.25, 1.03, 0.97)  # a change of 2% or more is near one of these


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`apply(trial, x)` makes the change; `fault` is its name in `findings.CAUSES`, `label` may show the fitted {x}."""

    fault: str
    label: str
    apply: Apply
    grid: Sequence[float] = (0.0,)  # values to try; each third one first, the others where those are promising
    fit: str = ""  # "real" or "whole": numbers between the values of the grid are tried, too
    none: float = math.nan  # the value that changes nothing
    units: Units = field(default_factory=dict[str, Apply])  # the same in single parts of the model
    is_sampling: bool = False  # of sampled tokens alone: prompt log-probabilities do not show it
    is_output: bool = False  # of logits alone: the model need not run again
    is_rounding: bool = False  # it rounds: small differences before it become steps, and no simulation is exact
    is_partial: bool = False  # never in all units at once
    details: Callable[[], Sequence[Hypothesis]] | None = None  # other forms, tried where this one is promising


def list_hypotheses(
    reference: Reference, *, previous: Any = None, specials: Sequence[int] = (), stops: Sequence[int] = (), dtype: str
) -> Iterator[Hypothesis]:
    """Every cause that can be simulated for this model. `specials` are ids that an engine may put before a prompt."""
    yield from _outputs(stops)
    yield from _inputs(reference, specials)
    if reference.adapter is not None:
        deltas = adapter_deltas(reference.model, reference.adapter)
        units = {name: partial(_scale_adapter, name, by) for name, by in deltas.items()}
        yield _in_units("adapter_missing", "the adapter times {x:.3g}", units, (0.0, *FAR), "real", 1.0)
    if previous is not None and (units := _stale_units(reference, previous, getattr(torch, dtype))):
        label, grid = "the previous weights, and {x:.3g} of the update", (0.0, 0.5, 0.9, 1.1, 2.0)
        yield _in_units("stale_weights", label, units, grid, "real", 1.0)
    yield from _attributes(reference)
    yield from _mixtures(reference)
    yield from _parts(reference)
    yield from _quantised(reference, dtype)
    if dtype == "float32":
        yield from _dtypes(reference)


def run_all(units: Units) -> Apply:
    return lambda trial, x: [apply(trial, x) for apply in units.values()]


def _in_units(fault: str, label: str, units: Units, *how: Any, **more: Any) -> Hypothesis:
    return Hypothesis(fault, label, run_all(units), *how, units=units, **more)


# Logits: temperature, filters, penalties, padding.

FILTERS: Mapping[str, Sequence[float]] = {
    "top_k": (*range(1, 11), 15, 20, 25, 30, 40, 50, 64, 100),
    "top_p": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "min_p": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3),
}
PENALTIES: Mapping[str, Sequence[float]] = {
    "repetition": (0.9, 1.01, 1.05, 1.1, 1.2, 1.5),
    "presence": (-0.5, 0.1, 0.5, 1.0, 1.5),
    "frequency": (-0.5, 0.1, 0.5, 1.0),
}
TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


def _outputs(stops: Sequence[int]) -> Iterator[Hypothesis]:
    def on(fault: str, label: str, change: Callable[..., Tensor], *how: Any, **more: Any) -> Hypothesis:
        def apply(trial: Trial, x: float) -> None:
            trial.outputs = lambda logits, seen: change(logits, seen, x)

        return Hypothesis(fault, label, apply, *how, is_output=True, **more)

    def filtered(name: str, label: str, before: Callable[[Tensor], Tensor] = lambda z: z, **more: Any) -> Hypothesis:
        change = lambda z, seen, x: filter_logits(before(z), x, name=name)  # noqa: E731
        fit = "" if name == "top_k" else "real"
        return on("sampled_filters", label + name + " {x:.3g}", change, FILTERS[name], fit, is_sampling=True, **more)

    def both() -> list[Hypothesis]:
        """Defaults of an engine often have two of temperature, top-k and top-p."""
        cold = [filtered("top_p", f"temperature {t:g} and ", lambda z, t=t: z / t) for t in TEMPERATURES if t != 1]
        few = (10, 20, 40, 50)
        return cold + [filtered("top_p", f"top_k {k} and ", partial(filter_logits, x=k, name="top_k")) for k in few]

    yield on("sampled_temperature", "logits divided by {x:.4g}", lambda z, seen, x: z / x, FAR, "real", 1.0)
    label = "unused rows of the output layer weigh e^{x:.2f} in the softmax"
    yield on("vocab_padding", label, lambda z, seen, x: pad(z, (0, 1), value=x), range(-2, 26, 2), "real")
    caps = (5, 15, 30, 50, 100, 200)
    yield on("logit_softcap", "logits capped at {x:.3g}", lambda z, seen, x: x * torch.tanh(z / x), caps, "real")
    for name in FILTERS:
        yield filtered(name, "", details=both if name == "top_p" else None)
    for name, grid in PENALTIES.items():
        label, change = f"a {name} penalty of {{x:.3g}}", partial(penalise, name=name)
        yield on("sampled_penalty", label, change, grid, "real", is_sampling=True)
    ids = torch.tensor(list(stops), dtype=torch.long)

    def ban(logits: Tensor, seen: Observation, x: float) -> Tensor:
        early = torch.tensor(seen.positions) - seen.prompt_tokens < x
        return torch.where(early[:, None], logits.index_fill(1, ids, -torch.inf), logits)

    label = "stop tokens removed from the first {x:.0f} tokens"
    yield on("stop_banned", label, ban, (4, 8, 16, 32, 9999), "whole", is_sampling=True)


def count_kept(probs: Tensor, name: str, x: float) -> Tensor:
    """`[rows, 1]`: how many of the likeliest tokens a filter at x keeps. `probs`: descending."""
    if name == "top_k":
        return torch.full_like(probs[:, :1], min(x, probs.shape[-1]), dtype=torch.long)
    is_kept = probs.cumsum(dim=-1) - probs < x if name == "top_p" else probs >= probs[:, :1] * x
    return is_kept.sum(dim=-1, keepdim=True)


def filter_logits(logits: Tensor, x: float, *, name: str) -> Tensor:
    """Logits with -inf for what a filter at x removes."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    is_cut = torch.arange(logits.shape[-1]) >= count_kept(ordered.softmax(dim=-1), name, x)
    return logits.masked_fill(torch.zeros_like(is_cut).scatter(1, order, is_cut), -torch.inf)


def penalise(logits: Tensor, seen: Observation, x: float, *, name: str) -> Tensor:
    """Repetition concerns prompt and answer, presence and frequency the answer alone, as vLLM has them."""
    changed = logits.clone()
    for row, at in enumerate(seen.positions):
        start = 0 if name == "repetition" else seen.prompt_tokens
        ids, counts = torch.tensor(seen.token_ids[start:at], dtype=torch.long).unique(return_counts=True)
        own = logits[row, ids]
        if name == "repetition":
            changed[row, ids] = torch.where(own > 0, own / x, own * x)
        else:
            changed[row, ids] = own - x * (counts if name == "frequency" else 1)
    return changed


# Inputs: other ids, other positions, another window.


def _inputs(reference: Reference, specials: Sequence[int]) -> Iterator[Hypothesis]:
    def edit(change: Callable[[Observation, int], Observation]) -> Apply:
        return lambda trial, x: setattr(trial, "inputs", lambda seen: change(seen, int(x)))

    def give(change: Callable[[int, int, int], dict[str, Tensor]]) -> Apply:
        return lambda trial, x: setattr(trial, "given", lambda length, sent: change(length, sent, int(x)))

    def drop(start: int) -> Hypothesis:
        def change(seen: Observation, x: int) -> Observation:
            x = max(0, min(x, seen.prompt_tokens - 1 - max(0, start)))
            return seen.edit(start if start >= 0 else seen.prompt_tokens - x, x)

        label = f"the prompt without {{x:.0f}} tokens {f'from its token {start} on' if start >= 0 else 'at its end'}"
        return Hypothesis("prompt_changed", label, edit(change), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), "whole")

    by = lambda trial, x: setattr(trial, "align", int(x))  # noqa: E731
    yield Hypothesis("off_by_one", "the log-probability {x:+.0f} places on", by, (-1, 1), is_output=True)
    if specials:
        before = edit(lambda seen, x: seen.edit(0, 0, (x,)))
        yield Hypothesis("bos_added", "token {x:.0f} before the prompt", before, specials)
    yield replace(drop(0), details=lambda: [drop(n) for n in (1, 2, 3, 4)])
    yield drop(-1)
    last = edit(lambda seen, x: seen.edit(0, max(0, seen.prompt_tokens - x)))
    kept = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
    yield Hypothesis("context_truncated", "the last {x:.0f} prompt tokens", last, kept, "whole", is_sampling=True)
    moved = give(lambda n, sent, x: {"position_ids": (torch.arange(n) + x * (torch.arange(n) >= sent)).clamp(0)[None]})
    label, shifts = "positions of sampled tokens moved by {x:.0f}", (-2, -1, 1, 2, 8, 32)
    yield Hypothesis("decode_positions", label, moved, shifts, "whole", is_sampling=True)
    own = getattr(reference.config, "sliding_window", None) or 0
    windows = [x for x in (*([0] if own else []), 8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 512) if x != own]
    seen = give(lambda n, sent, x: {"attention_mask": _banded_mask(n, x or n)})
    yield Hypothesis("sliding_window", "attention to {x:.0f} tokens (0: all)", seen, windows, "whole")


def _banded_mask(length: int, window: int) -> Tensor:
    """Additive `[1, 1, length, length]`: each token sees itself and the `window - 1` before it."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(1, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)


# Settings of attention, norms and activations.


def _attributes(reference: Reference) -> Iterator[Hypothesis]:
    """Other values of an attribute, in all modules that have one or in some."""
    model, config = reference.model, reference.config
    base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or 0.0
    place = lambda own: torch.arange(own.shape[0]) / own.shape[0]  # noqa: E731
    bases, epsilons = [base * by for by in (*FAR, 10.0, 100.0, 0.1, 0.01)], [10.0**-n for n in (2, 3, 4, 5, 7, 12)]
    wide, parts = (*FAR, 8.0), (0.5, 0.25, 0.75)
    rows: list[tuple[Any, ...]] = [
        ("attention_scale", "attention scores times {x:.4g}", "scaling", lambda own, x: own * x, wide, "real", 1.0),
        ("rope", "rope base {x:.4g}", "inv_freq", lambda own, x: own * (x / base) ** -place(own), bases, "real", base),
        ("rope", "rope frequencies ÷ {x:.4g}", "inv_freq", lambda own, x: own / x, wide, "real", 1.0),
        ("rope", "rope frequencies in bfloat16", "inv_freq", lambda own, x: own.bfloat16().float()),
        ("rope", "{x:.2g} of the dimensions turn", "inv_freq", lambda own, x: own * (place(own) < x), parts),
        ("norm_epsilon", "norm epsilon {x:.3g}", "variance_epsilon", lambda own, x: x, epsilons, "real"),
        ("norm_epsilon", "norm epsilon {x:.3g}", "eps", lambda own, x: x, epsilons, "real"),
        ("bias_dropped", "biases set to 0", "bias", lambda own, x: own * 0),
    ]  # fmt: skip
    for act in (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()):
        rows.append(("activation", f"{act} as activation", "act_fn", lambda own, x, act=act: act))
    for fault, label, name, change, *how in rows:
        owners = {at: one for at, one in model.named_modules() if getattr(one, name, None) is not None}
        if owners and (fault != "rope" or base):
            yield _in_units(fault, label, _set_all(owners, name, change), *how)
    if base and hasattr(getattr(model, "model", None), "rotary_emb"):
        if config.rope_parameters.get("rope_type", "default") != "default":
            yield Hypothesis("rope", "rope without scaling", partial(_rebuild_rope, rope_type="default"))
        for label, is_whole in (("the whole", True), ("a part of the", False)):
            yarn = partial(_rebuild_rope, rope_type="yarn", is_whole=is_whole)
            yield Hypothesis("rope", f"YaRN by {{x:.0f}} from {label} context", yarn, (2, 4, 8, 16, 32))
    norms = {at: one for at, one in model.named_modules() if "Norm" in type(one).__name__ and hasattr(one, "weight")}
    plain = _set_all(norms, "weight", lambda own, x: torch.ones_like(own))
    yield _in_units("norm_missing", "norms without their weights", plain, is_partial=True)
    if heads := _hook_all(
        {at: one for at, one in norms.items() if at.endswith(("q_norm", "k_norm"))}, lambda i, o, x: i[0]
    ):
        yield _in_units("norm_missing", "norms of queries and keys left out", heads)
    grown = _hook_all({"embedding": model.get_input_embeddings()}, lambda inputs, output, x: output * x)
    sizes = (*FAR, config.hidden_size**0.5)
    yield _in_units("embedding_scale", "embeddings times {x:.4g}", grown, sizes, "real", 1.0)


def _set_all(owners: Mapping[str, Any], name: str, change: Callable[[Any, float], Any]) -> dict[str, Apply]:
    def put(owner: Any, trial: Trial, x: float) -> None:
        trial.set(owner, name, change(getattr(owner, name), x))

    return {at: partial(put, owner) for at, owner in owners.items()}


def _hook_all(modules: Mapping[str, nn.Module], change: Callable[[Any, Any, float], Any]) -> dict[str, Apply]:
    """`change(inputs, output, x)` replaces the output of each module, or the first of its outputs."""

    def hook(module: nn.Module, trial: Trial, x: float) -> None:
        def run(given: Any, out: Any) -> Any:
            return (change(given, out[0], x), *out[1:]) if isinstance(out, tuple) else change(given, out, x)

        trial.hook(module, run)

    return {name: partial(hook, module) for name, module in modules.items()}


def _rebuild_rope(trial: Trial, x: float, *, rope_type: str, is_whole: bool = True) -> None:
    config, owner = copy.deepcopy(trial.model.config), trial.model.model
    longest = config.max_position_embeddings
    more = {"factor": x, "original_max_position_embeddings": longest if is_whole else int(longest / x)} if x else {}
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": rope_type, **more}
    trial.set(owner, "rotary_emb", type(owner.rotary_emb)(config))


# Mixtures.


def _mixtures(reference: Reference) -> Iterator[Hypothesis]:
    named = reference.model.named_modules()
    routers: dict[str, Any] = {at: one for at, one in named if type(one).__name__.endswith("Router")}
    first = next(iter(routers.values()), None)
    if not isinstance(own := getattr(first, "top_k", None), int):
        return
    counts = sorted({1, own - 1, own + 1, 2 * own, first.num_experts} - {0, own})
    chosen = _set_all(routers, "top_k", lambda own, x: int(x))
    yield _in_units("experts_per_token", "{x:.0f} experts a token", chosen, counts)
    if hasattr(first, "norm_topk_prob"):
        flipped = _set_all(routers, "norm_topk_prob", lambda own, x: not own)
        yield _in_units("expert_weights", "expert weights normalised or not, unlike the model", flipped)
    weighed = {at: partial(_weigh_experts, one) for at, one in routers.items()}
    yield _in_units("expert_weights", "expert weights times {x:.4g}", weighed, FAR, "real", 1.0)
    narrow = {at: partial(_narrow_router, one, torch.bfloat16) for at, one in routers.items()}
    yield _in_units("router_dtype", "the router in bfloat16", narrow, is_rounding=True)


def _weigh_experts(router: Any, trial: Trial, x: float) -> None:
    trial.hook(router, lambda inputs, out: (out[0], out[1] * x, *out[2:]))


def _narrow_router(router: Any, dtype: torch.dtype, trial: Trial, x: float) -> None:
    narrow = copy.deepcopy(router).to(dtype)

    def route(inputs: Any, output: Any) -> Any:
        with WideSums():
            found = narrow(inputs[0].to(dtype))
        return tuple(one.float() if one.is_floating_point() else one for one in found)

    trial.hook(router, route)


# Parts of the model left out or exchanged.


def _parts(reference: Reference) -> Iterator[Hypothesis]:
    model = reference.model
    named: dict[str, Any] = dict(model.named_modules())
    lists = {at: one for at, one in named.items() if isinstance(one, nn.ModuleList)}
    stack = max(lists, key=lambda at: len(lists[at]), default="")
    layers = {f"{stack}.{n}": layer for n, layer in enumerate(lists.get(stack, ()))}
    if not 1 < len(layers) <= 64:
        return
    ends = (".self_attn", ".mlp", ".shared_expert", ".shared_experts")
    branches = {at: one for at, one in named.items() if at.endswith(ends)}
    skipped = _hook_all(layers, lambda inputs, output, x: inputs[0])
    left_out = _hook_all(branches, lambda inputs, output, x: output * 0)
    yield _in_units("layer_skipped", "left out", {**skipped, **left_out}, is_partial=True)
    names = list(layers)
    pairs = combinations(names, 2) if len(names) < 9 else pairwise(names)
    exchanged = {f"{a} and {b}": partial(_exchange, layers[a], layers[b]) for a, b in pairs}
    yield _in_units("layer_order", "exchanged", exchanged, is_partial=True)

    def halve(own: Tensor, x: float) -> Tensor:
        return own * (torch.arange(own.shape[-1]) < own.shape[-1] // 2)

    sums = {
        f"{at}.{key}": getattr(one, key)
        for at, one in named.items()
        for key in ("o_proj", "down_proj")
        if isinstance(getattr(one, key, None), nn.Linear)
    }
    yield _in_units("partial_sum", "the first half of a sum", _set_all(sums, "weight", halve), is_partial=True)
    attentions = {at: one for at, one in named.items() if hasattr(one, "q_proj") and hasattr(one, "head_dim")}
    for fault, label, changes in ORDERS:
        units = {at: partial(_reorder, one, changes) for at, one in attentions.items()}
        yield _in_units(fault, label, units)
    gated = {at: one for at, one in named.items() if hasattr(one, "gate_proj") and hasattr(one, "up_proj")}
    swapped = {at: partial(_exchange, one.gate_proj, one.up_proj) for at, one in gated.items()}
    yield _in_units("projection_order", "gate and up projections exchanged", swapped)
    if not getattr(reference.config, "tie_word_embeddings", True):
        weight = model.get_input_embeddings().weight
        tie = _set_all({"head": model.get_output_embeddings()}, "weight", lambda own, x: weight.data)
        yield _in_units("tied_head", "output layer = embedding", tie)


def _exchange(one: nn.Module, other: nn.Module, trial: Trial, x: float) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=False):
        if a.shape == b.shape:
            first, second = a.data, b.data
            trial.set(a, "data", second)
            trial.set(b, "data", first)


def _reorder(attention: Any, changes: Mapping[str, Callable[[Tensor, int], Tensor]], trial: Trial, x: float) -> None:
    """Rows of projections as `[heads, head_dim, ...]`, columns of the last one likewise, in another order."""
    size, groups = attention.head_dim, getattr(attention, "num_key_value_groups", 1)
    for name, change in changes.items():
        module = getattr(attention, name, None)
        if module is not None:
            weight = module.weight.data.T if name == "o_proj" else module.weight.data
            moved = change(weight.unflatten(0, (-1, size)), groups).flatten(0, 1)
            trial.set(module.weight, "data", moved.T if name == "o_proj" else moved)


def _pair(rows: Tensor, groups: int) -> Tensor:
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def _tile(rows: Tensor, groups: int) -> Tensor:
    return rows.unflatten(0, (groups, -1)).transpose(0, 1).flatten(0, 1)


def _flip(rows: Tensor, groups: int) -> Tensor:
    return rows.flip(0)


ORDERS: Sequence[tuple[str, str, Mapping[str, Callable[[Tensor, int], Tensor]]]] = (
    ("rope", "rotary pairs of neighbours", {"q_proj": _pair, "k_proj": _pair, "q_norm": _pair, "k_norm": _pair}),
    ("rope", "rotary pairs of neighbours in the projections", {"q_proj": _pair, "k_proj": _pair}),
    ("projection_order", "query heads tiled over key heads", {"q_proj": _tile, "o_proj": _tile}),
    ("projection_order", "query heads in another order", {"q_proj": _tile}),
    ("projection_order", "key and value heads in reverse", {"k_proj": _flip, "v_proj": _flip}),
)


# Quantised weights and caches.


def _quantised(reference: Reference, dtype: str) -> Iterator[Hypothesis]:
    model, last = reference.model, reference.model.get_output_embeddings()
    linears: dict[str, Any] = {
        at: one for at, one in model.named_modules() if isinstance(one, nn.Linear) and one is not last
    }
    experts = {at: one for at, one in model.named_modules() if "Experts" in type(one).__name__}

    def weights(kind: str, label: str, rounding: Rounding) -> list[Hypothesis]:
        units = {at: partial(_round_weights, at, one, rounding) for at, one in {**linears, **experts}.items()}
        whole, name = run_all(units), f"{kind}_weights"
        # Most engines leave the output layer as it is.
        head = {"the output layer": lambda trial, x: _use(last, rounding(last.weight.data), trial)}
        inputs = FORMATS["int8"]["int8 per row"] if kind == "int8" else FORMATS["fp8"]["float8_e4m3fn per row"]

        def narrow(trial: Trial, x: float) -> None:
            whole(trial, x)
            for one in linears.values():
                trial.round_inputs(one, inputs)

        finer = Hypothesis(name, f"{label}, activations per token too", narrow, is_rounding=True)
        made = Hypothesis(name, label, whole, units={**units, **head}, is_rounding=True)
        return [made, finer] if label.endswith(("per row", "per matrix", "per block")) else [made]

    for kind, formats in FORMATS.items():
        fine = {
            label: to for label, to in formats.items() if not label.endswith(("per tensor", "per token"))
        }  # no heads
        first, *others = [made for one in fine.items() for made in weights(kind, *one)]
        yield replace(first, details=partial(list, others))
    for kind, formats in {**FORMATS, **({"dtype": NARROW} if dtype == "float32" else {})}.items():
        usual = [label for label in formats if " " not in label or label.endswith(("per row", "scale", "per tensor"))]
        first, *others = [
            _cache(kind, label, rounding, parts)
            for label, rounding in formats.items() for parts in (CACHES if label in usual else CACHES[:1])
        ]  # fmt: skip
        yield replace(first, details=partial(list, others))


def _round_weights(name: str, module: nn.Module, rounding: Rounding, trial: Trial, x: float) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            trial.set(parameter, "data", rounding(trial.saved.get(f"{name}.{key}", parameter.data)))


def _use(place: Any, weight: Tensor, trial: Trial, narrow: Rounding = lambda value: value) -> None:
    """Another matrix at one of two places that share theirs."""
    use = nn.functional.embedding if isinstance(place, nn.Embedding) else partial(linear, bias=place.bias)
    trial.hook(place, lambda inputs, output: narrow(use(narrow(inputs[0]), weight)))


CACHES = ("", "read by decoding alone", "keys alone", "values alone")


def _cache(kind: str, label: str, rounding: Rounding, parts: str) -> Hypothesis:
    keys, values = (None if parts == f"{other} alone" else rounding for other in ("values", "keys"))
    is_late = parts == CACHES[1]

    def apply(trial: Trial, x: float) -> None:
        trial.cache = lambda: rounding_cache(keys, values, prefill=not is_late)

    words = f"KV cache in {label}" + (f", {parts}" if parts else "")
    return Hypothesis(f"{kind}_kv_cache", words, apply, is_sampling=is_late, is_rounding=True)


def _largest(value: Tensor, dims: Any) -> Tensor:
    return value.abs().amax(dim=dims, keepdim=True).clamp(min=1e-12)


def _integers(value: Tensor, dims: Any, *, top: int) -> Tensor:
    step = _largest(value, dims) / top
    return (value / step).round().clamp(-top - 1, top) * step


def _with_zero(value: Tensor, dims: Any, *, levels: int, is_whole: bool) -> Tensor:
    """From the least to the largest value; `is_whole`: 0 is a level."""
    low, high = value.amin(dim=dims, keepdim=True), value.amax(dim=dims, keepdim=True)
    if is_whole:
        low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / levels).clamp(min=1e-12)
    zero = (-low / step).round() if is_whole else -low / step
    return ((value / step + zero).round().clamp(0, levels) - zero) * step


def _float8(value: Tensor, dims: Any, *, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    scale = 1.0 if dims is None else _largest(value, dims) / top
    return (value / scale).clamp(-top, top).to(dtype).to(value.dtype) * scale


def _nf4(value: Tensor, dims: Any) -> Tensor:
    scale, points = _largest(value, dims), torch.tensor(NF4)
    return points[torch.bucketize((value / scale).contiguous(), (points[1:] + points[:-1]) / 2)] * scale


def _in_blocks(value: Tensor, rows: int, columns: int, codec: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """With a scale for each block; those at the edges may be smaller."""
    shape = value.shape[-2:]
    padded = pad(value, (0, -shape[1] % columns, 0, -shape[0] % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return codec(blocks, (-3, -1)).flatten(-4, -3).flatten(-2)[..., : shape[0], : shape[1]]


NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)  # fmt: skip
# By what shares a scale. Rows of a cache are one head's of one token, its matrices one head's, its columns channels.
SCOPES: Mapping[str, Any] = {"row": -1, "matrix": (-2, -1), "column": -2, "token": (-3, -1), "tensor": (-3, -2, -1)}


def _scoped(name: str, codec: Callable[[Tensor, Any], Tensor], *scopes: str | int) -> dict[str, Rounding]:
    found: dict[str, Rounding] = {}
    for scope in scopes:
        if isinstance(scope, int):
            found[f"{name} in groups of {scope}"] = partial(_in_blocks, rows=1, columns=scope, codec=codec)
        elif scope == "block":
            found[f"{name} per block"] = partial(_in_blocks, rows=128, columns=128, codec=codec)
        else:
            found[f"{name} per {scope}" if scope else f"{name} without scale"] = partial(codec, dims=SCOPES.get(scope))
    return found


def _integer_formats(bits: int) -> dict[str, Rounding]:
    top = 2 ** (bits - 1) - 1
    real, whole = (partial(_with_zero, levels=2 * top + 1, is_whole=is_whole) for is_whole in (False, True))
    return {
        **_scoped(f"int{bits}", partial(_integers, top=top), *SCOPES, 8, 16, 32, 64, 128),
        **_scoped(f"int{bits} with zero points", real, "row", "column", 16, 32, 64),
        **_scoped(f"int{bits} with whole zero points", whole, "row", 32, 64, 128),
    }


FORMATS: Mapping[str, Mapping[str, Rounding]] = {
    "int8": _integer_formats(8),
    "fp8": {
        **_scoped("float8_e4m3fn", partial(_float8, dtype=torch.float8_e4m3fn), "row", "", "matrix", "tensor", "block"),
        **_scoped("float8_e5m2", partial(_float8, dtype=torch.float8_e5m2), "row", "", "matrix", "tensor"),
    },
    "int4": {
        **_integer_formats(4),
        **_scoped("nf4", _nf4, 64),
    },
}
NARROW: Mapping[str, Rounding] = {"bfloat16": lambda s: s.bfloat16().float(), "float16": lambda s: s.half().float()}


# Other weights of the same run.


def _scale_adapter(name: str, delta: Tensor, trial: Trial, x: float) -> None:
    weight = trial.model.get_submodule(name).weight
    trial.set(weight, "data", weight.data + (x - 1) * delta)


def _stale_units(reference: Reference, previous: Any, dtype: torch.dtype) -> dict[str, Apply]:
    """For each tensor that the last update changed: the weight before it, and x of the update."""
    old, model = load_model(previous).state_dict(), reference.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    units: dict[str, Apply] = {}

    def mix(now: Tensor, x: float, was: Tensor) -> Tensor:
        return was + x * (now - was)

    for name, own in model.named_parameters():
        before = old[name].to(dtype).float() if name in old and old[name].shape == own.shape else own.data
        if torch.equal(before, own.data):
            continue
        if own is embedding.weight is getattr(head, "weight", None):  # two places, of which an engine may update one
            places = {"embedding, which the output layer shares": embedding}
            for label, place in {**places, "output layer, which shares the embedding": head}.items():
                units[label] = lambda trial, x, at=place, was=before: _use(at, mix(at.weight, x, was), trial)
        else:
            units |= {name: _set_all({"": own}, "data", partial(mix, was=before))[""]}
    return units


# Dtypes, where float32 is expected.


def _dtypes(reference: Reference) -> Iterator[Hypothesis]:
    model, head = reference.model, reference.model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for name, narrow in NARROW.items():
        load = _set_all(dict(model.named_parameters()), "data", lambda own, x, narrow=narrow: narrow(own))
        project = partial(lambda trial, x, narrow: _use(head, narrow(head.weight.data), trial, narrow), narrow=narrow)
        yield Hypothesis(f"dtype_{name}", f"weights rounded to {name}", run_all(load))
        yield Hypothesis("head_dtype", f"the output layer in {name}", project, is_rounding=True)

    def tf32(trial: Trial, x: float) -> None:
        for module in linears:
            trial.set(module.weight, "data", _tf32(module.weight.data))
            trial.round_inputs(module, _tf32)

    yield Hypothesis("dtype_tf32", "matrix products in TF32", tf32, is_rounding=True)


def _tf32(value: Tensor) -> Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
