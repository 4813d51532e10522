"""One way to name a cause: fit every hypothesis on half of the tokens, confirm the best on the other half.

`e` is engine - reference, in units of what correct engines of the expected dtype differ by at that token. A cause is
named only if its prediction leaves nothing but rounding on tokens that the fit has not seen, with the right size, and
if no hypothesis of another name does as well. Everything else is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tokentrue.doctor.findings import Finding, fault, ok
from tokentrue.doctor.hypotheses import Hypothesis, filter_logits
from tokentrue.doctor.reference import Observation, Reference, WideSums, compute_logits, read_entries
from tokentrue.records import record

FLOAT32_SPREAD = 1.5e-5  # typical |e| of two correct float32 implementations of a small model
DEPARTS = 3.0  # mean |e| in units of the spread, float32: beyond this it is no rounding
BAND = 1.8  # the same in a coarser dtype, in units of the mean of the reference's own rounding orders
WORST = 10.0  # nats: a token that a hypothesis makes impossible counts as this far off
ALLOWED = 3.0  # times the spread, for single comparisons of an engine with itself
CERTAIN = 0.97  # of |e| explained: what is left is the simulation's own inexactness
CERTAIN_COARSE = 0.9  # in a coarser dtype: a large fault changes the rounding too
EVIDENCE = 12.0  # nats of log-likelihood on the held-out half
TIE = 8.0  # nats
SIZE = (0.7, 1.4)  # fitted multiple of a prediction that has the right size
PROMISING = 0.97  # residual ÷ difference on the first tokens, below which a hypothesis is fitted further
FINALISTS = 8
CHANCE = 1e-6  # of draws that stay inside one of about thirty filters by themselves


@record
class Spread:
    """Mean and largest |e| that rounding in the expected dtype gives by itself, e = engine - reference."""

    mean: float = 0.0
    largest: float = 0.0

    @property
    def limit(self) -> float:
        """A mean |e| above this is no rounding."""
        return max(ALLOWED * self.mean, 5e-5)

    @property
    def largest_limit(self) -> float:
        """A single |e| above this is no rounding."""
        return max(ALLOWED * self.largest, 1e-3)


class Evidence:
    """What the engine reported beside the reference, and how far apart correct engines are."""

    def __init__(self, reference: Reference, observations: Sequence[Observation], dtype: str) -> None:
        self.reference, self.observations, self.dtype = reference, list(observations), dtype
        self.logits = [compute_logits(reference.model, seen) for seen in self.observations]
        targets = [seen.targets for seen in self.observations]
        counts = [len(seen.positions) for seen in self.observations]
        starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        self.row = torch.cat([rows + start for (rows, _, _), start in zip(targets, starts, strict=False)])
        self.owner = torch.cat([torch.full_like(rows, n) for n, (rows, _, _) in enumerate(targets)])
        self.engine = torch.cat([values for _, _, values in targets])
        self.truth = self.read(self.logits)
        self.is_chosen = torch.cat(
            [torch.arange(len(rows)) < n for (rows, _, _), n in zip(targets, counts, strict=True)]
        )
        self.is_prompt = torch.tensor([seen.is_prompt for seen in self.observations])[self.owner]
        self.weight = self.row.bincount()[self.row].double().rsqrt()
        self.position = torch.cat(
            [torch.tensor(seen.positions)[rows] for seen, (rows, _, _) in zip(self.observations, targets, strict=True)]
        )
        self.held = self.row % 2 == 1
        self.rounding = Spread()
        self.spread, self.limit = self._measure_spread(dtype)

    @property
    def e(self) -> Tensor:
        return self.engine - self.truth

    @property
    def departs(self) -> bool:
        """Whether the difference is larger than rounding."""
        return self.size(self.e, torch.ones_like(self.held)) > self.limit

    def read(self, logits: Sequence[Tensor], outputs: Callable[[Tensor, Observation], Tensor] | None = None) -> Tensor:
        return torch.cat(
            [read_entries(seen, rows, outputs) for seen, rows in zip(self.observations, logits, strict=True)]
        )

    def orders(self, dtype: str) -> list[Tensor]:
        """What the reference itself differs by when it rounds in other orders: plain and fused, eager and not."""
        model, seen = self.reference.model, self.observations
        own = getattr(model.config, "_attn_implementation", "sdpa")
        if dtype == "float32":
            try:
                model.set_attn_implementation("eager")
                return [self.read([compute_logits(model, one, chunked=True) for one in seen]) - self.truth]
            finally:
                model.set_attn_implementation(own)
        with self.reference.trial() as trial:
            trial.round_modules(getattr(torch, dtype))
            fused = [compute_logits(model, one) for one in seen]
        narrow = self.reference.in_dtype(dtype)
        with WideSums():
            plain = [compute_logits(narrow, one) for one in seen]
        return [self.read(rows) - self.truth for rows in (plain, fused)]

    def _measure_spread(self, dtype: str) -> tuple[Tensor, float]:
        """Per entry, the size of honest differences; and the mean |e| in these units that is still honest."""
        found = self.orders(dtype)
        # A logit that is off by s moves log p by s (1 - p): certain tokens hardly move.
        doubt = -torch.expm1(self.truth.clamp(max=-1e-6))
        if dtype == "float32" or not found:
            largest = max((float(one.square().mean().sqrt()) for one in found), default=0.0)
            return torch.full_like(self.truth, max(FLOAT32_SPREAD, 3 * largest)), DEPARTS
        own = torch.stack(found)[:, self.is_chosen].abs()
        self.rounding = Spread(mean=float(own.mean()), largest=float(own.max()))
        squares = torch.stack(found).square().mean(dim=0)
        pooled = squares.sum() / doubt.square().sum().clamp(min=1e-9)
        spread = (0.5 * squares + 0.5 * pooled * doubt.square() + (0.02 * pooled.sqrt()) ** 2).sqrt().clamp(min=1e-6)
        return spread, BAND * max(float((one.abs() / spread * self.weight).sum() / self.weight.sum()) for one in found)

    def size(self, residual: Tensor, where: Tensor) -> float:
        """Mean |residual| in units of the spread."""
        weight = self.weight * where
        return float((weight * residual.abs().clamp(max=WORST) / self.spread).sum() / weight.sum().clamp(min=1e-9))

    def log_likelihood(self, residual: Tensor, where: Tensor) -> float:
        """Of Student's t with 4 degrees of freedom: rounding has heavy tails."""
        z = residual.clamp(-WORST, WORST) / self.spread
        return -2.5 * float((self.weight * where * torch.log1p(z * z / 4)).sum())

    def predict(self, hypothesis: Hypothesis, x: float, only: Sequence[int]) -> Tensor:
        """Log-probabilities that an engine with this cause reports; entries of other observations stay as they are."""
        found = self.truth.clone()
        with self.reference.trial() as trial:
            hypothesis.apply(trial, x)
            for n in only:
                seen = self.observations[n]
                if hypothesis.is_sampling and seen.is_prompt:
                    continue
                mine = self.owner == n
                if trial.align:
                    found[mine] = self._align(mine & self.is_chosen, mine, trial.align)
                    continue
                logits = compute_logits(self.reference.model, seen, trial) if trial.is_forward else self.logits[n]
                found[mine] = read_entries(seen, logits, trial.outputs)
        return found.nan_to_num(nan=-1e3, neginf=-1e3)

    def _align(self, chosen: Tensor, mine: Tensor, by: int) -> Tensor:
        """Each chosen token has its neighbour's value; at the ends anything may be."""
        own, engine = self.truth[chosen], self.engine[chosen]
        moved = own.roll(-by)
        moved[: max(0, -by)], moved[len(own) - max(0, by) :] = engine[: max(0, -by)], engine[len(own) - max(0, by) :]
        found = self.truth.clone()
        found[chosen] = moved
        return found[mine]


