"""Experiments on a small model that show where mismatch hurts, where it does not, and which correction helps.

Names are loaded when first used: the catalog needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from experiments.catalog import EXPERIMENTS, Experiment

if TYPE_CHECKING:
    from experiments.arms import Arm, Scale
    from experiments.registry import run_experiment
    from experiments.sources import SOURCES

_LAZY = {"Arm": "arms", "Scale": "arms", "run_experiment": "registry", "SOURCES": "sources"}
__all__ = ["EXPERIMENTS", "SOURCES", "Arm", "Experiment", "Scale", "run_experiment"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"experiments.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'experiments' has no attribute {name!r}")
