"""Losses and gradients of Miles, slime, AReaL and SkyRL, from their written-out formulas, on 1,000 random batches each,
to 1e-6."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import enough, examples
from tests.mismatch import loss_formulas
from tests.mismatch.batches import Batch, make
from tests.mismatch.peer_configs import from_areal, from_skyrl
from tokentrue.mismatch import Correction, LossConfig, Penalty, Weights, policy_loss

BATCHES = examples(1000)
CLOSE = {"atol": 1e-6, "rtol": 1e-6}
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:weights normalised over a single row")]


def compare(batch: Batch, oracle: Callable[[Tensor], Tensor], config: LossConfig, **counts: Any) -> bool:
    """Loss and gradient agree; says whether there was any gradient to agree on."""
    current = batch.current.clone().requires_grad_()
    want = oracle(current)
    loss, _ = policy_loss(current, batch.trainer, batch.rollout, batch.advantages, batch.mask, config, **counts)
    torch.testing.assert_close(loss, want, **CLOSE)
    grads = [torch.autograd.grad(value, current, allow_unused=True)[0] for value in (loss, want)]
    mine, theirs = (torch.zeros_like(current) if grad is None else grad for grad in grads)
    torch.testing.assert_close(mine, theirs, **CLOSE)
    return bool(theirs.any())


HELPER: dict[str, Any] = {
    "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0, "rs_lower_bound": 0.6, "rs_upper_bound": 1.5, "rs_veto_threshold": 1e-4, "tis_batch_normalize": False,
}  # fmt: skip


def test_miles_helper_losses_on_many_batches() -> None:
    """Every level and mode of weights, every level of rejection, with and without normalisation, dual clip, GSPO,
    unbiased KL."""
    levels = ("token", "sequence", "geometric")
    shapes = ({}, {"dual": 3.0}, {"gspo": True}, {"kl": 0.05}, {"per_token": True})
    choices = itertools.cycle(itertools.product(levels, levels, ("truncate", "clip", "mask"), (False, True), shapes))
    moved = 0
    for seed, (tis, rs, mode, normalise, shape) in zip(range(BATCHES), choices, strict=False):
        batch = make(seed)
        helper = HELPER | {
            "tis_level": tis,
            "rs_level": rs,
            "tis_mode": mode,
            "tis_batch_normalize": normalise and tis != "geometric",
        }
        correction = Correction.from_miles(helper, faithful=True)
        moved += _miles(batch, correction, helper=helper, low=0.2, high=0.28, **shape)
    assert moved > enough(500)


def test_miles_and_slime_built_in_losses_on_many_batches() -> None:
    """Truncation to [low, high], OPSM, bypass, slime's CISPO."""
    shapes: tuple[dict[str, Any], ...] = (
        {"clip": (0.0, 2.0)}, {"clip": (0.5, 1.5), "opsm": 1e-4}, {"opsm": 1e-4, "dual": 3.0}, {"bypass": True}, {"cispo": True},
        {"bypass": True, "gspo": True, "opsm": 1e-4},
    )  # fmt: skip
    moved = 0
    for seed, shape in zip(range(BATCHES), itertools.cycle(shapes), strict=False):
        args: dict[str, Any] = {"use_tis": "clip" in shape, "use_rs": False, "rs_veto_threshold": None}
        if "clip" in shape:
            args |= {"tis_clip_low": shape["clip"][0], "tis_clip": shape["clip"][1]}
        if "bypass" in shape:
            args = {"use_rollout_logprobs": True}
        if "opsm" in shape:
            args |= {"use_opsm": True, "opsm_delta": shape["opsm"]}
        batch = make(seed)
        near = Batch(
            **{n: getattr(batch, n) for n in ("trainer", "current", "advantages", "mask")}, rollout=_near(batch)
        )
        moved += _miles(
            near if "bypass" in shape else batch,
            Correction.from_miles(args, faithful=True),
            low=0.2,
            high=0.28,
            **shape,
        )
    assert moved > enough(800)


def _near(batch: Batch) -> Tensor:
    """A rollout within 3 of the trainer: peers without a clamp overflow on e^15 squared long before ours does."""
    return batch.trainer - batch.delta.clamp(-3, 3)