@record(eq=False)
class Fit:
    """A hypothesis with its fitted number, and what it leaves of the difference on the tokens of the fit."""

    hypothesis: Hypothesis
    x: float
    left: float
    residual: Tensor

    @property
    def label(self) -> str:
        return self.hypothesis.label.format(x=self.x)


def judge(evidence: Evidence, hypotheses: Iterable[Hypothesis], *, advice: str = "") -> Finding:
    """A named cause, `unknown`, or no fault."""
    everything = torch.ones_like(evidence.held)
    size, e = evidence.size(evidence.e, everything), evidence.e
    chosen = e[evidence.is_chosen].abs()
    figure = (
        f"mean |δ| {float(chosen.mean()):.2g}, max {float(chosen.max()):.2g} over {chosen.numel()} tokens, "
        f"{size / evidence.limit:.2g} of what {evidence.dtype} allows"
    )
    departs = size > evidence.limit
    if not departs and evidence.dtype == "float32":
        return ok(figure)
    fits = fit_all(evidence, hypotheses)
    named = [one for one in fits if is_confirmed(evidence, one, departs=departs)]
    if not named:
        rounding = name_dtype(evidence) if departs and evidence.dtype == "float32" else None
        if rounding is not None:
            return fault(rounding[0], figure, confidence="medium", detail=rounding[1])
        return describe_unknown(evidence, fits, figure, advice) if departs else ok(figure)
    best = named[0]
    others = [one for one in named[1:] if one.hypothesis.fault != best.hypothesis.fault]
    least = evidence.log_likelihood(best.residual, everything) - TIE
    rivals = [one for one in others if evidence.log_likelihood(one.residual, everything) > least]
    share = 1 - evidence.size(best.residual, evidence.held) / max(evidence.size(e, evidence.held), 1e-12)
    detail = f"{best.label}: explains {100 * share:.0f}% of the difference on tokens that the fit has not seen"
    if rivals:
        return describe_unknown(evidence, [best, *rivals], figure, advice, is_tie=True)
    return fault(best.hypothesis.fault, figure, detail=detail, confidence="high" if departs else "medium")


