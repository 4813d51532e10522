"""What an engine may compute instead: a table of (place, transformation, span of tokens, at most one fitted number).

Places are weights, settings, what modules return, attention masks, positions, the cache, prompts, logits, reports.
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
from torch.nn.functional import pad

from tokentrue.doctor.formats import FORMATS, NARROW, Rounding, tf32, to_float8
from tokentrue.doctor.reference import (
    Observation,
    Reference,
    Trial,
    WideSums,
    adapter_deltas,
    load_model,
    rounding_cache,
)

Apply: TypeAlias = Callable[[Trial, Any], object]
Units: TypeAlias = Mapping[str, Apply]
Span: TypeAlias = Callable[[Observation, Any], tuple[int, int]]
Rewrite: TypeAlias = Callable[[tuple[int, ...]], tuple[int, ...]]  # of a prompt's ids
# A change of 2% or more is near one of these; 1 changes nothing.
FAR = (0.5, 0.25, 1.0, 2.0, 0.8, 4.0, 1.03, 0.97, 1.25)
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
PAGES = (4, 8, 16, 32, 64)
FEW = (1, 2, 4, 8, 16, 32)
LAST = ("o_proj.weight", "down_proj.weight")  # whose sums tensor parallelism splits
LAYERS = r"(^|\.)(layers|h|blocks)\.\d+$"
TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
FILTERS: Mapping[str, Sequence[float]] = {
    "top_k": (*range(1, 11), 15, 20, 25, 30, 40, 50, 64, 100),
    "top_p": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "min_p": (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3),
    "least probability": (0.0003, 0.001, 0.003, 0.01, 0.02, 0.05),
}
# Each from the prompt's start (0), in the answer alone (1) or in the last 64 tokens (64).
PENALTIES: Mapping[str, tuple[int, Sequence[float]]] = {
    "repetition": (0, (0.9, 1.01, 1.05, 1.1, 1.2, 1.5)),
    "answer's repetition": (1, (0.9, 1.05, 1.2)),
    "64 tokens' repetition": (64, (0.9, 1.05, 1.2)),
    "presence": (1, (-0.5, 0.1, 0.5, 1.0, 1.5)),
    "frequency": (1, (-0.5, 0.1, 0.5, 1.0)),
    "prompt's presence": (0, (-0.5, 0.5, 1.5)),
    "prompt's frequency": (0, (-0.5, 0.1, 0.5)),
}


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`units` make the change, each in one place; `fault` is a name of `findings.CAUSES`; `label` may show the {x}."""

    fault: str
    label: str
    units: Units
    grid: Sequence[float] = (0.0,)  # values to try; each third one first, the others where those are promising
    fit: str = ""  # "real" or "whole": numbers between the values of the grid are tried, too
    is_sampling: bool = False  # of sampled tokens alone: prompt log-probabilities do not show it
    is_output: bool = False  # of logits or reports alone: the model need not run again
    is_rounding: bool = False  # it rounds: small differences before it become steps, and no simulation is exact
    is_partial: bool = False  # never in all units at once
    is_local: bool = False  # may be wrong in one layer, where the effect of all says nothing about it
    is_general: bool = False  # named by what happens to numbers: listed after a name that says why
    span: Span | None = None  # of token places that are computed under the change; the others are not
    details: Callable[[], Sequence[Hypothesis]] | None = None  # other forms, tried where this one is promising

    def make_trial(self, reference: Reference, x: float) -> Trial:
        trial, span = reference.trial(), self.span
        for change in self.units.values():
            change(trial, x)
        trial.span = None if span is None else lambda seen: span(seen, x)
        return trial

    def within(self, chosen: Iterable[str]) -> Hypothesis:
        """The same in some places only."""
        kept = {*chosen}
        units = {name: unit for name, unit in self.units.items() if name in kept}
        names = [*units]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        label = f"{self.label}; in {shown} alone"
        return replace(self, label=label, units=units, details=None, is_partial=False, is_local=False)


def list_hypotheses(
    reference: Reference,
    *,
    previous: Any = None,
    specials: Sequence[int] = (),
    stops: Sequence[int] = (),
    rewrites: Mapping[str, Rewrite] | None = None,
    dtype: str,
) -> Iterator[Hypothesis]:
    """Every cause that can be simulated for this model. `specials` are ids that an engine may put before a prompt,
    `rewrites` what an engine may make of the ids that it is sent."""
    yield from _outside(specials, stops, rewrites or {})
    yield from _masks(reference.model)
    yield from _other_weights(reference, previous, getattr(torch, dtype))
    yield from _settings(reference)
    yield from _experts(reference.model)
    yield from _formats(reference.model, dtype)
    yield from _parts(reference, specials)
    yield from _orders(reference)
    yield from _sizes(reference.model)


# Outside of the model: prompts, positions, logits, reports.


def _on(
    what: str, fault: str, label: str, change: Any, grid: Sequence[float] = (0.0,), fit: str = "", **how: Any
) -> Hypothesis:
    """A change of the trial's `inputs`, `positions`, `outputs` or `reports`."""
    units = {"": lambda trial, x: setattr(trial, what, lambda *given: change(*given, x))}
    return Hypothesis(fault, label, units, grid, fit, is_output=what in ("outputs", "reports"), **how)


