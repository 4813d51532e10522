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
NEAR = (0.7, 0.97, 0.997, 1.003, 1.03, 1.3)  # a true change between 0.2% and any size is near enough to one of these
FAR = (0.25, 0.5, *NEAR, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`apply(trial, x)` makes the change; `fault` is its name in `findings.CAUSES`, `label` may show the fitted {x}."""

    fault: str
    label: str
    apply: Apply
    grid: Sequence[float] = (0.0,)  # values to try
    fit: str = ""  # "real" or "whole": numbers between the values of the grid are tried, too
    none: float = math.nan  # the value that changes nothing
    is_sampling: bool = False  # of sampled tokens alone: prompt log-probabilities do not show it
    is_output: bool = False  # of logits alone: the model need not run again
    is_rounding: bool = False  # it rounds: small differences before it become steps, and no simulation is exact
    units: Mapping[str, Apply] = field(default_factory=dict[str, Apply])  # the same in single parts of the model
    details: Callable[[], Sequence[Hypothesis]] | None = None  # other forms, tried where this one is promising


def list_hypotheses(
    reference: Reference, *, previous: Any = None, specials: Sequence[int] = (), stops: Sequence[int] = (), dtype: str
) -> Iterator[Hypothesis]:
    """Every cause that can be simulated for this model. `specials` are ids that an engine may put before a prompt."""
    yield from _outputs(reference, stops)
    yield from _inputs(reference, specials)
    if reference.adapter is not None:
        units = {
            name: partial(_scale, name, by) for name, by in adapter_deltas(reference.model, reference.adapter).items()
        }
        label = "the adapter times {x:.3g}"
        yield Hypothesis("adapter_missing", label, run_all(units), (0.0, *FAR), "real", 1.0, units=units)
    if previous is not None:
        yield from _stale(reference, previous, getattr(torch, dtype))
    yield from _arithmetic(reference)
    yield from _mixtures(reference)
    yield from _layers(reference)
    yield from _quantised(reference, dtype)
    if dtype == "float32":
        yield from _dtypes(reference)


def run_all(units: Mapping[str, Apply]) -> Apply:
    return lambda trial, x: [apply(trial, x) for apply in units.values()]


# Logits: temperature, filters, penalties, padding.


def _outputs(reference: Reference, stops: Sequence[int]) -> Iterator[Hypothesis]:
    def on(fault: str, label: str, change: Callable[..., Tensor], *how: Any, sampled: bool = False) -> Hypothesis:
        def apply(trial: Trial, x: float) -> None:
            trial.outputs = lambda logits, seen: change(logits, seen, x)

        return Hypothesis(fault, label, apply, *how, is_sampling=sampled, is_output=True)

    yield on("sampled_temperature", "logits divided by {x:.4g}", lambda z, seen, x: z / x, FAR, "real", 1.0)
    label = "unused rows of the output layer weigh e^{x:.2f} in the softmax"
    yield on("vocab_padding", label, lambda z, seen, x: pad(z, (0, 1), value=x), range(-2, 26, 2), "real")
    cap = getattr(reference.config, "final_logit_softcapping", None)
    if cap is None:
        caps = (5, 15, 30, 50, 100, 200)
        yield on("logit_softcap", "logits capped at {x:.3g}", lambda z, seen, x: x * torch.tanh(z / x), caps, "real")
    else:
        label, most = "logits without their cap", 1 - 1e-7
        yield on("logit_softcap", label, lambda z, seen, x: cap * torch.atanh((z / cap).clamp(-most, most)))
    for name, grid in FILTERS.items():
        change, fit = partial(filter_logits, name=name), "" if name == "top_k" else "real"
        yield on("sampled_filters", name + " {x:.3g}, renormalised", change, grid, fit, sampled=True)
    for name, grid in PENALTIES.items():
        change = partial(penalise, name=name)
        yield on("sampled_penalty", f"a {name} penalty of {{x:.3g}}", change, grid, "real", sampled=True)
    if stops:
        ids = torch.tensor(list(stops))
        banned = "stop tokens removed before the softmax"
        yield on("stop_banned", banned, lambda z, seen, x: z.index_fill(1, ids, -torch.inf), sampled=True)


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


def count_kept(ordered: Tensor, name: str, x: float) -> Tensor:
    """`[rows, 1]`: how many of the likeliest tokens a filter at x keeps; all without a name. `ordered`: descending."""
    if name in ("", "top_k"):
        return torch.full_like(ordered[:, :1], min(x or torch.inf, ordered.shape[-1]), dtype=torch.long)
    probs = ordered.softmax(dim=-1)
    is_kept = probs.cumsum(dim=-1) - probs < x if name == "top_p" else ordered >= ordered[:, :1] + math.log(x)
    return is_kept.sum(dim=-1, keepdim=True)


def filter_logits(logits: Tensor, seen: Any, x: float, *, name: str) -> Tensor:
    """Logits with -inf for what a filter at x removes."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    is_cut = torch.arange(logits.shape[-1]) >= count_kept(ordered, name, x)
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
        return Hypothesis("prompt_changed", label, edit(change), range(1, 13 if start else 33))

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
    seen = give(lambda n, sent, x: {"attention_mask": banded_mask(n, x or n)})
    yield Hypothesis("sliding_window", "attention to {x:.0f} tokens (0: all)", seen, windows, "whole")


def banded_mask(length: int, window: int) -> Tensor:
    """Additive `[1, 1, length, length]`: each token sees itself and the `window - 1` before it."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(1, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)


# Arithmetic of attention, norms and activations.


def _arithmetic(reference: Reference) -> Iterator[Hypothesis]:
    model, config = reference.model, reference.config

    def on(fault: str, label: str, name: str, kind: type, change: Callable[[Any, float], Any], **how: Any) -> Any:
        """Another value of an attribute, of all modules that have one."""
        owners = {at: module for at, module in model.named_modules() if isinstance(getattr(module, name, None), kind)}
        units = {at: partial(_set, module, name, change) for at, module in owners.items()}
        return [Hypothesis(fault, label, run_all(units), units=units, **how)] if units else []

    scaled = partial(on, "attention_scale", "attention scores times {x:.4g}", "scaling", float, lambda own, x: own * x)
    yield from scaled(grid=(*FAR, 8.0), fit="real", none=1.0)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    base = rope.get("rope_theta")
    if base is not None and hasattr(getattr(model, "model", None), "rotary_emb"):
        turn = partial(on, "rope", name="inv_freq", kind=Tensor)

        def based(own: Tensor, x: float) -> Tensor:
            return own * (x / base) ** -(torch.arange(own.shape[0]) / own.shape[0])

        bases = [base * by for by in (0.01, 0.1, *FAR, 10.0, 100.0)]
        yield from turn("rope base {x:.4g}", change=based, grid=bases, fit="real", none=base)
        yield from turn("rope frequencies ÷ {x:.4g}", change=lambda f, x: f / x, grid=(*FAR, 8.0), fit="real", none=1.0)
        yield from turn("rope frequencies in bfloat16", change=lambda f, x: f.bfloat16().float())
        if rope.get("rope_type", "default") != "default":
            yield Hypothesis("rope", "rope without scaling", partial(_rebuild_rope, rope_type="default"))
        for label, is_whole in (("the whole", True), ("a part of the", False)):
            yarn = partial(_rebuild_rope, rope_type="yarn", is_whole=is_whole)
            yield Hypothesis("rope", f"YaRN by {{x:.0f}} from {label} context", yarn, (2, 4, 8, 16, 32))
    for name in ("variance_epsilon", "eps"):
        grid = [10.0**-n for n in (2, 3, 4, 5, 6, 7, 8, 12)]
        yield from on("norm_epsilon", "norm epsilon {x:.3g}", name, float, lambda own, x: x, grid=grid, fit="real")
    norms: list[Any] = [
        m for m in model.modules() if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None
    ]
    units = {str(at): partial(_set, m.weight, "data", lambda own, x: own + x) for at, m in enumerate(norms)}
    yield Hypothesis("norm_weight", "norm weights plus {x:.0f}", run_all(units), (-1, 1))
    for act in (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()):
        yield from on("activation", f"{act} as activation", "act_fn", nn.Module, lambda own, x, act=act: act)
    embedding = model.get_input_embeddings()
    times: Apply = lambda trial, x: trial.hook(embedding, lambda inputs, output: output * x)  # noqa: E731
    grid = (*FAR, config.hidden_size**0.5)
    yield Hypothesis("embedding_scale", "embeddings times {x:.4g}", times, grid, "real", 1.0)


def _set(owner: Any, name: str, change: Callable[[Any, float], Any], trial: Trial, x: float) -> None:
    trial.set(owner, name, change(getattr(owner, name), x))


def _rebuild_rope(trial: Trial, x: float, *, rope_type: str, is_whole: bool = True) -> None:
    config, owner = copy.deepcopy(trial.model.config), trial.model.model
    longest = config.max_position_embeddings
    more = {"factor": x, "original_max_position_embeddings": longest if is_whole else int(longest / x)} if x else {}
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": rope_type, **more}
    trial.set(owner, "rotary_emb", type(owner.rotary_emb)(config))


# Mixtures.


def _mixtures(reference: Reference) -> Iterator[Hypothesis]:
    routers: list[Any] = [module for module in reference.model.modules() if type(module).__name__.endswith("Router")]
    if not routers or not isinstance(own := getattr(routers[0], "top_k", None), int):
        return

    def on(fault: str, label: str, change: Callable[[Trial, Any, float], Any], *how: Any, **more: Any) -> Hypothesis:
        return Hypothesis(fault, label, lambda trial, x: [change(trial, one, x) for one in routers], *how, **more)

    grid = sorted({1, own - 1, own + 1, 2 * own, routers[0].num_experts} - {0, own})
    yield on("experts_per_token", "{x:.0f} experts a token", lambda t, one, x: t.set(one, "top_k", int(x)), grid)
    if hasattr(routers[0], "norm_topk_prob"):
        label, name = "expert weights normalised or not, unlike the model", "norm_topk_prob"
        yield on("expert_weights", label, lambda t, one, x: t.set(one, name, not getattr(one, name)))
    weigh = lambda t, one, x: t.hook(one, lambda i, out: (out[0], out[1] * x, *out[2:]))  # noqa: E731
    yield on("expert_weights", "expert weights times {x:.4g}", weigh, FAR, "real", 1.0)
    for dtype in (torch.bfloat16, torch.float16):
        change = partial(_narrow_router, dtype=dtype)
        yield on("router_dtype", f"the router in {str(dtype)[6:]}", change, is_rounding=True)
    if shared := [m for n, m in reference.model.named_modules() if n.endswith(("shared_expert", "shared_experts"))]:
        drop: Apply = lambda trial, x: [trial.hook(one, lambda i, output: output * 0) for one in shared]  # noqa: E731
        yield Hypothesis("shared_expert", "the shared experts left out", drop)


def _narrow_router(trial: Trial, router: Any, x: float, *, dtype: torch.dtype) -> None:
    narrow = copy.deepcopy(router).to(dtype)

    def route(inputs: Any, output: Any) -> Any:
        with WideSums():
            found = narrow(inputs[0].to(dtype))
        return tuple(one.float() if one.is_floating_point() else one for one in found)

    trial.hook(router, route)


# Layers and heads.


def _layers(reference: Reference) -> Iterator[Hypothesis]:
    lists = [module for module in reference.model.modules() if isinstance(module, nn.ModuleList)]
    layers: list[Any] = list(max(lists, key=len, default=[]))
    if 1 < len(layers) <= 64:

        def skip(trial: Trial, x: float) -> None:
            trial.hook(layers[int(x)], lambda i, o: (i[0], *o[1:]) if isinstance(o, tuple) else i[0])

        def exchange(trial: Trial, x: float, by: int) -> None:
            for a, b in zip(layers[int(x)].parameters(), layers[int(x) + by].parameters(), strict=False):
                if a.shape == b.shape:
                    first, second = a.data, b.data
                    trial.set(a, "data", second)
                    trial.set(b, "data", first)

        yield Hypothesis("layer_skipped", "layer {x:.0f} skipped", skip, range(len(layers)))
        for by in range(1, len(layers) if len(layers) < 9 else 2):
            label, places = f"layer {{x:.0f}} and the one {by} further exchanged", range(len(layers) - by)
            yield Hypothesis("layer_order", label, partial(exchange, by=by), places)
    if biases := {n: m for n, m in reference.model.named_modules() if getattr(m, "bias", None) is not None}:
        units = {name: partial(_set, module.bias, "data", lambda own, x: own * 0) for name, module in biases.items()}
        yield Hypothesis("bias_dropped", "biases set to 0", run_all(units), units=units)
    if not getattr(reference.config, "tie_word_embeddings", True):
        head, embedding = reference.model.get_output_embeddings(), reference.model.get_input_embeddings()
        tie = partial(_set, head.weight, "data", lambda own, x: embedding.weight.data)
        yield Hypothesis("tied_head", "output layer = embedding", tie)


# Quantised weights and caches.


def _quantised(reference: Reference, dtype: str) -> Iterator[Hypothesis]:
    for kind, formats in GRIDS.items():
        for label, rounding in {**formats, **WEIGHT_GRIDS.get(kind, {})}.items():
            if not label.endswith(("per tensor", "per token")):  # those of caches, which have heads
                units = dict(_quantise(reference, rounding))
                last = next(reversed(units))  # the output layer, which most engines leave as it is
                whole = run_all({name: unit for name, unit in units.items() if name != last})
                finer = partial(_with_activations, kind, label, whole)
                yield Hypothesis(f"{kind}_weights", label, whole, units=units, details=finer, is_rounding=True)
    for kind, formats in {**GRIDS, **({"dtype": NARROW} if dtype == "float32" else {})}.items():
        first, *others = [_cache(kind, *one, prefill) for one in formats.items() for prefill in (True, False)]
        yield replace(first, details=partial(list, others))


def _quantise(reference: Reference, rounding: Rounding) -> Iterator[tuple[str, Apply]]:
    """Every linear layer and expert; the output layer last, without an embedding that shares its weight."""
    last = reference.model.get_output_embeddings()
    for name, module in reference.model.named_modules():
        if module is not last and (isinstance(module, nn.Linear) or "Experts" in type(module).__name__):
            matrices = [(f"{name}.{key}", p) for key, p in module.named_parameters(recurse=False) if p.dim() > 1]
            yield name, partial(_round_weights, matrices, rounding)

    yield "the output layer", lambda trial, x: _use(last, rounding(last.weight.data), trial)


def _use(place: Any, weight: Tensor, trial: Trial, narrow: Rounding = lambda value: value) -> None:
    """Another matrix at one of two places that share theirs."""
    use = nn.functional.embedding if isinstance(place, nn.Embedding) else partial(linear, bias=place.bias)
    trial.hook(place, lambda inputs, output: narrow(use(narrow(inputs[0]), weight)))


def _round_weights(matrices: Sequence[tuple[str, Any]], rounding: Rounding, trial: Trial, x: float) -> None:
    for name, parameter in matrices:
        trial.set(parameter, "data", rounding(trial.saved.get(name, parameter.data)))


def _with_activations(kind: str, label: str, whole: Apply) -> list[Hypothesis]:
    rounding = _integers(127) if kind == "int8" else _fp8(-1)

    def apply(trial: Trial, x: float) -> None:
        whole(trial, x)
        last = trial.model.get_output_embeddings()
        for module in trial.model.modules():
            if isinstance(module, nn.Linear) and module is not last:
                trial.round_inputs(module, rounding)

    return [Hypothesis(f"{kind}_weights", f"{label}, activations per token too", apply, is_rounding=True)]


def _cache(kind: str, label: str, rounding: Rounding, prefill: bool) -> Hypothesis:
    label = f"KV cache in {label}" + ("" if prefill else ", read by decoding alone")
    store: Apply = lambda trial, x: setattr(trial, "cache", lambda: rounding_cache(rounding, prefill=prefill))  # noqa: E731
    return Hypothesis(f"{kind}_kv_cache", label, store, is_sampling=not prefill, is_rounding=True)


def _largest(value: Tensor, dims: Any) -> Tensor:
    return value.abs().amax(dim=dims, keepdim=True).clamp(min=1e-12)


def _integers(top: int, dims: Any = -1) -> Rounding:
    def rounded(value: Tensor) -> Tensor:
        step = _largest(value, dims) / top
        return (value / step).round().clamp(-top - 1, top) * step

    return rounded


def _with_zero(levels: int, dims: Any = -1, *, is_whole: bool = True) -> Rounding:
    """From the least to the largest value; `is_whole`: 0 is a level."""

    def rounded(value: Tensor) -> Tensor:
        low, high = value.amin(dim=dims, keepdim=True), value.amax(dim=dims, keepdim=True)
        if is_whole:
            low, high = low.clamp(max=0), high.clamp(min=0)
        step = ((high - low) / levels).clamp(min=1e-12)
        zero = (-low / step).round() if is_whole else -low / step
        return ((value / step + zero).round().clamp(0, levels) - zero) * step

    return rounded


def _groups(size: int, rounding: Rounding) -> Rounding:
    """`rounding` of groups of `size` inputs; a last group may be shorter."""
    return lambda value: (
        rounding(pad(value, (0, -value.shape[-1] % size)).unflatten(-1, (-1, size)))
        .flatten(-2)[..., : value.shape[-1]]
    )  # fmt: skip


def _fp8(scope: Any, dtype: torch.dtype = torch.float8_e4m3fn) -> Rounding:
    """float8 with a scale over these dimensions, per 128 x 128 "block", or None."""
    top = torch.finfo(dtype).max

    def cast(value: Tensor, scale: Tensor | float) -> Tensor:
        return (value / scale).clamp(-top, top).to(dtype).to(value.dtype) * scale

    def rounded(value: Tensor) -> Tensor:
        if scope != "block":
            return cast(value, 1.0 if scope is None else _largest(value, scope) / top)
        rows, columns = value.shape[-2:]
        blocks = pad(value, (0, -columns % 128, 0, -rows % 128)).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
        return cast(blocks, _largest(blocks, (-3, -1)) / top).flatten(-4, -3).flatten(-2)[..., :rows, :columns]

    return rounded


NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)  # fmt: skip
FP4 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _levels(levels: Sequence[float], *, is_power: bool) -> Rounding:
    """The nearest level times the group's scale, a power of two in MX formats."""
    points = torch.tensor(levels)

    def rounded(value: Tensor) -> Tensor:
        largest = _largest(value, -1)
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 2) if is_power else largest / points[-1]
        return points[torch.bucketize((value / scale).contiguous(), (points[1:] + points[:-1]) / 2)] * scale

    return rounded


