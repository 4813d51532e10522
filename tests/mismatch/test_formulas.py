"""Miles, AReaL, SkyRL and prime-rl, from their written-out formulas, on 1,000 random batches each; and where code
departs from words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.marks import enough, examples
from tests.mismatch import formulas
from tests.mismatch.batches import make
from tests.mismatch.peer_configs import from_areal, from_skyrl
from tokentrue.errors import ConfigError
from tokentrue.mismatch import Correction, LossConfig, OffPolicyMask, Penalty, correct, policy_loss

BATCHES = examples(1000)
pytestmark = pytest.mark.thorough
CLOSE = {"atol": 1e-6, "rtol": 1e-6}
MILES: dict[str, Any] = {
    "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0, "rs_lower_bound": None, "rs_upper_bound": None, "rs_veto_threshold": 1e-4, "tis_batch_normalize": False,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:weights normalised over a single row")
def test_miles_on_many_batches() -> None:
    levels = ("token", "sequence", "geometric")
    options = itertools.cycle(itertools.product(levels, levels, ("truncate", "clip", "mask"), (False, True)))
    for seed, (tis, rs, mode, normalise) in zip(range(BATCHES), options, strict=False):
        batch = make(seed)
        config = MILES | {
            "tis_level": tis,
            "rs_level": rs,
            "tis_mode": mode,
            "rs_lower_bound": 0.8,
            "rs_upper_bound": 1.4,
        }
        config["tis_batch_normalize"] = normalise and tis != "geometric"
        want, mask = formulas.miles(batch.trainer, batch.rollout, batch.float_mask, **config)
        mine = correct(batch.trainer, batch.rollout, batch.mask, Correction.from_miles(config, faithful=True))
        assert torch.equal(mine.mask, mask.bool()), (seed, config)
        torch.testing.assert_close(mine.weights[mine.mask], want[mine.mask], **CLOSE)


def test_miles_rejection_alone_needs_weights_in_its_code() -> None:
    config = MILES | {"use_tis": False}
    assert Correction.from_miles(config).reject and not Correction.from_miles(config, faithful=True).reject


def test_areal_on_many_batches() -> None:
    metrics = [("ratio", 1.5, 0.4), ("kl_k1", 0.5, -0.6), ("kl_k2", 0.4, None), ("kl_k3", 0.4, None)]
    shapes = [("token", "sum"), ("sequence", "sum"), ("sequence", "mean"), ("sequence", "max")]
    options = itertools.cycle(itertools.product(metrics, shapes))
    rejected = 0
    for seed, ((metric, upper, lower), (level, agg)) in zip(range(BATCHES), options, strict=False):
        batch = make(seed)
        lower = None if agg == "max" else lower
        rule = {"level": level, "action": "mask", "metric": metric, "agg": agg, "upper": upper, "lower": lower}
        want, mask = formulas.areal(batch.trainer, batch.rollout, batch.float_mask, **rule)
        config = from_areal({"use_decoupled_loss": True, "rejection_sampling": rule}, faithful=True)
        mine = correct(batch.trainer, batch.rollout, batch.mask, config)
        assert torch.equal(mine.mask, mask.bool()), (seed, rule)
        torch.testing.assert_close(mine.weights[batch.mask], want[batch.mask], **CLOSE)
        rejected += int(batch.mask.sum() - mask.sum())
    assert rejected > enough(5000)


def test_areal_clamp_is_truncated_importance_sampling() -> None:
    for seed in range(examples(200)):
        batch = make(seed)
        rule = {"level": "token", "action": "clamp", "metric": "ratio", "agg": "sum", "upper": 5.0, "lower": 0.2}
        want, _ = formulas.areal(batch.trainer, batch.rollout, batch.float_mask, **rule)
        config = from_areal({"use_decoupled_loss": True, "rejection_sampling": rule})
        mine = correct(batch.trainer, batch.rollout, batch.mask, config)
        torch.testing.assert_close(mine.weights[batch.mask], want[batch.mask], **CLOSE)


def test_areal_defaults_and_keys_are_those_of_its_dataclass() -> None:
    """Sequence level aggregates by the mean unless told otherwise; the rest of the actor's section may be there, typos
    may not."""
    rule = {"level": "sequence"}
    config = from_areal({"use_decoupled_loss": True, "eps_clip": 0.2, "c_clip": None, "rejection_sampling": rule})
    assert config.reject[0].aggregate == "geometric" and config.reject[0].upper == 5.0
    assert config.weights is not None and config.weights.level == "geometric" and config.weights.mode == "raw"
    with pytest.raises(ConfigError, match="did you mean use_decoupled_loss"):
        from_areal({"use_decoupled_los": True})
    with pytest.raises(ConfigError, match="no longer a key of AReaL"):
        from_areal({"behave_imp_weight_cap": 5.0})
    assert "ignores it" in from_areal({"rejection_sampling": {"upper": 2.0}}).notes[0]


def test_areal_k1_is_the_log_ratio_in_words_and_in_code() -> None:
    """δ = 1 is above the bound 0.5 and δ = -1 is not; verl's k1 has the other sign."""
    delta = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    config = {"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k1", "upper": 0.5}}
    for faithful in (False, True):
        out = correct(delta, torch.zeros_like(delta), None, from_areal(config, faithful=faithful))
        assert out.mask.tolist() == [[False], [True]]


