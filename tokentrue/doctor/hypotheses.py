"""Known causes as changes of the reference, each with at most one fitted number.

A hypothesis says what a wrong engine computes; `naming` decides whether that is what the engine computed. Causes that
no measurement of log-probabilities can separate share a name.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

from tokentrue.doctor.reference import Observation, Reference, Rounding, Trial, adapter_deltas, load_model

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
    details: Callable[[], Sequence[Hypothesis]] | None = None  # finer forms, tried where this one explains a part


def list_hypotheses(
    reference: Reference, *, previous: Any = None, specials: Sequence[int] = (), stops: Sequence[int] = (), dtype: str
) -> Iterator[Hypothesis]:
    """Every cause that can be simulated for this model. `specials` are ids that an engine may put before a prompt."""
    yield from _outputs(reference, stops)
    yield from _inputs(reference, specials)
    if reference.adapter is not None:
        apply = partial(_scale_adapter, deltas=adapter_deltas(reference.model, reference.adapter))
        yield Hypothesis("adapter_missing", "the adapter times {x:.3g}", apply, (0.0, *FAR), "real", 1.0)
    if previous is not None:
        yield from _stale(reference, previous)
    yield from _arithmetic(reference)
    yield from _mixtures(reference)
    yield from _layers(reference)
    yield from _quantised(dtype)
    if dtype == "float32":
        yield from _dtypes(reference)


# Logits: temperature, filters, penalties, padding.


def _outputs(reference: Reference, stops: Sequence[int]) -> Iterator[Hypothesis]:
    scaled = _on_logits(lambda logits, seen, x: logits / x)
    yield Hypothesis("sampled_temperature", "logits divided by {x:.4g}", scaled, FAR, "real", 1.0)
    label = "unused rows of the output layer weigh e^{x:.2f} in the softmax"
    yield Hypothesis("vocab_padding", label, _on_logits(_pad_vocabulary), range(-2, 26, 2), "real")
    cap = getattr(reference.config, "final_logit_softcapping", None)
    if cap is None:
        capped = _on_logits(lambda logits, seen, x: x * torch.tanh(logits / x))
        yield Hypothesis("logit_softcap", "logits capped at {x:.3g}", capped, (5, 15, 30, 50, 100, 200), "real")
    else:
        open_ = _on_logits(lambda logits, seen, x: cap * torch.atanh((logits / cap).clamp(-1 + 1e-7, 1 - 1e-7)))
        yield Hypothesis("logit_softcap", "logits without their cap", open_)
    for name, grid in FILTERS.items():
        apply, fit = _on_logits(partial(filter_logits, name=name)), "" if name == "top_k" else "real"
        yield Hypothesis("sampled_filters", name + " {x:.3g}, renormalised", apply, grid, fit, is_sampling=True)
    for name, grid in PENALTIES.items():
        apply = _on_logits(partial(_penalise, name=name))
        yield Hypothesis("sampled_penalty", f"a {name} penalty of {{x:.3g}}", apply, grid, "real", is_sampling=True)
    if stops:
        banned = _on_logits(lambda logits, seen, x: logits.index_fill(1, torch.tensor(list(stops)), -torch.inf))
        yield Hypothesis("stop_banned", "stop tokens removed before the softmax", banned, is_sampling=True)


FILTERS: Mapping[str, Sequence[float]] = {
    "top_k": (1, 2, 3, 4, 5, 8, 10, 20, 30, 40, 50, 64, 100),
    "top_p": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "min_p": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3),
}
PENALTIES: Mapping[str, Sequence[float]] = {
    "repetition": (0.9, 1.01, 1.05, 1.1, 1.2, 1.5),
    "presence": (-0.5, 0.1, 0.5, 1.0, 1.5),
    "frequency": (-0.5, 0.1, 0.5, 1.0),
}


def _on_logits(change: Callable[[Tensor, Observation, float], Tensor]) -> Apply:
    return lambda trial, x: setattr(trial, "outputs", lambda logits, seen: change(logits, seen, x))


def _pad_vocabulary(logits: Tensor, seen: Observation, x: float) -> Tensor:
    return torch.cat((logits, torch.full((logits.shape[0], 1), x)), dim=1)


def filter_logits(logits: Tensor, seen: Any, x: float, *, name: str) -> Tensor:
    """Logits with -inf for what a filter at x removes."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if name == "top_k":
        keep = torch.arange(logits.shape[-1]).expand_as(logits) < x
    elif name == "top_p":
        probs = ordered.softmax(dim=-1)
        keep = probs.cumsum(dim=-1) - probs < x
    else:
        keep = ordered >= ordered[:, :1] + math.log(x)
    return logits.masked_fill(~torch.zeros_like(keep).scatter(1, order, keep), -torch.inf)