def _integer_grids(bits: int) -> dict[str, Rounding]:
    """By the scope of a scale. Rows of a cache are one head's of one token, its matrices one head's, its columns
    channels."""
    top = 2 ** (bits - 1) - 1
    zero = _with_zero(2 * top + 1, is_whole=False)
    return {
        **{f"int{bits} per {scope}": _integers(top, dims) for scope, dims in SCOPES.items()},
        f"int{bits} with zero points": zero,
        f"int{bits} with whole zero points": _with_zero(2 * top + 1),
        f"int{bits} with zero points per column": _with_zero(2 * top + 1, -2, is_whole=False),
        **{f"int{bits} in groups of {n}": _groups(n, _integers(top)) for n in (8, 16, 32, 64, 128)},
        **{f"int{bits} with zero points, groups of {n}": _groups(n, zero) for n in (16, 32, 64)},
    }


SCOPES: Mapping[str, Any] = {"row": -1, "matrix": (-2, -1), "column": -2, "token": (-3, -1), "tensor": (-3, -2, -1)}
FP8 = {
    f"{str(dtype)[6:]} per {scope}" if scope else f"{str(dtype)[6:]} without scale": _fp8(SCOPES.get(scope), dtype)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for scope in ("", "row", "matrix", "tensor")
}  # fmt: skip
GRIDS: Mapping[str, Mapping[str, Rounding]] = {"int8": _integer_grids(8), "fp8": FP8, "int4": _integer_grids(4)}
WEIGHT_GRIDS: Mapping[str, Mapping[str, Rounding]] = {
    "fp8": {"float8_e4m3fn per block": _fp8("block")},
    "int4": {
        **{f"int4 with whole zero points, groups of {n}": _groups(n, _with_zero(15)) for n in (32, 64, 128)},
        "nf4 in blocks of 64": _groups(64, _levels(NF4, is_power=False)),
        "mxfp4": _groups(32, _levels(FP4, is_power=True)),
    },
}
NARROW: Mapping[str, Rounding] = {"bfloat16": lambda s: s.bfloat16().float(), "float16": lambda s: s.half().float()}