def fit_all(evidence: Evidence, hypotheses: Iterable[Hypothesis]) -> list[Fit]:
    """The best hypotheses over all tokens, best first; each is tried on few tokens first."""
    first = choose_first(evidence)
    inside = torch.isin(evidence.owner, torch.tensor(first)) & ~evidence.held
    whole = evidence.size(evidence.e, inside)
    queue, found = list(hypotheses), list[Fit]()
    while queue:
        hypothesis = queue.pop(0)
        best = min(
            (try_value(evidence, hypothesis, x, first, inside) for x in hypothesis.grid), key=lambda one: one.left
        )
        if hypothesis.fit and best.left < PROMISING * whole:
            best = refine(evidence, best, first, inside)
        if best.left < 0.95 * whole and hypothesis.details is not None:
            queue += hypothesis.details()
        found.append(best)
        if evidence.dtype == "float32" and best.left < evidence.limit / 2:
            break  # nothing but rounding is left: what else leaves nothing is the same computation
    found.sort(key=lambda one: one.left)
    rest = [n for n in range(len(evidence.observations)) if n not in first]
    every = list(range(len(evidence.observations)))
    finalists = [
        try_value(evidence, one.hypothesis, one.x, every, ~evidence.held) if rest else one
        for one in found[: FINALISTS if evidence.dtype == "float32" else 3 * FINALISTS] if one.left < whole
    ]  # fmt: skip
    return sorted(finalists, key=lambda one: one.left)


def choose_first(evidence: Evidence) -> list[int]:
    """Observations that show most of the difference per token that has to be computed."""
    worth: list[tuple[float, int]] = []
    for n, seen in enumerate(evidence.observations):
        rows = evidence.owner == n
        worth.append((evidence.size(evidence.e, rows) * len(seen.positions) / len(seen.token_ids), n))
    chosen, rows = list[int](), 0
    for _, n in sorted(worth, reverse=True):
        chosen.append(n)
        rows += len(evidence.observations[n].positions)
        if rows >= 64:
            break
    return chosen


def try_value(evidence: Evidence, hypothesis: Hypothesis, x: float, only: Sequence[int], inside: Tensor) -> Fit:
    residual = evidence.engine - evidence.predict(hypothesis, x, only)
    return Fit(hypothesis=hypothesis, x=x, left=evidence.size(residual, inside), residual=residual)