def _penalise(logits: Tensor, seen: Observation, x: float, *, name: str) -> Tensor:
    """Repetition concerns prompt and answer, presence and frequency the answer alone, as vLLM has them."""
    changed = logits.clone()
    for row, at in enumerate(seen.positions):
        if name == "repetition":
            ids = torch.tensor(seen.token_ids[:at]).unique()
            own = logits[row, ids]
            changed[row, ids] = torch.where(own > 0, own / x, own * x)
        elif at > seen.prompt_tokens:
            ids, counts = torch.tensor(seen.token_ids[seen.prompt_tokens : at]).unique(return_counts=True)
            changed[row, ids] -= x * (counts if name == "frequency" else 1)
    return changed


# Inputs: other ids, other positions, another window.


def _inputs(reference: Reference, specials: Sequence[int]) -> Iterator[Hypothesis]:
    yield Hypothesis("off_by_one", "the log-probability {x:+.0f} places on", _setter("align"), (-1, 1))
    if specials:
        before = _on_inputs(lambda seen, x: seen.move_prompt((int(x),)))
        yield Hypothesis("bos_added", "token {x:.0f} before the prompt", before, specials)
    cut = _on_inputs(lambda seen, x: _cut(seen, min(int(x), seen.prompt_tokens - 1)))
    yield Hypothesis("prompt_changed", "the prompt without its first {x:.0f} tokens", cut, (1, 2, 3, 4))
    last = _on_inputs(lambda seen, x: _cut(seen, max(0, seen.prompt_tokens - int(x))))
    kept = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
    yield Hypothesis("context_truncated", "the last {x:.0f} prompt tokens", last, kept, "whole", is_sampling=True)
    label, shifts = "positions of sampled tokens moved by {x:.0f}", (-2, -1, 1, 2, 8, 32)
    yield Hypothesis("decode_positions", label, _setter("decode_shift"), shifts, "whole", is_sampling=True)
    own = getattr(reference.config, "sliding_window", None) or 0
    windows = [x for x in (*([0] if own else []), 8, 16, 32, 64, 128, 256, 512) if x != own]
    yield Hypothesis("sliding_window", "attention to {x:.0f} tokens (0: all)", _setter("window"), windows, "whole")


def _setter(name: str) -> Apply:
    return lambda trial, x: setattr(trial, name, int(x))


def _on_inputs(change: Callable[[Observation, float], Observation]) -> Apply:
    return lambda trial, x: setattr(trial, "inputs", lambda seen: change(seen, x))


def _cut(seen: Observation, count: int) -> Observation:
    """Rows of a prompt's own log-probabilities that lose their context keep the next one that has any."""
    moved = seen.move_prompt(cut=count)
    return replace(moved, positions=tuple(max(1, at) for at in moved.positions))


# Arithmetic of attention, norms and activations.


def _arithmetic(reference: Reference) -> Iterator[Hypothesis]:
    modules, config = list(reference.model.modules()), reference.config
    if any(isinstance(getattr(module, "scaling", None), float) for module in modules):
        scale = _on_modules("scaling", lambda own, x: own * x, float)
        yield Hypothesis("attention_scale", "attention scores times {x:.4g}", scale, (*FAR, 8.0), "real", 1.0)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    base = rope.get("rope_theta")
    if base is not None and hasattr(getattr(reference.model, "model", None), "rotary_emb"):
        based = _turn(lambda f, x: f * (x / base) ** -(torch.arange(f.shape[0]) / f.shape[0]))
        bases = [base * by for by in (0.01, 0.1, *FAR, 10.0, 100.0)]
        yield Hypothesis("rope", "rope base {x:.4g}", based, bases, "real", base)
        yield Hypothesis("rope", "rope frequencies ÷ {x:.4g}", _turn(lambda f, x: f / x), (*FAR, 8.0), "real", 1.0)
        if rope.get("rope_type", "default") != "default":
            yield Hypothesis("rope", "rope without scaling", partial(_rebuild_rope, rope_type="default"))
        for at, length in (("the whole", 1), ("a part of the", 0)):
            yarn = partial(_rebuild_rope, rope_type="yarn", is_whole=bool(length))
            yield Hypothesis("rope", f"YaRN by {{x:.0f}} from {at} context", yarn, (2, 4, 8, 16, 32))
        yield Hypothesis("rope", "rope of neighbours instead of halves", _interleave)
    for name in ("variance_epsilon", "eps"):
        if own := next((getattr(m, name) for m in modules if isinstance(getattr(m, name, None), float)), None):
            grid = [10.0**-n for n in (2, 3, 4, 5, 6, 7, 8, 12)]
            changed = _on_modules(name, lambda own, x: x, float)
            yield Hypothesis("norm_epsilon", "norm epsilon {x:.3g}", changed, [x for x in grid if x != own], "real")
    yield Hypothesis("norm_weight", "norm weights plus {x:.0f}", _add_to_norms, (-1, 1))
    if any(isinstance(getattr(module, "act_fn", None), nn.Module) for module in modules):
        for act in (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()):
            apply = _on_modules("act_fn", partial(lambda own, x, act: act, act=act), nn.Module)
            yield Hypothesis("activation", f"{act} as activation", apply)

    def embed(trial: Trial, x: float) -> None:
        trial.hook(trial.model.get_input_embeddings(), lambda inputs, output: output * x)

    grid = (*FAR, config.hidden_size**0.5)
    yield Hypothesis("embedding_scale", "embeddings times {x:.4g}", embed, grid, "real", 1.0)


