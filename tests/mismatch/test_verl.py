"""verl 0.9.1 as oracle on 1,000 random float64 batches: weights, rejection, losses and gradients, and where it is known
to differ."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import enough, examples, slow_except
from tests.mismatch.batches import Batch, make
from tokentrue.mismatch import PRESETS, Correction, LossConfig, Reject, correct, diagnose, policy_loss

BATCHES = examples(1000)
pytestmark = pytest.mark.thorough
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


VERL_NAMES = {
    "kl": "corr/k1",
    "k3_kl": "corr/k3",
    "chi2_token": "chi2/token",
    "chi2_seq": "chi2/sequence",
    "training_ppl": "ppl/trainer",
    "training_log_ppl": "log_ppl/trainer",
    "rollout_ppl": "ppl/rollout",
    "rollout_log_ppl": "log_ppl/rollout",
    "ppl_ratio": "ppl/ratio",
    "log_ppl_diff": "log_ppl/gap_mean",
    "log_ppl_abs_diff": "log_ppl/abs_gap_mean",
    "log_ppl_diff_max": "log_ppl/gap/max",
    "log_ppl_diff_min": "log_ppl/gap/min",
    "rollout_is_mean": "ratio/applied/mean",
    "rollout_is_std": "ratio/applied/std",
    "rollout_is_max": "ratio/applied_range/max",
    "rollout_is_min": "ratio/applied_range/min",
    "rollout_is_eff_sample_size": "ratio/applied/ess",
}


def chosen(values: Tensor, batch: Batch) -> Tensor:
    return values[batch.mask]


def theirs(verl: SimpleNamespace, batch: Batch, **config: Any) -> tuple[Tensor | None, Tensor]:
    proto, mask, _ = verl.helper.compute_rollout_correction_and_rejection_mask(
        batch.trainer, batch.rollout, batch.float_mask, **config
    )
    return None if proto is None else proto.batch["rollout_is_weights"], mask.bool()


WEIGHTS = [
    {"rollout_is": "token", "rollout_is_threshold": 2.0},
    {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    {"rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True},
]
RULES = [
    ("token_k1", "0.6_1.2"), ("token_k2", 0.5), ("token_k3", 0.5), ("seq_sum_k1", "0.5_2.0"), ("seq_sum_k2", 1.0), ("seq_sum_k3", 1.0),
    ("seq_mean_k1", "0.9_1.3"), ("seq_mean_k2", 0.1), ("seq_mean_k3", 0.1), ("seq_max_k2", 0.5), ("seq_max_k3", 0.5),
    ("token_k1,seq_mean_k3", "0.5_4.0,0.3"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:weights normalised over a single row")
def test_weights_and_rejection_on_many_batches(verl: SimpleNamespace) -> None:
    rejected = truncated = 0
    for seed, weights, (option, bound) in zip(
        range(BATCHES), itertools.cycle(WEIGHTS), itertools.cycle(RULES), strict=False
    ):
        batch = make(seed)
        config = {**weights, "rollout_rs": option, "rollout_rs_threshold": bound}
        try:
            want, mask = theirs(verl, batch, **config)
        except ZeroDivisionError:  # verl's ESS when IcePop zeroes every token
            assert isinstance(weights["rollout_is_threshold"], str)
            continue
        mine = correct(batch.trainer, batch.rollout, batch.mask, Correction.from_verl(config, faithful=True))
        assert want is not None
        torch.testing.assert_close(chosen(mine.weights, batch), chosen(want, batch), **CLOSE)
        assert torch.equal(mine.mask, mask), (seed, config)
        rejected += int(batch.mask.sum() - mask.sum())
        truncated += int(mine.metrics["fraction/weights_above"] > 0)
    assert rejected > enough(5000) and truncated > enough(200)  # the batches do exercise what is compared


def test_geometric_rejection_is_the_documented_one_without_faithful(verl: SimpleNamespace) -> None:
    """verl's k1 bounds hold for the inverse ratio; documented are bounds on trainer ÷ rollout. Fed the inverse, it
    agrees."""
    differs = 0
    for seed in range(200):
        batch = make(seed)
        ours = Correction.from_verl({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.2"})
        mine = correct(batch.trainer, batch.rollout, batch.mask, ours).mask
        _, documented = theirs(verl, batch, rollout_rs="token_k1", rollout_rs_threshold=f"{1 / 1.2}_{1 / 0.6}")
        _, literal = theirs(verl, batch, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.2")
        assert torch.equal(mine, documented)
        differs += int(not torch.equal(mine, literal))
    assert differs > 50


def test_off_policy_metrics(verl: SimpleNamespace) -> None:
    for seed in range(examples(300)):
        batch = make(seed, empty_rows=False)  # verl counts empty rows as perplexity 1
        peer = verl.helper.compute_offpolicy_metrics(batch.trainer, batch.rollout, batch.float_mask)
        mine = diagnose(batch.trainer, batch.rollout, batch.mask)
        named = {f"rollout_corr/{theirs}": mine[key] for theirs, key in VERL_NAMES.items()}
        for name, value in peer.items():
            assert named[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-6), (seed, name)


def test_applied_statistics(verl: SimpleNamespace) -> None:
    for seed in range(examples(200)):
        batch = make(seed, empty_rows=False)
        _, peer = verl.helper.compute_rollout_correction_weights(batch.delta, batch.float_mask, "token", 2.0)
        mine = diagnose(batch.trainer, batch.rollout, batch.mask, correction=PRESETS["decoupled_token_is"])
        assert mine["ratio/applied/mean"] == pytest.approx(peer["rollout_is_mean"], rel=1e-6)
        assert mine["ratio/applied/ess"] == pytest.approx(peer["rollout_is_eff_sample_size"], rel=1e-6)
        assert mine["ratio/applied_range/max"] == pytest.approx(peer["rollout_is_max"], rel=1e-6)
        assert mine["fraction/weights_above"] == pytest.approx(peer["rollout_is_ratio_fraction_high"], abs=1e-7)
        if batch.mask.sum() > 1:  # verl's is the root of a difference of means over n + 1e-8 tokens: good to about 1e-4
            assert mine["ratio/applied/std"] == pytest.approx(peer["rollout_is_std"], abs=2e-4)
            applied = batch.delta.exp().clamp(max=2.0)[batch.mask]
            assert mine["ratio/applied/std"] == pytest.approx(float(applied.std(correction=0)), rel=1e-6, abs=1e-9)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, of)
    return grad


LOSSES = [
    (
        "vanilla",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28},
        {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0},
    ),
    ("gspo", {"clip_ratio": 0.05}, {"surrogate": "gspo", "clip_low": 0.05, "clip_high": 0.05}),
    ("cispo", {"clip_ratio": 0.3}, {"surrogate": "cispo", "clip_low": 0.3, "clip_high": 0.3}),
    ("dppo_tv", {"clip_ratio": 0.2}, {"surrogate": "dppo_tv", "ratio_cap": 3.0}),
]
AGGREGATES = [
    ("token-mean", {"aggregate": "token_mean"}),
    ("seq-mean-token-mean", {"aggregate": "seq_mean_token_mean"}),
    ("seq-mean-token-sum", {"aggregate": "seq_mean_token_sum"}),
    ("token-sum", {"aggregate": "token_sum"}),
]


def test_losses_and_gradients_on_many_batches(verl: SimpleNamespace) -> None:
    """Decoupled: PPO with dual clip, GSPO, CISPO, DPPO-TV, times token weights, after k3 rejection, in every
    aggregate."""
    compared = 0
    pairs = itertools.cycle(itertools.product(LOSSES, AGGREGATES))
    for seed, ((name, actor, mine), (mode, aggregate)) in zip(range(BATCHES), pairs, strict=False):
        batch = make(seed)
        options = {
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": 1.0,
        }
        weights, mask = theirs(verl, batch, **options)
        current = batch.current.clone().requires_grad_()
        function = getattr(verl.core, f"compute_policy_loss_{name}")
        want, _ = function(
            old_log_prob=batch.trainer, log_prob=current, advantages=batch.advantages, response_mask=mask.double(), loss_agg_mode=mode,
            config=verl.actor(**actor), rollout_is_weights=weights,
        )  # fmt: skip
        reject = (Reject(estimator="k3", aggregate="seq_mean", upper=1.0),)
        surrogate = mine.get("surrogate", "ppo")
        correction = Correction(
            weights=PRESETS["decoupled_token_is"].weights, reject=reject, loss_counts="kept", surrogate=surrogate
        )
        config = LossConfig(correction=correction, **aggregate, **mine)
        loss, metrics = policy_loss(current, batch.trainer, batch.rollout, batch.advantages, batch.mask, config)
        if not mask.any():  # everything rejected: NaN there, 0 here
            assert loss == 0 and gradient(loss, current).eq(0).all() and metrics["all_rejected"] == 1
            continue
        torch.testing.assert_close(loss, want, **CLOSE)
        torch.testing.assert_close(gradient(loss, current), gradient(want, current), **CLOSE)
        compared += 1
    assert compared > enough(600)


def test_global_counts_and_fixed_length(verl: SimpleNamespace) -> None:
    for seed in range(examples(200)):
        batch = make(seed)
        current = batch.current.clone().requires_grad_()
        for mode, mine, info in (
            ("token-mean", {"aggregate": "token_mean"}, {"batch_num_tokens": 977}),
            ("seq-mean-token-sum-norm", dict(aggregate="fixed_length", fixed_length=9), {"global_batch_size": 31, "loss_scale_factor": 9}),
        ):  # fmt: skip
            want, _ = verl.core.compute_policy_loss_vanilla(
                old_log_prob=batch.trainer, log_prob=current, advantages=batch.advantages, response_mask=batch.float_mask,
                loss_agg_mode=mode, config=verl.actor(global_batch_info=info),
            )  # fmt: skip
            config = LossConfig(dual_clip=3.0, **mine)
            loss, _ = policy_loss(
                current, batch.trainer, batch.rollout, batch.advantages, batch.mask, config, num_tokens=977, num_rows=31
            )
            torch.testing.assert_close(loss, want, **CLOSE)
            torch.testing.assert_close(gradient(loss, current), gradient(want, current), **CLOSE)


@pytest.mark.parametrize(
    "preset",
    slow_except(
        {"bypass_ppo_clip", "decoupled_token_is", "decoupled_k3_rs_token_tis", "disabled"},
        [name for name in PRESETS if name.startswith(("decoupled_", "bypass_")) or name == "disabled"],
    ),
)
def test_every_preset_equals_its_namesake(verl: SimpleNamespace, preset: str) -> None:
    """The 19 presets, read from verl's own factory and run in its own mode: bypass inside the loss, decoupled before
    it."""
    config = getattr(verl.config, preset)()
    keys = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
    given = {key: getattr(config, key) for key in keys}
    assert Correction.from_verl(given) == PRESETS[preset]
    faithful = Correction.from_verl(given, faithful=True)
    options = {key: given[key] for key in keys[:4]}
    for seed in range(60):
        batch = make(seed, empty_rows=False)
        scaled = batch.rollout + (batch.trainer - batch.rollout) * (
            0.999 if seed % 2 else 0.0
        )  # near and far from on-policy
        current = batch.current.clone().requires_grad_()
        if config.bypass_mode:
            actor = verl.actor(
                policy_loss={"rollout_correction": {**options, "loss_type": config.loss_type}}, clip_ratio_c=3.0
            )
            want, _ = verl.core.compute_policy_loss_bypass_mode(
                old_log_prob=scaled,
                log_prob=current,
                advantages=batch.advantages,
                response_mask=batch.float_mask,
                config=actor,
            )
        else:
            proto, mask, _ = verl.helper.compute_rollout_correction_and_rejection_mask(
                batch.trainer, scaled, batch.float_mask, **options
            )
            want, _ = verl.core.compute_policy_loss_vanilla(
                old_log_prob=batch.trainer, log_prob=current, advantages=batch.advantages, response_mask=mask, config=verl.actor(),
                rollout_is_weights=None if proto is None else proto.batch["rollout_is_weights"],
            )  # fmt: skip
        dual = 3.0 if faithful.surrogate == "ppo" else None
        kept = Correction.from_verl(given, faithful=True)
        kept = kept if not config.bypass_mode else _with_kept_counts(kept)
        loss, metrics = policy_loss(
            current, batch.trainer, scaled, batch.advantages, batch.mask, LossConfig(correction=kept, dual_clip=dual)
        )
        if metrics["all_rejected"]:
            assert loss == 0 and gradient(loss, current).eq(0).all() and not torch.isfinite(want)
            continue
        torch.testing.assert_close(loss, want, **CLOSE)
        torch.testing.assert_close(gradient(loss, current), gradient(want, current), **CLOSE)


def _with_kept_counts(correction: Correction) -> Correction:
    """verl's bypass divides by what is left unless it is told the global count."""
    from dataclasses import replace

    return replace(correction, loss_counts="kept")


def test_kl_penalties(verl: SimpleNamespace) -> None:
    from tokentrue.mismatch import Penalty

    for seed in range(examples(100)):
        batch = make(seed)
        reference = batch.trainer + (batch.current - batch.trainer) * 0.5
        current = batch.current.clone().requires_grad_()
        for name in ("k1", "k2", "k3"):
            config = LossConfig(penalty=Penalty(coefficient=1.0, estimator=name))
            base, _ = policy_loss(current, batch.trainer, None, batch.advantages, batch.mask, LossConfig())
            with_penalty, _ = policy_loss(
                current, batch.trainer, None, batch.advantages, batch.mask, config, reference_logprobs=reference
            )
            per_token = verl.core.kl_penalty(current, reference, name)
            want = (per_token * batch.float_mask).sum() / batch.mask.sum()
            torch.testing.assert_close(with_penalty - base, want, **CLOSE)
            torch.testing.assert_close(gradient(with_penalty - base, current), gradient(want, current), **CLOSE)
