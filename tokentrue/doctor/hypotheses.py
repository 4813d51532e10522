"""What an engine may compute instead: a table of (where, which transformation, one fitted number).

Places are weights, settings of operators, activations, attention masks, positions, the cache, prompts, logits, reports.
A hypothesis is one transformation at all places of a kind; `naming` finds the number, and the places where it happened.
Causes that no measurement of log-probabilities can separate share a name.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from tokentrue.doctor.formats import FORMATS, NARROW, Rounding, tf32
from tokentrue.doctor.reference import (
    Observation,
    Reference,
    Trial,
    WideSums,
    adapter_deltas,
    load_model,
    rounding_cache,
)

Apply: TypeAlias = Callable[[Trial, float], object]
Units: TypeAlias = Mapping[str, Apply]
Change: TypeAlias = Callable[[Any, float], Any]
Span: TypeAlias = Callable[[Observation, float], tuple[int, int]]
FAR = (0.5, 0.25, 0.8, 2.0, 4.0, 1.25, 1.03, 0.97)  # a change of 2% or more is near one of these
LAYERS = r"(^|\.)(layers|h|blocks)\.\d+$"
BLOCK = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`units` make the change, each in one place; `fault` is a name of `findings.CAUSES`; `label` may show the {x}."""

    fault: str
    label: str
    units: Units
    grid: Sequence[float] = (0.0,)  # values to try; each third one first, the others where those are promising
    fit: str = ""  # "real" or "whole": numbers between the values of the grid are tried, too
    none: float = math.nan  # the value that changes nothing
    is_sampling: bool = False  # of sampled tokens alone: prompt log-probabilities do not show it
    is_output: bool = False  # of logits alone: the model need not run again
    is_rounding: bool = False  # it rounds: small differences before it become steps, and no simulation is exact
    is_partial: bool = False  # never in all units at once
    is_local: bool = False  # may be wrong in one layer, where the effect of all says nothing about it
    is_general: bool = False  # a cause that is named by what it does to numbers: no rival of one that is known by name
    span: Span | None = None  # of token places that are computed under the change; the others are not
    details: Callable[[], Sequence[Hypothesis]] | None = None  # other forms, tried where this one is promising

    def apply(self, trial: Trial, x: float) -> None:
        for change in self.units.values():
            change(trial, x)

    def within(self, chosen: Iterable[str]) -> Hypothesis:
        """The same in some places only."""
        kept = set(chosen)
        names = [name for name in self.units if name in kept]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        units = {name: self.units[name] for name in names}
        return replace(
            self, label=f"{self.label}; in {shown} alone", units=units, details=None, is_partial=False, is_local=False
        )


def list_hypotheses(
    reference: Reference, *, previous: Any = None, specials: Sequence[int] = (), stops: Sequence[int] = (), dtype: str
) -> Iterator[Hypothesis]:
    """Every cause that can be simulated for this model. `specials` are ids that an engine may put before a prompt."""
    yield from _logits(stops)
    yield from _prompts(specials)
    yield from _positions_and_masks(reference)
    yield from _other_weights(reference, previous, getattr(torch, dtype))
    yield from _settings(reference)
    yield from _experts(reference)
    yield from _formats(reference, dtype)
    yield from _parts(reference, specials)
    yield from _orders(reference)
    yield from _sizes(reference)


def _one(change: Apply) -> Units:
    return {"": change}


def by_kind(units: Units) -> Iterator[tuple[str, Units]]:
    """By what is after the number of the layer."""
    kinds: dict[str, dict[str, Apply]] = {}
    for name, unit in units.items():
        kinds.setdefault(re.sub(r"^.*?\.\d+\.", "", name), {})[name] = unit
    return iter(kinds.items())


# Logits and reports.

FILTERS: Mapping[str, Sequence[float]] = {
    "top_k": (*range(1, 11), 15, 20, 25, 30, 40, 50, 64, 100),
    "top_p": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "min_p": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3),
}
PENALTIES: Mapping[str, Sequence[float]] = {
    "repetition": (0.9, 1.01, 1.05, 1.1, 1.2, 1.5),
    "answer's repetition": (0.9, 1.05, 1.2),
    "presence": (-0.5, 0.1, 0.5, 1.0, 1.5),
    "frequency": (-0.5, 0.1, 0.5, 1.0),
}
TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


def _logits(stops: Sequence[int]) -> Iterator[Hypothesis]:
    def on(fault: str, label: str, change: Callable[..., Tensor], *how: Any, **more: Any) -> Hypothesis:
        def apply(trial: Trial, x: float) -> None:
            trial.outputs = lambda logits, seen: change(logits, seen, x)

        return Hypothesis(fault, label, _one(apply), *how, is_output=True, **more)

    def filtered(name: str, label: str, before: Callable[[Tensor], Tensor] = lambda z: z, **more: Any) -> Hypothesis:
        change = lambda z, seen, x: filter_logits(before(z), x, name=name)  # noqa: E731
        fit = "" if name == "top_k" else "real"
        return on("sampled_filters", label + name + " {x:.3g}", change, FILTERS[name], fit, is_sampling=True, **more)

    def both() -> list[Hypothesis]:
        """Defaults of an engine often have two of temperature, top-k and top-p."""
        cold = [filtered("top_p", f"temperature {t:g} and ", lambda z, t=t: z / t) for t in TEMPERATURES if t != 1]
        few = (10, 20, 40, 50)
        return cold + [filtered("top_p", f"top_k {k} and ", partial(filter_logits, x=k, name="top_k")) for k in few]

    def report(fault: str, label: str, change: Change, *how: Any, **more: Any) -> Hypothesis:
        def apply(trial: Trial, x: float) -> None:
            trial.reports = lambda values: change(values, x)

        return Hypothesis(fault, label, _one(apply), *how, is_output=True, **more)

    yield Hypothesis(
        "off_by_one", "the log-probability {x:+.0f} places on", _one(lambda trial, x: setattr(trial, "align", int(x))),
        (-1, 1), is_output=True
    )  # fmt: skip
    bases = (1 / math.log(10), 1 / math.log(2), *FAR)
    yield report("log_base", "log-probabilities times {x:.4g}", lambda own, x: own * x, bases, "real", 1.0)
    floors = (-1, -2, -3, -4, -5, -8, -12)
    yield report("bad_logprobs", "none below {x:.3g}", lambda own, x: own.clamp(min=x), floors, "real")
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
    for dtype, narrow in NARROW.items():
        yield on("head_dtype", f"logits rounded to {dtype}", lambda z, seen, x, to=narrow: to(z), is_rounding=True)