def _on_modules(name: str, change: Callable[[Any, float], Any], kind: type) -> Apply:
    """Another value of an attribute, of all modules that have one."""

    def apply(trial: Trial, x: float) -> None:
        for module in list(trial.model.modules()):
            if isinstance(own := getattr(module, name, None), kind):
                trial.set(module, name, change(own, x))

    return apply


def _turn(change: Callable[[Tensor, float], Tensor]) -> Apply:
    return _on_modules("inv_freq", lambda own, x: change(own, x).to(own.dtype), Tensor)


def _rebuild_rope(trial: Trial, x: float, *, rope_type: str, is_whole: bool = True) -> None:
    config, owner = copy.deepcopy(trial.model.config), trial.model.model
    longest = config.max_position_embeddings
    more = {"factor": x, "original_max_position_embeddings": longest if is_whole else int(longest / x)} if x else {}
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": rope_type, **more}
    trial.set(owner, "rotary_emb", type(owner.rotary_emb)(config))


def _interleave(trial: Trial, x: float) -> None:
    """Rotating neighbours is rotating halves of heads whose dimensions are reordered."""
    for module in trial.model.modules():
        size = getattr(module, "head_dim", None)
        if not isinstance(size, int) or not hasattr(module, "q_proj"):
            continue
        order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
        parts = [getattr(module, name, None) for name in ("q_proj", "k_proj", "q_norm", "k_norm")]
        for parameter in (one for part in parts if part is not None for one in part.parameters(recurse=False)):
            heads = parameter.data.view(-1, size, *parameter.data.shape[1:])
            trial.write(parameter, heads[:, order].reshape(parameter.data.shape))


def _add_to_norms(trial: Trial, x: float) -> None:
    for module in trial.model.modules():
        if "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), nn.Parameter):
            trial.write(module.weight, module.weight.data + x)


# Mixtures.


def _mixtures(reference: Reference) -> Iterator[Hypothesis]:
    routers: list[Any] = [module for module in reference.model.modules() if type(module).__name__.endswith("Router")]
    if not routers or not isinstance(own := getattr(routers[0], "top_k", None), int):
        return
    grid = sorted({1, own - 1, own + 1, 2 * own, routers[0].num_experts} - {0, own})
    counted = _on_modules("top_k", lambda own, x: int(x), int)
    yield Hypothesis("experts_per_token", "{x:.0f} experts a token", counted, grid)
    flipped = _on_modules("norm_topk_prob", lambda own, x: not own, bool)
    yield Hypothesis("expert_weights", "expert weights normalised or not, unlike the model", flipped)

    def weigh(trial: Trial, x: float) -> None:
        for router in routers:
            trial.hook(router, lambda inputs, out: (out[0], out[1] * x, *out[2:]))

    yield Hypothesis("expert_weights", "expert weights times {x:.4g}", weigh, FAR, "real", 1.0)
    for name, whole in (("bfloat16", True), ("bfloat16", False), ("float16", True), ("float16", False)):
        apply = partial(_round_routers, routers=routers, dtype=getattr(torch, name), is_whole=whole)
        yield Hypothesis("router_dtype", f"{'the router' if whole else 'router logits'} in {name}", apply)
    if shared := [m for n, m in reference.model.named_modules() if n.endswith(("shared_expert", "shared_experts"))]:
        apply = partial(lambda trial, x, m: trial.hook(m, lambda inputs, output: output * 0), m=shared[0])
        yield Hypothesis("shared_expert", "the shared expert left out", apply)


