"""The reference trainer. Names are loaded when first used: the configuration needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokentrue.train.checkpoint import Store
    from tokentrue.train.config import Baseline, OptimConfig, TrainConfig, config_hash
    from tokentrue.train.loop import Rounds, SourceRounds, train
    from tokentrue.train.publishing import Publisher
    from tokentrue.train.ranks import Ranks, join, leave, shard
    from tokentrue.train.reporting import MetricsWriter, StepReport
    from tokentrue.train.rows import Groups
    from tokentrue.train.scoring import ExactScorer, PlainScorer, Scorer
    from tokentrue.train.trainer import Trainer

__all__ = [
    "Baseline", "ExactScorer", "Groups", "MetricsWriter", "OptimConfig", "PlainScorer", "Publisher", "Ranks", "Rounds",
    "Scorer", "SourceRounds", "StepReport", "Store", "TrainConfig", "Trainer", "config_hash", "join", "leave", "shard",
    "train",
]  # fmt: skip
_HOMES = ("config", "rows", "scoring", "ranks", "reporting", "trainer", "publishing", "checkpoint", "loop")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"tokentrue.train.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'tokentrue.train' has no attribute {name!r}")
