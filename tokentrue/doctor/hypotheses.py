"""What an engine may compute instead: (place, transformation, span of tokens, at most one fitted number).

A hypothesis is one transformation at all places of a kind; `naming` finds the number, and the places where it happened.
Causes that no log-probabilities can separate share a name.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise, permutations
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tokentrue.doctor import reference as ref
from tokentrue.doctor.formats import FORMATS, NARROW, Rounding, tf32, to_float8
from tokentrue.doctor.reference import Observation, Reference, Trial

Apply = Callable[[Trial, Any], object]
Units = Mapping[str, Apply]
Span = Callable[[Observation, Any], tuple[int, int]]
Rewrite = Callable[[tuple[int, ...]], tuple[int, ...]]  # of a prompt's ids
Rows = Iterable[tuple[Any, ...]]  # arguments of a hypothesis; a dictionary at the end has named ones
# A change of 2% or more is near one of these; 1 changes nothing.
FAR = (0.5, 0.25, 1.0, 2.0, 0.8, 4.0, 1.03, 0.97, 1.25)
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
PAGES, CHUNKS = (4, 8, 16, 32, 64), (16, 32, 64, 128, 256, 512)
FEW = (1, 2, 4, 8, 16, 32)
LAST = ("o_proj.weight", "down_proj.weight")  # whose sums tensor parallelism splits
PADDED = 64  # engines fill the rows of the vocabulary up to a multiple of this before they split them
TURNS = ("positions", "frequencies", "angles", "cosines and sines")  # in the order in which they are computed
STEPS = ("products", "logits", "probabilities", "weights")
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
LOCAL, PARTIAL, ROUNDING, SAMPLING = ({f"is_{name}": True} for name in ("local", "partial", "rounding", "sampling"))
NARROWED = {"is_narrow": True}


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
    is_narrow: bool = False  # a part computes in 16 bits, as it does in every engine of such a dtype
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
        kept = {*chosen}
        units = {name: unit for name, unit in self.units.items() if name in kept}
        names = [*units]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        label = f"{self.label}; in {shown} alone"
        return replace(self, label=label, units=units, details=None, is_partial=False, is_local=False)


def list_hypotheses(
    reference: Reference, *, previous: Any = None, specials: Sequence[int] = (), stops: Sequence[int] = (),
    rewrites: Mapping[str, Rewrite] | None = None, dtype: str,
) -> Iterator[Hypothesis]:  # fmt: skip
    """`specials`: ids that an engine may put before a prompt; `rewrites`: what it may make of the ids that it is sent."""
    yield from _outside(specials, stops, rewrites or {})
    yield from _masks(reference.model)
    yield from _other_weights(reference, previous, getattr(torch, dtype))
    for rows in (_list_settings, _list_ropes, _list_activations, _list_norms, _list_experts):
        yield from _read(rows(reference.model, reference.config))
    yield from _formats(reference.model, dtype)
    yield from _read(_list_parts(reference, specials))
    yield from _read(_list_orders(reference))
    # What any part returns, times a number.
    scaled = _at(_find(reference.model, r"(proj|norm|self_attn|mlp)$"), _out(lambda inputs, output, x: output * x))
    added = {at: unit for at, unit in scaled.items() if at.endswith(("self_attn", "mlp"))}
    for kind, units in {"attention and MLP": added, **_group(scaled)}.items():
        # Nothing is a scale for a reason: weights that are 0, or branches that are left out, in all layers.
        nothing = {"": lambda trial, x, units=units: [unit(trial, 0.0) for unit in units.values()]}
        fault = "layer_skipped" if kind in ("attention and MLP", "self_attn", "mlp") else "weights_missing"
        yield Hypothesis(fault, f"what {kind} returns is 0", nothing)
        label = f"what {kind} returns times {{x:.4g}}"
        yield Hypothesis("weight_scale", label, units, (*FAR, 0.0), "real", is_general=True)


def _read(rows: Rows, make: Callable[..., Hypothesis] = Hypothesis) -> Iterator[Hypothesis]:
    for row in rows:
        values, named = ([*row[:-1]], row[-1]) if isinstance(row[-1], dict) and len(row) > 3 else ([*row], {})
        if values[2]:  # this model has such places
            yield make(*values, **named)


# Places and changes.


def _find(model: nn.Module, pattern: str) -> dict[str, Any]:
    return {at: one for at, one in model.named_modules() if re.search(pattern, at)}


def _having(model: nn.Module, *names: str) -> dict[str, Any]:
    return {at: one for at, one in model.named_modules() if all(getattr(one, name, None) is not None for name in names)}


def _at(owners: Mapping[str, Any], change: Callable[[Any, Trial, Any], object]) -> dict[str, Apply]:
    return {at: partial(change, one) for at, one in owners.items()}


def _set(name: str, to: Callable[[Any, Any], Any]) -> Callable[[Any, Trial, Any], object]:
    return lambda owner, trial, x: trial.set(owner, name, to(trial.get(owner, name), x))


def _out(change: Callable[[Any, Any, Any], Any], **how: bool) -> Callable[[Any, Trial, Any], object]:
    """`change(inputs, output, x)` replaces what a module returns."""
    return lambda owner, trial, x: trial.hook(owner, lambda inputs, output: change(inputs, output, x), **how)


def _group(units: Units) -> Mapping[str, Units]:
    """By what follows the number of the layer."""
    kinds: dict[str, dict[str, Apply]] = {}
    for name, unit in units.items():
        kinds.setdefault(re.sub(r"^.*?\.\d+\.", "", name), {})[name] = unit
    return kinds


# Outside of the model: prompts, positions, logits, reports.


def _on(
    what: str, fault: str, label: str, change: Any, grid: Sequence[float] = (0.0,), fit: str = "", **how: Any
) -> Hypothesis:
    """`what`: the trial's "inputs", "positions", "outputs" or "reports"."""
    units = {"": lambda trial, x: setattr(trial, what, lambda *given: change(*given, x))}
    return Hypothesis(fault, label, units, grid, fit, is_output=what in ("outputs", "reports"), **how)


