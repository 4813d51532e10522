"""One way to name a cause: fit every hypothesis on half of the tokens, confirm the best on the other half.

`e` is engine - reference, in units of what correct engines of the expected dtype differ by at that token. A cause is
named only if its prediction leaves nothing but rounding on the other half, with the right size and without structure,
and if no hypothesis of another name does as well; one that predicts the same numbers is listed beside it. Everything
else is `unknown`.
"""

import copy
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from itertools import chain, combinations
from typing import Any, Self

import torch
from torch import Tensor

from tokentrue.doctor.findings import Finding, fault, ok
from tokentrue.doctor.formats import NARROW
from tokentrue.doctor.hypotheses import (
    FILTERS,
    PENALTIES,
    TEMPERATURES,
    Hypothesis,
    biased,
    constant,
    count_kept,
    edited,
    penalise,
    sampler,
)
from tokentrue.doctor.reference import Observation, Reference, compute_batch, compute_logits, read_entries
from tokentrue.records import record

FLOAT32_SPREAD = 1.5e-5  # typical |e| of two correct float32 implementations of a small model
DEPARTS = 3.0  # mean |e| in units of the spread, float32: beyond this it is no rounding
BAND = 1.8  # the same in a coarser dtype, in units of the mean of the reference's own rounding orders
UNITS = (0.1, 0.15, 0.22, 0.33, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)  # of noise, in those of the spread
EDGE = 0.01  # of the entries: at most so many tokens at the edge of a filter
WORST = 10.0  # nats: a token that a hypothesis makes impossible counts as this far off
WAYS = ("", "tables", "norms", "eager")  # to round in 16 bits
ALLOWED = 3.0  # times the spread, for single comparisons of an engine with itself
EVIDENCE = 12.0  # nats of log-likelihood on the held-out half
TOKENS = 4  # held-out tokens at least that a cause makes likelier
TIE = 8.0  # nats
SIZE = (0.7, 1.4)  # fitted multiple of a prediction that has the right size
PROMISING = 0.97  # residual ÷ difference on the first tokens, below which a hypothesis is fitted further
ALIKE = 0.15  # correlation of prediction and difference, above which other forms and parts of a cause are tried
ASKED = ("stale_weights", "adapter_missing")  # what the user gave weights for
LATE = ("prompt_changed", "bos_added", "context_truncated", "decode_positions", "sliding_window", "attention_mask")
EMPTY = ("weights_missing", "layer_skipped")
NEARLY = 0.97  # of a difference
SHARED = 0.2  # of a difference, by orders of rounding; of differences of their size and other origin, less than a tenth
FEW = 6  # layers that are tried one by one
MANY = 40  # parts of a model that are tried one by one
FINALISTS = 8
CHANCE = 1e-6  # of draws that look like another distribution by themselves
UNEVEN = 1.63  # Kolmogorov's distance times the root of the count; true draws are beyond it once in a hundred times
ODD = 5.5  # standard deviations, of draws that do not follow the reports: a third of them may be repeats of the others
LIKELIEST = 1024  # tokens that a filter may keep
# Of generation_config.json, the first one before the second.
FILTER_PAIRS = [{"top_k": k, "top_p": p} for k in (5, 10, 20, 30, 40, 50, 64, 100) for p in (0.7, 0.8, 0.9, 0.95, 0.98)]