def _outside(specials: Sequence[int], stops: Sequence[int], rewrites: Mapping[str, Rewrite]) -> Iterator[Hypothesis]:
    """i: place of a token; n: how many tokens were sent; z: logits; own: log-probabilities of the entries."""
    ids = torch.tensor([*stops], dtype=torch.long)

    def ban(z: Tensor, seen: Observation, x: float) -> Tensor:
        early = torch.tensor(seen.positions) - seen.prompt_tokens < x
        return torch.where(early[:, None], z.index_fill(1, ids, -torch.inf), z)

    def drop(seen: Observation, x: int, *, is_end: bool) -> Observation:
        x = max(0, min(x, seen.prompt_tokens - 1))
        return seen.edit(seen.prompt_tokens - x if is_end else 0, x)

    def over_the_top(own: Tensor, seen: Observation, z: Tensor, x: int) -> Tensor:
        mass = z.double().log_softmax(-1).topk(min(x, z.shape[-1])).values.logsumexp(-1)
        return (own - mass[seen.targets[0]]).clamp(max=0)

    capped = lambda z, seen, x: x * torch.tanh(z / x)  # noqa: E731
    padding = "unused rows of the output layer weigh e^{x:.2f} in the softmax"
    drops, shifts, bases = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (-2, -1, 1, 2, 8, 32), [1 / math.log(n) for n in (10, 2)]
    rows: tuple[tuple[Any, ...], ...] = (
        ("reports", "log_base", "log-probabilities times {x:.4g}", lambda own, seen, z, x: own * x, (*bases, *FAR), "real"),
        ("reports", "bad_logprobs", "none below {x:.3g}", lambda own, seen, z, x: own.clamp(min=x), (-1, -2, -3, -4, -5, -8, -12), "real"),
        ("outputs", "sampled_temperature", "logits divided by {x:.4g}", lambda z, seen, x: z / x, FAR, "real"),
        ("outputs", "vocab_padding", padding, lambda z, seen, x: pad(z, (0, 1), value=x), range(-2, 26, 2), "real"),
        ("outputs", "logit_softcap", "logits capped at {x:.3g}", capped, (5, 15, 30, 50, 100, 200), "real"),
        ("inputs", "prompt_changed", "the prompt without {x:.0f} tokens at its start", partial(drop, is_end=False), drops, "whole"),
        ("inputs", "prompt_changed", "the prompt without {x:.0f} tokens at its end", partial(drop, is_end=True), drops, "whole"),
        ("positions", "decode_positions", "positions of sampled tokens moved by {x:.0f}", lambda i, n, x: i + x * (i >= n), shifts, "whole"),
        ("positions", "decode_positions", "positions after the first sampled token moved by {x:.0f}", lambda i, n, x: i + x * (i > n), shifts, "whole"),
        ("positions", "decode_positions", "sampled tokens beyond position {x:+.0f} from the prompt's end have that one", lambda i, n, x: i.minimum(n + x), (0, -1)),
        ("positions", "decode_positions", "positions begin again after {x:.0f} tokens", lambda i, n, x: torch.where(i < n, i % x, i), LENGTHS, "whole"),
        ("positions", "decode_positions", "positions begin again each {x:.0f} tokens", lambda i, n, x: i % x, LENGTHS, "whole"),
        ("positions", "decode_positions", "no position beyond {x:.0f}", lambda i, n, x: i.clamp(max=x), LENGTHS, "whole"),
        *(("inputs", "bos_added", "token {x:.0f} before the prompt", lambda seen, x: seen.edit(0, 0, (x,)), specials) for _ in specials[:1]),
    )  # fmt: skip
    neighbour = {"": lambda trial, x: setattr(trial, "align", x)}
    yield Hypothesis("off_by_one", "the log-probability {x:+.0f} places on", neighbour, (-1, 1), is_output=True)
    yield from (_on(*row) for row in rows)
    early: dict[str, Any] = {"is_sampling": True}
    label = "log-probabilities normalised over the {x:.0f} likeliest"
    yield _on("reports", "other_reports", label, over_the_top, FILTERS["top_k"], is_general=True, **early)
    for first in (0, 1, 4, 16, 32, 64):
        keep = lambda seen, x, first=first: seen.edit(first, max(0, seen.prompt_tokens - first - x))  # noqa: E731
        label = f"the first {first} and the last {{x:.0f}} prompt tokens"
        yield _on("inputs", "context_truncated", label, keep, LENGTHS, "whole", **early)
    for label, to in rewrites.items():
        change = lambda seen, x, to=to: seen.edit(0, seen.prompt_tokens, to(seen.token_ids[: seen.prompt_tokens]))  # noqa: E731
        yield _on("inputs", "prompt_changed", label, change, **early)
    label = "stop tokens removed from the first {x:.0f} tokens"
    yield _on("outputs", "stop_banned", label, ban, (4, 8, 16, 32, 9999), "whole", **early)
    for name, grid in FILTERS.items():
        yield _filtered(name, grid, details=_two_filters if name == "top_p" else None)
    for name, (start, grid) in PENALTIES.items():
        change = partial(penalise, name=name, start=start)
        yield _on("outputs", "sampled_penalty", f"a {name} penalty of {{x:.3g}}", change, grid, "real", **early)
    yield _on("outputs", "sampled_penalty", "no {x:.0f} tokens that were there before", ban_runs, range(1, 7), **early)
    for dtype, narrow in NARROW.items():
        rounded = lambda z, seen, x, to=narrow: to(z)  # noqa: E731
        yield _on("outputs", "head_dtype", f"logits rounded to {dtype}", rounded, is_rounding=True)


def _filtered(
    name: str, grid: Sequence[float], before: Callable[[Tensor], Tensor] = lambda z: z, label: str = "", **how: Any
) -> Hypothesis:
    change = lambda z, seen, x: filter_logits(before(z), x, name=name)  # noqa: E731
    fit, label = "" if name == "top_k" else "real", f"{label}{name} {{x:.3g}}"
    return _on("outputs", "sampled_filters", label, change, grid, fit, is_sampling=True, **how)


def _two_filters() -> list[Hypothesis]:
    """Defaults of an engine often have two of temperature, top-k and top-p."""
    first = {f"temperature {t:g} and ": lambda z, t=t: z / t for t in TEMPERATURES if t != 1}
    first |= {f"top_k {k} and ": partial(filter_logits, x=k, name="top_k") for k in (10, 20, 40, 50)}
    return [_filtered("top_p", FILTERS["top_p"], before, label) for label, before in first.items()]


def biased(bias: Mapping[int, float]) -> Hypothesis:
    ids, by = torch.tensor([*bias]), torch.tensor([*bias.values()])
    add = lambda z, seen, x: z.index_add(1, ids, by.to(z.dtype).expand(len(z), -1))  # noqa: E731
    shown = ", ".join(f"{token}: {value:+.3g}" for token, value in [*bias.items()][:6])
    return _on("outputs", "logit_bias", f"a bias on the logits of {len(bias)} tokens ({shown})", add)


def edited(edits: Mapping[tuple[int, ...], Observation], label: str, fault: str) -> Hypothesis:
    """Each prompt with an edit of its own, by the ids of the whole observation."""
    return _on("inputs", fault, label, lambda seen, x: edits.get(seen.token_ids, seen))


def count_kept(probs: Tensor, name: str, x: float) -> Tensor:
    """`[rows, 1]`: how many of the likeliest tokens a filter at x keeps. `probs`: descending."""
    if name == "top_k":
        return torch.full_like(probs[:, :1], min(x, probs.shape[-1]), dtype=torch.long)
    least = {"min_p": probs[:, :1] * x, "least probability": probs[:, :1].clamp(max=x)}
    is_kept = probs.cumsum(dim=-1) - probs < x if name == "top_p" else probs >= least[name]
    return is_kept.sum(dim=-1, keepdim=True)


