"""One batch in three layouts gives the same bits; padding is never read; edge rows and empty batches are harmless."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.mismatch.batches import Batch, make
from tokentrue.errors import InputError
from tokentrue.mismatch import LOSSES, PRESETS, Correction, LossConfig, correct, diagnose, loss_named, policy_loss
from tokentrue.mismatch.batch import sum_padded_rows

WANTED = ["decoupled_token_is", "decoupled_seq_is_rs", "decoupled_token_icepop", "miles_config_1", "tis-srs-k3-corr-mean", "deepseek_v3_2",
          "srs-k3-ppo-mean", "skyrl_recommended"]  # fmt: skip


def flat(values: object) -> Tensor:
    return torch.cat([row.reshape(-1) for row in values])  # type: ignore[union-attr]


def layouts(batch: Batch, seed: int) -> dict[str, dict[str, object]]:
    """The same valid tokens: padded with NaN around them, packed with rows' own widths, and lists without any
    padding."""
    rows = batch.mask.shape[0]
    junk = torch.full((rows, 5), torch.nan, dtype=batch.trainer.dtype)

    def padded(values: Tensor) -> Tensor:
        spoiled = torch.where(batch.mask, values, torch.nan)
        return torch.cat([junk, spoiled, junk], dim=1) if seed % 2 else spoiled

    side = torch.zeros(rows, 5, dtype=torch.bool)
    mask = torch.cat([side, batch.mask, side], dim=1) if seed % 2 else batch.mask
    cut = [int(m.nonzero().max()) + 1 if m.any() else 0 for m in batch.mask]
    bounds = torch.tensor([0, *cut]).cumsum(0)
    names = ("trainer", "rollout", "current", "advantages")
    return {
        "padded": {"mask": mask, **{n: padded(getattr(batch, n)) for n in names}},
        "packed": {"mask": torch.cat([m[:c] for m, c in zip(batch.mask, cut, strict=True)]), "cu_seqlens": bounds,
                   **{n: torch.cat([v[:c] for v, c in zip(getattr(batch, n), cut, strict=True)]) for n in names}},
        "rows": {"mask": None, **{n: [v[m] for v, m in zip(getattr(batch, n), batch.mask, strict=True)] for n in names}},
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:weights normalised over a single row")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", WANTED)
def test_three_layouts_give_the_same_bits(preset: str, dtype: torch.dtype) -> None:
    for seed in range(12):
        batch = _cast(make(seed), dtype)
        found = {}
        for kind, given in layouts(batch, seed).items():
            rest = {
                "cu_seqlens": given.get("cu_seqlens"),
                "logprobs": given["current"],
                "advantages": given["advantages"],
            }
            out = correct(given["trainer"], given["rollout"], given["mask"], PRESETS[preset], **rest)  # type: ignore[arg-type]
            diagnosis = diagnose(given["trainer"], given["rollout"], given["mask"], correction=PRESETS[preset], **rest)  # type: ignore[arg-type]
            mask = flat(given["mask"]).bool() if given["mask"] is not None else torch.ones_like(flat(out.mask))
            kept = (flat(out.weights)[mask], flat(out.mask)[mask], out.metrics, diagnosis)
            assert (
                torch.equal(flat(diagnosis.corrected.weights), flat(out.weights))
                and diagnosis.corrected.metrics == out.metrics
            )  # type: ignore[union-attr]
            assert not flat(out.weights)[~mask].any() and not flat(out.mask)[~mask].any()
            found[kind] = kept
        for kind in ("packed", "rows"):
            assert torch.equal(found[kind][0], found["padded"][0]) and torch.equal(found[kind][1], found["padded"][1])
            assert found[kind][2] == found["padded"][2] and found[kind][3] == found["padded"][3]


@pytest.mark.parametrize("width", [2048, 5000])
@pytest.mark.parametrize("holes", [False, True])
def test_long_rows_too(width: int, holes: bool) -> None:
    """Rows of many chunks; NaN stands wherever the mask is off."""
    generator = torch.Generator().manual_seed(width)
    lengths = torch.randint(width - 300, width + 1, (5, 1), generator=generator)
    mask = torch.arange(width) < lengths
    if holes:
        mask &= torch.rand(5, width, generator=generator) < 0.9
    trainer = torch.where(mask, -torch.rand(5, width, generator=generator), torch.nan)
    rollout = trainer + 0.05 * torch.randn(5, width, generator=generator)
    padded = diagnose(trainer, rollout, mask, correction=PRESETS["decoupled_k3_rs_token_tis"])
    rows = [[values[m] for values, m in zip(batch, mask, strict=True)] for batch in (trainer, rollout)]
    lists = diagnose(*rows, correction=PRESETS["decoupled_k3_rs_token_tis"])
    assert lists == padded and padded.corrected is not None and lists.corrected is not None
    assert (
        torch.equal(flat(lists.corrected.weights), padded.corrected.weights[mask])
        and not padded.corrected.weights[~mask].any()
    )
    assert (
        torch.equal(flat(lists.corrected.mask), padded.corrected.mask[mask]) and not padded.corrected.mask[~mask].any()
    )
    assert padded["delta/abs_mean"] == pytest.approx(float((trainer - rollout)[mask].double().abs().mean()), rel=1e-6)


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_agree_across_layouts(name: str) -> None:
    config = loss_named(name)
    for seed in range(8):
        batch = make(seed)
        found = {}
        for kind, given in layouts(batch, seed).items():
            current = given["current"]
            leaves = (
                current.requires_grad_() if isinstance(current, Tensor) else [row.requires_grad_() for row in current]
            )  # type: ignore[union-attr]
            loss, _ = policy_loss(
                leaves,
                given["trainer"],
                given["rollout"],
                given["advantages"],
                given["mask"],
                config,
                cu_seqlens=given.get("cu_seqlens"),  # type: ignore[arg-type]
            )
            grads = flat(torch.autograd.grad(loss, leaves, allow_unused=True))
            mask = flat(given["mask"]) if given["mask"] is not None else torch.ones_like(grads, dtype=torch.bool)
            assert not grads[~mask].any()
            found[kind] = (loss.detach(), grads[mask])
        for kind in ("packed", "rows"):
            torch.testing.assert_close(found[kind], found["padded"], atol=1e-12, rtol=1e-12)


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    names = ("trainer", "rollout", "current", "advantages")
    return Batch(mask=batch.mask, **{name: getattr(batch, name).to(dtype) for name in names})


def test_bfloat16_is_upcast_before_the_subtraction() -> None:
    batch = _cast(make(4), torch.bfloat16)
    wide = _cast(batch, torch.float32)
    mine = correct(batch.trainer, batch.rollout, batch.mask, PRESETS["decoupled_token_is"])
    assert mine.weights.dtype == torch.float32
    assert torch.equal(
        mine.weights, correct(wide.trainer, wide.rollout, wide.mask, PRESETS["decoupled_token_is"]).weights
    )
    assert diagnose(batch.trainer, batch.rollout, batch.mask) == diagnose(wide.trainer, wide.rollout, wide.mask)


def test_float32_is_close_to_float64() -> None:
    for seed in range(50):
        batch = make(seed)
        narrow = _cast(batch, torch.float32)
        wide = _cast(narrow, torch.float64)
        a, b = diagnose(narrow.trainer, narrow.rollout, narrow.mask), diagnose(wide.trainer, wide.rollout, wide.mask)
        for key in ("corr/k1", "corr/k2", "corr/k3", "delta/abs_mean", "ppl/trainer"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), (seed, key)


@pytest.mark.parametrize("preset", WANTED)
@pytest.mark.parametrize("mask", [[[0, 0], [0, 0]], [[1, 0], [0, 0]]])
def test_empty_and_one_token_rows(preset: str, mask: list[list[int]]) -> None:
    given = torch.tensor(mask)
    trainer = torch.full((2, 2), torch.nan)
    trainer[given.bool()] = -1.0
    current = trainer.clone().requires_grad_()
    out = correct(trainer, trainer, given, PRESETS[preset], logprobs=current, advantages=torch.ones(2, 2))
    loss, metrics = policy_loss(
        current, trainer, trainer, torch.ones(2, 2), given, LossConfig(correction=PRESETS[preset])
    )
    (grad,) = torch.autograd.grad(loss, current)
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and all(v == v for v in metrics.values())
    assert out.weights.tolist() == given.float().tolist()
    assert out.mask.tolist() == given.bool().tolist()
    assert bool(grad.any()) == bool(given.any())


def test_sums_by_pairs_depend_on_nothing_but_their_row() -> None:
    """What a GPU sums with: every row alone, among others, and beside longer ones has the same bits, and those are
    right."""
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, 2, 3, 7, 64, 0, 33]
    values = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    parts = values.split(sizes)
    whole = sum_padded_rows(values, torch.tensor(sizes))
    alone = torch.cat([sum_padded_rows(part, torch.tensor([part.numel()])) for part in parts])
    assert torch.equal(whole, alone)
    want = torch.tensor([math.fsum(part.tolist()) for part in parts], dtype=torch.float64)
    torch.testing.assert_close(whole, want, rtol=1e-13, atol=1e-13)
    nothing = sum_padded_rows(torch.zeros(0, requires_grad=True), torch.zeros(2, dtype=torch.long))
    assert (
        nothing.tolist() == [0.0, 0.0] and nothing.requires_grad
    )  # a batch that is masked altogether has a gradient, of zeros


def test_no_rows_at_all() -> None:
    for empty in (torch.zeros(0, 4), torch.zeros(3, 0)):
        out = correct(empty, empty, None, PRESETS["decoupled_seq_is_rs"])
        assert out.weights.shape == empty.shape and out.metrics["tokens"] == 0
        assert diagnose(empty, empty)["corr/k3"] == 0.0
    assert diagnose([], [])["tokens"] == 0
    loss, _ = policy_loss(torch.zeros(0, 4, requires_grad=True), None, None, torch.zeros(0, 4))
    assert loss == 0


def test_a_fully_rejected_batch_has_zero_loss_and_zero_gradient() -> None:
    batch = make(6)
    current = batch.current.clone().requires_grad_()
    for counts in ("original", "kept"):
        for aggregate in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum"):
            correction = Correction(reject=PRESETS["srs-k3-corr"].reject, loss_counts=counts)  # type: ignore[arg-type]
            config = LossConfig(correction=correction, aggregate=aggregate)  # type: ignore[arg-type]
            loss, metrics = policy_loss(current, batch.trainer, batch.rollout - 9, batch.advantages, batch.mask, config)
            (grad,) = torch.autograd.grad(loss, current)
            assert loss == 0 and not grad.any() and metrics["all_rejected"] == 1 and metrics["kept"] == 0


def test_keys_are_the_same_on_every_rank() -> None:
    full = diagnose(torch.zeros(2, 3), torch.zeros(2, 3) - 1, correction=PRESETS["decoupled_token_is"])
    empty = diagnose(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3), correction=PRESETS["decoupled_token_is"])
    nothing = diagnose(torch.zeros(0, 3), torch.zeros(0, 3))
    assert set(empty.metrics) == set(full.metrics)
    assert set(nothing.metrics) <= set(full.metrics)
    assert all(value == value for value in (*empty.metrics.values(), *nothing.metrics.values()))


def test_non_finite_tokens_are_refused_or_handled_as_said() -> None:
    trainer = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    rollout = trainer - 0.5
    rollout[0, 1] = -torch.inf
    with pytest.raises(InputError, match=r"1 valid tokens.*row 0.*non_finite"):
        correct(trainer, rollout)
    assert correct(trainer, rollout, None, Correction(non_finite="unit")).mask.tolist() == [[True] * 3] * 2
    assert diagnose(trainer, rollout, non_finite="unit")["delta/mean"] == pytest.approx(2.5 / 6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: correct(x, x[:, :2]), "rollout_logprobs: shape"),
        (lambda x: correct(x, x, x[:1]), "mask: shape"),
        (lambda x: correct(x.view(-1), x.view(-1)), "cu_seqlens: missing"),
        (lambda x: correct(x.view(-1), x.view(-1), cu_seqlens=[0, 7]), "cu_seqlens: must rise from 0 to 6"),
        (lambda x: correct(x, x, cu_seqlens=[0, 6]), "cu_seqlens: given with a padded"),
        (lambda x: correct(list(x), list(x[:1])), "rollout_logprobs: must be a list of 2"),
        (lambda x: correct(x, x, None, PRESETS["srs-k3-ppo"]), "logprobs: the current policy"),
        (
            lambda x: correct(x, x, None, PRESETS["deepseek_v3_2"], logprobs=x),
            "advantages: missing; OffPolicyMask needs them",
        ),
        (lambda x: diagnose(x, x, row_names=["a"]), "row_names: 1 names for 2 rows"),
        (lambda x: diagnose(x, x, kinds=x.long() + 3, kind_names=["a"]), "kinds: 3 to 3 do not index"),
        (lambda x: policy_loss(x, x, None, x, None, PRESETS["decoupled_token_is"]), "rollout_logprobs: needed"),
        (lambda x: policy_loss(x, x, x, torch.zeros(7)), "advantages: shape"),
        (lambda x: correct(x, x, torch.ones(2, 3, device="meta")), "mask: on meta, the rest on cpu; move them"),
        (lambda x: correct(x, x.to("meta")), "rollout_logprobs: on meta, the rest on cpu"),
        (lambda x: correct(list(x), [row.to("meta") for row in x]), "rollout_logprobs: on meta"),
    ],
)
def test_bad_input_names_the_field_and_the_cure(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("[", r"\[")):
        call(torch.zeros(2, 3))  # type: ignore[operator]


@pytest.mark.parametrize("centre", [-17.0, -10.0, -0.9, 0.0])
def test_moments_of_small_ratios_do_not_cancel(centre: float) -> None:
    """And batches merge to the numbers of one call."""
    rollout = torch.full((4, 300), -1.0, dtype=torch.float64)
    delta = centre + 0.3 * torch.randn(4, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, ratio = diagnose(rollout + delta, rollout).metrics, delta.exp()
    assert found["ratio/raw/ess"] == pytest.approx(
        float(ratio.sum() ** 2 / (ratio.numel() * (ratio * ratio).sum())), rel=1e-12
    )
    assert found["ratio/raw/std"] == pytest.approx(float(ratio.std(unbiased=False)), rel=1e-10)
    assert found["chi2/token"] == pytest.approx(float((ratio * ratio - 1).mean()), rel=1e-12)
    halves = [diagnose(rollout[rows] + delta[rows], rollout[rows]).metrics for rows in (slice(0, 1), slice(1, 4))]
    assert dict(halves[0].merge(halves[1])) == pytest.approx(dict(found), rel=1e-12, abs=1e-20)