def refine(evidence: Evidence, best: Fit, first: Sequence[int], inside: Tensor, steps: int = 14) -> Fit:
    """Golden-section search between the neighbours of the best value of the grid."""
    hypothesis = best.hypothesis
    nothing = () if math.isnan(hypothesis.none) else (hypothesis.none,)
    grid: list[float] = sorted({*hypothesis.grid, *nothing})
    at = grid.index(best.x)
    is_log = grid[0] > 0
    there, back = (math.log, math.exp) if is_log else (float, float)
    gap = (there(grid[1]) - there(grid[0]), there(grid[-1]) - there(grid[-2])) if len(grid) > 1 else (1.0, 1.0)
    low = there(grid[at - 1]) if at else there(best.x) - gap[0]
    high = there(grid[at + 1]) if at + 1 < len(grid) else there(best.x) + gap[1]
    tried = {best.x: best}

    def cost(place: float) -> float:
        x = float(round(back(place))) if hypothesis.fit == "whole" else back(place)
        if x not in tried:
            tried[x] = try_value(evidence, hypothesis, x, first, inside)
        return tried[x].left

    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    for _ in range(steps):
        if cost(left) <= cost(right):
            high, right = right, left
            left = high - golden * (high - low)
        else:
            low, left = left, right
            right = low + golden * (high - low)
    return min(tried.values(), key=lambda one: one.left)


def is_confirmed(evidence: Evidence, fit: Fit, *, departs: bool) -> bool:
    """On the held-out half: only rounding is left, the size is right, and chance is no explanation."""
    held, e = evidence.held, evidence.e
    left, before = evidence.size(fit.residual, held), evidence.size(e, held)
    gain = evidence.log_likelihood(fit.residual, held) - evidence.log_likelihood(e, held)
    predicted = e - fit.residual
    per = (evidence.weight * held) / evidence.spread.square()
    inside = predicted.abs() < WORST
    multiple = float(
        (per * inside * predicted * e).sum() / (per * inside * predicted * predicted).sum().clamp(min=1e-30)
    )
    explained = left <= evidence.limit or 1 - left / max(before, 1e-12) >= (
        CERTAIN if evidence.dtype == "float32" else CERTAIN_COARSE
    )
    needed = EVIDENCE if departs else 1.5 * EVIDENCE
    return explained and gain >= needed and SIZE[0] <= multiple <= SIZE[1]


def name_dtype(evidence: Evidence) -> tuple[str, str] | None:
    """A coarser dtype, by the grid of its logits or by the pattern of its rounding; its size alone names nothing."""
    for dtype, step in (("bfloat16", 2.0**-6), ("float16", 2.0**-9)):
        share, gaps = grid_share(evidence, step)
        if gaps >= 20 and share > 0.9:
            return f"dtype_{dtype}", f"{100 * share:.0f}% of {gaps} gaps between logits are multiples of {step:g}"
        orders = evidence.orders(dtype)
        held, e = evidence.held & evidence.is_chosen, evidence.e
        for order in orders:
            pair = torch.stack((e[held], order[held]))
            together = float(torch.corrcoef(pair)[0, 1])
            ratio = float(pair[0].abs().mean() / pair[1].abs().mean().clamp(min=1e-12))
            if together > 0.5 and together * math.sqrt(int(held.sum())) > 5 and 0.5 < ratio < 2:
                return f"dtype_{dtype}", f"the difference follows the rounding of {dtype}: correlation {together:.2f}"
    return None


def grid_share(evidence: Evidence, step: float) -> tuple[float, int]:
    """Gaps between two log-probabilities of one position are gaps of logits: how many lie on a grid."""
    first = torch.zeros(int(evidence.row.max()) + 1, dtype=torch.float64)
    first[evidence.row[evidence.is_chosen]] = evidence.engine[evidence.is_chosen]
    gaps = (evidence.engine - first[evidence.row])[~evidence.is_chosen]
    gaps = gaps[gaps.abs() > 1e-4]
    if not gaps.numel():
        return 0.0, 0
    off = (gaps / step - (gaps / step).round()).abs() * step
    return float((off < 0.02 * step).double().mean()), gaps.numel()