def _outside(specials: Sequence[int], stops: Sequence[int], rewrites: Mapping[str, Rewrite]) -> Iterator[Hypothesis]:
    """i: place of a token; n: how many tokens were sent; z: logits; own: log-probabilities of the entries."""
    ids = torch.tensor([*stops], dtype=torch.long)

    def ban(z: Tensor, seen: Observation, x: float) -> Tensor:
        early = torch.tensor(seen.positions) - seen.prompt_tokens < x
        return torch.where(early[:, None], z.index_fill(1, ids, -torch.inf), z)

    def drop(seen: Observation, x: int, is_end: bool = False) -> Observation:
        x = max(0, min(x, seen.prompt_tokens - 1))
        return seen.edit(seen.prompt_tokens - x if is_end else 0, x)

    def keep(first: int, seen: Observation, x: int) -> Observation:
        return seen.edit(first, max(0, seen.prompt_tokens - first - x))

    def fill(token: int, is_multiple: bool, seen: Observation, x: float) -> Observation:
        missing = x - seen.prompt_tokens
        return seen.edit(0, 0, (token,) * int(missing % x if is_multiple else max(0, missing)))

    def rewrite(to: Rewrite, seen: Observation, x: float) -> Observation:
        return seen.edit(0, seen.prompt_tokens, to(seen.token_ids[: seen.prompt_tokens]))

    def over_the_top(own: Tensor, seen: Observation, z: Tensor, x: int) -> Tensor:
        mass = z.double().log_softmax(-1).topk(min(x, z.shape[-1])).values.logsumexp(-1)
        return (own - mass[seen.targets[0]]).clamp(max=0)

    neighbour = {"": lambda trial, x: setattr(trial, "align", x)}
    yield Hypothesis("off_by_one", "the log-probability {x:+.0f} places on", neighbour, (-1, 1), is_output=True)
    drops, shifts, bases = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (-2, -1, 1, 2, 8, 32), [1 / math.log(n) for n in (10, 2)]
    rows = [
        ("reports", "log_base", "log-probabilities times {x:.4g}", lambda own, seen, z, x: own * x, (*bases, *FAR), "real"),
        ("reports", "bad_logprobs", "none below {x:.3g}", lambda own, seen, z, x: own.clamp(min=x), (-1, -2, -3, -4, -5, -8, -12), "real"),
        ("reports", "other_reports", "log-probabilities normalised over the {x:.0f} likeliest", over_the_top, FILTERS["top_k"], {"is_general": True, **SAMPLING}),
        ("outputs", "sampled_temperature", "logits divided by {x:.4g}", lambda z, seen, x: z / x, FAR, "real"),
        ("outputs", "vocab_padding", "unused rows of the output layer weigh e^{x:.2f} in the softmax", lambda z, seen, x: pad(z, (0, 1), value=x), range(-2, 26, 2), "real"),
        ("outputs", "logit_softcap", "logits capped at {x:.3g}", lambda z, seen, x: x * torch.tanh(z / x), (5, 15, 30, 50, 100, 200), "real"),
        ("inputs", "prompt_changed", "the prompt without {x:.0f} tokens at its start", drop, drops, "whole"),
        ("inputs", "prompt_changed", "the prompt without {x:.0f} tokens at its end", partial(drop, is_end=True), drops, "whole"),
        *(("inputs", "prompt_changed", label, partial(rewrite, to), SAMPLING) for label, to in rewrites.items()),
        *(("inputs", "bos_added", "token {x:.0f} before the prompt", lambda seen, x: seen.edit(0, 0, (x,)), specials) for _ in specials[:1]),
        *(("inputs", "context_truncated", f"the first {first} and the last {{x:.0f}} prompt tokens", partial(keep, first), LENGTHS, "whole", SAMPLING) for first in (0, 1, 4, 16, 32, 64)),
        ("inputs", "context_truncated", "the first {x:.0f} prompt tokens", lambda seen, x: keep(int(x), seen, 0), LENGTHS, "whole", SAMPLING),
        *(("inputs", "attention_mask", f"tokens {token} that fill prompts up {words} {{x:.0f}} are seen", partial(fill, token, is_multiple), (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512), SAMPLING)
          for token in specials[:4] for words, is_multiple in (("to a multiple of", True), ("to", False))),
        ("positions", "decode_positions", "positions of sampled tokens moved by {x:.0f}", lambda i, n, x: i + x * (i >= n), shifts, "whole"),
        ("positions", "decode_positions", "positions after the first sampled token moved by {x:.0f}", lambda i, n, x: i + x * (i > n), shifts, "whole"),
        ("positions", "decode_positions", "sampled tokens beyond position {x:+.0f} from the prompt's end have that one", lambda i, n, x: i.minimum(n + x), (0, -1)),
        ("positions", "decode_positions", "positions begin again after {x:.0f} tokens", lambda i, n, x: torch.where(i < n, i % x, i), LENGTHS, "whole"),
        ("positions", "decode_positions", "positions begin again each {x:.0f} tokens", lambda i, n, x: i % x, LENGTHS, "whole"),
        ("positions", "decode_positions", "no position beyond {x:.0f}", lambda i, n, x: i.clamp(max=x), LENGTHS, "whole"),
        ("outputs", "stop_banned", "stop tokens removed from the first {x:.0f} tokens", ban, (4, 8, 16, 32, 9999), "whole", SAMPLING),
        *(("outputs", "sampled_penalty", f"a {name} penalty of {{x:.3g}}", partial(penalise, name, start), grid, "real", SAMPLING) for name, (start, grid) in PENALTIES.items()),
        ("outputs", "sampled_penalty", "no {x:.0f} tokens that were there before", ban_runs, range(1, 7), SAMPLING),
    ]  # fmt: skip
    yield from _read(rows, _on)
    for name, grid in FILTERS.items():
        change = lambda z, seen, x, name=name: filter_logits(z, x, name=name)  # noqa: E731
        fit = "" if name == "top_k" else "real"
        yield _on("outputs", "sampled_filters", f"{name} {{x:.3g}}", change, grid, fit, is_sampling=True)


def sampler(penalty: str, by: float, temperature: float, filters: Mapping[str, float]) -> Hypothesis:
    """Defaults of an engine: a penalty, a temperature, filters, in the order of most engines."""

    def change(z: Tensor, seen: Observation, x: float) -> Tensor:
        z = (penalise(penalty, PENALTIES[penalty][0], z, seen, by) if penalty else z) / temperature
        for name, value in filters.items():
            z = filter_logits(z, value, name=name)
        return z

    words = [f"a {penalty} penalty of {by:.3g}"] if penalty else []
    words += [f"temperature {temperature:.3g}"] if temperature != 1 else []
    words += [f"{name} {value:.3g}" for name, value in filters.items()]
    fault = "sampled_filters" if filters else "sampled_penalty" if penalty else "sampled_temperature"
    return _on("outputs", fault, " and ".join(words), change, is_sampling=True)


def biased(bias: Mapping[int, float]) -> Hypothesis:
    ids, by = torch.tensor([*bias]), torch.tensor([*bias.values()])
    add = lambda z, seen, x: z.index_add(1, ids, by.to(z.dtype).expand(len(z), -1))  # noqa: E731
    shown = ", ".join(f"{token}: {value:+.3g}" for token, value in [*bias.items()][:6])
    return _on("outputs", "logit_bias", f"a bias on the logits of {len(bias)} tokens ({shown})", add)


