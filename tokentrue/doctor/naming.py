"""One way to name a cause: fit every hypothesis on half of the tokens, confirm the best on the other half.

`e` is engine - reference, in units of what correct engines of the expected dtype differ by at that token. A cause is
named only if its prediction leaves nothing but rounding on tokens that the fit has not seen, with the right size, and
if no hypothesis of another name does as well. Everything else is `unknown`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokentrue.doctor.findings import Finding, fault, ok
from tokentrue.doctor.hypotheses import FILTERS, TEMPERATURES, Hypothesis, biased, count_kept, edited
from tokentrue.doctor.reference import (
    Observation,
    Reference,
    WideSums,
    compute_batch,
    compute_logits,
    compute_parts,
    read_entries,
)
from tokentrue.records import record

FLOAT32_SPREAD = 1.5e-5  # typical |e| of two correct float32 implementations of a small model
DEPARTS = 3.0  # mean |e| in units of the spread, float32: beyond this it is no rounding
BAND = 1.8  # the same in a coarser dtype, in units of the mean of the reference's own rounding orders
WORST = 10.0  # nats: a token that a hypothesis makes impossible counts as this far off
ALLOWED = 3.0  # times the spread, for single comparisons of an engine with itself
EVIDENCE = 12.0  # nats of log-likelihood on the held-out half
TOKENS = 4  # held-out tokens at least that a cause makes likelier
TIE = 8.0  # nats
SIZE = (0.7, 1.4)  # fitted multiple of a prediction that has the right size
PROMISING = 0.97  # residual ÷ difference on the first tokens, below which a hypothesis is fitted further
ALIKE = 0.15  # correlation of prediction and difference, above which other forms and parts of a cause are tried
ASKED = ("stale_weights", "adapter_missing")  # what the user gave weights for
FEW = 6  # layers that are tried one by one
MANY = 40  # parts of a model that are tried one by one
FINALISTS = 8
CHANCE = 1e-6  # of draws that look like another distribution by themselves
UNEVEN = 1.63  # Kolmogorov's distance times the root of the count; true draws are beyond it once in a hundred times
LIKELIEST = 1024  # tokens that a filter may keep


class Evidence:
    """What the engine reported beside the reference, and how far apart correct engines are; e = engine - reference."""

    def __init__(self, reference: Reference, observations: Sequence[Observation], dtype: str) -> None:
        self.reference, self.observations, self.dtype = reference, list(observations), dtype
        self.is_exact = dtype == "float32"
        self.logits = [reference.plain_logits(seen) for seen in self.observations]
        targets = [seen.targets for seen in self.observations]
        counts = [len(seen.positions) for seen in self.observations]
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        self.row = torch.cat([rows + start for (rows, _, _), start in zip(targets, starts, strict=False)])
        self.owner = torch.cat([torch.full_like(rows, n) for n, (rows, _, _) in enumerate(targets)])
        self.engine = torch.cat([values for _, _, values in targets])
        self.truth = self.read(self.logits)
        self.e = self.engine - self.truth
        self.is_first = torch.tensor(  # the first sampled token, which no decoding precedes
            [
                row == 0 and not seen.is_prompt
                for seen, n in zip(self.observations, counts, strict=True)
                for row in range(n)
            ]
        )[self.row]
        self.is_chosen = torch.cat(
            [torch.arange(len(rows)) < n for (rows, _, _), n in zip(targets, counts, strict=True)]
        )
        self.is_prompt = torch.tensor([seen.is_prompt for seen in self.observations])[self.owner]
        self.weight = self.row.bincount()[self.row].double().rsqrt()
        self.position = torch.tensor([at for seen in self.observations for at in seen.positions])[self.row]
        self.held = self.row % 2 == 1
        self.mean_limit, self.largest_limit = 5e-5, 1e-3  # of |e| of chosen tokens: beyond this it is no rounding
        self.honest = 1.0  # the size of a difference that is nothing but rounding; `limit` leaves room for other orders
        self.coarseness = 1.0  # the coarsest order of rounding ÷ the one that trials can use
        self.spread, self.limit = self._measure_spread()

    @property
    def is_late(self) -> bool:
        """Whether decoding alone is wrong: what follows the prompt at once is right everywhere."""
        now, then = self.size(self.e, self.is_first), self.size(self.e, ~self.is_first)
        return now < 0.2 * then if self.is_exact else now < 1.5 and then > 3 * now

    @property
    def departs(self) -> bool:
        """Whether the difference is larger than rounding."""
        return self.size(self.e) > self.limit

    def read(self, logits: Sequence[Tensor]) -> Tensor:
        return torch.cat([read_entries(seen, rows) for seen, rows in zip(self.observations, logits, strict=True)])

    def orders(self, dtype: str) -> Iterator[Tensor]:
        """What the reference differs by when it rounds in other orders: by module and by operation, eager, cached."""
        model, seen = self.reference.model, self.observations
        if dtype != "float32":
            with self.reference.trial() as trial:
                trial.round_modules(getattr(torch, dtype))
                found = [compute_logits(model, one) for one in seen]
            yield self.read(found) - self.truth
            model = self.reference.in_dtype(dtype)
            with WideSums():
                found = [compute_logits(model, one) for one in seen]
            yield self.read(found) - self.truth
        with WideSums() if dtype != "float32" else nullcontext(), _eager(model):
            found = [compute_logits(model, one, is_cached=True) for one in seen]
        yield self.read(found) - self.truth

    def _measure_spread(self) -> tuple[Tensor, float]:
        """Per entry, the size of honest differences; and the mean |e| in these units that is still honest."""
        found = torch.stack([*self.orders(self.dtype)])
        if self.is_exact:
            largest = float(found.square().mean(dim=1).sqrt().max())
            return torch.full_like(self.truth, max(FLOAT32_SPREAD, 3 * largest)), DEPARTS
        own = ALLOWED * found[:, self.is_chosen].abs()
        self.mean_limit, self.largest_limit = max(5e-5, float(own.mean())), max(1e-3, float(own.max()))
        # A logit that is off by s moves log p by s (1 - p): certain tokens hardly move.
        doubt = -torch.expm1(self.truth.clamp(max=-1e-6))
        squares = found.square().mean(dim=0)
        pooled = squares.sum() / doubt.square().sum().clamp(min=1e-9)
        self.spread = (
            (0.5 * squares + 0.5 * pooled * doubt.square() + (0.02 * pooled.sqrt()) ** 2).sqrt().clamp(min=1e-6)
        )
        sizes = [self.size(one) for one in found]
        self.coarseness = max(sizes) / max(sizes[0], 1e-12)
        self.honest = 1.25 * max(sizes)
        return self.spread, BAND * max(sizes)

    def size(self, residual: Tensor, where: Tensor | None = None) -> float:
        """Mean |residual| in units of the spread."""
        weight = self.weight if where is None else self.weight * where
        return float((weight * residual.abs().clamp(max=WORST) / self.spread).sum() / weight.sum().clamp(min=1e-9))

    def gains(self, residual: Tensor) -> Tensor:
        """Nats by which each entry is likelier than without the hypothesis, by Student's t with 4 degrees of freedom:
        rounding has heavy tails."""
        now, before = (one.clamp(-WORST, WORST) / self.spread for one in (residual, self.e))
        return 2.5 * self.weight * (torch.log1p(before * before / 4) - torch.log1p(now * now / 4))

    def gain(self, residual: Tensor) -> float:
        return float(self.gains(residual)[self.held].sum())

    @torch.no_grad()
    def predict(self, hypothesis: Hypothesis, x: float, only: Sequence[int], *, again: bool = False) -> Tensor:
        """Log-probabilities that an engine with this cause reports; entries of other observations stay as they are.
        `again`: in another order of rounding."""
        found, model = self.truth.clone(), self.reference.model
        span = hypothesis.span
        with self.reference.trial() as trial, _eager(model, again and self.is_exact):
            if span is None:
                hypothesis.apply(trial, x)
            if again and not self.is_exact:
                trial.round_modules(getattr(torch, self.dtype))
            run = [n for n in only if not (hypothesis.is_sampling and self.observations[n].is_prompt)]
            chosen = [self.observations[n] for n in run]
            if hypothesis.is_output and not again:
                logits = [self.logits[n] for n in run]
            elif span is not None:
                logits = [self._run_span(hypothesis, x, seen, span(seen, x)) for seen in chosen]
            else:
                logits = compute_batch(model, chosen, trial)
            for n, seen, rows in zip(run, chosen, logits, strict=True):
                mine = self.owner == n
                if trial.align:
                    mine = mine & self.is_chosen
                    moved, end = self.truth[mine].roll(-trial.align), 0 if trial.align < 0 else -1
                    moved[end] = self.engine[mine][end]  # at the ends anything may be
                    found[mine] = moved
                else:
                    own = read_entries(seen, rows, trial.outputs)
                    found[mine] = own if trial.reports is None else trial.reports(own)
        return found.nan_to_num(nan=-1e3, neginf=-1e3)

    def _run_span(self, hypothesis: Hypothesis, x: float, seen: Observation, span: tuple[int, int]) -> Tensor:
        """Only the tokens of the span are computed under the change."""

        @contextmanager
        def around(number: int) -> Iterator[None]:
            with self.reference.trial() as trial:
                if number == 1:
                    hypothesis.apply(trial, x)
                yield

        parts = [(0, span[0]), span, (span[1], len(seen.token_ids))]
        return compute_parts(self.reference.model, seen, parts, around=around)


@contextmanager
def _eager(model: Any, wanted: bool = True) -> Iterator[None]:
    own = getattr(model.config, "_attn_implementation", "sdpa")
    try:
        if wanted:
            model.set_attn_implementation("eager")
        yield
    finally:
        if wanted:
            model.set_attn_implementation(own)


@record(eq=False)
class Fit:
    """A hypothesis with its fitted number, and what it leaves of the difference on the tokens of the fit."""

    hypothesis: Hypothesis
    x: float
    left: float
    residual: Tensor
    own: float | None = None  # size of what the cause leaves in another order of rounding, where it is known

    def predicted(self, data: Evidence) -> Tensor:
        return data.e - self.residual

    @property
    def fault(self) -> str:
        return self.hypothesis.fault

    @property
    def label(self) -> str:
        return self.hypothesis.label.format(x=self.x)


def judge(
    data: Evidence, hypotheses: Iterable[Hypothesis], *, advice: str = "", prefixes: Sequence[tuple[int, ...]] = ()
) -> Finding:
    """A named cause, `unknown`, or no fault. `prefixes`: ids that may stand before a prompt, or in it."""
    size, chosen, departs = data.size(data.e), data.e[data.is_chosen].abs(), data.departs
    figure = (
        f"mean |δ| {float(chosen.mean()):.2g}, max {float(chosen.max()):.2g} over {chosen.numel()} tokens, "
        f"{size / data.limit:.2g} of what {data.dtype} allows"
    )
    if not departs and data.is_exact:
        return ok(figure)
    # What leaves a part of the model out is larger than rounding.
    fits = fit_all(data, hypotheses if departs else [one for one in hypotheses if not one.is_partial])
    confirmed = [one for one in fits if is_confirmed(data, one, departs=departs)]
    if not confirmed and departs:
        more = [*solve_bias(data), *([] if data.is_late else search_edits(data, prefixes))]
        everything = range(len(data.observations))
        fits = [*(try_value(data, one, 0.0, everything, ~data.held) for one in more), *fits]
        confirmed = [one for one in fits if is_confirmed(data, one, departs=departs)]
    if not confirmed and departs and data.is_exact:
        fits = [*fit_dtypes(data), *fits]
        confirmed = [one for one in fits if is_confirmed(data, one, departs=departs)]
    confirmed.sort(key=lambda one: one.hypothesis.is_general)
    for best in confirmed[:1]:
        rivals = [
            one for one in fits if one.fault != best.fault and data.gain(one.residual) > data.gain(best.residual) - TIE
        ]
        # What predicts the same numbers is the same computation: no measurement of log-probabilities separates them.
        apart = data.limit if data.is_exact else data.honest / 2
        same = [one for one in rivals if data.size(one.residual - best.residual) < apart]
        if len(same) < len(rivals) or has_more(data, best, fits):
            break
        words = f"{best.label}: explains {100 * share(data, best):.0f}% of the difference on tokens that the fit has not seen"
        others = {one.fault: one.label for one in same}
        words += "".join(f"; the same numbers as {label} ({name})" for name, label in others.items())
        confidence = "high" if departs and not others else "medium"
        return fault(best.fault, figure, detail=words, confidence=confidence, alternatives=tuple(others))
    if not departs:
        return ok(figure)
    if not confirmed and (words := reports_differ(data)):
        return fault("other_reports", figure, confidence="medium", detail=words)
    return describe_unknown(data, fits, figure, advice, is_tie=bool(confirmed))


def has_more(data: Evidence, best: Fit, fits: Sequence[Fit]) -> bool:
    """Whether what the cause leaves contains another one: then it is not the whole cause."""
    if data.size(best.residual, data.held) <= data.honest:
        return False
    for one in fits:
        more = one.predicted(data)
        per = data.weight * (more.abs() < WORST) / data.spread.square() * ~data.held
        part = float((per * more * best.residual).sum() / (per * more.square()).sum().clamp(min=1e-30))
        gain = data.gain(best.residual - part * more) - data.gain(best.residual)
        if one.fault != best.fault and part > 0.05 and gain > EVIDENCE:
            return True
    return False


def share(data: Evidence, fit: Fit) -> float:
    """Of |e| on the held-out half, how much the fit explains."""
    return 1 - data.size(fit.residual, data.held) / max(data.size(data.e, data.held), 1e-12)


SCOPED = ("prompt_changed", "bos_added", "context_truncated", "decode_positions", "sliding_window", "attention_mask")


def decoding(seen: Observation, x: float) -> tuple[int, int]:
    return seen.prompt_tokens, len(seen.token_ids)


def fit_all(data: Evidence, hypotheses: Iterable[Hypothesis]) -> list[Fit]:
    """The best hypotheses over all tokens, best first; each is tried on few tokens first."""
    first, inside = choose_first(data, 24 if data.is_exact else 80)
    more = choose_first(data, 100 if data.is_exact else 160)
    whole, is_late = data.size(data.e, inside), data.is_late
    visible = int((data.e.abs() > 6 * data.spread)[data.held & data.is_chosen].sum())
    # What noise correlates with by itself; float32 has none.
    alike = ALIKE if data.is_exact else 3 / math.sqrt(int((inside & data.is_chosen).sum()) + 1)
    queue, found = list(hypotheses), list[Fit]()
    while queue:
        hypothesis = queue.pop(0)
        is_scoped = hypothesis.is_output or hypothesis.span or hypothesis.fault.startswith(SCOPED)
        if is_late and not is_scoped and not hypothesis.fault.endswith("_kv_cache"):
            hypothesis = replace(hypothesis, label=f"{hypothesis.label}, in decoding alone", span=decoding)
        if not hypothesis.units:
            continue
        try:
            if hypothesis.is_partial:
                chosen = choose_units(data, hypothesis, hypothesis.grid[0], first, inside)
                hypothesis = replace(chosen, details=hypothesis.details)
            best = fit_number(data, hypothesis, first, inside, 0.4 if data.is_exact else alike)
        except RuntimeError:
            continue  # shapes of this model do not allow it
        found.append(best)
        is_whole = best.left < data.limit / 2 if data.is_exact else best.left < min(data.limit, 0.1 * whole)
        if is_whole and visible >= 2 * TOKENS and explains_all(data, best):
            found += list_equals(data, best, queue)
            break
        if best.left > 0.9 * whole and min(one.left for one in found) < 0.3 * whole:
            continue  # another cause explains most already
        predicted = data.e - best.residual
        is_alike = correlate(data, predicted, inside) > alike
        ratio = data.size(predicted, inside) / max(whole, 1e-12)
        if hypothesis.details is not None and (0.2 < ratio < 5 if hypothesis.is_rounding else is_alike):
            queue = [*hypothesis.details(), *queue]
        if hypothesis.is_local and len(hypothesis.units) <= FEW:
            queue = [*(hypothesis.within([name]) for name in hypothesis.units), *queue]
            continue
        is_part = is_alike and (not hypothesis.is_rounding or 0.3 < ratio < 10)
        if len(hypothesis.units) > 1 and (is_part or (hypothesis.fault in ASKED and hypothesis.span is None)):
            # A number is that of the whole; without one a part is changed or not: an update was taken or not.
            x = best.x if hypothesis.fit and hypothesis.grid[0] else hypothesis.grid[0]
            part = choose_units(data, hypothesis, x, *more)
            if len(part.units) < len(hypothesis.units):
                queue.insert(0, part)
    found = sorted((one for one in found if one.left < whole), key=lambda one: one.left)
    if data.is_exact and found and found[0].left < data.limit:
        found = [one for one in found if one.left < 10 * data.limit]  # others are no rivals
    if not data.is_exact:
        found = sort_again(data, found[: 3 * FINALISTS], *more)
    return sort_again(data, found[:FINALISTS], range(len(data.observations)), ~data.held)


def list_equals(data: Evidence, best: Fit, others: Iterable[Hypothesis]) -> Iterator[Fit]:
    """Once a cause leaves nothing but rounding on many tokens, only what computes the same can do so, too."""
    first, inside = choose_first(data, 6)
    for hypothesis in others:
        if hypothesis.fault == best.fault or not hypothesis.units:
            continue
        with suppress(RuntimeError):  # shapes of this model do not allow it
            if hypothesis.is_partial:
                hypothesis = choose_units(data, hypothesis, hypothesis.grid[0], first, inside)
            fit = fit_number(data, hypothesis, first, inside, 0.5)
            if fit.left < max(2 * best.left, data.limit):
                yield fit


def explains_all(data: Evidence, fit: Fit) -> bool:
    residual = try_value(data, fit.hypothesis, fit.x, range(len(data.observations)), ~data.held).residual
    return data.size(residual) < (data.limit if data.is_exact else 0.3 * data.size(data.e))


def fit_number(data: Evidence, hypothesis: Hypothesis, first: Sequence[int], inside: Tensor, alike: float) -> Fit:
    """Each third value of the grid, all of it where that is promising, and the numbers between."""
    whole = data.size(data.e, inside)
    tried = [try_value(data, hypothesis, x, first, inside) for x in hypothesis.grid[::3]]
    likeness = max(correlate(data, data.e - one.residual, inside) for one in tried)
    if likeness > alike / 2 or min(one.left for one in tried) < PROMISING * whole:
        rest = [x for n, x in enumerate(hypothesis.grid) if n % 3]
        tried += [try_value(data, hypothesis, x, first, inside) for x in rest]
    best = min(tried, key=lambda one: one.left)
    return refine(data, best, first, inside) if hypothesis.fit and best.left < PROMISING * whole else best


def solve_bias(data: Evidence) -> list[Hypothesis]:
    """Differences between tokens of one place are those of their logits: so a bias or a ban shows."""
    ids = torch.cat([seen.targets[1] for seen in data.observations])
    middle = torch.stack([data.e[data.row == row].median() for row in range(int(data.row.max()) + 1)])
    apart, bias = data.e - middle[data.row], dict[int, float]()
    for token in ids.unique().tolist():
        own = apart[(ids == token) & ~data.held]
        if own.numel() > 1 and float(own.abs().median()) > 6 * float(data.spread.median()):
            bias[token] = float(own.median())
    listed, likely = Counter[int](), Counter[int]()
    for seen, logits in zip(data.observations, data.logits, strict=True):
        for top, row in zip(seen.tops, logits, strict=False):
            listed.update(top)
            likely.update(row.topk(max(1, len(top) // 2)).indices.tolist())
    banned = {token: -1e4 for token, count in likely.items() if count > 1 and not listed[token]}
    return [biased(one) for one in (bias, banned) if 0 < len(one) <= 64]


def reports_differ(data: Evidence) -> str:
    """The draws are those of the reference, and the reports of another distribution. Under their own reports, a ratio
    of e^n in favour of any other distribution has a chance of e^-n."""
    mine = data.is_chosen & ~data.is_prompt
    ratio = -float(data.e[mine].sum())
    visible = data.row[data.e.abs() > 3 * data.spread].unique()
    if int(torch.isin(data.row[mine], visible).sum()) < 0.8 * int(mine.sum()):
        return ""  # the reports of the other tokens are those of the reference
    low = torch.stack([data.e[data.row == row].min() for row in data.row[mine].tolist()])
    if ratio < -math.log(CHANCE) or float((data.e[mine] - low).mean()) < 0.2 * float(data.e[mine].abs().mean()):
        return ""
    return f"what is sampled is e^{ratio:.0f} times likelier under the model directory than under the reports"


def search_edits(data: Evidence, prefixes: Sequence[tuple[int, ...]]) -> list[Hypothesis]:
    """Each prompt's own edit: tokens left out, doubled, exchanged or inserted, anywhere in it."""
    places = [n for n, seen in enumerate(data.observations) if not seen.is_prompt]
    edits: dict[tuple[int, ...], Observation] = {}
    known: list[
        tuple[int, int, tuple[int, ...]]
    ] = []  # of prompts before: place from the end if negative, dropped, put
    for number, n in enumerate(sorted(places, key=lambda n: len(data.observations[n].token_ids))):
        seen = data.observations[n]
        if data.size(data.e, data.owner == n) < data.limit:
            continue
        sent, kept = seen.prompt_tokens, min(10, len(seen.positions))
        short = replace(
            seen, token_ids=seen.token_ids[: sent + kept], positions=seen.positions[:kept],
            logprobs=seen.logprobs[:kept], tops=seen.tops[:kept],
            temperatures=seen.temperatures[:kept], kept=seen.kept[:kept],
        )  # fmt: skip
        tried = list(known)
        if number < 2 and sent <= 160:
            ids = seen.token_ids
            tried += [(at, count, ()) for count in (1, 2, 3, 4, 5, 6, 8) for at in range(sent - count)]
            tried += [(at, 0, (ids[at],)) for at in range(sent)]
            tried += [(at, 2, (ids[at + 1], ids[at])) for at in range(sent - 1)]
            ends = sorted({*range(min(6, sent)), *range(max(0, sent - 6), sent + 1)})
            tried += [(at, drop, put) for at in ends for put in prefixes for drop in (0, 1)]
        targets = short.targets
        is_fitted = targets[0] % 2 == 0
        costs: list[float] = []
        for start in range(0, len(tried), 64):
            some = [_edit(short, *one) for one in tried[start : start + 64]]
            for logits in compute_batch(data.reference.model, some):
                off = read_entries(short, logits) - targets[2]
                costs.append(float((off[is_fitted].abs() / data.spread.median()).clamp(max=WORST).mean()))
        best = min(range(len(costs)), key=lambda at: costs[at], default=-1)
        if best >= 0 and costs[best] < (data.limit if data.is_exact else 2 * data.limit):
            at, drop, put = tried[best]
            edits[seen.token_ids] = _edit(seen, at, drop, put)
            known += [(at, drop, put), (at - sent if at < sent else 10**6, drop, put)]
        elif number < 2 and not edits and number == 1:
            break
    if len(edits) < 2:
        return []
    at, drop, put = known[0]
    is_first = at == 0 and not drop and len(put) == 1
    words = f"prompts with tokens {list(put)} for {drop} of their own at {at}"
    return [edited(edits, words, "bos_added" if is_first else "prompt_changed")]


