"""The reference trainer: samples in, gradient steps, weights out, bit for bit reproducible."""

from tokentrue.train.config import Baseline, OptimConfig, TrainConfig, config_hash
from tokentrue.train.loop import Publisher, Store, train
from tokentrue.train.ranks import Ranks, join, leave, shard
from tokentrue.train.rounds import Groups, Rounds, SourceRounds
from tokentrue.train.scoring import ExactScorer, PlainScorer, Scorer
from tokentrue.train.trainer import StepReport, Trainer
from tokentrue.train.writer import MetricsWriter

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
