"""Training configuration, validated on construction. Every field has its default here."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from tokentrue.errors import ConfigError
from tokentrue.types import is_temperature

Baseline: TypeAlias = Literal["grpo", "grpo_batch", "dr_grpo", "rloo", "whitened", "whitened_groups", "none"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
RoutingReplay: TypeAlias = Literal["off", "experts", "weights"]


SMALL_PARAMETERS = 10_000_000
SMALL_RATE, RATE = 2.5e-4, 1e-6


def require_choice(key: str, value: object, kind: Any) -> None:
    if value not in get_args(kind):
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(get_args(kind))}")


def default_learning_rate(num_parameters: int) -> float:
    """1e-6, as in TRL and verl; models below ten million parameters, such as the one that ships, get the 2.5e-4 that
    was tuned for it."""
    return SMALL_RATE if num_parameters < SMALL_PARAMETERS else RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW. `warmup` and the decay count optimiser updates, of which a step has `TrainConfig.updates_per_step`."""

    lr: float | None = None  # None: by the size of the model, see `default_learning_rate`
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    schedule: Schedule = "constant"
    warmup: int = 0
    final: float = 0.1  # share of lr at the end of a decay
    length_surge: float = (
        0.0  # > 1: halve lr each time the smoothed response length exceeds so many times its reference; 0: never
    )

    def __post_init__(self) -> None:
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"optim.lr: {self.lr!r} must be > 0")
        if not self.clip_norm > 0:
            raise ConfigError(f"optim.clip_norm: {self.clip_norm!r} must be > 0; use a large number for no clipping")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ConfigError(f"optim.eps: {self.eps!r} must be finite and > 0")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"optim.weight_decay: {self.weight_decay!r} must be finite and >= 0")
        require_choice("optim.schedule", self.schedule, Schedule)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas: {self.betas!r} must be two numbers in [0, 1)")
        if not (self.length_surge == 0 or 1 < self.length_surge < math.inf):
            raise ConfigError(f"optim.length_surge: {self.length_surge!r} must be > 1, or 0 for off")
        if self.warmup < 0 or not 0 <= self.final <= 1:
            raise ConfigError("optim: warmup must be >= 0 and final in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Where frameworks divide differently. The defaults are this package's; what TRL and verl do is in
    docs/training.md.

    `epsilon` is added to the deviation that a baseline divides by (whitening by tokens: to the variance). `lone_group`:
    the advantage of a group of one is 0, or its reward. `whiten_by`: mean and deviation of `whitened` baselines are
    over sessions, or over trained tokens.
    """

    epsilon: float = 1e-6
    lone_group: Literal["zero", "reward"] = "zero"
    whiten_by: Literal["sessions", "tokens"] = "sessions"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ConfigError(f"train.advantages.epsilon: {self.epsilon!r} must be finite and >= 0")
        require_choice("train.advantages.lone_group", self.lone_group, Literal["zero", "reward"])
        require_choice("train.advantages.whiten_by", self.whiten_by, Literal["sessions", "tokens"])


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """Sessions that reach their limit of sampled tokens.

    `mask`: a session with a turn that was cut off at its limit counts in the baseline but is not trained on.
    `max_tokens` > 0 shapes the reward (DAPO's soft punishment): with n tokens sampled in the session, nothing up to
    max_tokens - buffer, then linearly down to
    -`penalty` at `max_tokens` and beyond.
    """

    mask: bool = False
    max_tokens: int = 0
    buffer: int = 0
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 0 or (self.max_tokens and not 0 < self.buffer <= self.max_tokens):
            raise ConfigError(
                f"train.overlong: max_tokens {self.max_tokens} and buffer {self.buffer}: set max_tokens > 0 and a buffer in "
                "[1, max_tokens], or neither"
            )
        if self.buffer and not self.max_tokens:
            raise ConfigError("train.overlong.buffer: belongs to train.overlong.max_tokens, which is 0")
        if not (math.isfinite(self.penalty) and self.penalty >= 0):
            raise ConfigError(f"train.overlong.penalty: {self.penalty!r} must be finite and >= 0")
        if self.penalty != 1.0 and not self.max_tokens:
            raise ConfigError("train.overlong.penalty: belongs to train.overlong.max_tokens, which is 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class KlConfig:
    """The divergence from the reference model, in the reward, and coefficients that follow a target.

    `reward_coefficient` > 0 subtracts that many times the sum over a session's trained tokens of `reward_estimator`
    from its reward (k1 = log p - log p_reference, both before the step), which needs the reference model. `target` > 0
    adapts the coefficient in use, the reward's or that of the loss's penalty: after each step it is multiplied by 1 +
    clip(kl / target - 1, ±0.2) · sessions / horizon (Ziegler et al., arXiv 1909.08593), kl being the mean over the
    trained tokens.
    """

    reward_coefficient: float = 0.0
    reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    target: float = 0.0
    horizon: int = 10_000

    def __post_init__(self) -> None:
        require_choice("train.kl.reward_estimator", self.reward_estimator, Literal["k1", "k2", "k3"])
        for name in ("reward_coefficient", "target"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"train.kl.{name}: {value!r} must be finite and >= 0")
        if self.horizon < 1:
            raise ConfigError(f"train.kl.horizon: {self.horizon!r} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceConfig:
    """Update acceptance on the inference policy (MIPU, arXiv 2606.29526).

    With `enabled` the engines score a step's rows with the new weights. An update is undone where the mean of (r -
    1)·A, r = engine after ÷ engine when it sampled, is below `min_gain`, or the mean k3 of r above `max_divergence` (0:
    no bound). More than `max_refused` refused updates in a row stop the run.
    """

    enabled: bool = False
    min_gain: float = 0.0
    max_divergence: float = 0.0
    max_refused: int = 3

    def __post_init__(self) -> None:
        if not math.isfinite(self.min_gain):
            raise ConfigError(f"train.acceptance.min_gain: {self.min_gain!r} must be finite")
        if not (math.isfinite(self.max_divergence) and self.max_divergence >= 0):
            raise ConfigError(
                f"train.acceptance.max_divergence: {self.max_divergence!r} must be finite and >= 0; 0 is no bound"
            )
        if self.max_refused < 0:
            raise ConfigError(f"train.acceptance.max_refused: {self.max_refused!r} must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """`lag` k: batch j is sampled by the weights of step max(0, j - k); 0 is synchronous, 1 is one step off.

    `exact`: score with the batch-invariant operators, and stop when a token sampled by the current weights has other
    bits here than in the rollout. `minibatches` and `epochs` give several updates per batch; then the ratio of PPO has
    something to clip.
    """

    steps: int = 20
    groups_per_step: int = 8
    baseline: Baseline = "grpo"
    advantages: AdvantageConfig = AdvantageConfig()
    overlong: OverlongConfig = OverlongConfig()
    kl: KlConfig = KlConfig()
    acceptance: AcceptanceConfig = AcceptanceConfig()
    temperature: float = 1.0
    minibatches: int = 1
    epochs: int = 1
    micro_tokens: int = 4096
    lag: int = 0
    exact: bool = True
    drop_idle_rows: bool = (
        True  # rows with advantage 0 are not trained on, unless a penalty or an entropy bonus gives them a gradient
    )
    checkpoint_activations: bool = (
        False  # layers keep their inputs alone and compute the rest again in the backward pass: less memory
    )
    shuffle: bool = False  # deal sessions to minibatches in a seeded random order instead of group after group
    max_skipped_updates: int = 3  # updates in a row whose gradient is not finite; one more stops the run
    checkpoint_every: int = 0  # steps; 0: by the clock alone
    checkpoint_minutes: float = 15.0  # 0: never by the clock
    keep_checkpoints: int = 2
    shard_checkpoint_gib: float = (
        8.0  # of weights; above it they are several files, and ranks write the optimiser's state in shards
    )
    offline: bool = False  # samples of a file: their versions count the steps of another run
    max_idle_steps: int = 3  # steps in a row without a row to train on; one more stops the run
    peak_tflops: float = (
        0.0  # of one device, in the dtype that is computed in; > 0: steps report model FLOPs utilisation
    )
    routing_replay: RoutingReplay = (
        "experts"  # of samples that carry their routing: take the rollout's experts, and their weights too
    )
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "minibatches", "epochs", "micro_tokens", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name}: {getattr(self, name)!r} must be at least 1")
        if not (math.isfinite(self.peak_tflops) and self.peak_tflops >= 0):
            raise ConfigError(f"train.peak_tflops: {self.peak_tflops!r} must be finite and >= 0")
        for name in ("checkpoint_minutes", "shard_checkpoint_gib"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"train.{name}: {getattr(self, name)!r} must be >= 0")
        if self.lag < 0 or self.checkpoint_every < 0 or self.max_idle_steps < 0 or self.max_skipped_updates < 0:
            raise ConfigError("train: lag, checkpoint_every, max_idle_steps and max_skipped_updates must be >= 0")
        require_choice("train.routing_replay", self.routing_replay, RoutingReplay)
        require_choice("train.baseline", self.baseline, Baseline)
        if not (is_temperature(self.temperature) and self.temperature > 0):
            raise ConfigError(
                f"train.temperature: {self.temperature!r} must be from 1e-30 to 1e30; greedy rollouts have no gradient"
            )

    @property
    def updates_per_step(self) -> int:
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """`every` steps (0: never) `tasks` held-out tasks are attempted `attempts` times each. A reward of at least
    `solved` counts as solved.

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
        if not is_temperature(self.temperature):
            raise ConfigError(f"evaluation.temperature: {self.temperature!r} must be 0, or from 1e-30 to 1e30")
        if not math.isfinite(self.solved):
            raise ConfigError(f"evaluation.solved: {self.solved!r} must be finite")
        if self.patience and not self.every:
            raise ConfigError("evaluation.patience: belongs to evaluation.every, which is 0")
        if self.attempts > 1 and self.temperature == 0:
            raise ConfigError(
                "evaluation.attempts: several attempts at temperature 0 are the same one; set evaluation.temperature"
            )


def learning_rate(optim: OptimConfig, update: int, total: int) -> float:
    """The rate of update number `update` (from 0) of `total`. `optim.lr` is a number by now."""
    peak = optim.lr
    if peak is None:
        raise ConfigError("optim.lr: not resolved; see default_learning_rate")
    if update < optim.warmup:
        return peak * (update + 1) / optim.warmup
    if optim.schedule == "constant":
        return peak
    done = min(1.0, (update - optim.warmup) / max(1, total - optim.warmup))
    shape = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (optim.final + (1 - optim.final) * shape)


def config_hash(*parts: Any) -> str:
    """Names a configuration; beside every row of metrics."""
    text = json.dumps([asdict(part) for part in parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