def _edit(seen: Observation, at: int, drop: int, put: tuple[int, ...]) -> Observation:
    at = max(0, min(at if at >= 0 else seen.prompt_tokens + at, seen.prompt_tokens - drop))
    return seen.edit(at, drop, put)


def sort_again(data: Evidence, fits: Sequence[Fit], only: Sequence[int], inside: Tensor) -> list[Fit]:
    """On more tokens, best first."""
    tried = [try_value(data, one.hypothesis, one.x, only, inside) for one in fits]
    return sorted(tried, key=lambda one: one.left)


def choose_first(data: Evidence, least: int) -> tuple[list[int], Tensor]:
    """Observations that show most of the difference per token that has to be computed, and their half of the fit."""

    def worth(n: int) -> float:
        seen = data.observations[n]
        return data.size(data.e, data.owner == n) * len(seen.positions) / len(seen.token_ids)

    ordered = sorted(range(len(data.observations)), key=worth, reverse=True)
    rows = torch.tensor([len(data.observations[n].positions) for n in ordered]).cumsum(0)
    first = ordered[: 1 + int((rows < least).sum())]
    return first, torch.isin(data.owner, torch.tensor(first)) & ~data.held


def try_value(data: Evidence, hypothesis: Hypothesis, x: float, only: Sequence[int], inside: Tensor) -> Fit:
    residual = data.engine - data.predict(hypothesis, x, only)
    return Fit(hypothesis=hypothesis, x=x, left=data.size(residual, inside), residual=residual)


