"""TRL 1.16.0 as oracle on 1,000 random float64 batches: its importance ratios, off-policy mask and whole GRPO loss with
gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.marks import examples
from tests.mismatch.batches import Batch, make
from tokentrue.mismatch import Correction, LossConfig, OffPolicyMask, Penalty, correct, policy_loss

BATCHES = examples(1000)
pytestmark = pytest.mark.thorough
CLOSE = {"atol": 1e-6, "rtol": 1e-6}
MODES = list(
    itertools.product(["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"], [(None, 3.0), (0.5, 2.0)])
)


def config_of(mode: str, bounds: tuple[float | None, float]) -> dict[str, Any]:
    names = {"mode": mode, "clip_min": bounds[0], "clip_max": bounds[1]}
    return {f"vllm_importance_sampling_{key}": value for key, value in names.items()}


def test_importance_ratios_on_many_batches(trl: SimpleNamespace) -> None:
    for seed, (mode, bounds) in zip(range(BATCHES), itertools.cycle(MODES), strict=False):
        batch = make(seed)
        want = trl.ratio(
            batch.trainer, batch.rollout, batch.float_mask, mode=mode, clip_min=bounds[0], clip_max=bounds[1]
        )
        mine = correct(batch.trainer, batch.rollout, batch.mask, Correction.from_trl(config_of(mode, bounds)))
        torch.testing.assert_close(mine.weights[batch.mask], want.expand_as(batch.trainer)[batch.mask], **CLOSE)
        assert torch.equal(mine.mask, batch.mask)


def test_a_token_that_could_not_be_scored_counts_as_agreement(trl: SimpleNamespace) -> None:
    batch = make(3, empty_rows=False)
    rollout = batch.rollout.clone()
    rollout[0, 0] = torch.nan
    for mode, bounds in MODES:
        want = trl.ratio(batch.trainer, rollout, batch.float_mask, mode=mode, clip_min=bounds[0], clip_max=bounds[1])
        mine = correct(batch.trainer, rollout, batch.mask, Correction.from_trl(config_of(mode, bounds)))
        torch.testing.assert_close(mine.weights[batch.mask], want.expand_as(batch.trainer)[batch.mask], **CLOSE)
        assert mine.metrics["fraction/bad"] > 0


LOSSES = [
    ({"loss_type": "grpo"}, {"aggregate": "seq_mean_token_mean"}),
    ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}),
    ({"loss_type": "bnpo"}, {}),
    ({"loss_type": "dr_grpo", "max_completion_length": 77}, {"aggregate": "fixed_length", "fixed_length": 77}),
    ({"loss_type": "cispo", "epsilon_high": 4.0}, {"surrogate": "cispo", "clip_low": None, "clip_high": 3.0}),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"},
     {"surrogate": "gspo", "gspo_gradient": "sequence", "aggregate": "seq_mean_token_mean"}),
]  # fmt: skip


def test_losses_and_gradients_on_many_batches(trl: SimpleNamespace) -> None:
    """With its default correction, the off-policy mask, and the unbiased KL penalty of DeepSeek-V3.2 at token level."""
    for seed, (theirs, mine) in zip(range(BATCHES), itertools.cycle(LOSSES), strict=False):
        batch = make(seed, empty_rows=False, sequence_advantages=True)
        current = batch.current.clone().requires_grad_()
        reference = batch.trainer * 0.99
        token_level = "importance_sampling_level" not in theirs
        beta = 0.05 if seed % 2 and token_level else 0.0
        threshold = 0.1 if seed % 3 == 0 else None
        want = trl.loss(
            current, trl_inputs(trl, batch, reference), beta=beta, off_policy_mask_threshold=threshold, **theirs
        )
        correction = Correction.from_trl({"off_policy_mask_threshold": threshold})
        penalty = Penalty(coefficient=beta, estimator="unbiased", tokens="valid") if beta else None
        config = LossConfig(correction=correction, penalty=penalty, **mine)
        loss, _ = policy_loss(
            current, batch.trainer, batch.rollout, batch.advantages[:, 0], batch.mask, config, reference_logprobs=reference,
            num_rows=batch.mask.shape[0],
        )  # fmt: skip
        torch.testing.assert_close(loss, want, **CLOSE)
        torch.testing.assert_close(torch.autograd.grad(loss, current), torch.autograd.grad(want, current), **CLOSE)


def trl_inputs(trl: SimpleNamespace, batch: Batch, reference: torch.Tensor) -> dict[str, Any]:
    ratio = trl.ratio(batch.trainer, batch.rollout, batch.float_mask, mode="sequence_mask", clip_min=None, clip_max=3.0)
    return {
        "completion_mask": batch.float_mask, "advantages": batch.advantages[:, 0], "old_per_token_logps": batch.trainer,
        "sampling_per_token_logps": batch.rollout, "importance_sampling_ratio": ratio, "ref_per_token_logps": reference,
        "num_items_in_batch": batch.mask.sum().double(),
    }  # fmt: skip


def test_off_policy_mask(trl: SimpleNamespace) -> None:
    dropped = 0
    for seed in range(300):
        batch = make(seed, empty_rows=False, sequence_advantages=True)
        want = trl.off_policy_mask(batch.advantages[:, :1], batch.current, batch.rollout, batch.float_mask, 0.05)
        config = Correction(off_policy_mask=OffPolicyMask(threshold=0.05))
        mine = correct(
            batch.trainer, batch.rollout, batch.mask, config, logprobs=batch.current, advantages=batch.advantages
        )
        assert torch.equal(mine.mask, batch.mask & want.bool())
        dropped += int((want == 0).sum())
    assert dropped > 50


def test_default_is_the_sequence_mask() -> None:
    weights = Correction.from_trl({"loss_type": "dapo", "epsilon": 0.2}).weights  # other GRPOConfig keys may be there
    assert weights is not None and (weights.level, weights.mode, weights.upper) == ("sequence", "mask", 3.0)


def test_unknown_option_of_its_own_is_refused() -> None:
    from tokentrue.errors import ConfigError

    with pytest.raises(ConfigError, match="vllm_importance_sampling_cap"):
        Correction.from_trl({"vllm_importance_sampling_cap": 2.0})
