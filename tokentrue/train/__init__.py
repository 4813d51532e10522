"""The reference trainer: samples in, gradient steps, weights out, bit for bit reproducible. Names are loaded when first
used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokentrue.train.config import Baseline, OptimConfig, TrainConfig, config_hash
    from tokentrue.train.data.rounds import Groups, Rounds, SourceRounds
    from tokentrue.train.loop import Store, train
    from tokentrue.train.publishing import Publisher
    from tokentrue.train.ranks import Ranks, join, leave, shard
    from tokentrue.train.reporting import StepReport
    from tokentrue.train.trainer import Trainer
    from tokentrue.train.update.scoring import ExactScorer, PlainScorer, Scorer
    from tokentrue.train.writer import MetricsWriter

_HOME = {
    "Baseline": "tokentrue.train.config",
    "ExactScorer": "tokentrue.train.update.scoring",
    "Groups": "tokentrue.train.data.rounds",
    "MetricsWriter": "tokentrue.train.writer",
    "OptimConfig": "tokentrue.train.config",
    "PlainScorer": "tokentrue.train.update.scoring",
    "Publisher": "tokentrue.train.publishing",
    "Ranks": "tokentrue.train.ranks",
    "Rounds": "tokentrue.train.data.rounds",
    "Scorer": "tokentrue.train.update.scoring",
    "SourceRounds": "tokentrue.train.data.rounds",
    "StepReport": "tokentrue.train.reporting",
    "Store": "tokentrue.train.loop",
    "TrainConfig": "tokentrue.train.config",
    "Trainer": "tokentrue.train.trainer",
    "config_hash": "tokentrue.train.config",
    "join": "tokentrue.train.ranks",
    "leave": "tokentrue.train.ranks",
    "shard": "tokentrue.train.ranks",
    "train": "tokentrue.train.loop",
}
__all__ = [
    "Baseline",
    "ExactScorer",
    "Groups",
    "MetricsWriter",
    "OptimConfig",
    "PlainScorer",
    "Publisher",
    "Ranks",
    "Rounds",
    "Scorer",
    "SourceRounds",
    "StepReport",
    "Store",
    "TrainConfig",
    "Trainer",
    "config_hash",
    "join",
    "leave",
    "shard",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tokentrue.train' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