def _miles(batch: Batch, correction: Correction, **o: Any) -> bool:
    reference = batch.trainer * 0.97
    surrogate = "gspo" if o.get("gspo") else "cispo" if o.get("cispo") else "ppo"
    config = LossConfig(
        correction=correction, surrogate=surrogate, clip_low=o["low"], clip_high=o["high"], dual_clip=o.get("dual"),
        gspo_gradient="sequence", aggregate="token_sum" if o.get("per_token") else "seq_mean_token_mean",
        penalty=Penalty(coefficient=o["kl"], estimator="unbiased") if o.get("kl") else None,
    )  # fmt: skip

    def oracle(current: Tensor) -> Tensor:
        return loss_formulas.miles(
            current, batch.trainer, batch.rollout, batch.advantages, batch.float_mask, reference, **o
        )

    return compare(batch, oracle, config, num_rows=1, reference_logprobs=reference)


def test_areal_losses_on_many_batches() -> None:
    """Every metric, level, aggregate and action; plain recompute and bypass PPO; dual clip."""
    metrics = (("ratio", 1.5, 0.4), ("kl_k1", 0.5, -0.6), ("kl_k2", 0.4, None), ("kl_k3", 0.4, None))
    rules: list[dict[str, Any] | None] = [
        {
            "level": level,
            "action": "mask",
            "metric": metric,
            "agg": agg,
            "upper": upper,
            "lower": None if agg == "max" else lower,
        }
        for (metric, upper, lower), (level, agg) in itertools.product(
            metrics, (("token", "mean"), ("sequence", "sum"), ("sequence", "mean"), ("sequence", "max"))
        )
    ]
    rules += [
        {"level": level, "action": "clamp", "metric": "ratio", "agg": "mean", "upper": 1.5, "lower": lower}
        for level, lower in itertools.product(("token", "sequence"), (None, 0.5))
    ]
    rules.append(None)
    moved = 0
    for seed, (rule, dual) in zip(range(BATCHES), itertools.cycle(itertools.product(rules, (None, 3.0))), strict=False):
        batch = make(seed)
        given = {"use_decoupled_loss": True, "rejection_sampling": rule}
        config = LossConfig(correction=from_areal(given, faithful=True), clip_low=0.2, clip_high=0.3, dual_clip=dual)
        moved += _areal(batch, config, rule=rule, dual=dual, low=0.2, high=0.3)
    assert moved > enough(500)


def test_areal_bypass_and_sequence_ratios() -> None:
    """Without the decoupled loss the rollout is the denominator. GSPO agrees where a row has one advantage and goes or
    stays whole."""
    rule = {"level": "sequence", "action": "mask", "metric": "kl_k2", "agg": "mean", "upper": 0.4, "lower": None}
    for seed in range(examples(300)):
        batch = make(seed, sequence_advantages=True)
        near = Batch(
            **{n: getattr(batch, n) for n in ("trainer", "current", "advantages", "mask")}, rollout=_near(batch)
        )
        _areal(near, LossConfig(correction=from_areal({})), low=0.2, high=0.2, decoupled=False)
        correction = from_areal({"use_decoupled_loss": True, "rejection_sampling": rule}, faithful=True)
        config = LossConfig(correction=correction, surrogate="gspo", gspo_gradient="sequence")
        _areal(batch, config, rule=rule, gspo=True, low=0.2, high=0.2)


def _areal(batch: Batch, config: LossConfig, **o: Any) -> bool:
    def oracle(current: Tensor) -> Tensor:
        return loss_formulas.areal(current, batch.trainer, batch.rollout, batch.advantages, batch.float_mask, **o)

    return compare(batch, oracle, config)


SKYRL: dict[str, Any] = {
    "tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0, "sequence_mask_metric": None,
    "geo_mask_high": 1.2, "geo_mask_low": 0.7, "product_mask_high": 2.0, "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None, "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None, "token_mask_is_threshold_high": None,
}  # fmt: skip
STAGES = ((None, "token", "sequence"), (None, "geometric", "product"), (None, (1e-2, 50.0)), (None, (0.5, 2.0)))
REDUCTIONS = (
    ("token_mean", {"aggregate": "token_mean"}),
    ("sequence_mean", {"aggregate": "seq_mean_token_mean"}),
    ("seq_mean_token_sum_norm", {"aggregate": "fixed_length", "fixed_length": 50}),
)