def _round_routers(trial: Trial, x: float, *, routers: Sequence[Any], dtype: torch.dtype, is_whole: bool) -> None:
    """Logits in another dtype; `is_whole`: inputs, weights and scores too."""
    for router in routers:
        trial.set(router, "forward", partial(_call_rounded, router.forward, dtype, is_whole))
        if is_whole:
            trial.write(router.weight, router.weight.data.to(dtype).float())
            trial.round_inputs(router, lambda value: value.to(dtype).float())


def _call_rounded(forward: Callable[..., Any], dtype: torch.dtype, is_whole: bool, *args: Any) -> Any:
    with _RoundedResults(dtype, is_whole):
        return forward(*args)


class _RoundedResults(TorchFunctionMode):
    """The results of linear maps lose precision, or of every operation."""

    def __init__(self, dtype: torch.dtype, is_whole: bool) -> None:
        super().__init__()
        self.dtype, self.is_whole = dtype, is_whole

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_real = isinstance(result, Tensor) and result.dtype == torch.float32
        return result.to(self.dtype).float() if is_real and (self.is_whole or func is linear) else result


# Layers and heads.


def _layers(reference: Reference) -> Iterator[Hypothesis]:
    lists = [module for module in reference.model.modules() if isinstance(module, nn.ModuleList)]
    layers: list[Any] = list(max(lists, key=len, default=[]))
    if 1 < len(layers) <= 64:

        def skip(trial: Trial, x: float) -> None:
            trial.hook(layers[int(x)], lambda i, o: (i[0], *o[1:]) if isinstance(o, tuple) else i[0])

        def exchange(trial: Trial, x: float) -> None:
            pairs = zip(layers[int(x)].parameters(), layers[int(x) + 1].parameters(), strict=False)
            for one, other in [(a, b) for a, b in pairs if a.shape == b.shape]:
                first, second = one.data, other.data
                trial.write(one, second)
                trial.write(other, first)

        yield Hypothesis("layer_skipped", "layer {x:.0f} skipped", skip, range(len(layers)))
        yield Hypothesis("layer_order", "layer {x:.0f} and the next exchanged", exchange, range(len(layers) - 1))
    if biases := [m.bias for m in reference.model.modules() if isinstance(m, nn.Linear) and m.bias is not None]:
        zero = partial(_write_all, {bias: torch.zeros_like(bias) for bias in biases})
        yield Hypothesis("bias_dropped", "biases set to 0", zero)
    if not getattr(reference.config, "tie_word_embeddings", True):
        head, embedding = reference.model.get_output_embeddings(), reference.model.get_input_embeddings()
        yield Hypothesis(
            "tied_head", "output layer = embedding", partial(_write_all, {head.weight: embedding.weight.data})
        )


def _write_all(values: Mapping[Tensor, Tensor], trial: Trial, x: float) -> None:
    for parameter, value in values.items():
        trial.write(parameter, value)


# Quantised weights and caches.


def _quantised(dtype: str) -> Iterator[Hypothesis]:
    for fault, formats in WEIGHTS.items():
        for label, rounding in formats.items():
            finer = partial(_finer, fault, label, rounding)
            yield Hypothesis(fault, label, partial(_quantise, rounding=rounding), details=finer)
    for fault, formats in CACHES.items():
        for label, rounding in formats.items() if fault != "dtype_kv_cache" or dtype == "float32" else ():
            for words, prefill in (("", True), (", read by decoding alone", False)):
                apply = partial(_store, rounding=rounding, prefill=prefill)
                yield Hypothesis(fault, f"KV cache in {label}{words}", apply, is_sampling=not prefill)


def _finer(fault: str, label: str, rounding: Rounding) -> list[Hypothesis]:
    """The same grid on a part of the model, on the output layer too, and on activations."""
    ways: Mapping[str, Any] = {
        "output layer too": {"head": True},
        "MLP layers alone": {"pattern": r"mlp|experts|feed_forward"},
        "attention layers alone": {"pattern": r"attn|attention"},
        "activations per token too": {"activations": _int_grid(127) if fault == "int8_weights" else _fp8("row")},
    }
    return [Hypothesis(fault, f"{label}, {w}", partial(_quantise, rounding=rounding, **how)) for w, how in ways.items()]