def correlate(data: Evidence, predicted: Tensor, inside: Tensor) -> float:
    """Of prediction and difference, each token's scale taken out: one large token decides nothing."""
    scale = (data.spread.square() + data.e.square() + predicted.square()).sqrt()
    a, b = (data.e / scale)[inside], (predicted / scale)[inside]
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt().clamp(min=1e-12))


def choose_units(data: Evidence, hypothesis: Hypothesis, x: float, first: Sequence[int], inside: Tensor) -> Hypothesis:
    """The hypothesis in those parts of the model whose effects add up to the difference, by least squares."""
    units, is_fitted = hypothesis.units, bool(hypothesis.fit and hypothesis.grid[0])
    # An effect's curvature is a part of its size, so large differences count no more than small ones.
    scale = 1 / (data.spread.square() + (0.3 * data.e).square()).sqrt()[inside]
    target, spread = data.e[inside].clamp(-WORST, WORST), data.spread[inside]

    def effect(names: Iterable[str]) -> Tensor:
        predicted = data.predict(hypothesis.within(names), x, first) - data.truth
        return predicted[inside].clamp(-WORST, WORST)

    def cost_of(names: Iterable[str]) -> float:
        return float(((target - effect(names)) / spread).abs().sum())

    groups: dict[str, list[str]] = {}
    for name in units:
        layer = re.match(r".*?\.\d+(?=\.)", name) if len(units) > MANY else None
        groups.setdefault(layer[0] if layer else name, []).append(name)
    while True:
        effects = torch.stack([effect(names) * scale for names in groups.values()])
        square = effects @ effects.T
        own = square.diagonal()  # parts that are left out have effects of very different sizes
        square += torch.diag(1e-4 * (own if hypothesis.is_partial else own.mean().expand_as(own)) + 1e-9)
        parts = dict(zip(groups, torch.linalg.solve(square, effects @ (target * scale)).tolist(), strict=True))
        if is_fitted:
            most = max(max(map(abs, parts.values())), 1e-12)
            parts = {name: abs(part) / most for name, part in parts.items()}
        if all(len(names) == 1 for names in groups.values()):
            break
        largest = max(parts, key=lambda name: parts[name])
        groups = {n: [n] for group, names in groups.items() if parts[group] > 0.2 or group == largest for n in names}
    chosen = {name for name, part in parts.items() if part > 0.5} or {max(parts, key=lambda name: parts[name])}
    cost, whole = cost_of(chosen), float((target / spread).abs().sum())
    doubts = [] if is_fitted else sorted(parts, key=lambda name: abs(parts[name] - 0.5))
    doubts = [name for name in doubts if not hypothesis.is_partial or 0.15 < parts[name] < 0.85]
    for name in [*doubts[:8], *(doubts if len(doubts) <= MANY else [])]:  # effects do not quite add up
        if cost < 0.01 * whole:
            break
        other = chosen ^ {name}
        if other and (new := cost_of(other)) < cost:
            chosen, cost = other, new
    return hypothesis.within(chosen)


