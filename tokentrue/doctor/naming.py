"""One way to name a cause: fit every hypothesis on half of the tokens, confirm the best on the other half.

`e` is engine - reference, in units of what correct engines of the expected dtype differ by at that token. A cause is
named only if its prediction leaves nothing but rounding on tokens that the fit has not seen, with the right size, and
if no hypothesis of another name does as well. Everything else is `unknown`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokentrue.doctor.findings import Finding, fault, ok
from tokentrue.doctor.hypotheses import FILTERS, TEMPERATURES, Hypothesis, count_kept, run_all
from tokentrue.doctor.reference import Observation, Reference, WideSums, compute_logits, read_entries
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
MANY = 40  # parts of a model that are tried one by one
FINALISTS = 8
CHANCE = 1e-6  # of draws that look like another distribution by themselves
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
        self.is_chosen = torch.cat(
            [torch.arange(len(rows)) < n for (rows, _, _), n in zip(targets, counts, strict=True)]
        )
        self.is_prompt = torch.tensor([seen.is_prompt for seen in self.observations])[self.owner]
        self.weight = self.row.bincount()[self.row].double().rsqrt()
        self.position = torch.tensor([at for seen in self.observations for at in seen.positions])[self.row]
        self.held = self.row % 2 == 1
        self.mean_limit, self.largest_limit = 5e-5, 1e-3  # of |e| of chosen tokens: beyond this it is no rounding
        self.coarseness = 1.0  # the coarsest order of rounding ÷ the one that trials can use
        self.spread, self.limit = self._measure_spread()

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
        with self.reference.trial() as trial, _eager(model, again and self.is_exact):
            hypothesis.apply(trial, x)
            if again and not self.is_exact:
                trial.round_modules(getattr(torch, self.dtype))
            for n in only:
                seen, mine = self.observations[n], self.owner == n
                if trial.align:
                    chosen = mine & self.is_chosen
                    moved, end = self.truth[chosen].roll(-trial.align), 0 if trial.align < 0 else -1
                    moved[end] = self.engine[chosen][end]  # at the ends anything may be
                    found[chosen] = moved
                elif not (hypothesis.is_sampling and seen.is_prompt):
                    is_known = hypothesis.is_output and not again
                    logits = self.logits[n] if is_known else compute_logits(model, seen, trial)
                    found[mine] = read_entries(seen, logits, trial.outputs)
        return found.nan_to_num(nan=-1e3, neginf=-1e3)


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

    @property
    def fault(self) -> str:
        return self.hypothesis.fault

    @property
    def label(self) -> str:
        return self.hypothesis.label.format(x=self.x)


def judge(data: Evidence, hypotheses: Iterable[Hypothesis], *, advice: str = "") -> Finding:
    """A named cause, `unknown`, or no fault."""
    size, chosen, departs = data.size(data.e), data.e[data.is_chosen].abs(), data.departs
    figure = (
        f"mean |δ| {float(chosen.mean()):.2g}, max {float(chosen.max()):.2g} over {chosen.numel()} tokens, "
        f"{size / data.limit:.2g} of what {data.dtype} allows"
    )
    if not departs and data.is_exact:
        return ok(figure)
    # What leaves a part of the model out is larger than rounding.
    fits = fit_all(data, hypotheses if departs else [one for one in hypotheses if not one.is_partial])
    best = next((one for one in fits if is_confirmed(data, one, departs=departs)), None)
    least = math.inf if best is None else data.gain(best.residual) - TIE
    rivals = [one for one in fits if best and one.fault != best.fault and data.gain(one.residual) > least]
    if best is not None and not rivals:
        part = f"{100 * share(data, best):.0f}% of the difference on tokens that the fit has not seen"
        confidence = "high" if departs else "medium"
        return fault(best.fault, figure, detail=f"{best.label}: explains {part}", confidence=confidence)
    if not departs:
        return ok(figure)
    if best is None and data.is_exact and (rounding := name_dtype(data)):
        return fault(rounding[0], figure, confidence="medium", detail=rounding[1])
    return describe_unknown(data, [best, *rivals] if best else fits, figure, advice, is_tie=best is not None)


def share(data: Evidence, fit: Fit) -> float:
    """Of |e| on the held-out half, how much the fit explains."""
    return 1 - data.size(fit.residual, data.held) / max(data.size(data.e, data.held), 1e-12)


def fit_all(data: Evidence, hypotheses: Iterable[Hypothesis]) -> list[Fit]:
    """The best hypotheses over all tokens, best first; each is tried on few tokens first."""
    first, inside = choose_first(data, 32 if data.is_exact else 80)
    more = choose_first(data, 100 if data.is_exact else 160)
    whole = data.size(data.e, inside)
    visible = int((data.e.abs() > 6 * data.spread)[data.held & data.is_chosen].sum())
    # What noise correlates with by itself; float32 has none.
    alike = ALIKE if data.is_exact else 3 / math.sqrt(int((inside & data.is_chosen).sum()) + 1)
    queue, found = list(hypotheses), list[Fit]()
    while queue:
        hypothesis = queue.pop(0)
        if hypothesis.is_partial:
            hypothesis = choose_units(data, hypothesis, hypothesis.grid[0], first, inside)
        tried = [try_value(data, hypothesis, x, first, inside) for x in hypothesis.grid[::3]]
        likeness = max(correlate(data, data.e - one.residual, inside) for one in tried)
        if likeness > (0.2 if data.is_exact else alike / 2) or min(one.left for one in tried) < PROMISING * whole:
            rest = [x for n, x in enumerate(hypothesis.grid) if n % 3]
            tried += [try_value(data, hypothesis, x, first, inside) for x in rest]
        best = min(tried, key=lambda one: one.left)
        if hypothesis.fit and best.left < PROMISING * whole:
            best = refine(data, best, first, inside)
        found.append(best)
        if data.is_exact and best.left < data.limit / 2 and visible >= 2 * TOKENS:
            break  # nothing but rounding is left on many tokens: what else leaves nothing is the same computation
        if best.left > 0.9 * whole and min(one.left for one in found) < 0.3 * whole:
            continue  # another cause explains most already
        predicted = data.e - best.residual
        is_alike = correlate(data, predicted, inside) > alike
        ratio = data.size(predicted, inside) / max(whole, 1e-12)
        if hypothesis.details is not None and (is_alike or (hypothesis.is_rounding and 0.3 < ratio < 3)):
            queue += hypothesis.details()
        is_part = is_alike and (not hypothesis.is_rounding or 0.3 < ratio < 10)
        if len(hypothesis.units) > 1 and (is_part or hypothesis.fault in ASKED):
            # A number is that of the whole; without one a part is changed or not: an update was taken or not.
            x = best.x if hypothesis.fit and hypothesis.grid[0] else hypothesis.grid[0]
            queue.insert(0, choose_units(data, hypothesis, x, *more))
    found = sorted((one for one in found if one.left < whole), key=lambda one: one.left)
    if data.is_exact and found and found[0].left < data.limit:
        found = [one for one in found if one.left < 10 * data.limit]  # others are no rivals
    if not data.is_exact:
        found = sort_again(data, found[: 3 * FINALISTS], *more)
    return sort_again(data, found[:FINALISTS], range(len(data.observations)), ~data.held)


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
    target = data.e[inside].clamp(-WORST, WORST) * scale

    def effect(names: Iterable[str]) -> Tensor:
        predicted = data.predict(restrict(hypothesis, names), x, first) - data.truth
        return predicted[inside].clamp(-WORST, WORST) * scale

    groups: dict[str, list[str]] = {}
    for name in units:
        layer = re.match(r".*?\.\d+(?=\.)", name) if len(units) > MANY else None
        groups.setdefault(layer[0] if layer else name, []).append(name)
    while True:
        effects = torch.stack([effect(names) for names in groups.values()])
        square = effects @ effects.T
        own = square.diagonal()  # parts that are left out have effects of very different sizes
        square += torch.diag(1e-4 * (own if hypothesis.is_partial else own.mean().expand_as(own)) + 1e-9)
        parts = dict(zip(groups, torch.linalg.solve(square, effects @ target).tolist(), strict=True))
        if is_fitted:
            most = max(max(map(abs, parts.values())), 1e-12)
            parts = {name: abs(part) / most for name, part in parts.items()}
        if all(len(names) == 1 for names in groups.values()):
            break
        largest = max(parts, key=lambda name: parts[name])
        groups = {n: [n] for group, names in groups.items() if parts[group] > 0.2 or group == largest for n in names}
    chosen = {name for name, part in parts.items() if part > 0.5} or {max(parts, key=lambda name: parts[name])}
    cost = float((target - effect(chosen)).abs().sum())
    doubts = [] if is_fitted else sorted(parts, key=lambda name: abs(parts[name] - 0.5))
    doubts = [name for name in doubts if not hypothesis.is_partial or 0.15 < parts[name] < 0.85]
    for name in doubts[:8]:  # least squares leaves these in doubt
        other = chosen ^ {name}
        if other and (new := float((target - effect(other)).abs().sum())) < cost:
            chosen, cost = other, new
    return restrict(hypothesis, chosen)


def restrict(whole: Hypothesis, chosen: Iterable[str]) -> Hypothesis:
    names = [name for name in whole.units if name in chosen]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    apply = run_all({name: whole.units[name] for name in names})
    return replace(
        whole, label=f"{whole.label}; in {shown} alone", apply=apply, units={}, details=None, is_partial=False
    )


def refine(data: Evidence, best: Fit, first: Sequence[int], inside: Tensor) -> Fit:
    """Golden-section search between the neighbours of the best value of the grid."""
    hypothesis = best.hypothesis
    grid = sorted({*hypothesis.grid, *(() if math.isnan(hypothesis.none) else (hypothesis.none,))})
    at = grid.index(best.x)
    there, back = (math.log, math.exp) if grid[0] > 0 else (float, float)
    places = [there(x) for x in grid]
    places = [2 * places[0] - places[1], *places, 2 * places[-1] - places[-2]]
    low, high, tried = places[at], places[at + 2], {best.x: best}

    def cost(place: float) -> float:
        x = float(round(back(place))) if hypothesis.fit == "whole" else back(place)
        if x not in tried:
            tried[x] = try_value(data, hypothesis, x, first, inside)
        return tried[x].left

    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    for step in range(30):
        explained = 1 - min(cost(left), cost(right)) / data.size(data.e, inside)
        if (step > 5 and data.is_exact and explained < 0.3) or (step > 11 and explained < 0.7):
            break  # more digits of a number that explains little
        if cost(left) <= cost(right):
            high, right = right, left
            left = high - golden * (high - low)
        else:
            low, left = left, right
            right = low + golden * (high - low)
    return min(tried.values(), key=lambda one: one.left)


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
    left = data.size(fit.residual, held)
    if left <= data.limit:
        return True
    # A large change rounds differently, and quantisation makes steps of roundings: what the cause itself leaves.
    again = data.predict(fit.hypothesis, fit.x, range(len(data.observations)), again=True)
    own, part = data.size(again - (data.engine - fit.residual), held), share(data, fit)
    # Where nearly all is explained, what is left may be that of the coarsest order.
    return part > 0.5 and left <= (DEPARTS if data.is_exact else BAND) * own * (data.coarseness if part > 0.85 else 1)


def name_dtype(data: Evidence) -> tuple[str, str] | None:
    """A coarser dtype, by the signs of its rounding; the size of a difference names nothing."""
    for dtype in ("bfloat16", "float16"):
        for order in data.orders(dtype):
            where = data.held & data.is_chosen & (order.abs() >= order[data.is_chosen].abs().median())
            same = float((order[where].sign() == data.e[where].sign()).double().mean())
            ratio = float(data.e[where].abs().median() / order[where].abs().median().clamp(min=1e-12))
            if not 0.2 < ratio < 5:
                break  # other orders differ by about as much
            if same > 0.66 and (same - 0.5) * 2 * math.sqrt(int(where.sum())) > 4 and 0.5 < ratio < 2:
                return f"dtype_{dtype}", f"{100 * same:.0f}% of the differences have the sign of rounding to {dtype}"
    return None


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
    for t in TEMPERATURES:
        total = (logits / t).logsumexp(dim=-1, keepdim=True)
        own, probs = drawn.double() / t - total, (likeliest / t - total).exp()
        mass = probs.cumsum(dim=-1).log()
        for name, x in (("", 0.0), *((name, x) for name, grid in FILTERS.items() for x in grid)):
            gains = own - plain
            if name:
                kept = count_kept(probs, name, x)
                gains = torch.where(rank < kept, gains - mass.gather(1, kept - 1), -torch.inf)
            parts = [("temperature_ignored", f"temperature {t:g}")] * (t != 1)
            parts += [("sampled_filters", f"{name} {x:g}")] * bool(name)
            causes, words = tuple(cause for cause, _ in parts), " and ".join(word for _, word in parts)
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
    return fault(causes[0], figure, detail=f"draws of {words}, which the log-probabilities do not contain")
