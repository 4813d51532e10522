"""Diagnostics, corrections and policy losses for training-inference mismatch: pure functions over tensors."""

from tokentrue.mismatch.advantages import grpo_advantages, rloo_advantages, whitened_advantages
from tokentrue.mismatch.correction import PRESETS, Corrected, Correction, correct
from tokentrue.mismatch.diagnosis import Diagnosis, UpdateCheck, WorstRow, check_update, check_update_mipu, diagnose
from tokentrue.mismatch.loss import LOSSES, LossConfig, Penalty, loss_named, policy_loss
from tokentrue.mismatch.metrics import Metrics
from tokentrue.mismatch.rules import (
    Normalise,
    OffPolicyMask,
    Outlier,
    Reject,
    ScoreCentering,
    SecondMoment,
    Staleness,
    Veto,
    Weights,
)

__all__ = [
    "LOSSES", "PRESETS", "Corrected", "Correction", "Diagnosis", "LossConfig", "Metrics", "Normalise", "OffPolicyMask",
    "Outlier", "Penalty", "Reject", "ScoreCentering", "SecondMoment", "Staleness", "UpdateCheck", "Veto", "Weights",
    "WorstRow", "check_update", "check_update_mipu", "correct", "diagnose", "grpo_advantages", "loss_named",
    "policy_loss", "rloo_advantages", "whitened_advantages",
]  # fmt: skip
