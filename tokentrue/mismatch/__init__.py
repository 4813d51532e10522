"""Diagnostics, corrections and policy losses for training-inference mismatch: pure functions over tensors."""

from tokentrue.mismatch.advantages import grpo_advantages, rloo_advantages, whitened_advantages
from tokentrue.mismatch.batch import support_log_mass, support_log_mass_of
from tokentrue.mismatch.correction import Corrected, Correction, correct
from tokentrue.mismatch.diagnosis import Diagnosis, LengthDecay, UpdateCheck, WorstRow, check_update, diagnose
from tokentrue.mismatch.loss import policy_loss
from tokentrue.mismatch.loss_config import (
    LOSSES,
    LossConfig,
    Penalty,
    SapoTemperatures,
    VespoKernel,
    loss_from_trl,
    loss_from_verl,
    loss_named,
)
from tokentrue.mismatch.metrics import Metrics
from tokentrue.mismatch.presets import PRESETS
from tokentrue.mismatch.routing import record_routing, replay_routing, routing_of
from tokentrue.mismatch.rules import (
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