def refine(data: Evidence, best: Fit, first: Sequence[int], inside: Tensor) -> Fit:
    """Ever narrower between the neighbours of the best value of the grid."""
    hypothesis, whole = best.hypothesis, data.size(data.e, inside)
    grid = sorted({*hypothesis.grid, *(() if math.isnan(hypothesis.none) else (hypothesis.none,))})
    there, back = (math.log, math.exp) if grid[0] > 0 else (float, float)
    places = [there(x) for x in grid]
    places = [2 * places[0] - places[1], *places, 2 * places[-1] - places[-2]]
    at = grid.index(best.x) + 1
    wide, tried = max(places[at + 1] - places[at], places[at] - places[at - 1]), {best.x: best}
    for step in range(16):
        wide /= 2.2
        for place in (there(best.x) - wide, there(best.x) + wide):
            x = float(round(back(place))) if hypothesis.fit == "whole" else back(place)
            if x not in tried:
                tried[x] = try_value(data, hypothesis, x, first, inside)
        best = min(tried.values(), key=lambda one: one.left)
        explained = 1 - best.left / whole
        if (step > 3 and data.is_exact and explained < 0.3) or (step > 6 and explained < 0.7):
            break  # more digits of a number that explains little
    return best


def is_confirmed(data: Evidence, fit: Fit, *, departs: bool) -> bool:
    """On the held-out half: only rounding is left, the size is right, and chance is no explanation."""
    held, e = data.held, data.e
    better = data.gains(fit.residual)[held & data.is_chosen] > 0.5
    if data.gain(fit.residual) < (EVIDENCE if departs else 1.5 * EVIDENCE) or int(better.sum()) < TOKENS:
        return False
    predicted = e - fit.residual
    per = data.weight * held * (predicted.abs() < WORST) / data.spread.square()
    multiple = float((per * predicted * e).sum() / (per * predicted.square()).sum().clamp(min=1e-30))
    if not SIZE[0] <= multiple <= SIZE[1]:
        return False
    left, before = data.size(fit.residual, held), data.size(e, held)
    if left <= min(data.limit, data.honest + 0.1 * before):
        return True
    # A large change rounds differently, and quantisation makes steps of roundings: what the cause itself leaves.
    if (own := fit.own) is None:
        again = data.predict(fit.hypothesis, fit.x, range(len(data.observations)), again=True)
        own = data.size(again - (data.engine - fit.residual), held)
    part = 1 - left / before
    # Where nearly all is explained, what is left may be that of the coarsest order.
    return part > 0.5 and left <= (DEPARTS if data.is_exact else BAND) * own * (data.coarseness if part > 0.85 else 1)