def biased(bias: Mapping[int, float]) -> Hypothesis:
    ids, by = torch.tensor(list(bias)), torch.tensor(list(bias.values()))
    add = lambda logits, seen: logits.index_add(1, ids, by.to(logits.dtype).expand(len(logits), -1))  # noqa: E731
    shown = ", ".join(f"{token}: {value:+.3g}" for token, value in list(bias.items())[:6])
    units = _one(lambda trial, x: setattr(trial, "outputs", add))
    return Hypothesis("logit_bias", f"a bias on the logits of {len(bias)} tokens ({shown})", units, is_output=True)


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
    """Repetition concerns prompt and answer, the others the answer alone, as vLLM has them."""
    changed = logits.clone()
    for row, at in enumerate(seen.positions):
        start = 0 if name == "repetition" else seen.prompt_tokens
        ids, counts = torch.tensor(seen.token_ids[start:at], dtype=torch.long).unique(return_counts=True)
        own = logits[row, ids]
        if name.endswith("repetition"):
            changed[row, ids] = torch.where(own > 0, own / x, own * x)
        else:
            changed[row, ids] = own - x * (counts if name == "frequency" else 1)
    return changed


# Prompts, positions, attention masks.


def _prompts(specials: Sequence[int]) -> Iterator[Hypothesis]:
    def edit(
        fault: str, label: str, change: Callable[[Observation, int], Observation], *how: Any, **more: Any
    ) -> Hypothesis:
        units = _one(lambda trial, x: setattr(trial, "inputs", lambda seen: change(seen, int(x))))
        return Hypothesis(fault, label, units, *how, **more)

    def drop(seen: Observation, x: int, start: int) -> Observation:
        x = max(0, min(x, seen.prompt_tokens - 1 - max(0, start)))
        return seen.edit(start if start >= 0 else seen.prompt_tokens - x, x)

    if specials:
        yield edit("bos_added", "token {x:.0f} before the prompt", lambda seen, x: seen.edit(0, 0, (x,)), specials)
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    for start, where in ((0, "at its start"), (-1, "at its end")):
        label = f"the prompt without {{x:.0f}} tokens {where}"
        yield edit("prompt_changed", label, partial(drop, start=start), counts, "whole")
    last = lambda seen, x: seen.edit(0, max(0, seen.prompt_tokens - x))  # noqa: E731
    yield edit("context_truncated", "the last {x:.0f} prompt tokens", last, LENGTHS, "whole", is_sampling=True)


def edited(edits: Mapping[tuple[int, ...], Observation], label: str, fault: str) -> Hypothesis:
    """Each prompt with an edit of its own, by the ids of the whole observation."""
    units = _one(lambda trial, x: setattr(trial, "inputs", lambda seen: edits.get(seen.token_ids, seen)))
    return Hypothesis(fault, label, units)