def filter_logits(logits: Tensor, x: float, *, name: str) -> Tensor:
    """Logits with -inf for what a filter at x removes."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    is_cut = torch.arange(logits.shape[-1]) >= count_kept(ordered.softmax(dim=-1), name, x)
    return logits.masked_fill(torch.zeros_like(is_cut).scatter(1, order, is_cut), -torch.inf)


def penalise(logits: Tensor, seen: Observation, x: float, *, name: str, start: int) -> Tensor:
    changed = logits.clone()
    for row, at in enumerate(seen.positions):
        first = {0: 0, 1: seen.prompt_tokens}.get(start, max(0, at - start))
        ids, counts = torch.tensor(seen.token_ids[first:at], dtype=torch.long).unique(return_counts=True)
        own = logits[row, ids]
        if name.endswith("repetition"):
            changed[row, ids] = torch.where(own > 0, own / x, own * x)
        else:
            changed[row, ids] = own - x * (counts if name.endswith("frequency") else 1)
    return changed


def ban_runs(logits: Tensor, seen: Observation, x: int) -> Tensor:
    """No run of x tokens twice, as `no_repeat_ngram_size` asks for."""
    changed, ids = logits.clone(), seen.token_ids
    for row, at in enumerate(seen.positions):
        tail = ids[at - x + 1 : at]
        changed[row, [ids[end] for end in range(x - 1, at) if ids[end - x + 1 : end] == tail]] = -torch.inf
    return changed


# Attention masks.


def _masks(model: nn.Module) -> Iterator[Hypothesis]:
    """i and j: places of query and key; n: how many tokens were sent."""
    attentions = _find(model, r"(self_attn|\.attention|\.attn)$")
    windows = {at: getattr(one, "sliding_window", None) or 10**9 for at, one in attentions.items()}

    def hidden(
        label: str, grid: Sequence[float], rule: Callable[..., Tensor], is_all: bool = False,
        fault: str = "attention_mask", **how: Any,
    ) -> Hypothesis:  # fmt: skip
        """`is_all`: the rule says what is not seen, otherwise what is not seen beside the model's own mask."""

        def apply(at: str, trial: Trial, x: float) -> None:
            own = lambda i, j: False if is_all else (j > i) | (i - j >= windows[at])  # noqa: E731
            trial.hide(attentions[at], lambda i, j, n: rule(i, j, n, x) | own(i, j))

        return Hypothesis(fault, label, {at: partial(apply, at) for at in attentions}, grid, **how)

    def window(i: Tensor, j: Tensor, n: Tensor, x: int, first: int = 0, is_late: bool = False) -> Tensor:
        return (j > i) | (i - j >= (x or 10**9)) & (j >= first) & ((i >= n) | (not is_late))

    def list_windows(is_late: bool) -> list[Hypothesis]:
        who = "decoding sees" if is_late else "attention to"
        rules: dict[str, Callable[..., Tensor]] = {
            f"{who} the last {{x:.0f}} tokens and the first {first}": partial(window, first=first, is_late=is_late)
            for first in (4, 1, 2, 16)
        }
        rules[f"{who} own blocks of {{x:.0f}} tokens"] = lambda i, j, n, x: (
            (j > i) | (i // x != j // x) & ((i >= n) | (not is_late))
        )
        return [hidden(label, LENGTHS, rule, True, "sliding_window", fit="whole") for label, rule in rules.items()]

    if not attentions:
        return
    spans = sorted({*(0 for own in windows.values() if own < 10**9), *LENGTHS, 40})
    shared: dict[str, Any] = {"fault": "sliding_window", "fit": "whole", "is_all": True}
    label, details = "attention to {x:.0f} tokens (0: all)", partial(list_windows, False)
    yield hidden(label, spans, window, **shared, is_local=True, details=details)
    label, late = "decoding sees {x:.0f} tokens", partial(window, is_late=True)
    yield hidden(label, LENGTHS, late, **shared, details=partial(list_windows, True))
    # Chunks of a prompt; c: where the query's chunk begins.
    rules: tuple[tuple[Any, ...], ...] = (
        ("the prompt is read in both directions", (0,), lambda i, j, n, x: (j > i) & (j >= n), True),
        ("chunks of {x:.0f} prompt tokens are read in both directions", LENGTHS, lambda i, j, n, x: (j > i) & ((j >= n) | (j // x != i // x)), True),
        ("masks of chunks of {x:.0f} prompt tokens begin at the first key", LENGTHS, lambda i, j, n, x: (j > i) | (i < n) & (j > i % x)),
        ("chunks of {x:.0f} prompt tokens do not see earlier ones", LENGTHS, lambda i, j, n, x: (i < n) & (j < i // x * x)),
        ("chunks of {x:.0f} prompt tokens do not see their own earlier tokens", LENGTHS, lambda i, j, n, x: (i < n) & (x <= i) & (i // x * x <= j) & (j < i)),
        *((f"chunks of {{x:.0f}} prompt tokens do not see the {y} before them", LENGTHS, lambda i, j, n, x, y=y: (i < n) & (j < i // x * x) & (j >= i // x * x - y)) for y in (1, 16)),
        ("nothing sees the first {x:.0f} tokens", FEW, lambda i, j, n, x: (i >= x) & (j < x)),
        ("page {x:.0f} of 16 tokens is not seen", range(8), lambda i, j, n, x: (j // 16 == x) & (i // 16 > x)),
        ("tokens from {x:.0f} on do not see the one before them", LENGTHS, lambda i, j, n, x: (j == x - 1) & (i >= x)),
        ("tokens do not see each {x:.0f}th one", PAGES, lambda i, j, n, x: (j % x == x - 1) & (j < i)),
        ("decoding does not see the first {x:.0f} tokens", FEW, lambda i, j, n, x: (i >= n) & (j < x)),
        ("decoding does not see the last {x:.0f} prompt tokens", FEW, lambda i, j, n, x: (i >= n) & (j >= n - x) & (j < n)),
        ("decoding does not see the {x:.0f} tokens before it", FEW, lambda i, j, n, x: (i >= n) & (j < i) & (j >= i - x)),
        ("decoding does not see sampled tokens before the last {x:.0f}", (0, *FEW), lambda i, j, n, x: (j >= n) & (j < i - x)),
        ("decoding does not see the open page of {x:.0f}", PAGES, lambda i, j, n, x: (i >= n) & (j // x == i // x) & (j < i)),
        ("decoding does not see the prompt's open page of {x:.0f}", PAGES, lambda i, j, n, x: (i >= n) & (j >= n // x * x) & (j < n)),
        ("decoding does not see the first token of an open page of {x:.0f}", PAGES, lambda i, j, n, x: (i >= n) & (j == i) & (i % x == 0)),
        ("decoding does not see sampled tokens of closed pages of {x:.0f}", PAGES, lambda i, j, n, x: (j >= n) & (j // x < i // x)),
    )  # fmt: skip
    yield from (hidden(*row) for row in rules)


# Weights: other ones, missing, exchanged, in another order.


@dataclass(frozen=True, slots=True)
class Place:
    """A weight as one module has it; embedding and output layer may share theirs. `name`: in the model's state."""

    module: nn.Module
    attribute: str
    name: str

    @property
    def weight(self) -> Tensor:
        return getattr(self.module, self.attribute).data

    def put(self, to: Callable[[Tensor, float], Tensor], *, saved: bool = False) -> Apply:
        """`saved`: from the weight before the engine's dtype rounded it."""

        def apply(trial: Trial, x: float) -> None:
            own = trial.saved.get(self.name) if saved else None
            own = trial.get(self.module, self.attribute) if own is None else own
            trial.set(self.module, self.attribute, to(own, x))

        return apply


def list_places(model: Any) -> dict[str, Place]:
    names = {own: name for name, own in model.named_parameters()}
    first = model.get_input_embeddings()
    is_shared = first.weight is getattr(model.get_output_embeddings(), "weight", None)
    found: dict[str, Place] = {}
    for module in model.modules():
        for attribute, own in module.named_parameters(recurse=False):
            label = names[own]
            if is_shared and own is first.weight:
                one, other = ("embedding", "output layer") if module is first else ("output layer", "embedding")
                label = f"{one}, which the {other} shares"
            found[label] = Place(module, attribute, names[own])
    return found


def _put_all(places: Mapping[str, Place], to: Callable[[Tensor, float], Tensor], **how: bool) -> dict[str, Apply]:
    return {name: place.put(to, **how) for name, place in places.items()}


def _find(model: nn.Module, pattern: str) -> dict[str, Any]:
    return {at: one for at, one in model.named_modules() if re.search(pattern, at)}


def _having(model: nn.Module, *names: str) -> dict[str, Any]:
    return {at: one for at, one in model.named_modules() if all(getattr(one, name, None) is not None for name in names)}


def _hook_all(
    modules: Mapping[str, nn.Module], change: Callable[[Any, Any, float], Any], **how: bool
) -> dict[str, Apply]:
    """`change(inputs, output, x)` replaces the output of each module."""

    def hook(module: nn.Module, trial: Trial, x: float) -> None:
        trial.hook(module, lambda inputs, output: change(inputs, output, x), **how)

    return {name: partial(hook, module) for name, module in modules.items()}


def by_kind(units: Units) -> Mapping[str, Units]:
    """By what is after the number of the layer."""
    kinds: dict[str, dict[str, Apply]] = {}
    for name, unit in units.items():
        kinds.setdefault(re.sub(r"^.*?\.\d+\.", "", name), {})[name] = unit
    return kinds


def _other_weights(reference: Reference, previous: Any, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Of the same run, which the user gave: in all of the model, in parts, or for some of the tokens."""
    if reference.adapter is not None:
        units: dict[str, Apply] = {}
        for name, by in adapter_deltas(reference.model, reference.adapter).items():
            place = Place(reference.model.get_submodule(name), "weight", f"{name}.weight")
            units[name] = place.put(lambda now, x, by=by: now + (x - 1) * by)
        yield from _in_spans(Hypothesis("adapter_missing", "the adapter times {x:.3g}", units, (0.0, *FAR), "real"))
    if previous is None:
        return
    old, changed = load_model(previous).state_dict(), dict[str, Apply]()
    scaled, shards = dict[str, Apply](), {count: dict[str, Apply]() for count in (2, 4, 8)}
    for name, place in list_places(reference.model).items():
        own, was = place.weight, old.get(place.name)
        before = own if was is None or was.shape != own.shape else was.to(dtype).float()
        if torch.equal(before, own):
            continue
        changed[name] = place.put(lambda now, x, was=before: was + x * (now - was))
        if own.dim() > 1:
            for count, units in shards.items():
                units[name] = place.put(partial(_keep_shard, was=before, count=count, is_last=name.endswith(LAST)))
        if place.name.endswith("_proj.weight"):
            scaled[name] = place.put(lambda now, x, was=before: to_float8(now, was))
    if changed:
        label, grid = "the previous weights, and {x:.3g} of the update", (0.0, 0.5, 1.0, 2.0, 0.9, 1.1)
        yield from _in_spans(Hypothesis("stale_weights", label, changed, grid, "real"))
    for count, units in shards.items():
        yield Hypothesis("stale_weights", f"the previous weights in shard {{x:.0f}} of {count}", units, range(count))
    yield Hypothesis("fp8_weights", "float8 per matrix, scales of the previous weights", scaled, is_rounding=True)


def _keep_shard(now: Tensor, x: float, *, was: Tensor, count: int, is_last: bool) -> Tensor:
    """One rank of tensor parallelism has other weights: some rows, or columns where sums are split."""
    places = torch.arange(now.shape[-1 if is_last else 0]) * count // now.shape[-1 if is_last else 0] == x
    return torch.where(places if is_last else places[:, None], was, now)


def _in_spans(whole: Hypothesis) -> Iterator[Hypothesis]:
    yield whole
    counts, zero = (16, 1, 2, 4, 8, 24, 32, 48, 64, 96, 128, 192, 256), dict[str, Apply]()
    spans: tuple[tuple[str, str, Sequence[float], Span], ...] = (
        ("prefix_cache", "full pages of {x:.0f} prompt tokens", (16, 4, 8, 32, 64, 128), lambda seen, x: (0, (seen.prompt_tokens - 1) // x * x)),
        ("prefix_cache", "{x:.0f} first tokens", counts, lambda seen, x: (0, min(x, seen.prompt_tokens - 1))),
        ("prefix_cache", "the prompt but its last token", (0,), lambda seen, x: (0, seen.prompt_tokens - 1)),
        (whole.fault, "the prompt and {x:.0f} sampled tokens", (0, *FEW, 12, 20, 24), lambda seen, x: (0, seen.prompt_tokens + x)),
        (whole.fault, "sampled tokens but {x:.0f}", (0, *FEW, 12, 20, 24), lambda seen, x: (seen.prompt_tokens + x, len(seen.token_ids))),
    )  # fmt: skip
    for at, unit in whole.units.items():
        zero[at] = lambda trial, x, unit=unit: unit(trial, 0.0)
    for fault, words, grid, span in spans:
        label = f"{whole.label.format(x=0)}, for {words} alone"
        yield replace(whole, fault=fault, label=label, units=zero, grid=grid, fit="", span=span)


def _exchange(one: nn.Module, other: nn.Module, trial: Trial, x: float, *, is_copy: bool = False) -> None:
    """`is_copy`: the first has the weights of the other, which keeps its own."""
    for a, b in zip(one.modules(), other.modules(), strict=False):
        for name, own in a.named_parameters(recurse=False):
            if getattr(getattr(b, name, None), "shape", None) == own.shape:
                first, second = trial.get(a, name), trial.get(b, name)
                trial.set(a, name, second)
                if not is_copy:
                    trial.set(b, name, first)


def _parts(reference: Reference, specials: Sequence[int]) -> Iterator[Hypothesis]:
    """Left out, set to 0, or exchanged."""
    model, places = reference.model, list_places(reference.model)
    layers, named = _find(model, LAYERS), dict(model.named_modules())

    def some(fault: str, label: str, units: Units) -> Hypothesis:
        return Hypothesis(fault, label, units, is_partial=True)

    skipped = _hook_all(layers, lambda inputs, output, x: inputs[0])
    skipped |= _hook_all(_find(model, r"\.(self_attn|mlp|shared_experts?)$"), lambda inputs, output, x: output * 0)
    yield some("layer_skipped", "left out", skipped)
    pairs = [*(combinations(layers, 2) if len(layers) < 9 else pairwise(layers))]
    swaps = {f"{a} and {b}": partial(_exchange, layers[a], layers[b]) for a, b in pairs}
    yield some("layer_order", "exchanged", swaps)
    both_ways = [*pairs, *((b, a) for a, b in pairs)]
    copies = {f"{a} as {b}": partial(_exchange, layers[a], layers[b], is_copy=True) for a, b in both_ways}
    yield some("layer_order", "weights of another layer", copies)
    for a, b in (("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_proj", "k_proj")):
        units = {at: partial(_exchange, getattr(one, a), getattr(one, b)) for at, one in _having(model, a, b).items()
                 if getattr(one, a).weight.shape == getattr(one, b).weight.shape}  # fmt: skip
        yield Hypothesis("projection_order", f"{a} and {b} exchanged", units)
    # Sums over the inner size, in the shards of tensor parallelism or by heads.
    cut: dict[str, Apply] = {}
    for at, one in places.items():
        if at.endswith(LAST):
            size = one.weight.shape[1]
            heads = size // getattr(named.get(at.removesuffix(".o_proj.weight")), "head_dim", size)
            for shards in {2, 4, heads} - {1}:
                for shard in range(shards) if shards * len(layers) <= 64 else ():
                    is_kept = torch.arange(size) * shards // size != shard
                    cut[f"{at} (part {shard + 1} of {shards})"] = one.put(lambda own, x, kept=is_kept: own * kept)
    yield some("partial_sum", "a part of the sum is missing", cut)
    yield some("weights_missing", "set to 0", _put_all(places, lambda own, x: own * 0))
    ends = {at: one for at, one in places.items() if one.weight.shape[:1] == (reference.vocab_size,)}
    rows = {f"row {n} of {at}": one.put(partial(_blank, n=n)) for at, one in ends.items() for n in specials}
    yield some("weights_missing", "rows of special tokens set to 0", rows)
    if not getattr(reference.config, "tie_word_embeddings", True):
        embedding = model.get_input_embeddings().weight.data
        tie = lambda trial, x: trial.set(model.get_output_embeddings(), "weight", embedding)  # noqa: E731
        yield Hypothesis("tied_head", "output layer = embedding", {"": tie})


def _blank(own: Tensor, x: float, *, n: int) -> Tensor:
    return own.index_fill(0, torch.tensor([n]), 0.0)


# Rows of a projection as a grid (d: size of a head, g: query heads of a key head), and what happens to that.
Order: TypeAlias = tuple[Callable[[int, int], tuple[int, ...]], Callable[[Tensor], Tensor]]
_transpose, _transpose_last = (partial(torch.transpose, dim0=n, dim1=n + 1) for n in (0, 1))
_flip, _flip_second = (partial(torch.flip, dims=(n,)) for n in (0, 1))
_roll = partial(torch.roll, shifts=1, dims=0)
HEADS: Mapping[str, Order] = {
    "halves of a head as pairs of neighbours": (lambda d, g: (-1, d // 2, 2), _transpose_last),
    "pairs of neighbours as halves of a head": (lambda d, g: (-1, 2, d // 2), _transpose_last),
    "halves of a head exchanged": (lambda d, g: (-1, 2, d // 2), _flip_second),
    "query heads in another order (tiled)": (lambda d, g: (g, -1, d), _transpose),
    "query heads in another order (grouped)": (lambda d, g: (-1, g, d), _transpose),
    "heads in reverse": (lambda d, g: (-1, d), _flip),
    "heads and their dimensions transposed": (lambda d, g: (d, -1), _transpose),
    "heads moved on by one": (lambda d, g: (-1, d), _roll),
    "neighbouring heads exchanged": (lambda d, g: (-1, 2, d), _flip_second),
}
ROWS: Mapping[str, Order] = {
    "halves exchanged": (lambda d, g: (2, -1), _flip),
    "quarters in reverse": (lambda d, g: (4, -1), _flip),
    "quarters 1 and 2 exchanged": (lambda d, g: (2, 2, -1), _transpose),
    "rows in reverse": (lambda d, g: (-1, 1), _flip),
    "even rows, then odd rows": (lambda d, g: (-1, 2), _transpose),
    "halves interleaved": (lambda d, g: (2, -1), _transpose),
    "moved on by one": (lambda d, g: (-1, 1), _roll),
    "transposed": (lambda d, g: (-1,), lambda own: own.T if own.shape[0] == own.shape[-1] else own),
}


def _reorder(own: Tensor, order: Order, d: int = 1, g: int = 1) -> Tensor:
    shape, change = order[0](d, g), order[1]
    if len(own) % math.prod(size for size in shape if size > 0):
        return own  # it has no such grid
    return change(own.unflatten(0, shape)).flatten(0, len(shape) - 1)


def _orders(reference: Reference) -> Iterator[Hypothesis]:
    """Rows of projections (columns of the last ones) in another order, as loaders split and join them."""
    attentions, mlps = (
        _having(reference.model, *names) for names in (("q_proj", "head_dim"), ("gate_proj", "down_proj"))
    )

    def reorder(one: Any, parts: Sequence[str], order: Order, trial: Trial, x: float) -> None:
        d, g = getattr(one, "head_dim", 1), getattr(one, "num_key_value_groups", 1)
        for name in parts:
            part, is_last = getattr(one, name, nn.Module()), name in ("o_proj", "down_proj")
            for attribute, own in part.named_parameters():
                if own.dim() > 1 or not is_last:
                    changed = _reorder(own.data.T if is_last else own.data, order, d, g)
                    trial.set(part, attribute, changed.T if is_last else changed)

    both, singles = ("q_proj", "k_proj"), [(f"{name}_proj",) for name in "qkvo"]
    normed = [(*both, "q_norm", "k_norm")] if any(hasattr(one, "q_norm") for one in attentions.values()) else []
    grouped = [both, *normed, *singles, ("k_proj", "v_proj"), ("q_proj", "o_proj"), (*both, "v_proj")]
    for owners, orders, kinds in (
        (attentions, HEADS, grouped),
        (attentions, ROWS, [*singles, both, (*both, "v_proj")]),
        (mlps, ROWS, [("gate_proj",), ("up_proj",), ("down_proj",), ("gate_proj", "up_proj")]),
    ):
        for parts in kinds:
            turns = {"q_proj", "k_proj"} <= {*parts} and "v_proj" not in parts
            for words, order in orders.items():
                units = {at: partial(reorder, one, parts, order) for at, one in owners.items()}
                fault = "rope" if turns and "hal" in words else "projection_order"
                yield Hypothesis(fault, f"{', '.join(parts)}: {words}", units)
    fused = {at: partial(_split_fused, one) for at, one in mlps.items()}
    label = "gate and up rows joined in shards of {x:.0f}, split as halves"
    yield Hypothesis("projection_order", label, fused, (2, 4, 8, 10**9))


def _split_fused(mlp: Any, trial: Trial, x: int) -> None:
    gate, up = mlp.gate_proj.weight.data, mlp.up_proj.weight.data
    both = [one.unflatten(0, (min(x, len(gate)), -1)) for one in (gate, up)]
    for part, rows in zip((mlp.gate_proj, mlp.up_proj), torch.stack(both, dim=1).flatten(0, 2).chunk(2), strict=True):
        trial.set(part, "weight", rows)


# Settings of operators; sizes of what they return.


def _settings(reference: Reference) -> Iterator[Hypothesis]:
    """Other values of an attribute, in all modules that have one or in some; other operators."""
    model, config = reference.model, reference.config
    base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or 0.0
    place = lambda own: torch.arange(own.shape[0]) / own.shape[0]  # noqa: E731
    times = lambda own, x: own * x  # noqa: E731
    bases, epsilons = [base * by for by in (*FAR, 10.0, 100.0, 0.1, 0.01)], [10.0**-n for n in (2, 3, 4, 5, 7, 12)]
    rows: list[tuple[Any, ...]] = [
        ("attention_scale", "attention scores times {x:.4g}", "scaling", times, (*FAR, 8.0), "real"),
        ("rope", "rope base {x:.4g}", "inv_freq", lambda own, x: own * (x / base) ** -place(own), bases, "real"),
        ("rope", "rope frequencies ÷ {x:.4g}", "inv_freq", lambda own, x: own / x, (*FAR, 8.0), "real"),
        ("rope", "rope frequencies in bfloat16", "inv_freq", lambda own, x: own.bfloat16().float()),
        ("rope", "{x:.2g} of the dimensions turn", "inv_freq", lambda own, x: own * (place(own) < x), (0.5, 0.25, 0.75, 0)),
        ("rope", "rope turns the other way", "inv_freq", lambda own, x: -own),
        ("rope", "cosines and sines times {x:.4g}", "attention_scaling", times, (*FAR, 8.0), "real"),
        ("norm_epsilon", "norm epsilon {x:.3g}", "variance_epsilon", lambda own, x: x, epsilons, "real"),
        ("norm_epsilon", "norm epsilon {x:.3g}", "eps", lambda own, x: x, epsilons, "real"),
        ("bias_dropped", "biases set to 0", "bias", lambda own, x: own * 0),
    ]  # fmt: skip
    for fault, label, name, change, *how in rows:
        owners = _having(model, name)
        if owners and (fault != "rope" or base):
            units = {at: partial(_set, one, name, change) for at, one in owners.items()}
            yield Hypothesis(fault, label, units, *how)
    queries = {at: getattr(one, "q_norm", None) or one.q_proj for at, one in _having(model, "q_proj", "k_proj").items()}
    label, units = "queries grow with the position ÷ {x:.0f}", _hook_all(queries, _grow)
    yield Hypothesis("attention_scale", label, units, (8, 16, 32, 64, 8192), "whole")
    if base and hasattr(getattr(model, "model", None), "rotary_emb"):
        yield from _list_ropes(model, config)
    yield from _list_activations(model)
    norms = {at: one for at, one in _having(model, "weight").items() if "Norm" in type(one).__name__}
    weights = {at: Place(one, "weight", f"{at}.weight") for at, one in norms.items()}
    off = _hook_all(norms, lambda inputs, output, x: inputs[0])
    heads = {at: one for at, one in off.items() if at.endswith(("q_norm", "k_norm"))}
    ones, more = (_put_all(weights, to) for to in (lambda own, x: torch.ones_like(own), lambda own, x: own + x))
    yield Hypothesis("norm_missing", "norms without their weights", ones, is_partial=True)
    yield Hypothesis("norm_missing", "{x:+.0f} added to the weights of norms", more, (1, -1))
    for kind, units in {"norms of queries and keys": heads, **by_kind(off)}.items():
        yield Hypothesis("norm_missing", f"{kind} left out", units)
    embedded = _hook_all({"embedding": model.get_input_embeddings()}, lambda inputs, output, x: output * x)
    sizes = (*FAR, config.hidden_size**0.5)
    yield Hypothesis("embedding_scale", "embeddings times {x:.4g}", embedded, sizes, "real")
    layers = _find(model, LAYERS)
    stay = _hook_all(layers, lambda inputs, output, x: inputs[0] * (x - 1) + output)
    yield Hypothesis("residual", "what a layer was given times {x:.4g}", stay, (0.0, *FAR), "real", is_local=True)
    split = _having(model, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    label = (
        "the residual is taken after the norm (1: attention, 2: MLP, 3: both), or the MLP does not see attention (4)"
    )
    units = {at: partial(_other_residual, one) for at, one in split.items()}
    yield Hypothesis("residual", label, units, (1, 2, 3, 4), is_local=True)


def _set(owner: Any, name: str, change: Callable[[Any, Any], Any], trial: Trial, x: float) -> None:
    trial.set(owner, name, change(trial.get(owner, name), x))


def _grow(inputs: Any, output: Tensor, x: float) -> Tensor:
    """As Llama 4 scales queries `[B, L, ...]` of long texts."""
    by = 1 + 0.1 * torch.log1p((torch.arange(output.shape[1]) // max(x, 1)).float())
    return output * by.view(-1, *[1] * (output.dim() - 2))


def _list_activations(model: nn.Module) -> Iterator[Hypothesis]:
    acts: tuple[Any, ...] = (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.Sigmoid(), nn.Identity())
    others = {"quick GELU": lambda z: z * torch.sigmoid(1.702 * z), "squared ReLU": lambda z: z.relu().square()}
    owners = {at: one.act_fn for at, one in _having(model, "act_fn").items()}
    for words, act in ({str(act): act for act in acts} | others).items():
        units = _hook_all(owners, lambda inputs, output, x, act=act: act(inputs[0]))
        yield Hypothesis("activation", f"{words} as activation", units)
    # Gated units: of the value before the activation, and of the one that it is multiplied by.
    top, both = lambda z, x: z.clamp(max=x), lambda z, x: z.clamp(-x, x)
    sizes = [0.25 * 2 ** (n / 2) for n in range(15)]
    gates: tuple[tuple[str, Any, Any, Sequence[float]], ...] = (
        ("gate values at most {x:.4g}, the others within it", top, both, sizes),
        ("gate values at most {x:.4g}", top, None, sizes),
        ("gate and other values within {x:.4g}", both, both, sizes),
        ("{x:+.0f} added to what the gate multiplies", None, lambda z, x: z + x, (1,)),
    )  # fmt: skip
    owners = _having(model, "gate_proj", "up_proj")
    for label, gate, up, grid in gates:
        units = {at: partial(_change_gate, one, gate, up) for at, one in owners.items()}
        yield Hypothesis("activation", label, units, grid, "real" if len(grid) > 1 else "", is_local=True)


def _change_gate(mlp: Any, gate: Any, up: Any, trial: Trial, x: float) -> None:
    for part, change in ((mlp.gate_proj, gate), (mlp.up_proj, up)):
        if change is not None:
            trial.hook(part, lambda inputs, output, change=change: change(output, x))


def _other_residual(layer: Any, trial: Trial, x: int) -> None:
    held: list[Tensor] = []

    def hold(inputs: Any, output: Tensor, by: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        held.append(by(inputs[0], output))
        return output

    pairs = ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp))
    for bit, (norm, branch) in enumerate(pairs):
        if x >> bit & 1:
            trial.hook(norm, partial(hold, by=lambda before, after: after - before))
            trial.hook(branch, lambda inputs, output: output + held.pop())
    if x == 4:
        trial.hook(layer.input_layernorm, partial(hold, by=lambda before, after: before))
        trial.hook_inputs(layer.post_attention_layernorm, lambda states: held.pop())


def _list_ropes(model: Any, config: Any) -> Iterator[Hypothesis]:
    own = model.model.rotary_emb
    if config.rope_parameters.get("rope_type", "default") != "default":
        yield Hypothesis("rope", "rope without scaling", {"": partial(_rebuild_rope, rope_type="default")})
    for label, is_whole in (("the whole", True), ("a part of the", False)):
        yarn = partial(_rebuild_rope, rope_type="yarn", is_whole=is_whole)
        yield Hypothesis("rope", f"YaRN by {{x:.0f}} from {label} context", {"": yarn}, (2, 4, 8, 16, 32))
    edges = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for longest in (8192, config.max_position_embeddings):
        llama = partial(_rebuild_rope, rope_type="llama3", original_max_position_embeddings=longest, **edges)
        yield Hypothesis("rope", f"Llama 3's scaling by {{x:.0f}} from {longest}", {"": llama}, (2, 4, 8, 16, 32))

    def turn(inputs: Any, out: Any, x: float, to: Rounding) -> Any:
        angles = to(torch.arange(out[0].shape[1])[:, None] * own.inv_freq).repeat(1, 2)
        return tuple((each * own.attention_scaling).expand_as(out[0]) for each in (angles.cos(), angles.sin()))

    for name, to in NARROW.items():
        table = lambda inputs, out, x, to=to: tuple(to(one) for one in out)  # noqa: E731
        for words, change in {"cosines and sines": table, "angles of rotation": partial(turn, to=to)}.items():
            yield Hypothesis("rope", f"{words} in {name}", _hook_all({"": own}, change, is_whole=True))
    still = lambda turns: (torch.ones_like(turns[0]), torch.zeros_like(turns[1]))  # noqa: E731
    units = {
        at: partial(_give, one, "position_embeddings", still) for at, one in _having(model, "q_proj", "k_proj").items()
    }
    yield Hypothesis("rope", "queries and keys are not turned", units, is_local=True)


def _give(module: nn.Module, name: str, change: Callable[[Any], Any], trial: Trial, x: float) -> None:
    trial.give(module, name, change)


def _rebuild_rope(trial: Trial, x: float, *, rope_type: str, is_whole: bool = True, **more: Any) -> None:
    config, own = copy.deepcopy(trial.model.config), trial.model.model.rotary_emb
    longest = config.max_position_embeddings
    if x:
        more = {"factor": x, "original_max_position_embeddings": longest if is_whole else int(longest / x), **more}
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": rope_type, **more}
    other = type(own)(config)
    for name in ("inv_freq", "attention_scaling", "rope_type"):
        trial.set(own, name, getattr(other, name))


def _sizes(model: nn.Module) -> Iterator[Hypothesis]:
    """What any part returns, times a number."""
    scaled = _hook_all(_find(model, r"(proj|norm|self_attn|mlp)$"), lambda inputs, output, x: output * x)
    added = {at: unit for at, unit in scaled.items() if at.endswith(("self_attn", "mlp"))}
    for kind, units in {"attention and MLP": added, **by_kind(scaled)}.items():
        label = f"what {kind} returns times {{x:.4g}}"
        yield Hypothesis("weight_scale", label, units, (*FAR, 0.0), "real", is_general=True)


# Mixtures.


def _experts(model: nn.Module) -> Iterator[Hypothesis]:
    routers = {at: one for at, one in model.named_modules() if type(one).__name__.endswith("Router")}
    first: Any = next(iter(routers.values()), None)
    if not isinstance(own := getattr(first, "top_k", None), int):
        return
    count = int(first.num_experts)
    counts = sorted({1, own - 1, own + 1, 2 * own, count} - {0, own})
    units = {at: partial(_set, one, "top_k", lambda own, x: x) for at, one in routers.items()}
    yield Hypothesis("experts_per_token", "{x:.0f} experts a token", units, counts)
    if hasattr(first, "norm_topk_prob"):
        units = {at: partial(_set, one, "norm_topk_prob", lambda own, x: not own) for at, one in routers.items()}
        yield Hypothesis("expert_weights", "expert weights normalised or not, unlike the model", units)
    # By the router's logits, its weights and choices.
    weighed = _hook_all(routers, lambda inputs, out, x: (out[0], out[1] * x, *out[2:]), is_whole=True)
    yield Hypothesis("expert_weights", "expert weights times {x:.4g}", weighed, FAR, "real")
    sigmoid, shares = torch.sigmoid, lambda z: z.sigmoid() / z.sigmoid().sum(-1, keepdim=True)
    for words, by in {"sigmoids": sigmoid, "normalised sigmoids": shares, "equal": lambda z: z * 0 + 1 / own}.items():
        change = lambda inputs, out, x, by=by: (out[0], by(out[0].gather(-1, out[2])), out[2])  # noqa: E731
        units = _hook_all(routers, change, is_whole=True)
        yield Hypothesis("expert_weights", f"expert weights: {words}", units)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = {at: partial(_narrow_router, one, dtype) for at, one in routers.items()}
        yield Hypothesis("router_dtype", f"the router in {dtype}", narrow, is_rounding=True)
    if count > 16:
        return
    owners = {at: [Place(one, name, "") for name, own in one.named_parameters(recurse=False) if len(own) == count]
              for at, one in model.named_modules() if "Experts" in type(one).__name__}  # fmt: skip
    singles = {f"{at}.{place.attribute}": [place] for at, places in owners.items() for place in places}

    def change_all(places: Sequence[Place], to: Callable[[Tensor, float], Tensor]) -> Apply:
        return lambda trial, x: [place.put(to)(trial, x) for place in places]

    exchanged, missing = dict[str, Apply](), dict[str, Apply]()
    for at, places in (singles | owners).items():
        for a, b in combinations(range(count), 2):
            order = torch.arange(count)
            order[[a, b]] = torch.tensor([b, a])
            exchanged[f"{at} {a} and {b}"] = change_all(places, lambda own, x, order=order: own[order])
    for at, places in owners.items():
        missing |= {f"{at}.{n}": change_all(places, partial(_blank, n=n)) for n in range(count)}
    yield Hypothesis("expert_order", "experts exchanged", exchanged, is_partial=True)
    yield Hypothesis("weights_missing", "experts set to 0", missing, is_partial=True)


def _narrow_router(router: Any, dtype: torch.dtype, trial: Trial, x: float) -> None:
    narrow = copy.deepcopy(router).to(dtype)

    def route(inputs: Any, output: Any) -> Any:
        with WideSums():
            found = narrow(inputs[0].to(dtype))
        return tuple(one.float() if one.is_floating_point() else one for one in found)

    trial.hook(router, route, is_whole=True)


# Quantised weights, activations and caches; coarser dtypes.

CACHES: Mapping[str, Mapping[str, Any]] = {
    ", read by decoding alone": {"prefill": False},
    ", keys alone": {"values": None},
    ", values alone": {"keys": None},
}


def _formats(model: Any, dtype: str) -> Iterator[Hypothesis]:
    matrices = {at: one for at, one in list_places(model).items() if one.weight.dim() > 1}
    head = model.get_output_embeddings()
    ends = {model.get_input_embeddings(), head}
    inner = {at: one for at, one in matrices.items() if one.module not in ends}
    outer = {at: one for at, one in matrices.items() if one.module in ends}
    linears = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not head]

    def rounded(places: Mapping[str, Place], to: Rounding) -> dict[str, Apply]:
        return _put_all(places, lambda own, x: to(own), saved=True)

    def inputs(to: Rounding) -> dict[str, Apply]:
        return {"inputs": lambda trial, x: [trial.hook_inputs(one, to) for one in linears]}

    for kind, formats in FORMATS.items():
        shared = {label: to for label, to in formats.items() if not label.endswith(("per tensor", "per token"))}
        row = FORMATS["fp8"]["float8_e4m3fn per row"] if kind == "fp8" else FORMATS["int8"]["int8 per row"]
        forms = {label: rounded(inner, to) for label, to in shared.items()}
        for label in shared:
            own = label.replace("per block", "in groups of 128")
            is_scaled = ", scales" in label
            if is_scaled or label.endswith(("per row", "per matrix", "per block")):
                forms[f"{label}, activations per row too"] = forms[label] | inputs(row)
                if own in shared and (is_scaled or kind != "int4"):
                    forms[f"{label}, activations {own} too"] = forms[label] | inputs(shared[own])
                    forms[f"activations alone, {own}"] = inputs(shared[own])
        yield from _first_of(
            Hypothesis(f"{kind}_weights", label, units, is_rounding=True) for label, units in forms.items()
        )
        # Most engines leave embedding and output layer as they are; some round these.
        for chosen in (*([at] for at in outer), [*outer]):
            places, where = {at: outer[at] for at in chosen}, " and ".join(chosen)
            yield from _first_of(
                Hypothesis(f"{kind}_weights", f"{label}; in {where}", rounded(places, to), is_rounding=True)
                for label, to in shared.items()
            )
    for kind, formats in {**FORMATS, **({"dtype": NARROW} if dtype == "float32" else {})}.items():
        for is_old in (False, True):
            yield from _first_of(_list_caches(f"{kind}_kv_cache", formats, is_old))
    if dtype != "float32":
        return
    stream = {"": model.get_input_embeddings(), **_find(model, LAYERS)}
    for name, narrow in NARROW.items():
        load, states = (lambda own, x, to=narrow: to(own)), (lambda inputs, output, x, to=narrow: to(output))
        yield Hypothesis(f"dtype_{name}", f"weights rounded to {name}", _put_all(list_places(model), load))
        project = {"": partial(_narrow_head, head, narrow)}
        yield Hypothesis("head_dtype", f"the output layer in {name}", project, is_rounding=True)
        units = _hook_all(stream, states)
        yield Hypothesis(f"dtype_{name}", f"the residual stream in {name}", units, is_rounding=True)
    coarse = {at: one for at, one in inner.items() if at.endswith(".weight")}
    products = _put_all(coarse, lambda own, x: tf32(own)) | inputs(tf32)
    yield Hypothesis("dtype_tf32", "matrix products in TF32", products, is_rounding=True)


def _narrow_head(head: nn.Module, to: Rounding, trial: Trial, x: float) -> None:
    trial.set(head, "weight", to(trial.get(head, "weight")))
    trial.hook_inputs(head, to)
    trial.hook(head, lambda inputs, output: to(output))


def _first_of(forms: Iterable[Hypothesis]) -> list[Hypothesis]:
    """The first form; the others are tried where it is promising."""
    found = [*forms]
    return [replace(found[0], details=lambda: found[1:])] if found else []


def _list_caches(fault: str, formats: Mapping[str, Rounding], is_old: bool) -> Iterator[Hypothesis]:
    """`is_old`: the last tokens are not rounded."""

    def by_channel(states: Tensor, to: Rounding) -> Tensor:
        return to(states.transpose(-1, -2)).transpose(-1, -2)

    for label, to in formats.items():
        forms: dict[str, Mapping[str, Any]] = {} if is_old else {"": {}}
        if is_old and re.search("row$|of (32|64)$", label):
            for recent in (32, 64, 128):
                forms[f", older than {recent} tokens, keys by channel"] = {
                    "recent": recent,
                    "keys": partial(by_channel, to=to),
                }
                forms[f", older than {recent} tokens"] = {"recent": recent}
        elif not is_old and (" " not in label or label.endswith(("per row", "scale", "per tensor"))):
            forms |= CACHES
        for words, how in forms.items():
            cache = partial(rounding_cache, **{"keys": to, "values": to, **how})
            units = {"": lambda trial, x, cache=cache: setattr(trial, "cache", cache)}
            is_late = is_old or "prefill" in how
            yield Hypothesis(fault, f"KV cache in {label}{words}", units, is_sampling=is_late, is_rounding=True)