def fit_dtypes(data: Evidence) -> list[Fit]:
    """A coarser dtype in several orders of rounding; how far these are apart is what it may leave."""
    found: list[Fit] = []
    for dtype in ("bfloat16", "float16"):
        _, *orders = data.orders(dtype)  # the first rounds no weights
        own = max(data.size(one - other, data.held) for one in orders for other in orders)
        for order in orders:
            residual = data.e - order
            hypothesis = Hypothesis(f"dtype_{dtype}", f"weights and operators in {dtype}", {})
            left = data.size(residual, ~data.held)
            found.append(Fit(hypothesis=hypothesis, x=0.0, left=left, residual=residual, own=own))
    return sorted(found, key=lambda one: one.left)


def describe_unknown(data: Evidence, fits: Sequence[Fit], figure: str, advice: str, *, is_tie: bool = False) -> Finding:
    """What it is not, what it looks like, and what to measure next."""
    shares = {one.fault: (share(data, one), one) for one in reversed(fits)}
    ranked = sorted(shares.values(), key=lambda pair: -pair[0])[:3]
    nearest = ", ".join(f"{one.fault} ({one.label}; {100 * max(0.0, part):.0f}%)" for part, one in ranked) or "none"
    words = f"cannot be told apart: {nearest}" if is_tie else f"nothing simulated explains it; nearest: {nearest}"
    detail = f"{words}. Looks like: {describe_pattern(data)}. Next: {advice}"
    return fault("unknown", figure, confidence="low", detail=detail)


