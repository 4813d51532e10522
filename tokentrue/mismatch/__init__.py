"""Diagnostics, corrections and policy losses for training-inference mismatch: pure functions over tensors."""

from tokentrue.mismatch.advantages import grpo_advantages, rloo_advantages, whitened_advantages
from tokentrue.mismatch.correction.config import Correction
from tokentrue.mismatch.correction.correct import Corrected, correct
from tokentrue.mismatch.correction.presets import PRESETS
from tokentrue.mismatch.correction.rules import (
    AdaptiveMix,
    Normalise,
    OffPolicyMask,
    Outlier,
    Reject,
    SecondMoment,
    Staleness,
    Veto,
    Weights,
)
from tokentrue.mismatch.diagnosis.diagnose import Diagnosis, WorstRow, diagnose
from tokentrue.mismatch.loss.config import LOSSES, LossConfig, Penalty, SapoTemperatures, VespoKernel, loss_named
from tokentrue.mismatch.loss.importers import loss_from_trl, loss_from_verl
from tokentrue.mismatch.loss.policy_loss import policy_loss
from tokentrue.mismatch.metrics import Metrics
from tokentrue.mismatch.routing import record_routing, replay_routing, routing_of
from tokentrue.mismatch.support import support_log_mass, support_log_mass_of
from tokentrue.mismatch.updates import LengthDecay, UpdateCheck, check_update

__all__ = [
    "LOSSES",
    "PRESETS",
    "AdaptiveMix",
    "Corrected",
    "Correction",
    "Diagnosis",
    "LengthDecay",
    "LossConfig",
    "Metrics",
    "Normalise",
    "OffPolicyMask",
    "Outlier",
    "Penalty",
    "Reject",
    "SapoTemperatures",
    "SecondMoment",
    "Staleness",
    "UpdateCheck",
    "VespoKernel",
    "Veto",
    "Weights",
    "WorstRow",
    "check_update",
    "correct",
    "diagnose",
    "grpo_advantages",
    "loss_from_trl",
    "loss_from_verl",
    "loss_named",
    "policy_loss",
    "record_routing",
    "replay_routing",
    "rloo_advantages",
    "routing_of",
    "support_log_mass",
    "support_log_mass_of",
    "whitened_advantages",
]