def constant(value: float) -> Hypothesis:
    """Entries that were reported so, to a millionth."""

    def report(own: Tensor, seen: Observation, z: Tensor, x: float) -> Tensor:
        told = seen.targets[2]
        return torch.where((told - value).abs() < 1e-6, told, own)

    return _on("reports", "bad_logprobs", f"{value:.6g} in place of some log-probabilities", report)


def edited(edits: Mapping[tuple[int, ...], Observation], label: str, fault: str) -> Hypothesis:
    """By the ids of the whole observation."""
    return _on("inputs", fault, label, lambda seen, x: edits.get(seen.token_ids, seen))


def count_kept(probs: Tensor, name: str, x: float) -> Tensor:
    """`[rows, 1]`: how many tokens a filter at x keeps. `probs`: descending."""
    if name == "top_k":
        return torch.full_like(probs[:, :1], min(x, probs.shape[-1]), dtype=torch.long)
    least = {"min_p": probs[:, :1] * x, "least probability": probs[:, :1].clamp(max=x)}
    is_kept = probs.cumsum(dim=-1) - probs < x if name == "top_p" else probs >= least[name]
    return is_kept.sum(dim=-1, keepdim=True)


def filter_logits(logits: Tensor, x: float, *, name: str) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    is_cut = torch.arange(logits.shape[-1]) >= count_kept(ordered.softmax(dim=-1), name, x)
    return logits.masked_fill(torch.zeros_like(is_cut).scatter(1, order, is_cut), -torch.inf)


