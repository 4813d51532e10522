"""Zero-mismatch rollout engine: its log-probabilities are the trainer's, bit for bit."""

from tokentrue.engine.engine import ExactEngine
from tokentrue.engine.schedule import ScheduleLimits

__all__ = ["ExactEngine", "ScheduleLimits"]