# Other weights of the same run.


def _scale(name: str, delta: Tensor, trial: Trial, x: float) -> None:
    weight = trial.model.get_submodule(name).weight
    trial.set(weight, "data", weight.data + (x - 1) * delta)


def _stale(reference: Reference, previous: Any, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """The previous weights, everywhere or in some tensors, and a part of the update."""
    old, model = load_model(previous).state_dict(), reference.model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    units: dict[str, Apply] = {}
    for name, own in model.named_parameters():
        before = old[name].to(dtype).float() if name in old and old[name].shape == own.shape else own.data
        if torch.equal(before, own.data):
            continue
        if own is embedding.weight is getattr(head, "weight", None):  # two places, of which an engine may update one
            for label, place in (
                ("embedding, which the output layer shares", embedding),
                ("output layer, which shares the embedding", head),
            ):
                units[label] = lambda trial, x, place=place, was=before: _use(
                    place, was + x * (place.weight - was), trial
                )
        else:
            units[name] = partial(_set, own, "data", lambda now, x, was=before: was + x * (now - was))
    if units:
        grid = (0.0, 0.5, 0.9, 1.1, 2.0)
        label = "the previous weights, and {x:.3g} of the update"
        yield Hypothesis("stale_weights", label, run_all(units), grid, "real", 1.0, units=units)


# Dtypes, where float32 is expected.


def _dtypes(reference: Reference) -> Iterator[Hypothesis]:
    head = reference.model.get_output_embeddings()
    linears = [module for module in reference.model.modules() if isinstance(module, nn.Linear)]
    for name, narrow in NARROW.items():

        def load(trial: Trial, x: float, narrow: Rounding = narrow) -> None:
            for parameter in trial.model.parameters():
                trial.set(parameter, "data", narrow(parameter.data))

        project = partial(lambda trial, x, narrow: _use(head, narrow(head.weight.data), trial, narrow), narrow=narrow)
        yield Hypothesis(f"dtype_{name}", f"weights rounded to {name}", load)
        yield Hypothesis("head_dtype", f"the output layer in {name}", project, is_rounding=True)

    def tf32(trial: Trial, x: float) -> None:
        for module in linears:
            trial.set(module.weight, "data", _tf32(module.weight.data))
            trial.round_inputs(module, _tf32)

    yield Hypothesis("dtype_tf32", "matrix products in TF32", tf32, is_rounding=True)


def _tf32(value: Tensor) -> Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
