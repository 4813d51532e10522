"""What a training run is told. Every field has one default, here; nonsense is refused when the record is made."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from tokentrue.errors import ConfigError

Baseline: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "whitened", "none"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
RoutingReplay: TypeAlias = Literal["off", "experts", "weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW. `warmup` and the decay count optimiser updates, of which a step has `TrainConfig.updates_per_step`."""

    lr: float = 2.5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    schedule: Schedule = "constant"
    warmup: int = 0
    final: float = 0.1  # share of lr at the end of a decay
    length_surge: float = 0.0  # > 1: halve lr each time the smoothed response length exceeds so many times its reference; 0: never

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"optim.lr: {self.lr!r} must be > 0")
        if self.clip_norm <= 0:
            raise ConfigError(f"optim.clip_norm: {self.clip_norm!r} must be > 0; use a large number for no clipping")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"optim.schedule: {self.schedule!r} is not one of constant, linear, cosine")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas: {self.betas!r} must be two numbers in [0, 1)")
        if self.length_surge != 0 and self.length_surge <= 1:
            raise ConfigError(f"optim.length_surge: {self.length_surge!r} must be > 1, or 0 for off")
        if self.warmup < 0 or not 0 <= self.final <= 1:
            raise ConfigError("optim: warmup must be >= 0 and final in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """`lag` k: batch j is sampled by the weights of step max(0, j - k); 0 is synchronous, 1 is one step off.

    `exact`: score with the batch-invariant operators, and stop when a token sampled by the current weights has other bits here than
    in the rollout. `minibatches` and `epochs` give several updates per batch; then the ratio of PPO has something to clip.
    """

    steps: int = 20
    groups_per_step: int = 8
    baseline: Baseline = "grpo"
    temperature: float = 1.0
    minibatches: int = 1
    epochs: int = 1
    micro_tokens: int = 4096
    lag: int = 0
    exact: bool = True
    drop_idle_rows: bool = True  # rows with advantage 0 are not trained on, unless a penalty or an entropy bonus gives them a gradient
    checkpoint_activations: bool = False  # layers keep their inputs alone and compute the rest again in the backward pass: less memory
    shuffle: bool = False  # deal rows to minibatches in a seeded random order instead of group after group
    max_skipped_updates: int = 3  # updates in a row whose gradient is not finite; one more stops the run
    checkpoint_every: int = 0  # steps; 0: by the clock alone
    checkpoint_minutes: float = 15.0  # 0: never by the clock
    keep_checkpoints: int = 2
    offline: bool = False  # samples of a file: their versions count the steps of another run
    max_idle_steps: int = 3  # steps in a row without a row to train on; one more stops the run
    routing_replay: RoutingReplay = "experts"  # of samples that carry their routing: take the rollout's experts, and their weights too
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "minibatches", "epochs", "micro_tokens", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name}: {getattr(self, name)!r} must be at least 1")
        if self.checkpoint_minutes < 0:
            raise ConfigError(f"train.checkpoint_minutes: {self.checkpoint_minutes!r} must be >= 0")
        if self.lag < 0 or self.checkpoint_every < 0 or self.max_idle_steps < 0 or self.max_skipped_updates < 0:
            raise ConfigError("train: lag, checkpoint_every, max_idle_steps and max_skipped_updates must be >= 0")
        if self.routing_replay not in ("off", "experts", "weights"):
            raise ConfigError(f"train.routing_replay: {self.routing_replay!r} is not one of off, experts, weights")
        if self.baseline not in ("grpo", "dr_grpo", "rloo", "whitened", "none"):
            raise ConfigError(f"train.baseline: {self.baseline!r} is not one of grpo, dr_grpo, rloo, whitened, none")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"train.temperature: {self.temperature!r} must be > 0: greedy rollouts have no policy gradient")

    @property
    def updates_per_step(self) -> int:
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """`every` steps (0: never) `tasks` held-out tasks are attempted `attempts` times each. A reward of at least `solved` counts as solved.

    After `patience` evaluations without a better mean reward the run ends (0: never).
    """

    every: int = 0
    tasks: int = 64
    attempts: int = 1
    temperature: float = 0.0
    solved: float = 1.0
    patience: int = 0

    def __post_init__(self) -> None:
        if self.every < 0 or self.patience < 0 or self.tasks < 1 or self.attempts < 1:
            raise ConfigError("evaluation: every and patience must be >= 0, tasks and attempts at least 1")
        if self.attempts > 1 and self.temperature == 0:
            raise ConfigError("evaluation.attempts: several attempts at temperature 0 are the same one; set evaluation.temperature")


def learning_rate(optim: OptimConfig, update: int, total: int) -> float:
    """The rate of update number `update` (from 0) of `total`."""
    if update < optim.warmup:
        return optim.lr * (update + 1) / optim.warmup
    if optim.schedule == "constant":
        return optim.lr
    done = min(1.0, (update - optim.warmup) / max(1, total - optim.warmup))
    shape = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.lr * (optim.final + (1 - optim.final) * shape)


def config_hash(*parts: Any) -> str:
    """Names a configuration; beside every row of metrics."""
    text = json.dumps([asdict(part) for part in parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