def penalise(name: str, start: int, logits: Tensor, seen: Observation, x: float) -> Tensor:
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
    windows = {one: getattr(one, "sliding_window", None) or 10**9 for one in attentions.values()}

    def hidden(
        label: str, grid: Sequence[float], rule: Any, is_all: bool = False, fault: str = "attention_mask", **how: Any
    ) -> Hypothesis:
        """`is_all`: the rule says what is not seen, otherwise what is not seen beside the model's own mask."""

        def apply(one: Any, trial: Trial, x: float) -> None:
            own = lambda i, j: False if is_all else (j > i) | (i - j >= windows[one])  # noqa: E731
            trial.hide(one, lambda i, j, n: rule(i, j, n, x) | own(i, j))

        return Hypothesis(fault, label, _at(attentions, apply), grid, **how)

    def window(i: Tensor, j: Tensor, n: Tensor, x: int, first: int = 0, is_late: bool = False) -> Tensor:
        return (j > i) | (i - j >= (x or 10**9)) & (j >= first) & ((i >= n) | (not is_late))

    def blocks(i: Tensor, j: Tensor, n: Tensor, x: int, is_late: bool = False) -> Tensor:
        return (j > i) | (i // x != j // x) & ((i >= n) | (not is_late))

    def list_windows(who: str, is_late: bool) -> list[Hypothesis]:
        words, firsts = "the last {{x:.0f}} tokens and the first {}", (4, 1, 2, 16)
        rules: dict[str, Any] = {words.format(first): partial(window, first=first) for first in firsts}
        rules["own blocks of {x:.0f} tokens"] = blocks
        return [
            hidden(f"{who} {label}", LENGTHS, partial(rule, is_late=is_late), True, "sliding_window", fit="whole")
            for label, rule in rules.items()
        ]

    if not attentions:
        return
    spans = sorted({*(0 for own in windows.values() if own < 10**9), *LENGTHS, 40})
    how: dict[str, Any] = {"is_all": True, "fault": "sliding_window", "fit": "whole"}
    details = partial(list_windows, "attention to", False)
    yield hidden("attention to {x:.0f} tokens (0: all)", spans, window, **how, is_local=True, details=details)
    late, details = partial(window, is_late=True), partial(list_windows, "decoding sees", True)
    yield hidden("decoding sees {x:.0f} tokens", LENGTHS, late, **how, details=details)
    chunks = "chunks of {x:.0f} prompt tokens"
    rules: list[Any] = [
        ("the prompt is read in both directions", (0,), lambda i, j, n, x: (j > i) & (j >= n), True),
        (f"{chunks} are read in both directions", CHUNKS, lambda i, j, n, x: (j > i) & ((j >= n) | (j // x != i // x)), True),
        (f"masks of {chunks} begin at the first key", CHUNKS, lambda i, j, n, x: (i < n) & (j > i % x)),
        (f"{chunks} do not see earlier ones", CHUNKS, lambda i, j, n, x: (i < n) & (j < i // x * x)),
        (f"{chunks} do not see their own earlier tokens", CHUNKS, lambda i, j, n, x: (i < n) & (x <= i) & (i // x * x <= j) & (j < i)),
        *((f"{chunks} do not see the {y} before them", CHUNKS, lambda i, j, n, x, y=y: (i < n) & (j < i // x * x) & (j >= i // x * x - y)) for y in (1, 16)),
        ("nothing sees the first {x:.0f} tokens", FEW, lambda i, j, n, x: (i >= x) & (j < x)),
        ("page {x:.0f} of 16 tokens is not seen", range(8), lambda i, j, n, x: (j // 16 == x) & (i // 16 > x)),
        ("tokens from {x:.0f} on do not see the one before them", LENGTHS, lambda i, j, n, x: (j == x - 1) & (i >= x)),
        ("decoding does not see the first {x:.0f} tokens", FEW, lambda i, j, n, x: (i >= n) & (j < x)),
        ("decoding does not see the last {x:.0f} prompt tokens", FEW, lambda i, j, n, x: (i >= n) & (j >= n - x) & (j < n)),
        ("decoding does not see the {x:.0f} tokens before it", FEW, lambda i, j, n, x: (i >= n) & (j < i) & (j >= i - x)),
        ("decoding does not see sampled tokens before the last {x:.0f}", (0, *FEW), lambda i, j, n, x: (j >= n) & (j < i - x)),
        ("decoding does not see the open page of {x:.0f}", PAGES, lambda i, j, n, x: (i >= n) & (j // x == i // x) & (j < i)),
        ("decoding does not see the prompt's open page of {x:.0f}", PAGES, lambda i, j, n, x: (i >= n) & (j >= n // x * x) & (j < n)),
        ("decoding does not see the first token of an open page of {x:.0f}", PAGES, lambda i, j, n, x: (i >= n) & (j == i) & (i % x == 0)),
        ("decoding does not see sampled tokens of closed pages of {x:.0f}", PAGES, lambda i, j, n, x: (j >= n) & (j // x < i // x)),
    ]  # fmt: skip
    for label, *rule in rules:
        yield hidden(label, *rule)


# Weights: other ones, missing, exchanged, in another order.


@dataclass(frozen=True, slots=True)
class Place:
    """A weight of one module; embedding and output layer may share theirs. `name`: in the model's state."""

    module: nn.Module
    attribute: str
    name: str = ""

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


def _list_places(model: Any) -> dict[str, Place]:
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


def _other_weights(reference: Reference, previous: Any, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Those of the same run that the user gave: in all of the model, in parts, or for some of the tokens."""
    if reference.adapter is not None:
        units: dict[str, Apply] = {}
        for name, by in ref.adapter_deltas(reference.model, reference.adapter).items():
            place = Place(reference.model.get_submodule(name), "weight")
            units[name] = place.put(lambda now, x, by=by: now + (x - 1) * by)
        yield from _in_spans(Hypothesis("adapter_missing", "the adapter times {x:.3g}", units, (0.0, *FAR), "real"))
    if previous is None:
        return
    old, changed = ref.load_model(previous).state_dict(), dict[str, Apply]()
    scaled, shards = dict[str, Apply](), {count: dict[str, Apply]() for count in (2, 4, 8)}
    for name, place in _list_places(reference.model).items():
        own, was = place.weight, old.get(place.name)
        before = own if was is None or was.shape != own.shape else was.to(dtype).float()
        if torch.equal(before, own):
            continue
        changed[name] = place.put(lambda now, x, was=before: was + x * (now - was))
        side = 1 if name.endswith(LAST) else 0
        is_row = own.shape[0] == reference.vocab_size
        size = own.shape[side] + (-own.shape[side] % PADDED if is_row else 0)
        # What has one dimension, and a router, each rank has all of.
        for count, units in shards.items() if own.dim() > 1 and (is_row or "_proj" in name) else ():
            units[name] = place.put(partial(_keep_shard, was=before, count=count, size=size, side=side))
        if place.name.endswith("_proj.weight"):
            scaled[name] = place.put(lambda now, x, was=before: to_float8(now, was))
    if changed:
        label, grid = "the previous weights, and {x:.3g} of the update", (0.0, 0.5, 1.0, 2.0, 0.9, 1.1)
        yield from _in_spans(Hypothesis("stale_weights", label, changed, grid, "real"))
    for count, units in shards.items():
        inner = {name: unit for name, unit in units.items() if "_proj" in name}
        for where, own in (("", units), (", but those of tokens", inner)):
            label = f"the previous weights in shard {{x:.0f}} of {count}{where}"
            yield Hypothesis("stale_weights", label, own, range(count))
    yield Hypothesis("fp8_weights", "float8 per matrix, scales of the previous weights", scaled, is_rounding=True)


def _keep_shard(now: Tensor, x: float, *, was: Tensor, count: int, size: int, side: int) -> Tensor:
    """One of `count` ranks that share the `size` places of a side has other weights."""
    places = torch.arange(now.shape[side]) * count // size == x
    return torch.where(places.view(*[1] * side, -1, *[1] * (now.dim() - side - 1)), was, now)


def _in_spans(whole: Hypothesis) -> Iterator[Hypothesis]:
    yield whole
    counts, late = (16, 1, 2, 4, 8, 24, 32, 48, 64, 96, 128, 192, 256), (0, *FEW, 12, 20, 24)
    spans: tuple[tuple[str, str, Sequence[float], Span], ...] = (
        ("prefix_cache", "full pages of {x:.0f} prompt tokens", (16, 4, 8, 32, 64, 128), lambda seen, x: (0, (seen.prompt_tokens - 1) // x * x)),
        ("prefix_cache", "the first {x:.0f} tokens, if they are full pages of 16", range(16, 272, 16), lambda seen, x: (0, min(x, (seen.prompt_tokens - 1) // 16 * 16))),
        ("prefix_cache", "{x:.0f} first tokens", counts, lambda seen, x: (0, min(x, seen.prompt_tokens - 1))),
        ("prefix_cache", "the prompt but its last token", (0,), lambda seen, x: (0, seen.prompt_tokens - 1)),
        (whole.fault, "the prompt and {x:.0f} sampled tokens", late, lambda seen, x: (0, seen.prompt_tokens + x)),
        (whole.fault, "sampled tokens but {x:.0f}", late, lambda seen, x: (seen.prompt_tokens + x, len(seen.token_ids))),
    )  # fmt: skip
    zero = _at(whole.units, lambda unit, trial, x: unit(trial, 0.0))
    for fault, words, grid, span in spans:
        label = f"{whole.label.format(x=0)}, for {words} alone"
        yield replace(whole, fault=fault, label=label, units=zero, grid=grid, fit="", span=span)


def _exchange(pair: tuple[nn.Module, nn.Module], trial: Trial, x: float, *, is_copy: bool = False) -> None:
    """`is_copy`: the first has the weights of the other, which keeps its own."""
    for a, b in zip(*(one.modules() for one in pair), strict=False):
        for name, own in a.named_parameters(recurse=False):
            if getattr(getattr(b, name, None), "shape", None) == own.shape:
                first, second = trial.get(a, name), trial.get(b, name)
                trial.set(a, name, second)
                if not is_copy:
                    trial.set(b, name, first)


def _list_parts(reference: Reference, specials: Sequence[int]) -> Rows:
    model, places = reference.model, _list_places(reference.model)
    layers, named = _find(model, LAYERS), dict(model.named_modules())
    zero = _out(lambda inputs, output, x: output * 0)
    branches = _at(_find(model, r"\.(self_attn|mlp|shared_experts?)$"), zero)
    pairs = [*(combinations(layers, 2) if len(layers) < 9 else pairwise(layers))]
    swaps = {f"{a} and {b}": (layers[a], layers[b]) for a, b in pairs}
    copies = {f"{a} as {b}": (layers[a], layers[b]) for a, b in [*pairs, *((b, a) for a, b in pairs)]}
    # Sums over the inner size, in the shards of tensor parallelism or by heads.
    cut: dict[str, Apply] = {}
    for at, one in places.items():
        size = one.weight.shape[-1]
        heads = size // getattr(named.get(at.removesuffix(".o_proj.weight")), "head_dim", size)
        for shards in {2, 4, heads} - {1} if at.endswith(LAST) else ():
            for shard in range(shards) if shards * len(layers) <= 64 else ():
                is_kept = torch.arange(size) * shards // size != shard
                cut[f"{at} (part {shard + 1} of {shards})"] = one.put(lambda own, x, kept=is_kept: own * kept)
    ends = {at: one for at, one in places.items() if one.weight.shape[:1] == (reference.vocab_size,)}
    rows = {f"row {n} of {at}": one.put(partial(_blank, n)) for at, one in ends.items() for n in specials}
    yield "layer_skipped", "left out", _at(layers, _out(lambda inputs, output, x: inputs[0])) | branches, PARTIAL
    yield "layer_order", "exchanged", _at(swaps, _exchange), PARTIAL
    yield "layer_order", "weights of another layer", _at(copies, partial(_exchange, is_copy=True)), PARTIAL
    yield "partial_sum", "a part of the sum is missing", cut, PARTIAL
    yield "weights_missing", "set to 0", _put_all(places, lambda own, x: own * 0), PARTIAL
    yield "weights_missing", "rows of special tokens set to 0", rows, PARTIAL
    for names in (("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_proj", "k_proj")):
        both = {at: tuple(getattr(one, name) for name in names) for at, one in _having(model, *names).items()}
        same = {at: pair for at, pair in both.items() if pair[0].weight.shape == pair[1].weight.shape}
        yield "projection_order", f"{' and '.join(names)} exchanged", _at(same, _exchange)
    if not getattr(reference.config, "tie_word_embeddings", True):
        first = model.get_input_embeddings().weight.data
        head = _at({"": model.get_output_embeddings()}, _set("weight", lambda own, x: first))
        yield "tied_head", "output layer = embedding", head


def _blank(n: int, own: Tensor, x: float) -> Tensor:
    return own.index_fill(0, torch.tensor([n]), 0.0)


# Rows of a projection as a grid (d: size of a head, g: query heads of a key head), and what happens to that.
Order = tuple[Callable[[int, int], tuple[int, ...]], Callable[[Tensor], Tensor]]
_transpose, _transpose_last = (partial(torch.transpose, dim0=n, dim1=n + 1) for n in (0, 1))
_flip, _flip_second = (partial(torch.flip, dims=(n,)) for n in (0, 1))
HEADS: Mapping[str, Order] = {
    "halves of a head as pairs of neighbours": (lambda d, g: (-1, d // 2, 2), _transpose_last),
    "pairs of neighbours as halves of a head": (lambda d, g: (-1, 2, d // 2), _transpose_last),
    "halves of a head exchanged": (lambda d, g: (-1, 2, d // 2), _flip_second),
    "query heads in another order (tiled)": (lambda d, g: (g, -1, d), _transpose),
    "query heads in another order (grouped)": (lambda d, g: (-1, g, d), _transpose),
    "heads and their dimensions transposed": (lambda d, g: (d, -1), _transpose),
}
ROWS: Mapping[str, Order] = {
    "halves exchanged": (lambda d, g: (2, -1), _flip),
    "even rows, then odd rows": (lambda d, g: (-1, 2), _transpose),
    "halves interleaved": (lambda d, g: (2, -1), _transpose),
    "transposed": (lambda d, g: (-1,), lambda own: own.T if own.shape == (len(own), len(own)) else own),
}
SHARDS: Mapping[str, Order] = {
    f"joined {words} {count} shards": (lambda d, g, shape=shape: (*shape, -1), _transpose)
    for count in (2, 4, 8)
    for words, shape in (("in", (2, count)), ("as blocks, not", (count, 2)))
}


def _reorder(parts: Sequence[str], order: Order, owner: Any, trial: Trial, x: float) -> None:
    shape = order[0](getattr(owner, "head_dim", 1), getattr(owner, "num_key_value_groups", 1))
    size = math.prod(one for one in shape if one > 0)
    for name in parts:
        part, is_last = getattr(owner, name, nn.Module()), name in ("o_proj", "down_proj")
        is_own = isinstance(part, nn.Parameter)  # of experts, which come first
        for module, attribute in [(owner, name)] if is_own else [(part, one) for one, _ in part.named_parameters()]:
            weight = getattr(module, attribute).data
            rows = weight.movedim(0, -1) if is_own else weight
            rows = rows.transpose(0, 1) if is_last and rows.dim() > 1 else rows
            if len(rows) % size == 0 and (rows.dim() > 1 or not is_last):  # else it has no such grid
                rows = order[1](rows.unflatten(0, shape)).flatten(0, len(shape) - 1)
                rows = rows.transpose(0, 1) if is_last else rows
                trial.set(module, attribute, rows.movedim(-1, 0) if is_own else rows)


def _list_orders(reference: Reference) -> Rows:
    """Rows of projections (columns of the last ones) in another order, as loaders split and join them."""
    attentions = _having(reference.model, "q_proj", "head_dim")
    mlps, experts = (_having(reference.model, first, "down_proj") for first in ("gate_proj", "gate_up_proj"))
    both, singles = ("q_proj", "k_proj"), [(f"{name}_proj",) for name in "qkvo"]
    normed = [(*both, "q_norm", "k_norm")] if any(hasattr(one, "q_norm") for one in attentions.values()) else []
    grouped = [both, *normed, *singles, ("k_proj", "v_proj"), ("q_proj", "o_proj"), (*both, "v_proj")]
    for owners, orders, kinds in (
        (attentions, HEADS, grouped),
        (attentions, ROWS, [*singles, both, (*both, "v_proj")]),
        (mlps, ROWS, [("gate_proj",), ("up_proj",), ("down_proj",), ("gate_proj", "up_proj")]),
        (experts, {**ROWS, **SHARDS}, [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")]),
    ):
        for parts in kinds:
            turns = {*both} <= {*parts} and "v_proj" not in parts
            for words, order in orders.items():
                fault = "rope" if turns and "hal" in words else "projection_order"
                yield fault, f"{', '.join(parts)}: {words}", _at(owners, partial(_reorder, parts, order))
    label = "{} rows joined {}, split {} (0: of heads or rows)"
    for owners, names in ((mlps, ("gate", "up")), (attentions, ("q", "k", "v")), (attentions, ("k", "v"))):
        for ways in permutations(("in shards of {x:.0f}", "as blocks")):
            units = _at(owners, partial(_split_fused, names, "shards" in ways[0]))
            yield "projection_order", label.format(", ".join(names), *ways), units, (2, 4, 8, 0)


def _split_fused(names: Sequence[str], is_sharded: bool, owner: Any, trial: Trial, x: int) -> None:
    """`is_sharded`: rows were joined shard by shard and are split as blocks; else the other way."""
    parts = [getattr(owner, f"{name}_proj") for name in names]
    sizes = [len(one.weight) for one in parts]
    most = min(sizes) // getattr(owner, "head_dim", 1)
    places = torch.arange(sum(sizes)).split(sizes)
    order = torch.cat([one.unflatten(0, (min(x or most, most), -1)) for one in places], dim=1).flatten()
    for attribute, _ in parts[0].named_parameters():
        rows = torch.cat([getattr(one, attribute).data for one in parts])[order if is_sharded else order.argsort()]
        for part, own in zip(parts, rows.split(sizes), strict=True):
            trial.set(part, attribute, own)


# Settings of operators, and other operators.


def _list_settings(model: Any, config: Any) -> Rows:
    queries = {at: getattr(one, "q_norm", None) or one.q_proj for at, one in _having(model, "q_proj", "k_proj").items()}
    layers = _find(model, LAYERS)
    split = _having(model, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    after = "residual taken after the norm (1: attention, 2: MLP, 3: both), or an MLP that does not see attention (4)"
    return (
        ("attention_scale", "attention scores times {x:.4g}", _at(_having(model, "scaling"), _set("scaling", mul)), (*FAR, 8.0), "real"),
        ("attention_scale", "queries grow with the position ÷ {x:.0f}", _at(queries, _out(_grow)), (8, 16, 32, 64, 8192), "whole"),
        ("bias_dropped", "biases set to 0", _at(_having(model, "bias"), _set("bias", lambda own, x: own * 0))),
        ("embedding_scale", "embeddings times {x:.4g}", _at({"embedding": model.get_input_embeddings()}, _out(lambda inputs, output, x: output * x)), (*FAR, config.hidden_size**0.5), "real"),
        ("residual", "what a layer was given times {x:.4g}", _at(layers, _out(lambda inputs, output, x: inputs[0] * (x - 1) + output)), (0.0, *FAR), "real", LOCAL),
        ("residual", after, _at(split, _other_residual), (1, 2, 3, 4), LOCAL),
    )  # fmt: skip


def _grow(inputs: Any, output: Tensor, x: float) -> Tensor:
    """As Llama 4 scales queries `[B, L, ...]` of long texts."""
    by = 1 + 0.1 * torch.log1p((torch.arange(output.shape[1]) // max(x, 1)).float())
    return output * by.view(-1, *[1] * (output.dim() - 2))


def _other_residual(layer: Any, trial: Trial, x: int) -> None:
    held: list[Tensor] = []

    def hold(inputs: Any, output: Tensor) -> Tensor:
        held.append(inputs[0] if x == 4 else output - inputs[0])
        return output

    pairs = ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp))
    for bit, (norm, branch) in enumerate(pairs):
        if x >> bit & 1:
            trial.hook(norm, hold)
            trial.hook(branch, lambda inputs, output: output + held.pop())
    if x == 4:
        trial.hook(layer.input_layernorm, hold)
        trial.hook_inputs(layer.post_attention_layernorm, lambda states: held.pop())


def _list_ropes(model: Any, config: Any) -> Rows:
    base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    own = getattr(getattr(model, "model", None), "rotary_emb", None)
    if not base:
        return
    place = lambda own: torch.arange(own.shape[0]) / own.shape[0]  # noqa: E731
    still = lambda turns: (torch.ones_like(turns[0]), torch.zeros_like(turns[1]))  # noqa: E731
    settings: Rows = (
        ("rope base {x:.4g}", "inv_freq", lambda own, x: own * (x / base) ** -place(own), [base * by for by in (*FAR, 10.0, 100.0, 0.1, 0.01)], "real"),
        ("rope frequencies ÷ {x:.4g}", "inv_freq", lambda own, x: own / x, (*FAR, 8.0), "real"),
        ("{x:.2g} of the dimensions turn", "inv_freq", lambda own, x: own * (place(own) < x), (0.5, 0.25, 0.75, 0)),
        ("rope turns the other way", "inv_freq", lambda own, x: -own),
        ("cosines and sines times {x:.4g}", "attention_scaling", mul, (*FAR, 8.0), "real"),
    )  # fmt: skip
    for label, name, change, *how in settings:
        yield "rope", label, _at(_having(model, name), _set(name, change)), *how
    if own is None:
        return
    longest, scales = config.max_position_embeddings, (2, 4, 8, 16, 32)
    llama = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for label, grid, given in (
        *((("rope without scaling", (0,), {"rope_type": "default"}),) if own.rope_type != "default" else ()),
        ("YaRN by {x:.0f} from the whole context", scales, {"rope_type": "yarn", "from": longest}),
        ("YaRN by {x:.0f} from a part of the context", scales, {"rope_type": "yarn"}),
        ("Llama 3's scaling by {x:.0f} from the whole context", scales, {**llama, "from": longest}),
        ("Llama 3's scaling by {x:.0f} from a part of the context", scales, llama),
        ("Llama 3's scaling by {x:.0f} from 8192", scales, {**llama, "from": 8192}),
    ):
        yield "rope", label, {"": partial(_rebuild_rope, given)}, grid

    def turn(to: Rounding, parts: Sequence[str], inputs: Any, out: Any, x: float) -> Any:
        place, by, angle, table = (to if part in parts else lambda value: value for part in TURNS)
        angles = angle(place(torch.arange(out[0].shape[1]).float())[:, None] * by(own.inv_freq)).repeat(1, 2)
        return tuple(table(each * own.attention_scaling).expand_as(out[0]) for each in (angles.cos(), angles.sin()))

    for parts in (TURNS[first:end] for first, end in combinations(range(5), 2)):
        # Coarse angles are a fault in any dtype: they say less and less where a token is.
        how = {} if {"positions", "angles"} & {*parts} else NARROWED
        for name, to in NARROW.items():
            units = _at({"": own}, _out(partial(turn, to, parts), is_whole=True))
            yield "rope", f"rotary {', '.join(parts)} in {name}", units, how
    # Tables are no weights: an update or a wake-up that brings weights alone leaves them empty.
    for words, kept in {"cosines and sines": (0, 0), "cosines": (0, 1), "sines": (1, 0)}.items():
        change = _out(lambda inputs, out, x, kept=kept: tuple(map(mul, out, kept)), is_whole=True)
        yield "rope", f"rotary {words} are 0", _at({"": own}, change)
    stop = lambda one, trial, x: trial.give(one, "position_embeddings", still)  # noqa: E731
    yield "rope", "queries and keys are not turned", _at(_having(model, "q_proj", "k_proj"), stop), LOCAL


def _rebuild_rope(given: Mapping[str, Any], trial: Trial, x: float) -> None:
    config, own = copy.deepcopy(trial.model.config), trial.model.model.rotary_emb
    scaled = {"factor": x, "original_max_position_embeddings": int(config.max_position_embeddings / x)} if x else {}
    scaled |= {name.replace("from", "original_max_position_embeddings"): value for name, value in given.items()}
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **scaled}
    other = type(own)(config)
    for name in ("inv_freq", "attention_scaling", "rope_type"):
        trial.set(own, name, getattr(other, name))


def _list_activations(model: nn.Module, config: Any) -> Rows:
    acts: tuple[Any, ...] = (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.Sigmoid(), nn.Identity())
    others = {"quick GELU": lambda z: z * torch.sigmoid(1.702 * z), "squared ReLU": lambda z: z.relu().square()}
    owners = {at: one.act_fn for at, one in _having(model, "act_fn").items()}
    for words, act in ({str(act): act for act in acts} | others).items():
        change = _out(lambda inputs, output, x, act=act: act(inputs[0]))
        yield "activation", f"{words} as activation", _at(owners, change)
    # Gated units: of the value before the activation, and of the one that it is multiplied by.
    plain, top, both = lambda z, x: z, lambda z, x: z.clamp(max=x), lambda z, x: z.clamp(-x, x)
    sizes, mlps = [0.25 * 2 ** (n / 2) for n in range(15)], _having(model, "gate_proj", "up_proj")
    for label, changes, *how in (
        ("gate values at most {x:.4g}, the others within it", (top, both), sizes, "real", LOCAL),
        ("gate values at most {x:.4g}", (top, plain), sizes, "real", LOCAL),
        ("gate and other values within {x:.4g}", (both, both), sizes, "real", LOCAL),
        ("{x:+.0f} added to what the gate multiplies", (plain, lambda z, x: z + x), (1,), LOCAL),
    ):
        yield "activation", label, _at(mlps, partial(_change_gate, changes)), *how


def _change_gate(changes: Sequence[Any], mlp: Any, trial: Trial, x: float) -> None:
    for part, change in zip((mlp.gate_proj, mlp.up_proj), changes, strict=True):
        trial.hook(part, lambda inputs, output, change=change: change(output, x))


def _list_norms(model: nn.Module, config: Any) -> Rows:
    norms = {at: one for at, one in _having(model, "weight").items() if "Norm" in type(one).__name__}
    off = _at(norms, _out(lambda inputs, output, x: inputs[0]))
    heads = {at: one for at, one in off.items() if at.endswith(("q_norm", "k_norm"))}
    for name in ("variance_epsilon", "eps"):
        units = _at(_having(model, name), _set(name, lambda own, x: x))
        yield "norm_epsilon", "norm epsilon {x:.3g}", units, [10.0**-n for n in (4, 3, 2, 7, 6, 5, 12)], "real"
    ones = _at(norms, _set("weight", lambda own, x: torch.ones_like(own)))
    more = _at(norms, _set("weight", lambda own, x: own + x))
    yield "norm_missing", "norms without their weights", ones, PARTIAL
    yield "norm_missing", "{x:+.0f} added to the weights of norms", more, (1, -1)
    for kind, units in {"norms of queries and keys": heads, **_group(off)}.items():
        yield "norm_missing", f"{kind} left out", units


def _list_experts(model: nn.Module, config: Any) -> Rows:
    routers = {at: one for at, one in model.named_modules() if type(one).__name__.endswith("Router")}
    first: Any = next(iter(routers.values()), None)
    if not isinstance(own := getattr(first, "top_k", None), int):
        return
    count = int(first.num_experts)
    counts = sorted({1, own - 1, own + 1, 2 * own, count} - {0, own})
    yield "experts_per_token", "{x:.0f} experts a token", _at(routers, _set("top_k", lambda own, x: x)), counts
    flip, gates = _set("norm_topk_prob", lambda own, x: not own), _having(model, "norm_topk_prob", "top_k")
    yield "expert_weights", "expert weights normalised or not, unlike the model", _at(gates, flip)
    # By the router's logits, its weights and choices.
    weighed = _out(lambda inputs, out, x: (out[0], out[1] * x, *out[2:]), is_whole=True)
    yield "expert_weights", "expert weights times {x:.4g}", _at(routers, weighed), FAR, "real"
    shares = lambda z: z.sigmoid() / z.sigmoid().sum(-1, keepdim=True)  # noqa: E731
    ways = {"sigmoids": torch.sigmoid, "normalised sigmoids": shares, "equal": lambda z: z * 0 + 1 / own}
    for words, by in ways.items():
        change = _out(lambda inputs, out, x, by=by: (out[0], by(out[0].gather(-1, out[2])), out[2]), is_whole=True)
        yield "expert_weights", f"expert weights: {words}", _at(routers, change)
    for parts in (STEPS[first:end] for first, end in combinations(range(5), 2)):
        for name, to in NARROW.items():
            change = partial(_narrow, to, parts)
            yield (
                "router_dtype",
                f"the router's {', '.join(parts)} in {name}",
                _at(routers, change),
                ROUNDING | NARROWED,
            )
    if count > 16:
        return
    owners = {at: [Place(one, name) for name, own in one.named_parameters(recurse=False) if len(own) == count]
              for at, one in model.named_modules() if "Experts" in type(one).__name__}  # fmt: skip
    singles = {f"{at}.{place.attribute}": [place] for at, places in owners.items() for place in places}

    def swap(a: int, b: int, own: Tensor, x: float) -> Tensor:
        order = torch.arange(count)
        order[[a, b]] = torch.tensor([b, a])
        return own[order]

    def put(to: Callable[[Tensor, float], Tensor], places: Sequence[Place], trial: Trial, x: float) -> None:
        for place in places:
            place.put(to)(trial, x)

    exchanged, missing = dict[str, Apply](), dict[str, Apply]()
    for a, b in combinations(range(count), 2):
        swaps = _at(singles | owners, partial(put, partial(swap, a, b)))
        exchanged |= {f"{at} {a} and {b}": unit for at, unit in swaps.items()}
    for n in range(count):
        missing |= {f"{at}.{n}": unit for at, unit in _at(owners, partial(put, partial(_blank, n))).items()}
    places, whole = torch.arange(count), {at: one for at, (one,) in singles.items()}
    for ranks in (one for one in (2, 4, 8) if count % one == 0):
        size = count // ranks
        for words, order in (
            (f"those of rank 1 of {ranks} on every rank", places % size),
            (f"those of the next of {ranks} ranks", places.roll(-size)),
            (f"dealt out to {ranks} ranks in turn", places.view(size, ranks).T.flatten()),
        ):
            change = lambda own, x, order=order: own[order]  # noqa: E731
            yield "expert_order", f"experts: {words}", _put_all(whole, change)
    yield "expert_order", "experts exchanged", exchanged, PARTIAL
    yield "weights_missing", "experts set to 0", missing, PARTIAL


def _narrow(to: Rounding, parts: Sequence[str], module: Any, trial: Trial, x: float) -> None:
    def run(inputs: Any, output: Any) -> Any:
        with RoundedParts(to, parts):
            return type(module).forward(module, *inputs)

    trial.hook(module, run, is_whole=True)


class RoundedParts(TorchFunctionMode):
    """Of a router or an output layer, some of `STEPS` in 16 bits."""

    def __init__(self, to: Rounding, parts: Sequence[str]) -> None:
        super().__init__()
        self.to, self.parts = to, parts

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        def rounded(step: str, value: Any) -> Any:
            is_real = isinstance(value, Tensor) and value.is_floating_point() and step in self.parts
            return self.to(value) if is_real else value

        name = getattr(func, "__name__", "")
        if name == "linear":
            return rounded("logits", func(*(rounded("products", one) for one in args), **(kwargs or {})))
        step = "probabilities" if name in ("softmax", "sigmoid") else "weights"
        return tree_map(partial(rounded, step), func(*args, **(kwargs or {})))


# Quantised weights, activations and caches; coarser dtypes.


def _formats(model: Any, dtype: str) -> Iterator[Hypothesis]:
    places, head = _list_places(model), model.get_output_embeddings()
    ends = {model.get_input_embeddings(), head}
    matrices = {at: one for at, one in places.items() if one.weight.dim() > 1}
    inner = {at: one for at, one in matrices.items() if one.module not in ends}
    outer = {at: one for at, one in matrices.items() if one.module in ends}
    experts = {at: one for at, one in inner.items() if ".experts." in at}
    linears = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not head]

    def inputs(to: Rounding, prompt: Rounding | None = None) -> dict[str, Apply]:
        """`prompt`: of all tokens that were sent together."""

        def change(trial: Trial, states: Tensor) -> Tensor:
            found = to(states)
            if prompt is not None and len(states) == len(trial.sent):
                for row, sent in enumerate(trial.sent[:, 0].tolist()):
                    found[row, :sent] = prompt(states[row, :sent])
            return found

        return {"inputs": lambda trial, x: [trial.hook_inputs(one, partial(change, trial)) for one in linears]}

    for kind, formats in FORMATS.items():
        shared = {label: to for label, to in formats.items() if not label.endswith(("per tensor", "per token"))}
        row = FORMATS["fp8"]["float8_e4m3fn per row"] if kind == "fp8" else FORMATS["int8"]["int8 per row"]
        forms = _weight_forms(inner, shared, row, kind, inputs)
        yield from _first_of((f"{kind}_weights", *form, ROUNDING) for form in forms.items())
        # Most engines leave embedding and output layer as they are; some round these, or experts alone.
        for chosen in (*({at: one} for at, one in outer.items()), outer, experts):
            where = "experts" if chosen is experts else " and ".join(chosen)
            named = {f"{label}; in {where}": _rounded(chosen, to) for label, to in shared.items()}
            yield from _first_of((f"{kind}_weights", *form, ROUNDING) for form in named.items())
    for kind, formats in {**FORMATS, **({"dtype": NARROW} if dtype == "float32" else {})}.items():
        for is_old in (False, True):
            yield from _first_of(_list_caches(f"{kind}_kv_cache", formats, is_old))
    if dtype != "float32":
        return
    stream = {"": model.get_input_embeddings(), **_find(model, LAYERS)}
    for name, to in NARROW.items():
        load, states = (lambda own, x, to=to: to(own)), (lambda inputs, output, x, to=to: to(output))
        yield Hypothesis(f"dtype_{name}", f"weights rounded to {name}", _put_all(places, load))
        for parts in (STEPS[:2], STEPS[1:2]):
            project = _at({"": head}, partial(_narrow, to, parts))
            yield Hypothesis(
                "head_dtype", f"the output layer's {' and '.join(parts)} in {name}", project, is_rounding=True
            )
        yield Hypothesis(f"dtype_{name}", f"the residual stream in {name}", _at(stream, _out(states)), is_rounding=True)
    coarse = {at: one for at, one in inner.items() if at.endswith(".weight")}
    products = _put_all(coarse, lambda own, x: tf32(own)) | inputs(tf32)
    yield Hypothesis("dtype_tf32", "matrix products in TF32", products, is_rounding=True)


def _rounded(places: Mapping[str, Place], to: Rounding) -> dict[str, Apply]:
    return _put_all(places, lambda own, x: to(own), saved=True)


def _weight_forms(
    places: Mapping[str, Place], formats: Mapping[str, Rounding], row: Rounding, kind: str, inputs: Callable[..., Any]
) -> dict[str, dict[str, Apply]]:
    """Weights alone, and with the inputs of their products."""
    forms = {label: _rounded(places, to) for label, to in formats.items()}
    for label, to in formats.items():
        own, is_scaled = label.replace("per block", "in groups of 128"), ", scales" in label
        joined = {label: forms[label]}
        if label.endswith("per matrix"):
            joined[f"{label}, parts of a layer joined"] = _join(places, to)
            joined[f"{label}, scaled alone and joined then"] = _join(places, to, to)
            for words, units in joined.items():
                forms[f"{words}, activations per prompt too"] = units | inputs(row, to)
        if is_scaled or label.endswith(("per row", "per matrix", "per block")):
            for words, units in joined.items():
                forms |= {words: units, f"{words}, activations per row too": units | inputs(row)}
            if own in formats and (is_scaled or kind != "int4"):
                forms[f"{label}, activations {own} too"] = forms[label] | inputs(formats[own])
                forms[f"activations alone, {own}"] = inputs(formats[own])
    return forms


def _join(places: Mapping[str, Place], to: Rounding, first: Rounding = lambda own: own) -> dict[str, Apply]:
    """Engines keep queries, keys and values in one matrix, gates and other values in one."""
    groups: dict[str, list[Place]] = {}
    for name, place in places.items():
        fused = re.sub(r"[qkv]_proj", "qkv_proj", re.sub(r"(gate|up)_proj", "gate_up_proj", name))
        groups.setdefault(fused, []).append(place)

    def apply(parts: Sequence[Place], trial: Trial, x: float) -> None:
        saved = [trial.saved.get(one.name) for one in parts]
        own = [one.weight if was is None else was for one, was in zip(parts, saved, strict=True)]
        rows = to(torch.cat([first(one.float()) for one in own])).split([len(one) for one in own])
        for one, value in zip(parts, rows, strict=True):
            trial.set(one.module, one.attribute, value)

    return {name: partial(apply, parts) for name, parts in groups.items()}


def _first_of(forms: Rows) -> list[Hypothesis]:
    """The first form; the others are tried where it is promising."""
    found = [*_read(forms)]
    return [replace(found[0], details=lambda: found[1:])] if found else []


def _list_caches(fault: str, formats: Mapping[str, Rounding], is_old: bool) -> Rows:
    """`is_old`: the last tokens are not rounded."""

    def by_channel(to: Rounding, states: Tensor) -> Tensor:
        return to(states.transpose(-1, -2)).transpose(-1, -2)

    for label, to in formats.items():
        forms: dict[str, dict[str, Any]] = {} if is_old else {"": {}}
        if is_old and re.search("row$|of (32|64)$", label):
            for recent in (32, 64, 128):
                old = f", older than {recent} tokens"
                forms[f"{old}, keys by channel"] = {"recent": recent, "keys": partial(by_channel, to)}
                forms[old] = {"recent": recent}
        elif not is_old and (" " not in label or label.endswith(("per row", "scale", "per tensor"))):
            forms[", read by decoding alone"] = {"prefill": False}
            forms |= {", keys alone": {"values": None}, ", values alone": {"keys": None}}
        for words, how in forms.items():
            cache = partial(ref.rounding_cache, **{"keys": to, "values": to, **how})
            units = {"": lambda trial, x, cache=cache: setattr(trial, "cache", cache)}
            is_late = is_old or "prefill" in how
            yield fault, f"KV cache in {label}{words}", units, {"is_sampling": is_late, **ROUNDING}
