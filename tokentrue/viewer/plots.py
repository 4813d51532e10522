"""Data of the mismatch plots, without torch: δ = trainer - rollout log-probability, r = exp(δ), and C(r) = -(r - 1)·A.
Formulas and advantages equal those of `tokentrue.mismatch`; tests compare them."""

import math
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokentrue.json_types import JsonObject
from tokentrue.samples.groups import group_of, group_sessions
from tokentrue.types import Sample

Floats = npt.NDArray[np.float64]
BINS = 81
TAIL_POINTS = 60
POSITION_BINS = 48
LOG_CLAMP = 20.0
EPS = 1e-6


def plots_to_json(
    rows: Sequence[tuple[Sequence[float | None], Sequence[float | None], Sequence[int], float | None]],
) -> JsonObject:
    tokens: list[tuple[float, int, float]] = []  # δ, trained tokens before it in its sample, advantage
    for rollout, trainer, mask, advantage in rows:
        pairs = zip(rollout, trainer, mask, strict=True)
        deltas = [t - r for r, t, trained in pairs if trained and r is not None and t is not None]
        known = math.nan if advantage is None else advantage
        tokens += [(delta, position, known) for position, delta in enumerate(deltas)]
    if not tokens:
        return {"tokens": 0}
    delta, position, advantages = np.array(tokens, dtype=np.float64).T
    size = np.abs(delta)
    return {
        "tokens": len(delta),
        "equal": int((delta == 0).sum()),
        "numbers": {
            "mean δ": float(delta.mean()),
            "mean |δ|": float(size.mean()),
            "median |δ|": float(np.quantile(size, 0.5)),
            "99% of |δ| below": float(np.quantile(size, 0.99)),
            "99.9% of |δ| below": float(np.quantile(size, 0.999)),
            "smallest δ": float(delta.min()),
            "largest δ": float(delta.max()),
        },
        "histogram": _histogram(delta),
        "tail": _tail(size),
        "position": _by_position(delta, position),
        "contribution": _contribution(delta, advantages),
    }


def _histogram(values: Floats) -> JsonObject:
    """Bins around 0 that hold 99.8% of the values; the rest is in the first and last bin."""
    reach = float(np.quantile(np.abs(values), 0.998)) or float(np.abs(values).max()) or 1e-6
    edges = np.linspace(-reach, reach, BINS + 1)
    counts, _ = np.histogram(np.clip(values, -reach, reach), bins=edges)
    outside = int((np.abs(values) > reach).sum())
    return {"x": ((edges[:-1] + edges[1:]) / 2).tolist(), "count": counts.tolist(), "outside": outside}


def _tail(size: Floats) -> JsonObject:
    positive = np.sort(size[size > 0])
    if not len(positive):
        return {"x": [], "share": []}
    low, high = max(float(positive[0]), 1e-9), float(positive[-1])
    x = np.geomspace(low, high, TAIL_POINTS) if high > low else np.array([low])
    share = (len(positive) - np.searchsorted(positive, x, side="left")) / len(size)
    return {"x": x.tolist(), "share": share.tolist()}


def _by_position(delta: Floats, position: Floats) -> JsonObject:
    """Mean ratio exp(δ) by the number of trained tokens before it, and the range of 98% of the tokens."""
    ratio = np.exp(np.minimum(delta, LOG_CLAMP))
    edges = np.unique(np.floor(np.linspace(0, float(position.max()) + 1, POSITION_BINS + 1)))
    place = np.searchsorted(edges, position, side="right") - 1
    rows: list[tuple[float, float, float, float, int]] = []
    for number in range(len(edges) - 1):
        chosen = ratio[place == number]
        if len(chosen):
            low, high = np.quantile(chosen, [0.01, 0.99])
            middle = (edges[number] + edges[number + 1] - 1) / 2
            rows.append((float(middle), float(chosen.mean()), float(low), float(high), len(chosen)))
    columns = [list(column) for column in zip(*rows, strict=True)]
    return dict(zip(("x", "mean", "low", "high", "count"), columns, strict=True))


def _contribution(delta: Floats, advantages: Floats) -> JsonObject | None:
    if not np.isfinite(advantages).any():
        return None
    value = -np.expm1(np.clip(delta, -LOG_CLAMP, LOG_CLAMP)) * advantages
    found: JsonObject = {}
    for name, chosen in (("positive", value[advantages > 0]), ("negative", value[advantages < 0])):
        if len(chosen):
            mean, spread = float(chosen.mean()), float(chosen.std())
            skew = float(((chosen - mean) ** 3).mean() / spread**3) if spread > 0 else 0.0
            found[name] = {"tokens": len(chosen), "mean": mean, "skew": skew, **_histogram(chosen)}
    return found


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (standard deviation (n - 1) + `EPS`); 0 if there is nothing to compare."""
    if len(rewards) < 2 or all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (spread + EPS) for reward in rewards]


def compute_advantages(samples: Sequence[Sample]) -> dict[str, float]:
    """By sample id; groups must be whole. An `advantage` in a sample's metadata takes precedence."""
    scored = [(sample, sample.reward) for sample in samples if sample.reward is not None]
    sessions = group_sessions((group_of(sample), sample.session_id, reward) for sample, reward in scored)
    values = sessions.advantages(group_advantages)
    found = {sample.sample_id: value for (sample, _), value in zip(scored, values, strict=True)}
    for sample in samples:
        given = sample.metadata.get("advantage")
        if isinstance(given, int | float) and abs(given) <= sys.float_info.max:  # an integer may have any size
            found[sample.sample_id] = float(given)
    return found
