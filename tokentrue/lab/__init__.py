"""Experiments that show at desk scale where mismatch hurts, where it does not, and what cures it."""

from tokentrue.lab.arms import Arm, Scale
from tokentrue.lab.registry import EXPERIMENTS, run_experiment
from tokentrue.lab.sources import SOURCES

__all__ = ["EXPERIMENTS", "SOURCES", "Arm", "Scale", "run_experiment"]