class Evidence:
    """What the engine reported beside the reference, and how far apart correct engines are; e = engine - reference."""

    def __init__(self, reference: Reference, observations: Sequence[Observation], dtype: str) -> None:
        self.reference, self.observations, self.dtype = reference, [*observations], dtype
        self.is_exact = dtype == "float32"
        # Trials in one forward pass: that of a small model takes as long for many.
        self.at_once = max(1, min(16, 20_000_000 // sum(one.numel() for one in reference.model.parameters())))
        self.order = ""  # of rounding: what the search compares the engine with
        # Logits and log-probabilities of the reference, by order.
        self.plain: dict[str, tuple[Sequence[Tensor], Tensor]] = {}
        logits = [reference.plain_logits(seen) for seen in self.observations]
        columns, values, start = list[Tensor](), list[Tensor](), 0
        for number, seen in enumerate(self.observations):
            row, _, reported = seen.targets
            same, count = torch.ones_like(row), len(seen.positions)
            is_first = (row == 0) & (not seen.is_prompt)  # the first sampled token, which no decoding precedes
            is_chosen = torch.arange(len(row)) < count
            place = torch.tensor(seen.positions)[row]
            columns.append(torch.stack((row + start, same * number, place, is_first, is_chosen, same * seen.is_prompt)))
            values.append(reported)
            start += count
        self.row, self.owner, self.position, *flags = torch.cat(columns, dim=1)
        self.is_first, self.is_chosen, self.is_prompt = (one.bool() for one in flags)
        self.held, self.weight = self.row % 2 == 1, self.row.bincount()[self.row].double().rsqrt()
        self.engine = torch.cat(values)
        self.plain[""] = logits, self.read(logits)
        self.mean_limit, self.largest_limit = 5e-5, 1e-3  # of |e| of chosen tokens: beyond this it is no rounding
        self.honest = 1.0  # the size of a difference that is nothing but rounding; `limit` leaves room for other orders
        self.spread, self.limit = self._measure_spread()
        self.departs = self.size(self.e) > self.limit

    @property
    def is_late(self) -> bool:
        """Whether decoding alone is wrong: what follows the prompt at once is right."""
        now, then = self.size(self.e, self.is_first), self.size(self.e, ~self.is_first)
        return now < (DEPARTS if self.is_exact else 1.5) and then > 3 * now

    def read(self, logits: Sequence[Tensor]) -> Tensor:
        return torch.cat([read_entries(seen, rows) for seen, rows in zip(self.observations, logits, strict=True)])

    @property
    def truth(self) -> Tensor:
        return self.plain[self.order][1]

    @property
    def e(self) -> Tensor:
        return self.engine - self.truth

    def orders(self, dtype: str) -> Iterator[Tensor]:
        """What the reference differs by in other orders of rounding."""
        ways = ("eager",) if dtype == "float32" else ("", "tables", "eager") if dtype == self.dtype else WAYS
        for order in [f"{dtype} {how}" for how in ways]:
            with self._computing(order):
                is_cached = order.endswith("eager")
                found = [compute_logits(self.reference.model, one, is_cached=is_cached) for one in self.observations]
            if dtype == self.dtype:
                self.plain[order] = found, self.read(found)
            yield self.read(found) - self.plain[""][1]

    @contextmanager
    def _computing(self, order: str) -> Iterator[None]:
        model = self.reference.model
        own = getattr(model.config, "_attn_implementation", "sdpa")
        try:
            if order.endswith("eager"):
                model.set_attn_implementation("eager")
            wide = {f"are_{what}_wide": order.endswith(what) for what in ("tables", "norms")}
            with self.reference.in_dtype(order.split(" ")[0] or "float32", **wide):
                yield
        finally:
            model.set_attn_implementation(own)

    def in_order(self, order: str) -> Self:
        found = copy.copy(self)
        found.order = order
        return found

    @property
    def other_order(self) -> str:
        return next(order for order in self.plain if order not in ("", self.order))

    def _measure_spread(self) -> tuple[Tensor, float]:
        """Per entry, the size of honest differences; and the mean |e| in these units that is still honest."""
        found = torch.stack([*self.orders(self.dtype)])
        if self.is_exact:
            largest = float(found.square().mean(dim=1).sqrt().max())
            return torch.full_like(self.truth, max(FLOAT32_SPREAD, 3 * largest)), DEPARTS
        own = ALLOWED * found[:, self.is_chosen].abs()
        self.mean_limit, self.largest_limit = max(5e-5, float(own.mean())), max(1e-3, float(own.max()))
        # A logit that is off by s moves log p by s (1 - p): certain tokens hardly move.
        doubt = torch.expm1(self.truth.clamp(max=-1e-6)).square()
        squares = found.square().mean(dim=0)
        pooled = squares.sum() / doubt.sum().clamp(min=1e-9)
        self.spread = (0.5 * squares + 0.5 * pooled * doubt + 4e-4 * pooled).sqrt().clamp(min=1e-6)
        coarsest = max(self.size(one) for one in found)
        self.honest = 1.25 * coarsest
        return self.spread, BAND * coarsest

    def size(self, residual: Tensor, where: Tensor | None = None) -> float:
        """Mean |residual| in units of the spread."""
        weight = self.weight if where is None else self.weight * where
        return float((weight * residual.abs().clamp(max=WORST) / self.spread).sum() / weight.sum().clamp(min=1e-9))

    def gains(self, residual: Tensor) -> Tensor:
        """Nats by which each entry is likelier under the hypothesis, by Student's t with 4 degrees of freedom: rounding
        has heavy tails."""
        null = min((self.engine - truth for _, truth in self.plain.values()), key=lambda one: self._costs(one)[0])
        return self._costs(null)[1] - self._costs(residual)[1]

    def _costs(self, residual: Tensor) -> tuple[float, Tensor]:
        """Of the tokens of the fit together, and of each entry. In a coarser dtype the engine may round nearly as the
        reference does: the unit is fitted, but where rounding alone may be the whole difference."""
        found = list[tuple[float, Tensor]]()
        for unit in (1.0,) if self.is_exact or not self.departs else UNITS:
            own = residual.clamp(-WORST, WORST) / (unit * self.spread)
            each = self.weight * (math.log(unit) + 2.5 * torch.log1p(own * own / 4))
            found.append((float(each[~self.held].sum()), each))
        return min(found, key=lambda one: one[0])

    def gain(self, residual: Tensor) -> float:
        return float(self.gains(residual)[self.held].sum())

    def multiple(self, predicted: Tensor, of: Tensor, where: Tensor) -> float:
        """By what the prediction has to be multiplied, by least squares."""
        per = self.weight * where * (predicted.abs() < WORST) / self.spread.square()
        return float((per * predicted * of).sum() / (per * predicted.square()).sum().clamp(min=1e-30))

    @torch.no_grad()
    def predict(
        self, tried: Sequence[tuple[Hypothesis, float]], only: Sequence[int], order: str | None = None
    ) -> list[Tensor | None]:
        """Log-probabilities that engines with these causes report; entries of other observations stay. None: this
        model's shapes do not allow it. Without `order`, changes are computed in float32 and added to `truth`."""
        if len(tried) > self.at_once:
            parts = [tried[start : start + self.at_once] for start in range(0, len(tried), self.at_once)]
            return [one for part in parts for one in self.predict(part, only, order)]
        try:
            with self._computing(order or ""):
                found = self._run(tried, only, *self.plain[order or ""])
        except RuntimeError:
            return [None] if len(tried) == 1 else [self.predict([one], only, order)[0] for one in tried]
        moved = self.truth - self.plain[""][1] if order is None else 0.0
        return [one.nan_to_num(nan=-1e3, neginf=-1e3) + moved for one in found]

    def _run(
        self, tried: Sequence[tuple[Hypothesis, float]], only: Sequence[int], plain: Sequence[Tensor], truth: Tensor
    ) -> list[Tensor]:
        trials = [hypothesis.make_trial(self.reference, x) for hypothesis, x in tried]
        for trial in trials if plain is self.plain[""][0] else ():
            trial.kept = self.reference.kept
        asked, seen = [one for one, _ in tried], self.observations
        places = [(k, n) for k, one in enumerate(asked) for n in only if not (one.is_sampling and seen[n].is_prompt)]
        wanted = [(k, n) for k, n in places if not asked[k].is_output]
        rows = compute_batch(self.reference.model, [seen[n] for _, n in wanted], [trials[k] for k, _ in wanted])
        computed, found = dict(zip(wanted, rows, strict=True)), [truth.clone() for _ in tried]
        for number, n in places:
            trial, mine, logits = trials[number], self.owner == n, computed.get((number, n), plain[n])
            own = read_entries(seen[n], logits, trial.outputs)
            if trial.align:
                mine = mine & self.is_chosen
                own, end = truth[mine].roll(-trial.align), 0 if trial.align < 0 else -1
                own[end] = self.engine[mine][end]  # at the ends anything may be
            if trial.reports is not None:
                own = trial.reports(own, seen[n], logits)
            found[number][mine] = own
        for own in found if not self.is_exact else ():  # rounding decides whether a token at a filter's edge is kept
            is_cut = own < -1e2
            if 0 < int(is_cut.sum()) <= EDGE * len(own):
                own[is_cut] = truth[is_cut]
        return found


@record(eq=False)
class Fit:
    """A hypothesis with its fitted number, and what it leaves of the difference on the tokens of the fit."""

    hypothesis: Hypothesis
    x: float
    left: float = 0.0
    residual: Tensor = field(default_factory=lambda: torch.zeros(0))
    own: float | None = None  # size of what the cause leaves in another order of rounding, where it is known

    @property
    def fault(self) -> str:
        return self.hypothesis.fault

    @property
    def label(self) -> str:
        return self.hypothesis.label.format(x=self.x)


# The verdict.


def judge(
    data: Evidence, hypotheses: Iterable[Hypothesis], *, advice: str = "", prefixes: Sequence[tuple[int, ...]] = ()
) -> Finding:
    """A named cause, `unknown`, or no fault. `prefixes`: ids that may be put into a prompt."""
    size, chosen, departs = data.size(data.e), data.e[data.is_chosen].abs(), data.departs
    figure = (
        f"mean |δ| {float(chosen.mean()):.2g}, max {float(chosen.max()):.2g} over {chosen.numel()} tokens, "
        f"{size / data.limit:.2g} of what {data.dtype} allows"
    )
    if not departs and data.is_exact:
        return ok(figure)
    # What leaves a part of the model out is larger than rounding.
    if not data.is_exact:  # the engine may round nearly as one of the orders does
        data = min(map(data.in_order, data.plain), key=lambda one: one.size(one.e, ~one.held))
        hypotheses = (one for one in hypotheses if not one.is_narrow)  # as that dtype computes
    hypotheses = chain(solve_settings(data), hypotheses)
    fits = fit_all(data, hypotheses if departs else (one for one in hypotheses if not one.is_partial))
    if not data.is_exact and fits:
        tried = [(one, Tokens(one, 10**9).sort(fits, one.order)) for one in map(data.in_order, data.plain)]
        data, fits = min(tried, key=lambda pair: pair[1][0].left)
    confirmed = [one for one in fits if is_confirmed(data, one)]
    if not confirmed and departs:
        more = [
            Fit(hypothesis=one, x=0.0)
            for one in (*solve_bias(data), *solve_constants(data), *search_edits(data, prefixes))
        ]
        fits = [*(fit_dtypes(data) if data.is_exact else ()), *Tokens(data, 10**9).sort(more), *fits]
        confirmed = [one for one in fits if is_confirmed(data, one)]
    confirmed.sort(key=lambda one: one.hypothesis.is_general)
    for best in confirmed[:1]:
        least = data.gain(best.residual) - TIE
        rivals = [one for one in fits if one.fault != best.fault and data.gain(one.residual) > least]
        # What predicts the same numbers is the same computation: no measurement of log-probabilities separates them.
        apart = data.limit if data.is_exact else data.honest / 2
        if best.fault in EMPTY:
            apart = max(apart, 2 * data.size(best.residual))
        others = {one.fault: one.label for one in rivals if data.size(one.residual - best.residual) < apart}
        if any(one.fault not in others for one in rivals) or has_more(data, best, fits):
            break
        part = f"{100 * share(data, best):.0f}% of the difference on tokens that the fit has not seen"
        words = [f"{best.label}: explains {part}", *(f"the same numbers as {others[name]} ({name})" for name in others)]
        confidence = "high" if departs and not others else "medium"
        return fault(best.fault, figure, detail="; ".join(words), confidence=confidence, alternatives=(*others,))
    if not departs:
        return ok(figure)
    if not confirmed and (said := reports_differ(data)):
        return fault("other_reports", figure, confidence="medium", detail=said)
    # What it is not, what it looks like, and what to measure next.
    shares = {one.fault: (share(data, one), one) for one in reversed(fits)}
    ranked = sorted(shares.values(), key=lambda pair: -pair[0])[:3]
    nearest = ", ".join(f"{one.fault} ({one.label}; {100 * max(0.0, part):.0f}%)" for part, one in ranked) or "none"
    known = "cannot be told apart" if confirmed else "nothing simulated explains it; nearest"
    detail = f"{known}: {nearest}. Looks like: {describe_pattern(data)}. Next: {advice}"
    return fault("unknown", figure, confidence="low", detail=detail)


def share(data: Evidence, fit: Fit) -> float:
    """Of |e| on the held-out half, the part that the fit explains."""
    return 1 - data.size(fit.residual, data.held) / max(data.size(data.e, data.held), 1e-12)


def is_confirmed(data: Evidence, fit: Fit) -> bool:
    """On the held-out half: only rounding is left, the size is right, and chance is no explanation."""
    held, e = data.held, data.e
    better = data.gains(fit.residual)[held & data.is_chosen] > 0.5
    if data.gain(fit.residual) < (EVIDENCE if data.departs else 1.5 * EVIDENCE) or int(better.sum()) < TOKENS:
        return False
    if not SIZE[0] <= data.multiple(e - fit.residual, e, held) <= SIZE[1]:
        return False
    left, before = data.size(fit.residual, held), data.size(e, held)
    if left <= min(data.limit, data.honest + 0.1 * before):
        return True
    # A large change rounds differently, and quantisation makes steps of roundings: what the cause itself leaves.
    part = 1 - left / before
    if is_nearly(data, fit, part):
        return True
    if fit.own is not None:
        return part > SHARED and left <= fit.own
    (again,) = data.predict([(fit.hypothesis, fit.x)], range(len(data.observations)), data.other_order)
    own = 0.0 if again is None else data.size(again - (data.engine - fit.residual), held)
    return part > 0.5 and left <= (DEPARTS if data.is_exact else BAND) * own


def is_nearly(data: Evidence, fit: Fit, part: float) -> bool:
    """In float32 no other cause comes so near: roundings take other steps in an engine's own order of sums, and weights
    that were never loaded may be small numbers."""
    return data.is_exact and part > NEARLY and (fit.hypothesis.is_rounding or fit.fault in EMPTY)


def has_more(data: Evidence, best: Fit, fits: Sequence[Fit]) -> bool:
    """Whether what the cause leaves contains another one: then it is not the whole cause."""
    if data.size(best.residual, data.held) <= data.honest:
        return False
    for one in fits:
        more = data.e - one.residual
        part = data.multiple(more, best.residual, ~data.held)
        gain = data.gain(best.residual - part * more) - data.gain(best.residual)
        # What orders of rounding leave has a pattern, which other causes explain a little of.
        is_little = best.own is not None and data.size(best.residual - part * more) > 0.9 * data.size(best.residual)
        if one.fault != best.fault and part > 0.05 and gain > EVIDENCE and not is_little:
            return True
    return False


def fit_dtypes(data: Evidence) -> list[Fit]:
    """A coarser dtype in several orders of rounding; how far these are apart is what it may leave."""
    found = list[Fit]()
    for dtype in NARROW:
        hypothesis = Hypothesis(f"dtype_{dtype}", f"weights and operators in {dtype}", {})
        orders = [*data.orders(dtype)]
        own = max(data.size(one - other, data.held) for one in orders for other in orders)
        for residual in (data.e - order for order in (*orders, mix_orders(data, orders))):
            left = data.size(residual, ~data.held)
            found.append(Fit(hypothesis=hypothesis, x=0.0, left=left, residual=residual, own=own))
    return sorted(found, key=lambda one: one.left)


def mix_orders(data: Evidence, orders: Sequence[Tensor]) -> Tensor:
    """What lies between the orders and nearest on the tokens of the fit: other kernels round here as one of them does,
    there as another."""
    first, *others = orders
    apart = torch.stack([one - first for one in others], dim=1)
    weight = (data.weight.sqrt() * ~data.held)[:, None]
    return first + (apart @ torch.linalg.lstsq(weight * apart, weight * (data.e - first)[:, None]).solution)[:, 0]


def reports_differ(data: Evidence) -> str:
    """The draws are the reference's, the reports of another distribution. Under their own reports, a ratio of e^n in
    favour of any other has a chance of e^-n."""
    mine = data.is_chosen & ~data.is_prompt
    ratio, visible = -float(data.e[mine].sum()), data.row[data.e.abs() > 3 * data.spread]
    if ratio < -math.log(CHANCE) or float(torch.isin(data.row[mine], visible).double().mean()) < 0.8:
        return ""  # in the second case, other tokens' reports are those of the reference
    low = torch.stack([data.e[data.row == row].min() for row in data.row[mine].tolist()])
    if float((data.e[mine] - low).mean()) < 0.2 * float(data.e[mine].abs().mean()):
        return ""  # all of a place's reports are lowered: they are no distribution
    return f"what is sampled is e^{ratio:.0f} times likelier under the model directory than under the reports"


def describe_pattern(data: Evidence) -> str:
    e, chosen = data.e, data.is_chosen
    own, found = e[chosen], list[str]()
    above = float((own > 0).double().mean())
    if above > 0.95 or above < 0.05:
        found.append("every log-probability is " + ("raised" if above > 0.95 else "lowered"))
    prompt, sampled = (data.size(e, chosen & side) for side in (data.is_prompt, ~data.is_prompt))
    found += ["only sampled tokens differ: decoding or sampling"] if sampled > 5 * prompt > 0 else []
    found += ["only prompt tokens differ"] if prompt > 5 * sampled > 0 else []
    seldom = float((own.abs() < 3 * data.spread[chosen]).double().mean())
    found += [f"{100 * seldom:.0f}% of the tokens agree within rounding"] if data.is_exact and seldom > 0.2 else []
    growth = grows_with_position(own, data.position[chosen])
    found += [f"it grows {growth:.0f}-fold with the position"] if growth > 4 else []
    together = float(torch.corrcoef(torch.stack((data.engine[chosen], data.truth[chosen])))[0, 1])
    return "; ".join([*found, f"correlation with the reference {together:.3f}"])


def grows_with_position(e: Tensor, positions: Tensor) -> float:
    """Mean |e| of the last third of the positions ÷ that of the first."""
    order = positions.argsort()
    third = max(1, e.numel() // 3)
    first, last = e[order[:third]].abs().mean(), e[order[-third:]].abs().mean()
    return float(last / first.clamp(min=1e-12))


# The search.


class Tokens:
    """Observations of a search, and their half of the fit: those with most of the difference per token."""

    def __init__(self, data: Evidence, least: int) -> None:
        sizes = [data.size(data.e, data.owner == n) for n in range(len(data.observations))]

        def cost(n: int) -> tuple[bool, float]:
            seen = data.observations[n]
            if data.at_once == 1:  # a trial takes long: the shortest of those that differ about as much as any
                return 2 * sizes[n] < max(sizes), len(seen.token_ids)
            return False, -sizes[n] * len(seen.positions) / len(seen.token_ids)

        ordered = sorted(range(len(sizes)), key=cost)
        rows = torch.tensor([len(data.observations[n].positions) for n in ordered]).cumsum(0)
        self.data, self.only = data, ordered[: 1 + int((rows < least).sum())]
        self.inside = torch.isin(data.owner, torch.tensor(self.only)) & ~data.held
        self.whole = data.size(data.e, self.inside)
        self.is_large = data.is_exact or self.whole > 10 * data.limit
        # What noise correlates with by itself; float32 has none.
        self.alike = ALIKE if data.is_exact else 3 / math.sqrt(int((self.inside & data.is_chosen).sum()) + 1)

    def try_all(self, tried: Sequence[tuple[Hypothesis, float]], order: str | None = None) -> list[Fit | None]:
        def fit(hypothesis: Hypothesis, x: float, residual: Tensor) -> Fit:
            return Fit(hypothesis=hypothesis, x=x, left=self.data.size(residual, self.inside), residual=residual)

        pairs = zip(tried, self.data.predict(tried, self.only, order), strict=True)
        return [None if found is None else fit(*one, self.data.engine - found) for one, found in pairs]

    def sort(self, fits: Sequence[Fit], order: str | None = None) -> list[Fit]:
        tried = self.try_all([(one.hypothesis, one.x) for one in fits], order)
        return sorted((one for one in tried if one is not None), key=lambda one: one.left)

    def screen(self, hypotheses: Sequence[Hypothesis]) -> list[dict[float, Fit]]:
        """All values of their grids; each third one where the numbers between are fitted."""
        grids = [one.grid[:: 3 if one.fit else 1] for one in hypotheses]
        found = iter(self.try_all([(one, x) for one, grid in zip(hypotheses, grids, strict=True) for x in grid]))
        return [{x: fit for x in grid if (fit := next(found)) is not None} for grid in grids]

    def correlate(self, fit: Fit) -> float:
        """Each token's scale is taken out: one large token decides nothing."""
        data, predicted = self.data, self.data.e - fit.residual
        scale = (data.spread.square() + data.e.square() + predicted.square()).sqrt()
        a, b = (data.e / scale)[self.inside], (predicted / scale)[self.inside]
        return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt().clamp(min=1e-12))

    def fit_number(self, hypothesis: Hypothesis, tried: dict[float, Fit], alike: float) -> Fit:
        """Where a third of the grid is promising, all of it, and the numbers between, ever narrower."""

        def extend(numbers: Iterable[float]) -> Fit:
            new = [x for x in dict.fromkeys(numbers) if x not in tried]
            found = self.try_all([(hypothesis, x) for x in new])
            tried.update({x: one for x, one in zip(new, found, strict=True) if one is not None})
            return min(tried.values(), key=lambda one: one.left)

        best, grid, fit = extend(()), hypothesis.grid, hypothesis.fit
        # A number on the wrong side of the model's moves everything the other way.
        likeness = max(abs(self.correlate(one)) for one in tried.values())
        if likeness > alike / 2 or best.left < PROMISING * self.whole:
            best = extend(grid)
        if not fit or best.left >= PROMISING * self.whole:
            return best
        there, back, least = (math.log, math.exp, 1) if min(grid) > 0 else (float, float, round(min(grid)) - 99)
        places = [there(x) for x in sorted({*grid})]
        at = places.index(there(best.x))
        wide = max(abs(places[at] - one) for one in (*places[max(0, at - 1) : at + 2], 2 * places[at] - places[at - 1]))
        for step in range(16):
            wide /= 2.2
            near = [back(place) for place in (there(best.x) - wide, there(best.x) + wide)]
            best = extend([max(least, round(x)) for x in near] if fit == "whole" else near)
            explained = 1 - best.left / self.whole
            if (step > 1 and self.data.is_exact and explained < 0.3) or (step > 6 and explained < 0.7):
                break  # more digits of a number that explains little
        return best

    def choose_units(self, hypothesis: Hypothesis, x: float) -> Hypothesis:
        """The parts of the model whose effects add up to the difference, by least squares."""
        data, inside, is_partial = self.data, self.inside, hypothesis.is_partial
        is_fitted = _has_size(hypothesis)
        # An effect's curvature is a part of its size, so large differences count no more than small ones.
        scale = 1 / (data.spread.square() + (0.3 * data.e).square()).sqrt()[inside]
        target, spread, truth = data.e[inside].clamp(-WORST, WORST), data.spread[inside], data.truth

        known = dict[frozenset[str], Tensor]()

        def compute_effects(sets: Sequence[Iterable[str]]) -> list[Tensor]:
            asked = [*map(frozenset, sets)]
            new = [names for names in dict.fromkeys(asked) if names not in known]
            predicted = data.predict([(hypothesis.within(names), x) for names in new], self.only)
            for names, one in zip(new, predicted, strict=True):
                known[names] = ((truth if one is None else one) - truth)[inside].clamp(-WORST, WORST)
            return [known[names] for names in asked]

        def cost_of(effect: Tensor) -> float:
            return float(((target - effect) / spread).abs().sum())

        groups: dict[str, list[str]] = {}
        for name in hypothesis.units:
            layer = re.match(r".*?\.\d+(?=\.)", name) if len(hypothesis.units) > MANY else None
            groups.setdefault(layer[0] if layer else name, []).append(name)
        while True:
            effects = torch.stack(compute_effects([*groups.values()])) * scale
            square = effects @ effects.T
            own = square.diagonal()  # parts that are left out have effects of very different sizes
            square += torch.diag(1e-4 * (own if is_partial else own.mean().expand_as(own)) + 1e-9)
            parts = dict(zip(groups, torch.linalg.solve(square, effects @ (target * scale)).tolist(), strict=True))
            if is_fitted:
                most = max(max(map(abs, parts.values())), 1e-12)
                parts = {name: abs(part) / most for name, part in parts.items()}
            largest = max(parts, key=lambda name: parts[name])
            if all(len(names) == 1 for names in groups.values()):
                break
            groups = {
                n: [n] for group, names in groups.items() if parts[group] > 0.2 or group == largest for n in names
            }
        chosen = frozenset(name for name, part in parts.items() if part > 0.5) or frozenset({largest})
        sets = [
            chosen,
            *({name} for name in parts),
            *([] if is_partial or is_fitted else list_sets([*hypothesis.units])),
        ]
        sets = [*dict.fromkeys(map(frozenset, sets))]
        costs = dict(zip(sets, map(cost_of, compute_effects(sets)), strict=True))
        chosen = min(sets, key=lambda one: costs[one])
        doubts = [] if is_fitted else sorted(parts, key=lambda name: abs(parts[name] - 0.5))
        doubts = [name for name in doubts if not is_partial or 0.15 < parts[name] < 0.85][:MANY]
        cost, whole = costs[chosen], cost_of(torch.zeros_like(target))
        while 0.01 * whole < cost < 0.8 * whole:  # effects do not quite add up
            others = [other for name in doubts if (other := chosen ^ {name})]
            costs = dict(zip(others, map(cost_of, compute_effects(others)), strict=True))
            best = min(costs, key=lambda one: costs[one], default=chosen)
            if costs.get(best, cost) >= cost:
                break
            chosen, cost = best, costs[best]
        return hypothesis.within(chosen)


def list_sets(names: Sequence[str]) -> Iterator[Iterable[str]]:
    """Parts of a model that an update, a loader or a pipeline takes at once: up to a tensor and from it on, layers that
    follow each other, those of one kind."""
    layers, kinds = dict[str, list[str]](), dict[str, list[str]]()
    for name in names:
        at = re.match(r"(.*?\.\d+)\.?(.*)", name)
        layers.setdefault(at[1] if at else name, []).append(name)
        kinds.setdefault(at[2] if at else "", []).append(name)
    inner = [one for one in layers.values() if one[0].count(".") > 1]  # embedding and output layer may share theirs
    singles = [[[name] for name in side] for side in (names, [*chain(*inner)]) if len(side) <= 4 * MANY]
    for parts in (*singles, [*layers.values()]):
        for at in range(len(parts)):
            yield chain(*parts[:at])
            yield chain(*parts[at:])
    yield chain(*inner)
    for first, end in combinations(range(len(inner) + 1), 2) if len(inner) < 13 else ():
        yield chain(*inner[first:end])
    for words in (*kinds, "self_attn", "mlp", "_proj", "norm", "experts"):
        chosen = [name for name in names if words in name] if words else kinds[words]
        yield chosen
        yield (name for name in names if name not in chosen)


def _has_size(hypothesis: Hypothesis) -> bool:
    return bool(hypothesis.fit and hypothesis.grid[0])


def _sampled(seen: Observation, x: float) -> tuple[int, int]:
    return seen.prompt_tokens, len(seen.token_ids)


def fit_all(data: Evidence, hypotheses: Iterable[Hypothesis]) -> list[Fit]:
    """The best hypotheses over all tokens, best first; each is tried on few tokens first."""
    few, more = (Tokens(data, least) for least in ((24, 100) if data.is_exact else (80, 160)))
    every = Tokens(data, 10**9)
    visible = int((data.e.abs() > 6 * data.spread)[data.held & data.is_chosen].sum())
    found, sizes, is_late = list[Fit](), list[Fit](), data.is_late
    asked = [_decode_alone(one) if is_late else one for one in hypotheses if one.units]
    queue, part = asked, few.whole  # of the difference, what is left without pairs of changes
    start, waiting = time.monotonic(), len(asked)
    while queue:
        waiting = min(waiting, len(queue))  # others are parts and forms of causes that are promising
        done = len(asked) - waiting
        minutes = (time.monotonic() - start) * waiting / max(1, done) / 60
        data.reference.on_progress(f"{done} of {len(asked)} causes tried, about {minutes:.0f} min left")
        some, queue = queue[: data.at_once], queue[data.at_once :]
        some = [few.choose_units(one, one.grid[0]) if one.is_partial else one for one in some]
        next_up: list[Hypothesis] = []
        for number, (hypothesis, tried) in enumerate(zip(some, few.screen(some), strict=True)):
            if not tried:
                continue  # shapes of this model do not allow it
            if hypothesis.is_general:  # before a norm, many parts have one size together
                own = tried[hypothesis.grid[0]]
                if any(data.size(own.residual - other.residual, few.inside) < data.limit for other in sizes):
                    continue
                sizes.append(own)
            best = few.fit_number(hypothesis, tried, max(few.alike, 0.4) if data.is_exact else few.alike)
            ties = [one for one in tried.values() if one.left <= best.left + data.limit / 10]
            if len(ties) > 1 and best.left < few.whole / 2:  # numbers that few tokens do not tell apart
                for again in every.sort(ties)[:1]:
                    best = next(one for one in ties if one.x == again.x)
            found.append(best)
            is_whole = best.left < (data.limit / 2 if data.is_exact else min(data.limit, 0.1 * few.whole))
            if is_whole and visible >= 2 * TOKENS and _explains_all(every, best):
                found += list_equals(few, best, [*some[number + 1 :], *next_up, *queue])
                next_up, queue = [], []
                break
            if best.left > 0.9 * few.whole and min(one.left for one in found) < 0.3 * few.whole:
                continue  # another cause explains most already
            next_up += _list_parts(few, more, best)
        queue = [*next_up, *queue]
        nearest = min(found, key=lambda one: one.left, default=None)
        if not queue and nearest is not None and few.is_large and data.limit < nearest.left < part / 2:
            part, queue = nearest.left, [*_list_pairs(nearest, asked)]
    found = sorted((one for one in found if one.left < few.whole), key=lambda one: one.left)
    if data.is_exact and found and found[0].left < data.limit:
        found = [one for one in found if one.left < 10 * data.limit]  # others are no rivals
    if not data.is_exact:
        found = more.sort(found[: 3 * FINALISTS])
    return every.sort(_of_several(found)[:FINALISTS])


def _of_several(found: Sequence[Fit]) -> list[Fit]:
    """Of one name, no more than half of the finalists: a family of many forms would hide what says why."""
    counts = Counter[str]()
    kept = list[Fit]()
    for one in found:
        counts[one.fault] += 1
        if 2 * counts[one.fault] <= FINALISTS:
            kept.append(one)
    return kept


def _decode_alone(hypothesis: Hypothesis) -> Hypothesis:
    if hypothesis.is_output or hypothesis.span or hypothesis.fault.startswith(LATE) or "_kv_cache" in hypothesis.fault:
        return hypothesis
    return replace(hypothesis, label=f"{hypothesis.label}, in decoding alone", span=_sampled)


def _list_parts(few: Tokens, more: Tokens, best: Fit) -> list[Hypothesis]:
    """Other forms of a promising cause, and the cause in a part of the model."""
    hypothesis, found = best.hypothesis, list[Hypothesis]()
    is_alike = few.correlate(best) > few.alike
    ratio = few.data.size(few.data.e - best.residual, few.inside) / max(few.whole, 1e-12)
    if hypothesis.details is not None and (0.2 < ratio < 5 if hypothesis.is_rounding else is_alike):
        found += hypothesis.details()
    singles = [hypothesis.within([name]) for name in hypothesis.units] if len(hypothesis.units) <= FEW else []
    if hypothesis.is_local and singles:
        return [*singles, *found]
    if len(hypothesis.units) < 2:
        return found
    if few.is_large and ratio > 1.5 and not hypothesis.fit:
        found += singles  # the effects of large changes do not add up
    is_asked = hypothesis.fault in ASKED and hypothesis.span in (None, _sampled)
    if not is_asked:
        if not is_alike or (hypothesis.is_rounding and not 0.3 < ratio < 10):
            return found
        (again,) = more.try_all([(hypothesis, best.x)])
        if again is None or more.correlate(again) < more.alike:
            return found
    # A number or a form is that of the whole; of an update, a part took all or nothing.
    part = more.choose_units(hypothesis, 0.0 if hypothesis.fit == "real" and not _has_size(hypothesis) else best.x)
    return [part, *found] if len(part.units) < len(hypothesis.units) else found


def _list_pairs(best: Fit, asked: Sequence[Hypothesis]) -> Iterator[Hypothesis]:
    """The best change with each other one of the same name."""
    first, x, label = best.hypothesis, best.x, best.label
    for other in asked:
        is_fit = other.fault == first.fault and other.span == first.span
        if is_fit and not (other.is_partial or any(one.is_output or one.is_rounding for one in (first, other))):

            def apply(trial: Any, by: float, other: Hypothesis = other) -> None:
                for one, number in ((first, x), (other, by)):
                    for unit in one.units.values():
                        unit(trial, number)

            yield replace(other, label=f"{label} and {other.label}", units={"": apply}, is_local=False, details=None)


def _explains_all(every: Tokens, fit: Fit) -> bool:
    (found,) = every.try_all([(fit.hypothesis, fit.x)])
    return found is not None and found.left < (every.data.limit if every.data.is_exact else 0.3 * every.whole)


def list_equals(few: Tokens, best: Fit, others: Sequence[Hypothesis]) -> Iterator[Fit]:
    """Once a cause leaves only rounding on many tokens, only what computes the same can do so, too."""
    others = [one for one in others if one.fault != best.fault]
    others = [few.choose_units(one, one.grid[0]) if one.is_partial else one for one in others]
    for hypothesis, tried in zip(others, few.screen(others), strict=True):
        if tried:
            fit = few.fit_number(hypothesis, tried, 0.5)
            if fit.left < max(2 * best.left, few.data.limit):
                yield fit


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
    for seen, logits in zip(data.observations, data.plain[""][0], strict=True):
        for top, row in zip(seen.tops, logits, strict=False):
            listed.update(top)
            likely.update(row.topk(max(1, len(top) // 2)).indices.tolist())
    banned = {token: -1e4 for token, count in likely.items() if count > 1 and not listed[token]}
    return [biased(one) for one in (bias, banned) if 0 < len(one) <= 64]


def solve_constants(data: Evidence) -> list[Hypothesis]:
    """Values that were reported again and again where the reference has others."""
    wrong = data.engine[~data.held & (data.e.abs() > 6 * data.spread)]
    common = Counter(round(value, 6) for value in wrong.tolist()).most_common(2)
    return [constant(value) for value, count in common if count > 2]


def solve_settings(data: Evidence) -> list[Hypothesis]:
    """A sampler's defaults. Differences between tokens of one place are those of temperature and penalties; what all
    tokens of a place have in common is the share that filters keep, and so how many tokens they keep."""
    chosen = [n for n, seen in enumerate(data.observations) if not seen.is_prompt]
    mine = torch.isin(data.owner, torch.tensor(chosen))
    row, count = data.row[mine].unique(return_inverse=True, return_counts=True)[1:]
    targets = torch.cat([data.observations[n].targets[1] for n in chosen or [0]])
    if not chosen or int(count.max()) < 2:
        return []
    reported, is_fit = data.engine[mine], ~data.held[mine]
    asked = torch.zeros(len(count), dtype=torch.bool).index_put((row[is_fit],), torch.tensor(True))

    def mean(values: Tensor) -> Tensor:
        return torch.zeros(len(count), dtype=torch.float64).index_add(0, row, values) / count

    def penalised(name: str, by: float) -> Tensor:
        pairs = [(data.plain[data.order][0][n], data.observations[n]) for n in chosen]
        start = PENALTIES[name][0] if name else 0
        return torch.cat([penalise(name, start, *pair, by) if name else pair[0] for pair in pairs])

    def fit_heat(name: str, by: float) -> tuple[float, float]:
        """What is left of the gaps, and the temperature that leaves it; a few tokens may be others."""
        logits = penalised(name, by)[row, targets].double()
        own, gaps = ((one - mean(one)[row])[is_fit] for one in (logits, reported))
        weight, heat = torch.ones_like(own), 1.0
        for _ in range(8):
            heat = float((weight * own * own).sum() / (weight * own * gaps).sum().clamp(min=1e-9))
            weight = 1 / (own / heat - gaps).abs().clamp(min=1e-5)
        return float((own / heat - gaps).abs().mean()), heat

    tried = {("", 1.0): fit_heat("", 1.0)}
    if tried["", 1.0][0] > float(data.spread.median()):
        tried |= {(name, by): fit_heat(name, by) for name, (_, grid) in PENALTIES.items() for by in grid}
    name, by = min(tried, key=lambda one: tried[one][0])
    for step in (0.05, 0.02, 0.008, 0.003, 0.001, 0.0004, 0.0001) if name else ():
        near = [(name, by + sign * step) for sign in (-2, -1, 1, 2)]
        tried |= {one: fit_heat(*one) for one in near}
        name, by = min((name, by), *near, key=lambda one: tried[one][0])
    own = tried[name, by][1]
    rounded = (round(own / by) * by for by in (0.1, 0.05, 0.01, 0.001) if own > by)
    heats = {f"{heat:.4g}": heat for heat in (own, *rounded, 1.0)}
    plain, found = penalised(name, by), list[Hypothesis]()
    for heat in heats.values():
        logits = plain.double() / heat
        first, total = logits.topk(min(LIKELIEST, logits.shape[-1])).values, logits.logsumexp(-1)
        filters = _solve_filters(first, total, mean(logits[row, targets] - reported), asked)
        if name or heat != 1 or filters:
            found.append(sampler(name, by, heat, filters))
    return found


def _solve_filters(first: Tensor, whole: Tensor, seen: Tensor, asked: Tensor) -> dict[str, float]:
    """By the likeliest logits `[rows, n]`, and the logarithms of the sums of all exponentials and of those kept."""
    found: list[tuple[float, int, dict[str, float]]] = []
    for k in (0, *FILTERS["top_k"]):
        total = first[:, :k].logsumexp(-1) if k else whole
        probs = (first[:, : k or None] - total[:, None]).exp()
        mass, left = probs.cumsum(-1), (seen - total)[:, None]
        kept = {"top_k": float(k)} if k else {}
        found.append((float(left.abs()[asked].mean()), len(kept), kept))
        last = (mass - left.exp()).abs().argmin(-1, keepdim=True)
        least = torch.cat((probs, torch.zeros_like(probs[:, :1])), -1) / probs[:, :1]
        is_cut = asked[:, None] & (mass.gather(1, last) < 1 - 1e-6)
        # In a row that keeps n tokens the number lies between two edges.
        edges = {"top_p": ((mass - probs).gather(1, last), mass.gather(1, last))}
        edges["min_p"] = least.gather(1, last + 1), least.gather(1, last)
        for name, (low, high) in edges.items() if bool(is_cut.any()) else ():
            x = _roundest(*sorted((float(low[is_cut].quantile(0.98)), float(high[is_cut].quantile(0.02)))))
            off = left - mass.gather(1, count_kept(probs, name, x) - 1).log()
            found.append((float(off.abs()[asked].mean()), len(kept) + 1, kept | {name: x}))
    least_off = min(found, key=lambda one: one[0])[0]
    return min((one for one in found if one[0] <= 1.05 * least_off + 1e-6), key=lambda one: (one[1], one[0]))[2]


def _roundest(low: float, high: float) -> float:
    """The number with the fewest digits between the two."""
    rounded = (math.ceil(low * 10**n + 1e-9) / 10**n for n in range(1, 7))
    return next((x for x in rounded if low < x <= high), high)


def search_edits(data: Evidence, prefixes: Sequence[tuple[int, ...]]) -> list[Hypothesis]:
    """Each prompt's own edit: tokens left out, doubled, exchanged or inserted."""
    if data.is_late:
        return []
    places = [n for n, seen in enumerate(data.observations) if not seen.is_prompt]
    places = [n for n in places if data.size(data.e, data.owner == n) >= data.limit]
    edits: dict[tuple[int, ...], Observation] = {}
    # Of prompts before: place (from the end if negative), how many are dropped, which are put there.
    known: list[tuple[int, int, tuple[int, ...]]] = []
    for number, n in enumerate(sorted(places, key=lambda n: len(data.observations[n].token_ids))):
        seen, tried = data.observations[n], [*known]
        short, ids, sent = seen.first(10), seen.token_ids, seen.prompt_tokens
        if number < 2 and sent <= 160:
            tried += [(at, count, ()) for count in (1, 2, 3, 4, 5, 6, 8) for at in range(sent - count + 1)]
            tried += [(at, 0, (ids[at],)) for at in range(sent)]
            tried += [(at, 2, (ids[at + 1], ids[at])) for at in range(sent - 1)]
            ends = sorted({*range(min(6, sent)), *range(max(0, sent - 6), sent + 1)})
            tried += [(at, drop, put) for at in ends for put in prefixes for drop in (0, 1)]
        row, _, reported = short.targets
        costs: list[float] = []
        for start in range(0, len(tried), 64):
            some = [_edit(short, *one) for one in tried[start : start + 64]]
            for logits in compute_batch(data.reference.model, some):
                off = (read_entries(short, logits) - reported)[row % 2 == 0].abs() / data.spread.median()
                costs.append(float(off.clamp(max=WORST).mean()))
        pairs = zip(costs, tried, strict=True)
        cost, (at, drop, put) = min(pairs, key=lambda pair: pair[0], default=(math.inf, (0, 0, ())))
        if cost < (data.limit if data.is_exact else 2 * data.limit):
            edits[ids] = _edit(seen, at, drop, put)
            known += [(at, drop, put), (at - sent if at < sent else 10**6, drop, put)]
        elif number == 1 and not edits:
            break
    if len(edits) < 2:
        return []
    at, drop, put = known[0]
    words = f"prompts with tokens {[*put]} for {drop} of their own at {at}"
    return [edited(edits, words, "bos_added" if at == 0 and not drop and len(put) == 1 else "prompt_changed")]


def _edit(seen: Observation, at: int, drop: int, put: tuple[int, ...]) -> Observation:
    at = max(0, min(at if at >= 0 else seen.prompt_tokens + at, seen.prompt_tokens - drop))
    return seen.edit(at, drop, put)


# Draws.


def judge_draws(
    reference: Reference, sampled: Sequence[Observation], *, temperature: float = 1.0, edge: float = 0.0
) -> Finding:
    """Whether sampled tokens follow the distribution that was reported for them. By the reference's probabilities, at
    the `temperature` that was asked for, filters, temperatures, and both together compete: each is fitted on half of the
    draws and tried on the others. `edge`: the share of draws that rounding takes over the edge of a filter."""
    sampled = [seen for seen in sampled if not seen.is_prompt]
    chosen = [seen.token_ids[at] for seen in sampled for at in seen.positions]
    logits = torch.cat([reference.plain_logits(seen) for seen in sampled]) / temperature
    logits -= logits.amax(dim=-1, keepdim=True)  # large ones, divided by a temperature, would round
    drawn = logits.gather(1, torch.tensor(chosen)[:, None])
    rank = (logits > drawn).sum(dim=-1, keepdim=True)
    likeliest = logits.topk(min(LIKELIEST, logits.shape[-1])).values.double()
    # By what was reported: where rounding of the reference is large, its own is no distribution of the draws.
    plain = torch.tensor([value for seen in sampled for value in seen.logprobs], dtype=torch.float64)[:, None]
    luck = torch.rand((len(chosen), 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # By cause: gains on both halves, words, and unevenness of the draws' places in the distribution.
    found: dict[tuple[str, ...], list[tuple[float, float, str, float]]] = {}
    for t in TEMPERATURES:
        total = (logits / t).logsumexp(dim=-1, keepdim=True)
        own, probs = drawn.double() / t - total, (likeliest / t - total).exp()
        mass, at = probs.cumsum(dim=-1), rank.clamp(max=probs.shape[-1] - 1)
        place = mass.gather(1, at) - luck * probs.gather(1, at)
        for filters in (*FILTER_PAIRS, *({name: x} for name, grid in FILTERS.items() for x in grid), {}):
            kept, top = torch.full_like(rank, probs.shape[-1]), torch.ones_like(plain)
            for name, x in filters.items():  # the second one is over what the first one leaves
                kept = kept.minimum(count_kept(probs / top, name, x))
                top = mass.gather(1, kept - 1)
            inside, outside = (math.log1p(-edge), math.log(edge) if edge else -math.inf) if filters else (0.0, 0.0)
            gains = own - plain + torch.where(rank < kept, inside - top.log(), outside)
            parts = {"temperature_ignored": f"temperature {t * temperature:g}"} if t != 1 else {}
            if filters:
                parts["sampled_filters"] = " and ".join(f"{name} {x:g}" for name, x in filters.items())
            even = (place / top).clamp(max=1).flatten().sort().values - torch.linspace(0, 1, len(chosen))
            uneven = float(even.abs().max()) * math.sqrt(len(chosen))
            halves = float(gains[::2].sum()), float(gains[1::2].sum())
            found.setdefault((*parts,), []).append((*halves, " and ".join(parts.values()), uneven))
    # Each half is tried under what fits the other one best.
    tested = dict[tuple[str, ...], tuple[float, str, float]]()
    for causes, tried in found.items():
        first, second = max(tried), max(tried, key=lambda one: one[1])
        tested[causes] = first[1] + second[0], *first[2:]
    causes, rival = sorted((one for one in tested if len(one) == 1), key=lambda one: tested[one], reverse=True)
    both = next(one for one in tested if len(one) == 2)
    other = tested[rival][0]
    if tested[both][0] > tested[causes][0] + TIE:
        causes, other = both, -torch.inf
    gain, words, uneven = tested[causes]
    advice = "compare the sampler's settings with those of the request"
    if gain < -math.log(CHANCE):
        first = (likeliest[:, :1] - logits.logsumexp(dim=-1, keepdim=True)).exp()
        hits, expected, spread = float((rank == 0).sum()), float(first.sum()), float((first * (1 - first)).sum().sqrt())
        figure = f"{len(chosen)} draws; {hits:.0f} of the likeliest token, {expected:.0f} ± {spread:.0f} expected"
        if spread < 3 or abs(hits - expected) < ODD * spread:
            return ok(f"{len(chosen)} draws follow the reported distribution")
        detail = f"no filter and no temperature explains the draws. Next: ask without speculative decoding; {advice}"
        return fault("unknown", figure, confidence="low", detail=detail)
    figure = f"{len(chosen)} draws; e^{gain:.0f} times likelier under {words}"
    doubt = f"cannot be told apart from {tested[rival][1]}" if other > gain - TIE / 2 else ""
    if uneven > UNEVEN:
        doubt = f"nearest: {words}, under which such draws are rare, too"
    if doubt:
        return fault("unknown", figure, confidence="low", detail=f"{doubt}. Next: {advice}")
    # Draws of another temperature than the reports: either may be what was not asked for.
    others = ("sampled_temperature",) if causes == ("temperature_ignored",) else ()
    if words == "top_k 1":  # always the likeliest token, as at temperature 0
        causes, others = ("temperature_ignored",), causes
    detail = f"draws of {words}, which the log-probabilities do not contain"
    return fault(causes[0], figure, detail=detail, alternatives=others, confidence="medium" if others else "high")


def reports_the_drawn_temperature(reference: Reference, sampled: Sequence[Observation]) -> bool:
    """Whether reports of another temperature than the one asked for are those of the draws."""
    logits = torch.cat([reference.plain_logits(seen) for seen in sampled]).double()
    chosen = torch.tensor([seen.token_ids[at] for seen in sampled for at in seen.positions])[:, None]
    told = torch.tensor([value for seen in sampled for value in seen.logprobs], dtype=torch.float64)
    grid = [n / 20 for n in range(4, 61)]
    own = {t: (logits / t).log_softmax(-1).gather(1, chosen)[:, 0] for t in grid}
    nearest = min(grid, key=lambda t: float((own[t] - told).abs().mean()))
    likelihood = {t: float(one.sum()) for t, one in own.items()}
    return likelihood[nearest] > max(max(likelihood.values()) - TIE, likelihood[1.0] + TIE / 2)
