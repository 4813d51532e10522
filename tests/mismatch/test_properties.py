"""What must hold for any batch: identity, monotone thresholds, permutation, padding, exact merging; and the numerics of
K3."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.marks import examples
from tests.mismatch.batches import Batch, make
from tokentrue.errors import InputError
from tokentrue.mismatch import (
    PRESETS,
    Correction,
    Diagnosis,
    Reject,
    Staleness,
    Veto,
    Weights,
    correct,
    diagnose,
)
from tokentrue.mismatch.metrics import contribution, k1, k2, k3

seeds = st.integers(0, 10**6)
bounds = st.floats(1e-4, 5)
quick = settings(max_examples=examples(40), deadline=None)


@quick
@given(seeds, st.sampled_from(sorted(PRESETS)))
@pytest.mark.filterwarnings("ignore:weights normalised over a single row")
def test_identity(seed: int, preset: str) -> None:
    """Trainer and rollout agree: weights are exactly 1, nothing is rejected, every divergence is exactly 0."""
    batch = make(seed)
    same = batch.trainer
    found = diagnose(
        same,
        same,
        batch.mask,
        logprobs=same,
        advantages=batch.advantages,
        correction=PRESETS[preset],
        versions=torch.zeros(len(same)),
        version=2,
    )
    assert found.corrected is not None
    assert torch.equal(found.corrected.mask, batch.mask)
    assert torch.equal(found.corrected.weights, batch.mask.double())
    for key in ("k1", "k2", "k3"):
        assert found[f"corr/{key}"] == found[f"ppo_train/{key}"] == found[f"ppo_rollout/{key}"] == 0.0
    assert found["chi2/token"] == found["chi2/sequence"] == 0.0 and found["ppl/ratio"] == 1.0 and not found.worst
    assert found["ratio/raw/ess"] == found["ratio/applied/ess"] == 1.0
    for sign in ("positive", "negative"):
        assert found[f"contribution/rollout/{sign}/mean"] == found[f"contribution/rollout/{sign}/skew"] == 0.0


@quick
@given(
    seeds,
    st.sampled_from(["token", "seq_sum", "seq_mean", "seq_max"]),
    st.sampled_from(["k2", "k3"]),
    bounds,
    st.floats(1, 10),
)
def test_looser_thresholds_keep_more(seed: int, aggregate: str, estimator: str, bound: float, factor: float) -> None:
    batch = make(seed)
    rules = [Reject(estimator=estimator, aggregate=aggregate, upper=u) for u in (bound, bound * factor)]  # type: ignore[arg-type]
    kept = [correct(batch.trainer, batch.rollout, batch.mask, Correction(reject=(rule,))).mask for rule in rules]
    assert bool((~kept[0] | kept[1]).all())


@quick
@given(seeds, st.sampled_from(["token", "sequence", "geometric"]), st.floats(1.0, 5.0), st.floats(1.0, 5.0))
def test_higher_caps_never_lower_a_weight(seed: int, level: str, upper: float, factor: float) -> None:
    batch = make(seed)
    low, high = (
        correct(batch.trainer, batch.rollout, batch.mask, Correction(weights=Weights(level=level, upper=u))).weights  # type: ignore[arg-type]
        for u in (upper, upper * factor)
    )
    assert bool((low <= high).all()) and float(high.max()) <= upper * factor


@quick
@given(seeds, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(seed: int, random: object) -> None:
    batch = make(seed)
    order = list(range(batch.mask.shape[0]))
    random.shuffle(order)  # type: ignore[attr-defined]
    names = [f"row {i}" for i in range(len(order))]
    straight = _diagnose(batch, names)
    shuffled = _diagnose(_rows(batch, order), [names[i] for i in order])
    assert_same(shuffled, straight)
    assert torch.equal(shuffled.corrected.weights, straight.corrected.weights[order])  # type: ignore[index,union-attr]


@quick
@given(seeds, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_merging_parts_is_the_whole(seed: int, sizes: list[int]) -> None:
    batch = make(seed)
    names = [f"row {i}" for i in range(batch.mask.shape[0])]
    parts, start = [], 0
    for size in [*sizes, len(names)]:
        chosen = list(range(start, min(start + size, len(names))))
        parts.append(_diagnose(_rows(batch, chosen), [names[i] for i in chosen]))
        start += size
    whole = _diagnose(batch, names)
    assert_same(parts[0].merge(*parts[1:]), whole)
    assert_same(parts[-1].merge(*parts[:-1]), whole)  # in any order
    assert [pickle.loads(pickle.dumps(part)).metrics for part in parts] == [part.metrics for part in parts]


def assert_same(mine: Diagnosis, other: Diagnosis) -> None:
    """But for the rounding of float64 sums."""
    assert mine.worst == other.worst
    assert dict(mine.metrics) == pytest.approx(dict(other.metrics), rel=1e-9, abs=1e-12)


def _rows(batch: Batch, chosen: list[int]) -> Batch:
    return Batch(
        **{name: getattr(batch, name)[chosen] for name in ("trainer", "rollout", "current", "advantages", "mask")}
    )


def _diagnose(batch: Batch, names: list[str]):
    return diagnose(
        batch.trainer, batch.rollout, batch.mask, logprobs=batch.current, advantages=batch.advantages,
        correction=PRESETS["decoupled_k3_rs_token_tis"], kinds=(batch.trainer < -3).long(), kind_names=["likely", "unlikely"],
        row_names=names,
    )  # fmt: skip


def test_sums_that_overflow_are_refused_and_markers_are_not() -> None:
    """Some engines mark a missing log-probability by -9999; its perplexity is capped, not infinite."""
    with pytest.raises(InputError, match="check the size"):
        diagnose(torch.zeros(1, 2), torch.ones(1, 2), advantages=torch.full((1, 2), 1e200, dtype=torch.float64))
    found = diagnose(torch.full((1, 2), -1.0), torch.full((1, 2), -9999.0))
    assert found["delta/clamped"] == 1.0 and all(math.isfinite(value) for value in found.metrics.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_k3_keeps_its_digits_where_the_plain_formula_is_noise(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [s * 10.0**e * m for e in range(-12, 1) for m in (1.0, 2.7, 9.9) for s in (1, -1)] + [5.0, -15.0, 15.0],
        dtype=dtype,
    )
    want = torch.tensor([_k3_exactly(float(v)) for v in x], dtype=torch.float64)
    worst = ((k3(x).double() - want) / want).abs().max()
    assert float(worst) < (1e-10 if dtype == torch.float64 else 1e-4)
    assert bool((k3(x) >= 0).all())
    if dtype == torch.float32:
        plain = (x.exp() - 1 - x)[x.abs() < 1e-4].double()
        assert float(((plain - want[x.abs() < 1e-4]) / want[x.abs() < 1e-4]).abs().median()) > 0.1
    assert float(k3(torch.zeros(1))) == 0.0


@pytest.mark.parametrize("scale", [1e-10, 1e-7, 1e-5, 9e-4, 1.1e-3, 1e-2, 1.0])
def test_sums_of_k3_keep_their_digits_at_every_scale(scale: float) -> None:
    """Chunks below and above the edge of the series, and both in one row; χ² beside it."""
    generator = torch.Generator().manual_seed(0)
    delta = torch.randn(3, 300, generator=generator, dtype=torch.float64) * scale
    delta[0, 130] = 0.5
    found = diagnose(delta, torch.zeros_like(delta))
    each = [_k3_exactly(x) for x in delta.view(-1).tolist()]
    assert found["corr/k3"] == pytest.approx(math.fsum(each) / 900, rel=1e-8)
    chi2 = math.fsum(2 * (x + k) + (x + k) ** 2 for x, k in zip(delta.view(-1).tolist(), each, strict=True)) / 900
    assert found["chi2/token"] == pytest.approx(chi2, rel=1e-8, abs=1e-18)
    rows = [math.fsum(each[300 * row : 300 * row + 300]) for row in range(3)]
    assert [row.sum_k3 for row in found.worst] == pytest.approx(sorted(rows, reverse=True), rel=1e-7)


def _k3_exactly(x: float) -> float:
    """The series in rational arithmetic, up to a term that no float64 shows."""
    value, term, total = Fraction(x), Fraction(x), Fraction(0)
    for n in range(2, 90):
        term = term * value / n
        total += term
        if abs(term) < abs(total) / 2**80:
            break
    return float(total)


def test_estimators_by_hand() -> None:
    x = torch.tensor([math.log(2.0), math.log(0.5)], dtype=torch.float64)
    assert k1(x).tolist() == pytest.approx([-0.693147, 0.693147], abs=1e-6)
    assert k2(x).tolist() == pytest.approx([0.240227, 0.240227], abs=1e-6)
    assert k3(x).tolist() == pytest.approx([0.306853, 0.193147], abs=1e-6)
    assert contribution(x, torch.tensor([3.0, -1.0])).tolist() == pytest.approx([-3.0, -0.5])


def test_quantiles_are_within_their_stated_error() -> None:
    scale = torch.tensor([[1e-6], [1e-3], [0.1], [1.0]])
    delta = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scale
    found = diagnose(delta - 20, torch.full_like(delta, -20.0))
    for share in (0.01, 0.5, 0.9, 0.99, 0.999):
        exact = float(delta.view(-1).quantile(share, interpolation="lower"))
        assert found[f"delta/quantile/p{share * 100:g}"] == pytest.approx(exact, rel=0.009)
        size = float(delta.abs().view(-1).quantile(share, interpolation="lower"))
        assert found[f"delta/quantile/abs_p{share * 100:g}"] == pytest.approx(size, rel=0.009)


def test_contribution_by_sign_by_hand() -> None:
    trainer = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    rollout = trainer - torch.tensor([[0.5, -0.5, 1.0, 0.0]], dtype=torch.float64)
    current = trainer + torch.tensor([[0.1, 0.1, 0.2, 0.3]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -2.0, 0.0]], dtype=torch.float64)
    found = diagnose(trainer, rollout, logprobs=current, advantages=advantages)
    by_train = [-math.expm1(0.1), -math.expm1(0.1)]
    by_roll = [-math.expm1(0.6), -math.expm1(-0.4)]
    assert found["contribution/trainer/positive/mean"] == pytest.approx(sum(by_train) / 2)
    assert found["contribution/rollout/positive/mean"] == pytest.approx(sum(by_roll) / 2)
    assert found["contribution/rollout/positive/std"] == pytest.approx(abs(by_roll[0] - by_roll[1]) / 2)
    assert found["contribution/rollout/negative/mean"] == pytest.approx(2 * math.expm1(1.2))
    assert found["contribution/rollout/negative/count"] == 1


def test_skew_is_that_of_the_values() -> None:
    batch = make(9, empty_rows=False)
    advantages = batch.advantages.abs()
    found = diagnose(batch.trainer, batch.rollout, batch.mask, advantages=advantages)
    values = contribution(batch.delta.clamp(-20, 20), advantages)[batch.mask]
    centred = values - values.mean()
    want = float((centred**3).mean() / (centred**2).mean() ** 1.5)
    assert found["contribution/rollout/positive/skew"] == pytest.approx(want, rel=1e-6)


def test_buckets_hold_every_token() -> None:
    trainer = torch.full((1, 300), -0.001, dtype=torch.float64)
    trainer[0, 200:] = -3.0
    rollout = trainer - 0.25
    found = diagnose(trainer, rollout, kinds=torch.arange(300).view(1, -1) % 2, kind_names=["even", "odd"])
    assert found["by_position/0-128"] == pytest.approx(0.25) and found["by_position/128-512"] == pytest.approx(0.25)
    assert found["by_position/512-2048"] == 0.0
    assert found["by_probability/0.5-0.9"] == pytest.approx(0.25) and found["by_probability/0.01-0.1"] == pytest.approx(
        0.25
    )
    assert found["by_kind/even"] == pytest.approx(0.25)
    counts = {k: s.count for k, s in found.metrics.statistics.items() if k.startswith("by_probability")}  # type: ignore[union-attr]
    assert (
        counts["by_probability/0.5-0.9"] == 200
        and counts["by_probability/0.01-0.1"] == 100
        and sum(counts.values()) == 300
    )


def test_clamp_hits_are_reported() -> None:
    delta = torch.tensor([[30.0, 1.0, -25.0, 0.0]], dtype=torch.float64)
    out = correct(delta, torch.zeros_like(delta), None, Correction(weights=Weights(mode="raw")))
    assert out.metrics["fraction/clamped"] == 0.5 and float(out.weights[0, 0]) == pytest.approx(math.exp(20))
    assert diagnose(delta, torch.zeros_like(delta))["delta/clamped"] == 0.5
    assert math.isfinite(diagnose(delta * 30, torch.zeros_like(delta))["corr/k3"])


def test_bounds_include_themselves() -> None:
    ratio = torch.tensor([[0.5, 2.0, 0.4999999, 2.0000001]], dtype=torch.float64)
    rule = Reject(estimator="ratio", aggregate="token", lower=0.5, upper=2.0)
    assert correct(ratio.log(), torch.zeros_like(ratio), None, Correction(reject=(rule,))).mask.tolist() == [
        [True, True, False, False]
    ]


def test_veto_and_staleness() -> None:
    trainer = torch.tensor([[-1.0, -20.0], [-1.0, -1.0]], dtype=torch.float64)
    vetoed = correct(trainer, trainer, None, Correction(veto=Veto(below=1e-6)))
    assert vetoed.mask.tolist() == [[False, False], [True, True]] and vetoed.metrics["fraction/vetoed_rows"] == 0.5
    versions = torch.tensor([[3, 5], [7, 7]])
    token = correct(trainer, trainer, None, Correction(staleness=Staleness(limit=2)), versions=versions, version=7)
    assert token.mask.tolist() == [[False, True], [True, True]]
    per_row = correct(
        trainer, trainer, None, Correction(staleness=Staleness(limit=2)), versions=torch.tensor([4, 6]), version=7
    )
    assert per_row.mask.tolist() == [[False, False], [True, True]]