def _quantise(
    trial: Trial, x: float, *, rounding: Rounding, head: bool = False, pattern: str = "", activations: Any = None
) -> None:
    """Every linear layer and expert, without the output layer unless `head`."""
    last = trial.model.get_output_embeddings()
    for name, module in trial.model.named_modules():
        is_linear = isinstance(module, nn.Linear)
        if not (is_linear or "Experts" in type(module).__name__) or (module is last and not head):
            continue
        if re.search(pattern, name):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    trial.write(parameter, rounding(trial.saved.get(f"{name}.{key}", parameter.data)))
            if is_linear and activations is not None:
                trial.round_inputs(module, activations)


def _store(trial: Trial, x: float, *, rounding: Rounding, prefill: bool) -> None:
    trial.store, trial.store_prefill = rounding, prefill


def _scale(value: Tensor, dims: Any) -> Tensor:
    return (value.abs().amax() if dims is None else value.abs().amax(dim=dims, keepdim=True)).clamp(min=1e-12)


def _int_grid(top: int, dims: Any = -1) -> Rounding:
    def rounded(value: Tensor) -> Tensor:
        step = _scale(value, dims) / top
        return (value / step).round().clamp(-top - 1, top) * step

    return rounded


def _asymmetric(value: Tensor) -> Tensor:
    low, high = value.amin(dim=-1, keepdim=True).clamp(max=0), value.amax(dim=-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 15).clamp(min=1e-12)
    zero = (-low / step).round()
    return ((value / step + zero).round().clamp(0, 15) - zero) * step


def _groups(size: int, rounding: Rounding) -> Rounding:
    """`rounding` of groups of `size` inputs; a last group may be shorter."""
    return lambda value: (
        rounding(pad(value, (0, -value.shape[-1] % size)).unflatten(-1, (-1, size)))
        .flatten(-2)[..., : value.shape[-1]]
    )  # fmt: skip


def _fp8(scope: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Rounding:
    """float8 with a scale per tensor, row or 128 x 128 block, or none."""
    top = torch.finfo(dtype).max

    def cast(value: Tensor, scale: Tensor | float) -> Tensor:
        return (value / scale).clamp(-top, top).to(dtype).to(value.dtype) * scale

    def rounded(value: Tensor) -> Tensor:
        if scope != "block":
            return cast(value, 1.0 if scope == "none" else _scale(value, None if scope == "tensor" else -1) / top)
        rows, columns = value.shape[-2:]
        blocks = pad(value, (0, -columns % 128, 0, -rows % 128)).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
        return cast(blocks, _scale(blocks, (-3, -1)) / top).flatten(-4, -3).flatten(-2)[..., :rows, :columns]

    return rounded


NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)  # fmt: skip
FP4 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _levels(levels: Sequence[float], *, is_power: bool) -> Rounding:
    """The nearest level times the group's scale, a power of two in MX formats."""
    points = torch.tensor(levels)

    def rounded(value: Tensor) -> Tensor:
        largest = _scale(value, -1)
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 2) if is_power else largest / points[-1]
        return points[torch.bucketize((value / scale).contiguous(), (points[1:] + points[:-1]) / 2)] * scale

    return rounded


WEIGHTS: Mapping[str, Mapping[str, Rounding]] = {
    "int8_weights": {
        "int8 per row": _int_grid(127),
        "int8 per tensor": _int_grid(127, None),
        **{f"int8 in groups of {n}": _groups(n, _int_grid(127)) for n in (32, 128)},
    },
    "fp8_weights": {
        **{f"float8_e4m3 per {scope}": _fp8(scope) for scope in ("tensor", "row", "block")},
        "float8_e4m3 without scale": _fp8("none"),
        "float8_e5m2 per tensor": _fp8("tensor", torch.float8_e5m2),
    },
    "int4_weights": {
        **{f"int4 in groups of {n}": _groups(n, _int_grid(7)) for n in (32, 64, 128)},
        **{f"int4 with zero points, groups of {n}": _groups(n, _asymmetric) for n in (32, 64, 128)},
        "int4 per row": _int_grid(7),
        "nf4 in blocks of 64": _groups(64, _levels(NF4, is_power=False)),
        "mxfp4": _groups(32, _levels(FP4, is_power=True)),
    },
}
CACHES: Mapping[str, Mapping[str, Rounding]] = {
    "fp8_kv_cache": {
        "float8_e4m3 without scale": _fp8("none"),
        "float8_e4m3 per head and token": _fp8("row"),
        "float8_e4m3 per tensor": _fp8("tensor"),
        "float8_e5m2 without scale": _fp8("none", torch.float8_e5m2),
    },
    "int8_kv_cache": {
        "int8 per head and token": _int_grid(127),
        "int8 per tensor": _int_grid(127, None),
        "int8 per head": _int_grid(127, (-2, -1)),
        "int8 per channel": _int_grid(127, -2),
        "int4 per head and token": _int_grid(7),
    },
    "dtype_kv_cache": {"bfloat16": lambda s: s.bfloat16().float(), "float16": lambda s: s.half().float()},
}


