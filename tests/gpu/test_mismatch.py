"""The mismatch room on CUDA: the CPU's numbers and gradients, the same bits in every layout, junk in the padding,
merging, its bench.

Needs torch alone. The comparison batches are those of tests/mismatch.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from tests.mismatch.batches import Batch, make
from tokentrue.mismatch import LOSSES, PRESETS, LossConfig, Metrics, Penalty, correct, diagnose, loss_named, policy_loss
from tokentrue.mismatch.metrics import Count, Extremes, Histogram, Mean, Moments

try:
    import pytest
except ImportError:  # `python -m tests.gpu.job` needs none
    pass
else:
    pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:weights normalised over a single row")]

DEVICE = "cuda"
NAMES = ("trainer", "rollout", "current", "advantages", "mask")
CHOSEN = ("decoupled_token_is", "decoupled_seq_is_rs", "decoupled_token_icepop", "decoupled_k3_rs_token_tis", "miles_config_1",
          "srs-k3-ppo-mean", "tis-srs-k1-corr-mean", "deepseek_v3_2", "skyrl_recommended", "trl_default", "areal_token_mask")  # fmt: skip


def moved(batch: Batch, *, junk: bool = False) -> Batch:
    """The batch on the device; with `junk`, NaN wherever the mask is off."""
    fields: dict[str, Any] = {name: getattr(batch, name) for name in NAMES}
    if junk:
        fields = {
            name: torch.where(batch.mask, value, torch.nan) if name != "mask" else value
            for name, value in fields.items()
        }
    return Batch(**{name: value.to(DEVICE) for name, value in fields.items()})


def outputs(batch: Batch, preset: str) -> tuple[Any, Any]:
    given = {"logprobs": batch.current, "advantages": batch.advantages}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="weights normalised over a single row")
        out = correct(batch.trainer, batch.rollout, batch.mask, PRESETS[preset], **given)
        kinds = {"kinds": (batch.mask & (batch.trainer < -3)).long(), "kind_names": ["likely", "unlikely"]}
        return out, diagnose(batch.trainer, batch.rollout, batch.mask, correction=PRESETS[preset], **given, **kinds)


def close(mine: Metrics, other: Metrics) -> None:
    """Counts, extremes of δ and histograms exactly; sums to the last digits, for exp differs by an ulp between
    devices."""
    assert set(mine.statistics) == set(other.statistics)
    for name, stat in mine.statistics.items():
        pair = other.statistics[name]
        if isinstance(stat, Count | Histogram):
            assert stat == pair, name
        if isinstance(stat, Mean | Moments):
            assert isinstance(pair, Mean | Moments) and stat.count == pair.count, name
        if isinstance(stat, Extremes) and name == "delta":
            assert stat == pair
    for key, value in mine.items():
        if not key.endswith("/skew"):  # a difference of sums of cubes
            assert math.isclose(value, other[key], rel_tol=1e-7, abs_tol=1e-12), (key, value, other[key])


def test_weights_masks_and_metrics_are_the_cpus() -> None:
    rejected = 0
    for seed in range(16):
        batch = make(seed)
        for preset in CHOSEN:
            here, found_here = outputs(batch, preset)
            there, found_there = outputs(moved(batch), preset)
            assert there.weights.device.type == torch.device(DEVICE).type
            torch.testing.assert_close(there.weights.cpu(), here.weights, atol=1e-12, rtol=1e-12)
            assert torch.equal(there.mask.cpu(), here.mask), (seed, preset)
            close(there.metrics, here.metrics)
            close(found_there.metrics, found_here.metrics)
            assert [row.row for row in found_there.worst] == [row.row for row in found_here.worst]
            rejected += int((batch.mask & ~here.mask).sum())
    assert rejected > 200


def test_losses_and_gradients_are_the_cpus() -> None:
    penalties = [Penalty(coefficient=0.3, estimator=name) for name in ("k1", "k2", "k3", "unbiased")]  # type: ignore[arg-type]
    configs = [loss_named(name) for name in LOSSES]
    configs += [LossConfig(correction=PRESETS[preset]) for preset in CHOSEN] + [
        LossConfig(penalty=penalty) for penalty in penalties
    ]
    for seed in range(6):
        batch = make(seed)
        for config in configs:
            found = []
            for part in (batch, moved(batch)):
                current = part.current.clone().requires_grad_()
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="weights normalised over a single row")
                    loss, _ = policy_loss(
                        current,
                        part.trainer,
                        part.rollout,
                        part.advantages,
                        part.mask,
                        config,
                        reference_logprobs=part.trainer * 0.9,
                    )
                (grad,) = torch.autograd.grad(loss, current)
                found.append((loss.detach().cpu(), grad.cpu()))
            torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=1e-9)


def test_nan_in_the_padding_changes_no_bit() -> None:
    for seed in range(8):
        batch = make(seed)
        for preset in CHOSEN:
            clean, found_clean = outputs(moved(batch), preset)
            dirty, found_dirty = outputs(moved(batch, junk=True), preset)
            assert torch.equal(dirty.weights, clean.weights) and torch.equal(dirty.mask, clean.mask)
            assert dirty.metrics == clean.metrics and found_dirty == found_clean
        current = moved(batch, junk=True).current.requires_grad_()
        junk = moved(batch, junk=True)
        loss, _ = policy_loss(
            current, junk.trainer, junk.rollout, junk.advantages, junk.mask, PRESETS["decoupled_k3_rs_token_tis"]
        )
        (grad,) = torch.autograd.grad(loss, current)
        assert torch.isfinite(loss) and torch.isfinite(grad).all() and not grad[~junk.mask].any()


def test_three_layouts_give_the_same_bits() -> None:
    """Long rows too: the order in which a row is summed must not depend on how many others there are."""
    for seed, width in ((1, 40), (2, 700), (3, 5000)):
        wide = moved(_long(seed, width))
        packed = {
            name: torch.cat([v[m] for v, m in zip(getattr(wide, name), wide.mask, strict=True)]) for name in NAMES
        }
        bounds = torch.tensor([0, *wide.mask.sum(dim=1).tolist()]).cumsum(0)
        for preset in ("decoupled_seq_is_rs", "decoupled_k3_rs_token_tis", "miles_config_3"):
            padded, found = outputs(wide, preset)
            given = (packed["trainer"], packed["rollout"], packed["mask"])
            flat = correct(*given, PRESETS[preset], cu_seqlens=bounds)
            assert torch.equal(flat.weights, padded.weights[wide.mask]) and torch.equal(
                flat.mask, padded.mask[wide.mask]
            )
            assert flat.metrics == padded.metrics
            rows = [
                [v[m] for v, m in zip(getattr(wide, name), wide.mask, strict=True)] for name in ("trainer", "rollout")
            ]
            lists = correct(*rows, None, PRESETS[preset])
            assert torch.equal(torch.cat(list(lists.weights)), flat.weights) and lists.metrics == flat.metrics
            # The device sums a whole batch in an order of its own, which depends on the layout: float64 rounding.
            one, other = (
                diagnose(*given, cu_seqlens=bounds).metrics,
                diagnose(wide.trainer, wide.rollout, wide.mask).metrics,
            )
            apart = {
                name: (one[name], other[name])
                for name in one
                if not math.isclose(one[name], other[name], rel_tol=1e-12)
            }
            assert one.keys() == other.keys() and not apart, apart
            assert found["tokens"] == float(wide.mask.sum())


def _long(seed: int, width: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = 9

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    trainer = -normal().abs()
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    lengths[0] = width
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=generator) < 0.9)
    return Batch(trainer=trainer, rollout=trainer - normal() * 0.02, current=trainer, advantages=normal(), mask=mask)


def test_merging_parts_is_the_whole() -> None:
    for seed in range(20):
        batch = moved(make(seed))
        names = [f"row {i}" for i in range(batch.mask.shape[0])]

        def part(chosen: slice, batch: Batch = batch, names: list[str] = names) -> Any:
            given = {
                "logprobs": batch.current[chosen],
                "advantages": batch.advantages[chosen],
                "row_names": names[chosen],
            }
            correction = PRESETS["decoupled_k3_rs_token_tis"]
            return diagnose(
                batch.trainer[chosen], batch.rollout[chosen], batch.mask[chosen], correction=correction, **given
            )

        whole = part(slice(None))
        for first, second in ((slice(0, 1), slice(1, None)), (slice(1, None), slice(0, 1))):
            close(part(first).merge(part(second)).metrics, whole.metrics)


def test_empty_and_wholly_rejected_batches() -> None:
    empty = torch.zeros(0, 4, device=DEVICE)
    assert diagnose(empty, empty)["tokens"] == 0 and correct(empty, empty).weights.shape == (0, 4)
    masked = torch.full((3, 5), torch.nan, device=DEVICE)
    off = torch.zeros(3, 5, dtype=torch.bool, device=DEVICE)
    current = masked.clone().requires_grad_()
    loss, metrics = policy_loss(current, masked, masked, masked, off, PRESETS["decoupled_token_is"])
    (grad,) = torch.autograd.grad(loss, current)
    assert loss == 0 and not grad.any() and all(value == value for value in metrics.values())
    batch = moved(make(6))
    current = batch.current.clone().requires_grad_()
    config = LossConfig(correction=PRESETS["tis-srs-k3-corr"])
    loss, metrics = policy_loss(current, batch.trainer, batch.rollout - 9, batch.advantages, batch.mask, config)
    (grad,) = torch.autograd.grad(loss, current)
    assert loss == 0 and not grad.any() and metrics["all_rejected"] == 1


def test_float32_and_bfloat16_agree_with_the_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for seed in range(8):
            batch = make(seed)
            cast = Batch(mask=batch.mask, **{name: getattr(batch, name).to(dtype) for name in NAMES[:-1]})
            here, _ = outputs(cast, "decoupled_token_is")
            there, found = outputs(moved(cast), "decoupled_token_is")
            assert there.weights.dtype == torch.float32
            torch.testing.assert_close(there.weights.cpu(), here.weights, atol=1e-6, rtol=1e-5)
            assert found["tokens"] == float(batch.mask.sum())


def test_devices_are_not_mixed() -> None:
    from tokentrue.errors import InputError

    batch = make(1)
    there = moved(batch)
    for call in (
        lambda: correct(there.trainer, there.rollout, batch.mask),
        lambda: correct(there.trainer, batch.rollout, there.mask),
    ):
        try:
            call()
        except InputError as error:
            assert "move them to one device" in str(error)
        else:
            raise AssertionError("tensors on two devices were taken")


def test_bench_on_the_device() -> None:
    """64 rows of up to 8,192 tokens: prints what one call takes and its peak; verl's helper beside it where it can be
    had."""
    from benchmarks.mismatch import on_device

    report = on_device(DEVICE, quick=False)
    print("  ".join(map(str, report.columns)))
    for row in report.rows:
        print("  ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    for note in report.notes:
        print(note)
    assert report.rows