def describe_pattern(data: Evidence) -> str:
    e, chosen = data.e, data.is_chosen
    own, found = e[chosen], list[str]()
    above = float((own > 0).double().mean())
    if above > 0.95 or above < 0.05:
        found.append("every log-probability is " + ("raised" if above > 0.95 else "lowered"))
    prompt, sampled = (data.size(e, chosen & side) for side in (data.is_prompt, ~data.is_prompt))
    found += ["only sampled tokens differ: decoding or sampling"] if sampled > 5 * prompt > 0 else []
    found += ["only prompt tokens differ"] if prompt > 5 * sampled > 0 else []
    growth = grows_with_position(own, data.position[chosen])
    found += [f"it grows {growth:.0f}-fold with the position"] if growth > 4 else []
    together = float(torch.corrcoef(torch.stack((data.engine[chosen], data.truth[chosen])))[0, 1])
    found.append(f"correlation with the reference {together:.3f}")
    return "; ".join(found)


def grows_with_position(e: Tensor, positions: Tensor) -> float:
    """Mean |e| of the last third of the positions ÷ that of the first third."""
    order = positions.argsort()
    third = max(1, e.numel() // 3)
    first, last = e[order[:third]].abs().mean(), e[order[-third:]].abs().mean()
    return float(last / first.clamp(min=1e-12))


def judge_draws(data: Evidence) -> Finding:
    """Do the sampled tokens follow the distribution that was reported for them? By the reference's probabilities.

    Filters and temperatures, and both together, compete: each is fitted on half of the draws and tried on the others.
    """
    places = [n for n, seen in enumerate(data.observations) if not seen.is_prompt]
    chosen = [data.observations[n].token_ids[at] for n in places for at in data.observations[n].positions]
    logits = torch.cat([data.logits[n] for n in places])
    drawn = logits.gather(1, torch.tensor(chosen)[:, None])
    rank = (logits > drawn).sum(dim=-1, keepdim=True)
    likeliest = logits.topk(min(LIKELIEST, logits.shape[-1])).values.double()
    held = torch.arange(len(chosen)) % 2 == 1
    plain = drawn.double() - logits.logsumexp(dim=-1, keepdim=True)
    found: dict[tuple[str, ...], list[tuple[float, float, str]]] = {}
    spread: dict[str, float] = {}  # of the draws' places in each distribution, from those of true draws
    luck = torch.rand(len(chosen), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in TEMPERATURES:
        total = (logits / t).logsumexp(dim=-1, keepdim=True)
        own, probs = drawn.double() / t - total, (likeliest / t - total).exp()
        mass = probs.cumsum(dim=-1).log()
        place = rank.clamp(max=probs.shape[-1] - 1)
        above = (mass.exp() - probs).gather(1, place) + luck[:, None] * probs.gather(1, place)
        for name, x in (("", 0.0), *((name, x) for name, grid in FILTERS.items() for x in grid)):
            gains = own - plain
            if name:
                kept = count_kept(probs, name, x)
                gains = torch.where(rank < kept, gains - mass.gather(1, kept - 1), -torch.inf)
            parts = [("temperature_ignored", f"temperature {t:g}")] * (t != 1)
            parts += [("sampled_filters", f"{name} {x:g}")] * bool(name)
            causes, words = tuple(cause for cause, _ in parts), " and ".join(word for _, word in parts)
            top = mass.gather(1, kept - 1).exp() if name else torch.ones_like(above)
            even = (above / top).clamp(max=1).flatten().sort().values
            spread[words] = float((even - torch.linspace(0, 1, len(even))).abs().max()) * math.sqrt(len(even))
            halves = float(gains[~held].sum()), float(gains[held].sum())
            found.setdefault(causes, []).append((*halves, words))
    # Each half is tried under what fits the other one best.
    tested: dict[tuple[str, ...], tuple[float, str]] = {}
    for causes, tried in found.items():
        first, second = max(tried), max(tried, key=lambda one: one[1])
        tested[causes] = first[1] + second[0], first[2]
    (gain, causes), (other, rival) = sorted(((tested[one][0], one) for one in tested if len(one) == 1), reverse=True)
    both = next(one for one in tested if len(one) == 2)
    if tested[both][0] > gain + TIE:
        (gain, _), causes, other = tested[both], both, -torch.inf
    words = tested[causes][1]
    if gain < -math.log(CHANCE):
        return ok(f"{len(chosen)} draws follow the reported distribution")
    figure = f"{len(chosen)} draws; e^{gain:.0f} times likelier under {words}"
    if other > gain - TIE / 2:
        return fault("unknown", figure, confidence="low", detail=f"cannot be told apart from {tested[rival][1]}")
    if spread[words] > UNEVEN:
        why = f"nearest: {words}, under which such draws would be rare, too. Next: compare the sampler's settings"
        return fault("unknown", figure, confidence="low", detail=why)
    return fault(causes[0], figure, detail=f"draws of {words}, which the log-probabilities do not contain")