def test_skyrl_losses_on_many_batches() -> None:
    """All its stages, in order, under PPO, dual clip, GSPO and CISPO, with each of its reductions."""
    kinds: tuple[dict[str, Any], ...] = (
        {"kind": "regular"}, {"kind": "dual_clip", "dual": 3.0}, {"kind": "gspo"}, {"kind": "cispo", "anchor": "old"},
    )  # fmt: skip
    choices = itertools.cycle(itertools.product(*STAGES, kinds, REDUCTIONS))
    moved = 0
    for seed, (tis, metric, outlier, token, kind, reduction) in zip(range(0, 7 * BATCHES, 7), choices, strict=False):
        given = SKYRL | {"tis_ratio_type": tis, "sequence_mask_metric": metric}
        if outlier:
            given |= {"outlier_token_is_threshold_low": outlier[0], "outlier_token_is_threshold_high": outlier[1]}
        if token:
            given |= {"token_mask_is_threshold_low": token[0], "token_mask_is_threshold_high": token[1]}
        moved += _skyrl(make(seed), given, from_skyrl(given), reduction, low=0.2, high=0.3, **kind)
    assert moved > enough(500)


def test_skyrl_losses_anchored_on_the_rollout_on_many_batches() -> None:
    """CISPO on the rollout, DPPO, and its `rollout_is`, which here is REINFORCE with IcePop weights of current ÷
    rollout."""
    calibrated = Weights(mode="mask", lower=0.7, upper=1.4, signal="ppo_rollout")
    kinds: tuple[tuple[dict[str, Any], Correction], ...] = (
        ({"kind": "cispo", "anchor": "rollout"}, Correction(denominator="rollout", surrogate="cispo")),
        ({"kind": "dppo"}, Correction(denominator="rollout", surrogate="dppo_tv")),
        ({"kind": "rollout_is"}, Correction(denominator="rollout", surrogate="reinforce", weights=calibrated)),
    )
    moved = 0
    for seed, ((kind, correction), reduction) in zip(
        range(BATCHES), itertools.cycle(itertools.product(kinds, REDUCTIONS)), strict=False
    ):
        batch = make(seed)
        near = Batch(**{n: getattr(batch, n) for n in ("trainer", "advantages", "mask")}, rollout=_near(batch),
                     current=(_near(batch) + (batch.current - batch.trainer)).clamp(max=0))  # fmt: skip
        moved += _skyrl(near, SKYRL, correction, reduction, low=0.3, high=0.4, **kind)
    assert moved > enough(800)


def _skyrl(
    batch: Batch, given: dict[str, Any], correction: Correction, reduction: tuple[str, dict[str, Any]], **o: Any
) -> bool:
    surrogate = {
        "regular": "ppo",
        "dual_clip": "ppo",
        "gspo": "gspo",
        "dppo": "dppo_tv",
        "rollout_is": "reinforce",
    }.get(o["kind"], "cispo")
    bounds = {} if o["kind"] == "rollout_is" else {"clip_low": o["low"], "clip_high": o["high"]}
    config = LossConfig(correction=correction, surrogate=surrogate, dual_clip=o.get("dual"), **bounds, **reduction[1])  # type: ignore[arg-type]

    def oracle(current: Tensor) -> Tensor:
        return loss_formulas.skyrl(
            current, batch.trainer, batch.rollout, batch.advantages, batch.float_mask, correction=given, reduction=reduction[0],
            max_seq_len=50, **o,
        )  # fmt: skip

    return compare(batch, oracle, config, num_rows=batch.mask.shape[0])


def test_the_oracles_do_not_use_the_code_they_judge() -> None:
    import ast
    from pathlib import Path

    for name in ("formulas", "loss_formulas", "batches"):
        tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
        named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(module.startswith("tokentrue") for module in named), name