def describe_unknown(
    evidence: Evidence, fits: Sequence[Fit], figure: str, advice: str, *, is_tie: bool = False
) -> Finding:
    """What it is not, what it looks like, and what to measure next."""
    e, held = evidence.e, evidence.held
    before = evidence.size(e, held)
    shares = {
        one.hypothesis.fault: (one, 1 - evidence.size(one.residual, held) / max(before, 1e-12))
        for one in reversed(fits)
    }
    ranked = sorted(shares.values(), key=lambda pair: -pair[1])[:3]
    nearest = ", ".join(f"{one.hypothesis.fault} ({one.label}; {100 * max(0.0, share):.0f}%)" for one, share in ranked)
    words = (
        f"cannot be told apart: {nearest}" if is_tie else f"nothing simulated explains it; nearest: {nearest or 'none'}"
    )
    return fault(
        "unknown", figure, confidence="low", detail=f"{words}. Looks like: {describe_pattern(evidence)}. Next: {advice}"
    )


def describe_pattern(evidence: Evidence) -> str:
    e, chosen = evidence.e, evidence.is_chosen
    own = e[chosen]
    found: list[str] = []
    above = float((own > 0).double().mean())
    if above > 0.95 or above < 0.05:
        found.append("every log-probability is " + ("raised" if above > 0.95 else "lowered"))
    prompt, sampled = chosen & evidence.is_prompt, chosen & ~evidence.is_prompt
    if bool(prompt.any()) and bool(sampled.any()):
        ratio = evidence.size(e, sampled) / max(evidence.size(e, prompt), 1e-12)
        if ratio > 5 or ratio < 0.2:
            found.append(
                "only " + ("sampled tokens differ: decoding or sampling" if ratio > 5 else "prompt tokens differ")
            )
    growth = grows_with_position(own, evidence.position[chosen])
    if growth > 4:
        found.append(f"it grows {growth:.0f}-fold with the position")
    together = float(torch.corrcoef(torch.stack((evidence.engine[chosen], evidence.truth[chosen])))[0, 1])
    found.append(
        f"correlation with the reference {together:.3f}"
        + (" (other weights or other tokens)" if together < 0.9 else "")
    )
    return "; ".join(found)


def grows_with_position(e: Tensor, positions: Tensor) -> float:
    """Mean |e| of the last third of the positions ÷ that of the first third."""
    order = positions.argsort()
    third = max(1, e.numel() // 3)
    first, last = e[order[:third]].abs().mean(), e[order[-third:]].abs().mean()
    return float(last / first.clamp(min=1e-12))


def judge_draws(evidence: Evidence) -> Finding:
    """Do the sampled tokens follow the distribution that was reported for them? By the reference's probabilities.

    A filter that kept every draw is an accusation where plain sampling would hardly have stayed inside it.
    """
    places = [n for n, seen in enumerate(evidence.observations) if not seen.is_prompt]
    logits = torch.cat([evidence.logits[n] for n in places])
    chosen = [seen.token_ids[at] for n in places for seen in (evidence.observations[n],) for at in seen.positions]
    tokens, plain = torch.tensor(chosen)[:, None], logits.log_softmax(-1)
    nothing = Observation(token_ids=(), positions=(), logprobs=())
    found = [(0.0, "")]
    for name, grid in DRAWN.items():
        for x in grid:
            kept = filter_logits(logits, nothing, x, name=name) > -torch.inf
            if bool(kept.gather(1, tokens).all()):
                found.append((float(plain.masked_fill(~kept, -torch.inf).logsumexp(-1).sum()), f"{name} {x:g}"))
    held = torch.arange(len(chosen)) % 2 == 1
    hot = {t: (logits / t).log_softmax(-1).gather(1, tokens)[:, 0].double() for t in TEMPERATURES}
    warmest = max(hot, key=lambda t: float(hot[t][~held].sum()))
    found.append((float((hot[1.0] - hot[warmest])[held].sum()), f"temperature {warmest:g}"))
    chance, like = min(found)
    if chance > math.log(CHANCE):
        return ok(f"{len(chosen)} draws follow the reported distribution")
    name = "temperature_ignored" if like.startswith("temperature") else "sampled_filters"
    detail = f"the draws are those of {like}, which the log-probabilities do not contain"
    return fault(name, f"{len(chosen)} draws; chance e^{chance:.0f}", detail=detail)


TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0)
DRAWN = {
    "top_k": (1, 2, 3, 5, 8, 10, 20, 40, 50, 64, 100),
    "top_p": (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99),
    "min_p": (0.3, 0.2, 0.1, 0.05, 0.02, 0.01),
}