def test_miles_correction_function_is_chosen_by_its_path() -> None:
    base = {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0}
    weights = Correction.from_miles(base).weights
    assert weights is not None and (weights.mode, weights.lower, weights.upper) == ("truncate", None, 2.0)
    icepop = Correction.from_miles(
        base | {"tis_clip_low": 0.5, "custom_tis_function_path": "miles.corrections.icepop_function"}
    ).weights
    assert icepop is not None and (icepop.mode, icepop.lower) == ("mask", 0.5)
    helper = Correction.from_miles(base | {"custom_tis_function_path": "examples.mis.compute_mis_weights_with_cp"})
    assert helper.reject and helper.weights is not None and helper.weights.normalise is not None
    assert Correction.from_miles(base | {"use_tis": False}).weights is None
    with pytest.raises(ConfigError, match="function of your own"):
        Correction.from_miles(base | {"custom_tis_function_path": "mine.correct"})


def test_skyrl_on_many_batches() -> None:
    base: dict[str, Any] = {
        "tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0, "sequence_mask_metric": None,
        "geo_mask_high": 1.2, "geo_mask_low": 0.7, "product_mask_high": 2.0, "product_mask_low": 0.5,
        "outlier_token_is_threshold_low": None, "outlier_token_is_threshold_high": None,
        "token_mask_is_threshold_low": None, "token_mask_is_threshold_high": None,
    }  # fmt: skip
    stages = ((None, "token", "sequence"), (None, "geometric", "product"), (None, (1e-2, 50.0)), (None, (0.5, 2.0)))
    choices = itertools.cycle(itertools.product(*stages))
    for seed, (tis, metric, outlier, token) in zip(range(BATCHES), choices, strict=False):
        batch = make(seed)
        config = base | {"tis_ratio_type": tis, "sequence_mask_metric": metric}
        if outlier:
            config |= {"outlier_token_is_threshold_low": outlier[0], "outlier_token_is_threshold_high": outlier[1]}
        if token:
            config |= {"token_mask_is_threshold_low": token[0], "token_mask_is_threshold_high": token[1]}
        want, mask = formulas.skyrl(batch.trainer, batch.rollout, batch.float_mask, **config)
        mine = correct(batch.trainer, batch.rollout, batch.mask, from_skyrl(config))
        assert torch.equal(mine.mask, mask.bool()), (seed, config)
        torch.testing.assert_close(mine.weights[mine.mask], want[mine.mask], **CLOSE)


def test_prime_rl_default_on_many_batches() -> None:
    config = LossConfig(
        correction=Correction(denominator="rollout", surrogate="dppo_tv"),
        penalty=Penalty(coefficient=2e-3, estimator="k2", against="rollout", tokens="valid"),
    )
    for seed in range(BATCHES):
        batch = make(seed)
        current = (batch.rollout + (batch.current - batch.trainer)).clamp(max=0).requires_grad_()
        want = formulas.prime_rl(current, batch.rollout, batch.advantages, batch.float_mask, tau=1e-3, scale=313.0)
        loss, _ = policy_loss(current, None, batch.rollout, batch.advantages, batch.mask, config, num_tokens=313.0)
        torch.testing.assert_close(loss, want, **CLOSE)
        torch.testing.assert_close(torch.autograd.grad(loss, current), torch.autograd.grad(want, current), **CLOSE)


def test_dppo_gradient_is_the_same_in_both_forms() -> None:
    """prime-rl differentiates r·A, verl the log-probability times a constant min(r, c): equal gradients while r < c."""
    for seed in range(examples(100)):
        batch = make(seed)
        current = batch.trainer + (batch.current - batch.trainer).clamp(-1, 1)
        current.requires_grad_()
        grads = []
        for cap in (None, 20.0):
            config = LossConfig(surrogate="dppo_tv", ratio_cap=cap)
            loss, _ = policy_loss(current, batch.trainer, None, batch.advantages, batch.mask, config)
            grads.append(torch.autograd.grad(loss, current)[0])
        torch.testing.assert_close(*grads, **CLOSE)


def test_off_policy_mask() -> None:
    dropped = False
    for seed in range(300):
        batch = make(seed)
        want = formulas.slime_off_policy_mask(batch.current, batch.trainer, batch.advantages, batch.float_mask, 1e-4)
        rule = OffPolicyMask(threshold=1e-4, signal="ppo_train")
        given = {"logprobs": batch.current, "advantages": batch.advantages}
        mine = correct(batch.trainer, batch.rollout, batch.mask, Correction(off_policy_mask=rule), **given)
        assert torch.equal(mine.mask, batch.mask & want)
        dropped |= bool((~want & batch.mask).any())
    assert dropped
