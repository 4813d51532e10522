"""Top-p sampling seen by a trainer that scores the whole vocabulary, with and without alignment."""

from __future__ import annotations

import pytest
import torch

from tokentrue.errors import InputError
from tokentrue.mismatch import Correction, LossConfig, Weights, correct, diagnose, policy_loss, support_log_mass


def top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Which tokens the nucleus keeps."""
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    keep = (probs.cumsum(-1) - probs) < p
    return torch.zeros_like(keep).scatter(-1, order, keep)


def sampled(p: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 500, 50, generator=generator, dtype=torch.float64) * 2
    kept = top_p(logits, p)
    nucleus = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    ids = torch.distributions.Categorical(logits=nucleus).sample()
    rollout = nucleus.gather(-1, ids[..., None]).squeeze(-1)
    trainer = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    return logits, kept, rollout, trainer


def test_the_mean_ratio_is_the_kept_mass_and_alignment_makes_it_one() -> None:
    torch.manual_seed(1)
    logits, kept, rollout, trainer = sampled(0.8)
    mass = support_log_mass(logits, kept)
    found = diagnose(trainer, rollout)
    assert (
        found["ratio/raw/mean"] == pytest.approx(float(mass.exp().mean()), abs=1e-9) and found["ratio/raw/mean"] < 0.95
    )
    weights = Weights(mode="clip", lower=0.5, upper=2.0)
    plain = correct(trainer, rollout, None, Correction(weights=weights))
    aligned = correct(trainer, rollout, None, Correction(weights=weights, align_support=True), support_log_mass=mass)
    assert float(plain.weights.mean()) < 0.95
    torch.testing.assert_close(aligned.weights, torch.ones_like(aligned.weights), atol=1e-12, rtol=0)


def test_ids_and_masks_say_the_same() -> None:
    logits, kept, _, _ = sampled(0.7)
    width = int(kept.sum(-1).max())
    ids = torch.where(kept, torch.arange(50), -1).sort(-1, descending=True)[0][..., :width]
    torch.testing.assert_close(support_log_mass(logits, ids), support_log_mass(logits, kept))


def test_the_loss_uses_the_aligned_ratio() -> None:
    logits, kept, rollout, trainer = sampled(0.8)
    mass = support_log_mass(logits, kept)
    config = LossConfig(correction=Correction(denominator="rollout", align_support=True))
    loss, metrics = policy_loss(trainer, None, rollout, torch.ones(4), None, config, support_log_mass=mass)
    assert float(loss) == pytest.approx(-1.0) and metrics["ppo_kl"] == pytest.approx(0.0, abs=1e-12)


def test_refusals() -> None:
    logits, kept, rollout, trainer = sampled(0.8)
    with pytest.raises(InputError, match="support_log_mass: align_support needs"):
        correct(trainer, rollout, None, Correction(align_support=True))
    with pytest.raises(InputError, match="keeps no token"):
        support_log_mass(logits, torch.zeros_like(kept))
    with pytest.raises(InputError, match="do not index"):
        support_log_mass(logits, torch.full((4, 500, 2), 50))