def _positions_and_masks(reference: Reference) -> Iterator[Hypothesis]:
    """i and j: places of query and key; n: how many tokens were sent."""

    def moved(
        label: str, change: Callable[[Tensor, Tensor, int], Tensor], grid: Sequence[float], fit: str = "whole"
    ) -> Hypothesis:
        units = _one(lambda trial, x: setattr(trial, "positions", lambda at, n: change(at, n, int(x))))
        return Hypothesis("decode_positions", label, units, grid, fit)

    shifts = (-2, -1, 1, 2, 8, 32)
    yield moved("positions of sampled tokens moved by {x:.0f}", lambda i, n, x: i + x * (i >= n), shifts)
    yield moved("positions after the first sampled token moved by {x:.0f}", lambda i, n, x: i + x * (i > n), shifts)
    yield moved("all sampled tokens at one position", lambda i, n, x: i.minimum(n + x), (0, -1), "")
    yield moved("positions begin again after {x:.0f} tokens", lambda i, n, x: torch.where(i < n, i % x, i), LENGTHS)
    yield moved("positions begin again each {x:.0f} tokens", lambda i, n, x: i % x, LENGTHS)
    yield moved("no position beyond {x:.0f}", lambda i, n, x: i.clamp(max=x), LENGTHS)
    attentions = {
        at: one for at, one in reference.model.named_modules() if at.endswith(("self_attn", ".attention", ".attn"))
    }
    if not attentions:
        return
    windows = {at: getattr(one, "sliding_window", None) or 10**9 for at, one in attentions.items()}

    def hidden(
        fault: str,
        label: str,
        rule: Callable[..., Tensor],
        grid: Sequence[float] = (0,),
        *,
        is_all: bool = False,
        **more: Any,
    ) -> Hypothesis:
        def apply(at: str, trial: Trial, x: float) -> None:
            def is_hidden(i: Tensor, j: Tensor, n: Tensor) -> Tensor:
                found = rule(i, j, n, int(x))
                return found if is_all else found | (j > i) | (i - j >= windows[at])

            trial.hide(attentions[at], is_hidden)

        fit = "whole" if len(grid) > 4 else ""
        return Hypothesis(fault, label, {at: partial(apply, at) for at in attentions}, grid, fit, **more)

    spans = sorted({*(0 for own in windows.values() if own < 10**9), *LENGTHS, 40})
    whole = 10**9

    def window(i: Tensor, j: Tensor, n: Tensor, x: int, first: int = 0) -> Tensor:
        return (j > i) | (i - j >= (x or whole)) & (j >= first)

    def others() -> list[Hypothesis]:
        rows: Mapping[str, Callable[..., Tensor]] = {
            "attention to the last {x:.0f} tokens and the first four": partial(window, first=4),
            "attention to the last {x:.0f} tokens and the first one": partial(window, first=1),
            "attention to own blocks of {x:.0f} tokens": lambda i, j, n, x: (j > i) | (i // x != j // x),
        }
        return [hidden("sliding_window", label, rule, LENGTHS, is_all=True) for label, rule in rows.items()]

    label = "attention to {x:.0f} tokens (0: all)"
    yield hidden("sliding_window", label, window, spans, is_all=True, is_local=True, details=others)
    label = "the prompt is read in both directions"
    yield hidden("attention_mask", label, lambda i, j, n, x: (j > i) & (j >= n), is_all=True)
    few, pages = (1, 2, 4, 8, 16, 32), (4, 8, 16, 32, 64)
    rules: tuple[tuple[str, Sequence[float], Callable[..., Tensor]], ...] = (
        ("nothing sees the first {x:.0f} tokens", few, lambda i, j, n, x: (i >= x) & (j < x)),
        ("page {x:.0f} of 16 tokens is not seen", range(8), lambda i, j, n, x: (j // 16 == x) & (i // 16 > x)),
        ("tokens do not see each {x:.0f}th one", pages, lambda i, j, n, x: (j % x == x - 1) & (j < i)),
    )
    decoding: tuple[tuple[str, Sequence[float], Callable[..., Tensor]], ...] = (
        ("the first {x:.0f} tokens", few, lambda i, j, n, x: (i >= n) & (j < x)),
        ("the last {x:.0f} prompt tokens", few, lambda i, j, n, x: (i >= n) & (j >= n - x) & (j < n)),
        ("the {x:.0f} tokens before it", few, lambda i, j, n, x: (i >= n) & (j < i) & (j >= i - x)),
        ("sampled tokens before the last {x:.0f}", (0, *few), lambda i, j, n, x: (j >= n) & (j < i - x)),
        ("the open page of {x:.0f}", pages, lambda i, j, n, x: (i >= n) & (j // x == i // x) & (j < i)),
        ("sampled tokens of closed pages of {x:.0f}", pages, lambda i, j, n, x: (j >= n) & (j // x < i // x)),
    )
    for words, grid, rule in (*rules, *((f"decoding does not see {words}", *rest) for words, *rest in decoding)):
        yield hidden("attention_mask", words, rule, grid)


# Weights: other ones, missing, exchanged, in another order, rounded.


@dataclass(frozen=True, slots=True)
class Place:
    """A weight of the model; one of two places where embedding and output layer share it."""

    weight: nn.Parameter
    name: str
    shared: Any = None

    def put(self, to: Callable[[Tensor, float], Tensor], *, saved: bool = False) -> Apply:
        """`saved`: from the weight before the engine's dtype rounded it."""

        def apply(trial: Trial, x: float) -> None:
            own = trial.saved.get(self.name, self.weight.data) if saved else self.weight.data
            if self.shared is None:
                trial.set(self.weight, "data", to(own, x))
            else:
                if self.shared not in trial.matrices:
                    trial.matrices[self.shared] = own
                    use_matrix(self.shared, lambda: trial.matrices[self.shared], trial)
                trial.matrices[self.shared] = to(trial.matrices[self.shared], x)

        return apply


def use_matrix(place: Any, weight: Callable[[], Tensor], trial: Trial, to: Rounding = lambda value: value) -> None:
    """Another matrix at one of two places that share theirs."""
    if isinstance(place, nn.Embedding):
        trial.hook(place, lambda inputs, output: embedding(inputs[0], weight()))
    else:
        trial.hook(place, lambda inputs, output: to(linear(to(inputs[0]), weight(), place.bias)))


def list_places(model: Any) -> dict[str, Place]:
    head, first = model.get_output_embeddings(), model.get_input_embeddings()
    found: dict[str, Place] = {}
    for name, own in model.named_parameters():
        if own is first.weight is getattr(head, "weight", None):
            found["embedding, which the output layer shares"] = Place(own, name, first)
            found["output layer, which shares the embedding"] = Place(own, name, head)
        else:
            found[name] = Place(own, name)
    return found


def _put_all(places: Mapping[str, Place], to: Callable[[Tensor, float], Tensor], **how: bool) -> dict[str, Apply]:
    return {name: place.put(to, **how) for name, place in places.items()}


def _other_weights(reference: Reference, previous: Any, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Of the same run, which the user gave: in all of the model, in parts, or for some of the tokens."""

    def mix(now: Tensor, x: float, was: Tensor) -> Tensor:
        return was + x * (now - was)

    def scoped(whole: Hypothesis) -> Iterator[Hypothesis]:
        yield whole
        pages, counts = (16, 4, 8, 32, 64, 128), (16, 1, 2, 4, 8, 24, 32, 48, 64, 96, 128, 192, 256)

        def paged(seen: Observation, x: float) -> tuple[int, int]:
            return 0, (seen.prompt_tokens - 1) // int(x) * int(x)

        spans: tuple[tuple[str, str, Sequence[float], Span], ...] = (
            ("prefix_cache", "full pages of {x:.0f} prompt tokens", pages, paged),
            ("prefix_cache", "{x:.0f} first tokens", counts, lambda seen, x: (0, int(min(x, seen.prompt_tokens - 1)))),
            ("prefix_cache", "the prompt but its last token", (0,), lambda seen, x: (0, seen.prompt_tokens - 1)),
            (whole.fault, "the prompt", (0,), lambda seen, x: (0, seen.prompt_tokens)),
            (whole.fault, "sampled tokens", (0,), lambda seen, x: (seen.prompt_tokens, len(seen.token_ids))),
        )
        zero = {at: (lambda trial, x, unit=unit: unit(trial, 0.0)) for at, unit in whole.units.items()}
        for fault, words, grid, span in spans:
            label = f"{whole.label.format(x=0)}, for {words} alone"
            yield replace(whole, fault=fault, label=label, units=zero, grid=grid, fit="", none=math.nan, span=span)

    if reference.adapter is not None:
        deltas = adapter_deltas(reference.model, reference.adapter)
        units: dict[str, Apply] = {}
        for name, by in deltas.items():
            place = Place(reference.model.get_submodule(name).weight, f"{name}.weight")
            units[name] = place.put(lambda now, x, by=by: now + (x - 1) * by)
        yield from scoped(Hypothesis("adapter_missing", "the adapter times {x:.3g}", units, (0.0, *FAR), "real", 1.0))
    if previous is not None:
        old, changed = load_model(previous).state_dict(), dict[str, Apply]()
        for name, place in list_places(reference.model).items():
            own, was = place.weight.data, old.get(place.name)
            before = own if was is None or was.shape != own.shape else was.to(dtype).float()
            if not torch.equal(before, own):
                changed[name] = place.put(partial(mix, was=before))
        label, grid = "the previous weights, and {x:.3g} of the update", (0.0, 0.5, 0.9, 1.1, 2.0)
        if changed:
            yield from scoped(Hypothesis("stale_weights", label, changed, grid, "real", 1.0))


def _find(model: Any, pattern: str) -> dict[str, Any]:
    return {at: one for at, one in model.named_modules() if re.search(pattern, at)}


def _hook_all(
    modules: Mapping[str, nn.Module], change: Callable[[Any, Any, float], Any], **how: bool
) -> dict[str, Apply]:
    """`change(inputs, output, x)` replaces the output of each module."""

    def hook(module: nn.Module, trial: Trial, x: float) -> None:
        trial.hook(module, lambda inputs, output: change(inputs, output, x), **how)

    return {name: partial(hook, module) for name, module in modules.items()}


def _exchange(one: nn.Module, other: nn.Module, trial: Trial, x: float) -> None:
    """x = 1: the other keeps its own."""
    for a, b in zip(one.parameters(), other.parameters(), strict=False):
        if a.shape == b.shape:
            first, second = a.data, b.data
            trial.set(a, "data", second)
            if x == 0:
                trial.set(b, "data", first)


def _parts(reference: Reference, specials: Sequence[int]) -> Iterator[Hypothesis]:
    """Left out, set to 0, or exchanged."""
    model, places = reference.model, list_places(reference.model)
    layers, named = _find(model, LAYERS), dict(model.named_modules())
    skipped = _hook_all(layers, lambda inputs, output, x: inputs[0])
    skipped |= _hook_all(_find(model, r"\.(self_attn|mlp|shared_experts?)$"), lambda inputs, output, x: output * 0)
    yield Hypothesis("layer_skipped", "left out", skipped, is_partial=True)
    names = list(layers)
    pairs = list(combinations(names, 2) if len(names) < 9 else pairwise(names))
    copied = {f"{a} with the weights of {b}": (a, b) for pair in pairs for a, b in (pair, pair[::-1])}
    copies = {words: partial(_exchange, layers[a], layers[b]) for words, (a, b) in copied.items()}
    yield Hypothesis("layer_order", "one like another", copies, (1,), is_partial=True)
    inside = {end for name in layers for end, one in layers[name].named_modules() if isinstance(one, nn.Linear)}
    for end in ("", *(f".{one}" for one in sorted(inside) if len(layers) < 9)):
        both = [(a + end, b + end) for a, b in pairs if a + end in named and b + end in named]
        units = {f"{a} and {b}": partial(_exchange, named[a], named[b]) for a, b in both}
        yield Hypothesis("layer_order", "exchanged", units, is_partial=True)
    for words, first, second in (("gate and up", "gate_proj", "up_proj"), ("key and value", "k_proj", "v_proj")):
        owners = {at: one for at, one in named.items() if hasattr(one, first) and hasattr(one, second)}
        units = {at: partial(_exchange, getattr(one, first), getattr(one, second)) for at, one in owners.items()}
        yield Hypothesis("projection_order", f"{words} projections exchanged", units)
    # Sums over the inner size, in the shards of tensor parallelism or by heads.
    cut: dict[str, Apply] = {}
    for at, one in places.items():
        if at.endswith(("o_proj.weight", "down_proj.weight")):
            size = getattr(named.get(at.removesuffix(".o_proj.weight")), "head_dim", one.weight.shape[1])
            for shards in {2, 4, one.weight.shape[1] // size} - {1}:
                for shard in range(shards) if shards * len(layers) <= 64 else ():
                    cut[f"{at} (part {shard + 1} of {shards})"] = one.put(partial(_without, shards=shards, shard=shard))
    yield Hypothesis("partial_sum", "a part of the sum is missing", cut, is_partial=True)
    yield Hypothesis("weights_missing", "set to 0", _put_all(places, lambda own, x: own * 0), is_partial=True)
    ends = {at: one for at, one in places.items() if one.weight.shape[:1] == (reference.vocab_size,)}
    rows = {f"row {n} of {at}": one.put(partial(_blank, n=n)) for at, one in ends.items() for n in specials}
    yield Hypothesis("weights_missing", "rows of special tokens set to 0", rows, is_partial=True)
    if not getattr(reference.config, "tie_word_embeddings", True):
        weight = model.get_input_embeddings().weight
        units = _one(lambda trial, x: use_matrix(model.get_output_embeddings(), lambda: weight.data, trial))
        yield Hypothesis("tied_head", "output layer = embedding", units)


def _without(own: Tensor, x: float, *, shards: int, shard: int) -> Tensor:
    return own * (torch.arange(own.shape[-1]) * shards // own.shape[-1] != shard)


def _blank(own: Tensor, x: float, *, n: int) -> Tensor:
    return own.index_fill(0, torch.tensor([n]), 0.0)


# Rows of a projection by heads, `[heads, head_dim, ...]`; of any matrix by shards, `[shards, size, ...]`.
Reorder: TypeAlias = Callable[[Tensor, int], Tensor]
HEADS: Mapping[str, Reorder] = {
    "halves of a head as pairs of neighbours": lambda w, g: torch.cat((w[:, ::2], w[:, 1::2]), dim=1),
    "pairs of neighbours as halves of a head": lambda w, g: torch.stack(w.chunk(2, dim=1), dim=2).flatten(1, 2),
    "halves of a head exchanged": lambda w, g: torch.cat(w.chunk(2, dim=1)[::-1], dim=1),
    "heads in reverse": lambda w, g: w.flip(0),
    "heads tiled": lambda w, g: w.unflatten(0, (g, -1)).transpose(0, 1).flatten(0, 1),
    "heads grouped": lambda w, g: w.unflatten(0, (-1, g)).transpose(0, 1).flatten(0, 1),
    "heads and their dimensions transposed": lambda w, g: w.flatten(0, 1).unflatten(0, w.shape[1::-1]).transpose(0, 1),
    "heads moved on by one": lambda w, g: w.roll(1, 0),
    "neighbouring heads exchanged": lambda w, g: (
        w.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) if len(w) % 2 == 0 else w
    ),
}
SHARDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "halves exchanged": lambda w: torch.cat(w.chunk(2)[::-1]),
    "quarters in reverse": lambda w: torch.cat(w.chunk(4)[::-1]),
    "quarters 1 and 2 exchanged": lambda w: torch.cat([w.chunk(4)[n] for n in (0, 2, 1, 3)]) if len(w) % 4 == 0 else w,
    "rows in reverse": lambda w: w.flip(0),
    "even rows, then odd rows": lambda w: torch.cat((w[::2], w[1::2])),
    "halves interleaved": lambda w: torch.stack(w.chunk(2), dim=1).flatten(0, 1) if len(w) % 2 == 0 else w,
    "moved on by one": lambda w: w.roll(1, 0),
}


def _orders(reference: Reference) -> Iterator[Hypothesis]:
    """Rows of projections (columns of the last ones) in another order, as loaders split and join them."""
    named = dict(reference.model.named_modules())
    attentions = {at: one for at, one in named.items() if hasattr(one, "q_proj") and hasattr(one, "head_dim")}
    mlps = {at: one for at, one in named.items() if hasattr(one, "down_proj") and isinstance(one.down_proj, nn.Linear)}

    def reorder(one: Any, parts: Sequence[str], change: Callable[[Tensor], Tensor], trial: Trial, x: float) -> None:
        for name in parts:
            module = getattr(one, name, None)
            for own in () if module is None else module.parameters():
                is_last = name in ("o_proj", "down_proj")
                if is_last and own.dim() < 2:
                    continue
                trial.set(own, "data", change(own.data.T).T if is_last else change(own.data))

    def in_heads(one: Any, change: Reorder) -> Callable[[Tensor], Tensor]:
        groups = getattr(one, "num_key_value_groups", 1)
        return lambda w: change(w.unflatten(0, (-1, one.head_dim)), groups).flatten(0, 1)

    for words, change in HEADS.items():
        fault = "rope" if "hal" in words else "projection_order"
        norms = ("q_norm", "k_norm")
        both = ("q_proj", "k_proj")
        targets = (both, (*both, *norms), ("q_proj",), ("k_proj",), ("v_proj",), ("o_proj",),
                   ("k_proj", "v_proj"), ("q_proj", "o_proj"), (*both, "v_proj"))  # fmt: skip
        for parts in targets:
            if norms[0] in parts and (
                "hal" not in words or not any(hasattr(one, norms[0]) for one in attentions.values())
            ):
                continue
            units = {at: partial(reorder, one, parts, in_heads(one, change)) for at, one in attentions.items()}
            name = fault if set(parts) >= {*both} and "v_proj" not in parts else "projection_order"
            yield Hypothesis(name, f"{', '.join(parts)}: {words}", units)
    for words, change in SHARDS.items():
        sets = ((attentions, ("q_proj", "k_proj", "v_proj", "o_proj")), (mlps, ("gate_proj", "up_proj", "down_proj")))
        for owners, kinds in sets:
            for parts in (*((kind,) for kind in kinds), kinds[:2], kinds[:-1]):
                units = {at: partial(reorder, one, parts, change) for at, one in owners.items()}
                yield Hypothesis("projection_order", f"{', '.join(parts)}: {words}", units)
    matrices = {at: one for at, one in list_places(reference.model).items() if one.weight.dim() == 2}
    square = {at: one for at, one in matrices.items() if one.weight.shape[0] == one.weight.shape[1]}
    yield Hypothesis("projection_order", "transposed", _put_all(square, lambda own, x: own.T), is_partial=True)
    ends = {at: one for at, one in matrices.items() if one.weight.shape[0] == reference.vocab_size}
    for words, change in SHARDS.items():
        yield Hypothesis("projection_order", words, _put_all(ends, lambda own, x, to=change: to(own)), is_partial=True)
    fused = {at: partial(_split_fused, one) for at, one in mlps.items() if hasattr(one, "gate_proj")}
    yield Hypothesis(
        "projection_order", "gate and up rows joined in shards of {x:.0f}, split as halves", fused, (2, 4, 8, 1e9)
    )


def _split_fused(mlp: Any, trial: Trial, x: float) -> None:
    gate, up = mlp.gate_proj.weight.data, mlp.up_proj.weight.data
    shards = min(int(x), len(gate))
    if len(gate) % shards == 0:
        joined = torch.stack((gate.unflatten(0, (shards, -1)), up.unflatten(0, (shards, -1))), dim=1).flatten(0, 2)
        for part, rows in zip((mlp.gate_proj, mlp.up_proj), joined.chunk(2), strict=True):
            trial.set(part.weight, "data", rows)


# Settings of operators; sizes of what they return.


def _settings(reference: Reference) -> Iterator[Hypothesis]:
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
        ("rope", "no dimension turns", "inv_freq", lambda own, x: own * 0),
        ("rope", "rope turns the other way", "inv_freq", lambda own, x: -own),
        ("rope", "cosines and sines times {x:.4g}", "attention_scaling", lambda own, x: own * x, wide, "real", 1.0),
        ("norm_epsilon", "norm epsilon {x:.3g}", "variance_epsilon", lambda own, x: x, epsilons, "real"),
        ("norm_epsilon", "norm epsilon {x:.3g}", "eps", lambda own, x: x, epsilons, "real"),
        ("bias_dropped", "biases set to 0", "bias", lambda own, x: own * 0),
    ]  # fmt: skip
    for act in (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.Sigmoid(), nn.Identity()):
        rows.append(("activation", f"{act} as activation", "act_fn", lambda own, x, act=act: act))
    quick = lambda value: value * torch.sigmoid(1.702 * value)  # noqa: E731
    rows.append(("activation", "quick GELU as activation", "act_fn", lambda own, x: quick))

    def put(owner: Any, name: str, change: Change, trial: Trial, x: float) -> None:
        if name == "act_fn":  # a module may not be replaced by a function
            trial.hook(owner.act_fn, lambda inputs, output: change(None, x)(inputs[0]))
        else:
            trial.set(owner, name, change(getattr(owner, name), x))

    for fault, label, name, change, *how in rows:
        owners = {at: one for at, one in model.named_modules() if getattr(one, name, None) is not None}
        if owners and (fault != "rope" or base):
            yield Hypothesis(fault, label, {at: partial(put, one, name, change) for at, one in owners.items()}, *how)
    if base and hasattr(getattr(model, "model", None), "rotary_emb"):
        if config.rope_parameters.get("rope_type", "default") != "default":
            yield Hypothesis("rope", "rope without scaling", _one(partial(_rebuild_rope, rope_type="default")))
        for label, is_whole in (("the whole", True), ("a part of the", False)):
            yarn = partial(_rebuild_rope, rope_type="yarn", is_whole=is_whole)
            yield Hypothesis("rope", f"YaRN by {{x:.0f}} from {label} context", _one(yarn), (2, 4, 8, 16, 32))
        table = lambda inputs, out, x: tuple(one.bfloat16().to(one.dtype) for one in out)  # noqa: E731
        yield Hypothesis(
            "rope", "cosines and sines in bfloat16", _hook_all({"": model.model.rotary_emb}, table, is_whole=True)
        )
    norms = {at: one for at, one in model.named_modules() if "Norm" in type(one).__name__ and hasattr(one, "weight")}
    weights = {at: Place(one.weight, f"{at}.weight") for at, one in norms.items()}
    plain = _put_all(weights, lambda own, x: torch.ones_like(own))
    yield Hypothesis("norm_missing", "norms without their weights", plain, is_partial=True)
    more = _put_all(weights, lambda own, x: own + x)
    yield Hypothesis("norm_missing", "{x:+.0f} added to the weights of norms", more, (1, -1))
    off = _hook_all(norms, lambda inputs, output, x: inputs[0])
    heads = {at: one for at, one in off.items() if at.endswith(("q_norm", "k_norm"))}
    for kind, units in (("norms of queries and keys", heads), *by_kind(off)):
        yield Hypothesis("norm_missing", f"{kind} left out", units)
    layers = _find(model, LAYERS)
    embedded = {"embedding": model.get_input_embeddings()}
    mean = lambda inputs, output, x: output - output.mean(dim=-1, keepdim=True)  # noqa: E731
    stay = lambda inputs, output, x: inputs[0] * (x - 1) + output  # noqa: E731
    by, sizes = lambda inputs, output, x: output * x, (*FAR, config.hidden_size**0.5)
    yield Hypothesis("norm_missing", "the mean taken from what norms return", _hook_all(norms, mean))
    yield Hypothesis("embedding_scale", "embeddings times {x:.4g}", _hook_all(embedded, by), sizes, "real", 1.0)
    label, units = "what a layer was given times {x:.4g}", _hook_all(layers, stay)
    yield Hypothesis("residual", label, units, (0.0, *FAR), "real", 1.0, is_local=True)
    split = {at: one for at, one in layers.items() if all(hasattr(one, part) for part in BLOCK)}
    label = "the residual is taken after the norm (1: attention, 2: MLP, 3: both)"
    units = {at: partial(_residual_after_norm, one) for at, one in split.items()}
    yield Hypothesis("residual", label, units, (1, 2, 3), is_local=True)
    units = {at: partial(_parallel, one) for at, one in split.items()}
    yield Hypothesis("residual", "attention and MLP side by side", units, is_local=True)


def _residual_after_norm(layer: Any, trial: Trial, x: float) -> None:
    pairs = ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp))
    for bit, (norm, branch) in enumerate(pairs):
        if int(x) >> bit & 1:
            held: list[Tensor] = []
            trial.hook(norm, lambda inputs, output, held=held: (held.append(output - inputs[0]), output)[1])
            trial.hook(branch, lambda inputs, output, held=held: output + held.pop())


def _parallel(layer: Any, trial: Trial, x: float) -> None:
    held: list[Tensor] = []
    trial.hook(layer.input_layernorm, lambda inputs, output: (held.append(inputs[0]), output)[1])
    trial.hook_inputs(layer.post_attention_layernorm, lambda given: held.pop())


def _rebuild_rope(trial: Trial, x: float, *, rope_type: str, is_whole: bool = True) -> None:
    config, owner = copy.deepcopy(trial.model.config), trial.model.model
    longest = config.max_position_embeddings
    more = {"factor": x, "original_max_position_embeddings": longest if is_whole else int(longest / x)} if x else {}
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": rope_type, **more}
    trial.set(owner, "rotary_emb", type(owner.rotary_emb)(config))


def _sizes(reference: Reference) -> Iterator[Hypothesis]:
    """What any part returns, times a number."""
    inner = _find(reference.model, r"(proj|norm|self_attn|mlp)$")
    scaled = _hook_all(inner, lambda inputs, output, x: output * x)
    added = {at: unit for at, unit in scaled.items() if at.endswith(("self_attn", "mlp"))}
    for kind, units in (("attention and MLP", added), *by_kind(scaled)):
        label = f"what {kind} returns times {{x:.4g}}"
        yield Hypothesis("weight_scale", label, units, (*FAR, 0.0), "real", 1.0, is_general=True)


# Mixtures.


def _experts(reference: Reference) -> Iterator[Hypothesis]:
    named = dict(reference.model.named_modules())
    routers: dict[str, Any] = {at: one for at, one in named.items() if type(one).__name__.endswith("Router")}
    first = next(iter(routers.values()), None)
    if not isinstance(own := getattr(first, "top_k", None), int):
        return

    def put(name: str, change: Change) -> dict[str, Apply]:
        return {
            at: lambda trial, x, one=one: trial.set(one, name, change(getattr(one, name), x))
            for at, one in routers.items()
        }

    counts = sorted({1, own - 1, own + 1, 2 * own, first.num_experts} - {0, own})
    yield Hypothesis("experts_per_token", "{x:.0f} experts a token", put("top_k", lambda own, x: int(x)), counts)
    if hasattr(first, "norm_topk_prob"):
        flipped = put("norm_topk_prob", lambda own, x: not own)
        yield Hypothesis("expert_weights", "expert weights normalised or not, unlike the model", flipped)
    weighed = _hook_all(routers, lambda inputs, out, x: (out[0], out[1] * x, *out[2:]), is_whole=True)
    yield Hypothesis("expert_weights", "expert weights times {x:.4g}", weighed, FAR, "real", 1.0)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = {at: partial(_narrow_router, one, dtype) for at, one in routers.items()}
        yield Hypothesis("router_dtype", f"the router in {dtype}", narrow, is_rounding=True)
    experts, count = {at: one for at, one in named.items() if "Experts" in type(one).__name__}, first.num_experts
    every = torch.arange(count)
    orders = {
        "in reverse": every.flip(0),
        "moved on by one": every.roll(1),
        "in halves exchanged": every.roll(count // 2),
    }
    for words, order in orders.items():
        units = {at: partial(_move_experts, one, order) for at, one in experts.items()}
        yield Hypothesis("expert_order", f"experts {words}", units)
    units, missing = dict[str, Apply](), dict[str, Apply]()
    for at, one in experts.items() if count <= 16 else ():
        for part in ("", *(name for name, _ in one.named_parameters(recurse=False))):
            for a, b in combinations(range(count), 2):
                order = every.clone()
                order[[a, b]] = order[[b, a]]
                units[f"{at}.{part} {a} and {b}"] = partial(_move_experts, one, order, part=part)
        for n in range(count):
            blank = {
                f"{at}.{n} {name}": Place(own, "").put(partial(_blank, n=n)) for name, own in one.named_parameters()
            }
            missing |= {f"{at}.{n}": partial(_run_all, blank.values())}
    yield Hypothesis("expert_order", "experts exchanged", units, is_partial=True)
    yield Hypothesis("weights_missing", "experts set to 0", missing, is_partial=True)


def _run_all(changes: Iterable[Apply], trial: Trial, x: float) -> None:
    for change in changes:
        change(trial, x)


def _move_experts(experts: nn.Module, order: Tensor, trial: Trial, x: float, *, part: str = "") -> None:
    for name, parameter in experts.named_parameters(recurse=False):
        if part in ("", name) and len(parameter) == len(order):
            trial.set(parameter, "data", parameter.data[order])


def _narrow_router(router: Any, dtype: torch.dtype, trial: Trial, x: float) -> None:
    narrow = copy.deepcopy(router).to(dtype)

    def route(inputs: Any, output: Any) -> Any:
        with WideSums():
            found = narrow(inputs[0].to(dtype))
        return tuple(one.float() if one.is_floating_point() else one for one in found)

    trial.hook(router, route, is_whole=True)


# Quantised weights, activations and caches; coarser dtypes.


def _formats(reference: Reference, dtype: str) -> Iterator[Hypothesis]:
    model = reference.model
    matrices = {at: one for at, one in list_places(model).items() if one.weight.dim() > 1}
    ends = {model.get_input_embeddings().weight, getattr(model.get_output_embeddings(), "weight", None)}
    inner = {at: one for at, one in matrices.items() if one.weight not in ends}
    outer = {at: one for at, one in matrices.items() if one.weight in ends}
    linears = [
        one
        for at, one in model.named_modules()
        if isinstance(one, nn.Linear) and one is not model.get_output_embeddings()
    ]

    def weights(kind: str, label: str, rounding: Rounding) -> Iterator[Hypothesis]:
        name, units = f"{kind}_weights", _put_all(inner, lambda own, x: rounding(own), saved=True)
        yield Hypothesis(name, label, units, is_rounding=True)
        if label.endswith(("per row", "per matrix", "per block")):
            finer = FORMATS["int8"]["int8 per row"] if kind == "int8" else FORMATS["fp8"]["float8_e4m3fn per row"]
            for own in (finer, FORMATS[kind][label]) if kind != "int4" else (finer,):
                narrow = {"inputs": lambda trial, x, own=own: [trial.hook_inputs(one, own) for one in linears]}
                both = {**units, **narrow}
                yield Hypothesis(name, f"{label}, activations too", both, is_rounding=True)
                yield Hypothesis(name, f"activations alone, {label}", narrow, is_rounding=True)

    for kind, formats in FORMATS.items():
        shared = [(label, to) for label, to in formats.items() if not label.endswith(("per tensor", "per token"))]
        first, *others = [one for label, to in shared for one in weights(kind, label, to)]
        yield replace(first, details=partial(list, others))
        # Most engines leave embedding and output layer as they are; some round these.
        for chosen in (*([at] for at in outer), [*outer]):
            places = {at: outer[at] for at in chosen}
            first, *others = [
                Hypothesis(
                    f"{kind}_weights",
                    f"{label}; in {' and '.join(chosen)}",
                    _put_all(places, lambda own, x, to=to: to(own), saved=True),
                    is_rounding=True,
                )
                for label, to in shared
            ]
            yield replace(first, details=partial(list, others))
    for kind, formats in {**FORMATS, **({"dtype": NARROW} if dtype == "float32" else {})}.items():
        usual = [label for label in formats if " " not in label or label.endswith(("per row", "scale", "per tensor"))]
        first, *others = [
            _cache(kind, label, rounding, parts)
            for label, rounding in formats.items() for parts in (CACHES if label in usual else CACHES[:1])
        ]  # fmt: skip
        yield replace(first, details=partial(list, others))
    if dtype != "float32":
        return
    head, layers = model.get_output_embeddings(), _find(model, LAYERS)
    for name, narrow in NARROW.items():
        load = {at: Place(own, at).put(lambda own, x, to=narrow: to(own)) for at, own in model.named_parameters()}
        project = _one(lambda trial, x, to=narrow: use_matrix(head, lambda: to(head.weight.data), trial, to))
        yield Hypothesis(f"dtype_{name}", f"weights rounded to {name}", load)
        yield Hypothesis("head_dtype", f"the output layer in {name}", project, is_rounding=True)
        stream = _hook_all(
            {"": model.get_input_embeddings(), **layers}, lambda inputs, output, x, to=narrow: to(output)
        )
        yield Hypothesis(f"dtype_{name}", f"the residual stream in {name}", stream, is_rounding=True)

    def in_tf32(trial: Trial, x: float) -> None:
        for module in linears:
            trial.set(module.weight, "data", tf32(module.weight.data))
            trial.hook_inputs(module, tf32)

    yield Hypothesis("dtype_tf32", "matrix products in TF32", _one(in_tf32), is_rounding=True)


CACHES = ("", "read by decoding alone", "keys alone", "values alone")


def _cache(kind: str, label: str, rounding: Rounding, parts: str) -> Hypothesis:
    keys, values = (None if parts == f"{other} alone" else rounding for other in ("values", "keys"))
    is_late = parts == CACHES[1]

    def apply(trial: Trial, x: float) -> None:
        trial.cache = lambda: rounding_cache(keys, values, prefill=not is_late)

    words = f"KV cache in {label}" + (f", {parts}" if parts else "")
    return Hypothesis(f"{kind}_kv_cache", words, _one(apply), is_sampling=is_late, is_rounding=True)