# Other weights of the same run.


def _scale_adapter(trial: Trial, x: float, *, deltas: Mapping[str, Tensor]) -> None:
    for name, delta in deltas.items():
        weight = trial.model.get_submodule(name).weight
        trial.write(weight, weight.data + (x - 1) * delta)


def _stale(reference: Reference, previous: Any) -> Iterator[Hypothesis]:
    """The previous weights everywhere, in one part of the model, in all but one part, or from one part on."""
    old, model = load_model(previous).state_dict(), reference.model
    mine = {n: p for n, p in model.named_parameters() if n in old and old[n].shape == p.shape}
    changed = [name for name, parameter in mine.items() if not torch.equal(old[name], parameter.data)]
    parts: dict[str, list[str]] = {}
    for name in changed:
        found = re.match(r".*?\.\d+(?=\.)", name)
        parts.setdefault(found[0] if found else name.removesuffix(".weight"), []).append(name)

    def some(label: str, names: Sequence[str], *how: Any, **more: Any) -> Hypothesis:
        def apply(trial: Trial, x: float) -> None:
            for name in names:
                trial.write(mine[name], old[name] + x * (mine[name].data - old[name]))

        return Hypothesis("stale_weights", f"the previous {label}", apply, *how, **more)

    yield some("weights, and {x:.3g} of the update", changed, (0.0, 0.5, 0.9, 1.1, 2.0), "real", 1.0)
    order = list(parts) if len(parts) > 1 else []
    for at, part in enumerate(order):
        yield some(part, parts[part], details=partial(list, [some(name, [name]) for name in parts[part]]))
        yield some(f"weights but for {part}", [name for name in changed if name not in parts[part]])
        if 1 < at < len(order) - 1:
            yield some(f"weights from {part} on", [name for one in order[at:] for name in parts[one]])
            yield some(f"weights before {part}", [name for one in order[:at] for name in parts[one]])
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = next((name for name in changed if mine[name] is embedding.weight is getattr(head, "weight", None)), None)
    if tied is not None:  # one tensor at two places, of which an engine may update one

        def project(trial: Trial, x: float) -> None:
            trial.hook(head, lambda inputs, output: linear(inputs[0], old[tied], head.bias))

        def embed(trial: Trial, x: float) -> None:
            trial.hook(embedding, lambda inputs, output: nn.functional.embedding(inputs[0], old[tied]))

        yield Hypothesis("stale_weights", "the previous output layer, which shares the embedding", project)
        yield Hypothesis("stale_weights", "the previous embedding, which the output layer shares", embed)


# Dtypes, where float32 is expected.


def _dtypes(reference: Reference) -> Iterator[Hypothesis]:
    head = reference.model.get_output_embeddings()
    for name in ("bfloat16", "float16"):
        dtype = getattr(torch, name)

        def narrow(value: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return value.to(dtype).float()

        def project(trial: Trial, x: float, narrow: Rounding = narrow) -> None:
            """Without touching an embedding that shares the weight."""
            trial.hook(head, lambda i, o: narrow(linear(narrow(i[0]), narrow(head.weight), head.bias)))

        def load(trial: Trial, x: float, narrow: Rounding = narrow) -> None:
            for parameter in trial.model.parameters():
                trial.write(parameter, narrow(parameter.data))

        yield Hypothesis(f"dtype_{name}", f"weights rounded to {name}", load)
        yield Hypothesis("head_dtype", f"the output layer in {name}", project)

    def tf32(trial: Trial, x: float) -> None:
        for module in trial.model.modules():
            if isinstance(module, nn.Linear):
                trial.write(module.weight, _tf32(module.weight.data))
                trial.round_inputs(module, _tf32)

    yield Hypothesis("dtype_tf32", "matrix products in TF32", tf32)


def _tf32(value: Tensor) -> Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
