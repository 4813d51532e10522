"""Training configuration, validated on construction. Every field has its default here."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.records import record
from tokentrue.types import AtLeastOne, Count, Finite, NotNegative, Positive, Share, check_fields, is_temperature

Baseline = Literal["grpo", "grpo_batch", "dr_grpo", "rloo", "whitened", "none"]
RoutingReplay = Literal["off", "experts", "weights"]
LoggerName = Literal["tensorboard", "wandb", "trackio"]
# must divide logits; greedy rollouts have no gradient
Temperature = Annotated[float, Meta(ge=1e-30, le=1e30)]


def default_learning_rate(num_parameters: int) -> float:
    """1e-6, as in TRL and verl; below ten million parameters what was tuned for the model that ships."""
    return 2.5e-4 if num_parameters < 10_000_000 else 1e-6


@record
class OptimConfig:
    """AdamW. `warmup` and the decay count optimiser updates."""

    lr: Positive | None = None  # None: by the size of the model, see `default_learning_rate`
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip_norm: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Count = 0
    final: Share = 0.1  # share of lr at the end of a decay

    def __post_init__(self) -> None:
        check_fields(self, "optim")
        if not self.clip_norm > 0:
            raise ConfigError(f"optim.clip_norm: {self.clip_norm!r} must be > 0; use a large number for no clipping")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas: {self.betas!r} must be two numbers in [0, 1)")


@record
class AdvantageConfig:
    """`epsilon` is added to the deviation that a baseline divides by; what TRL and verl do is in docs/training.md."""

    epsilon: NotNegative = 1e-6

    def __post_init__(self) -> None:
        check_fields(self, "train.advantages")


@record
class OverlongConfig:
    mask: bool = False


@record
class TrainConfig:
    """Batch j is sampled by the weights of step max(0, j - lag). `exact`: score with the batch-invariant operators, and
    stop when a token sampled by the current weights has other bits here."""

    steps: AtLeastOne = 20
    groups_per_step: AtLeastOne = 8
    baseline: Baseline = "grpo"
    advantages: AdvantageConfig = AdvantageConfig()
    overlong: OverlongConfig = OverlongConfig()
    lora_rank: Count = 0  # > 0: trains a LoRA adapter of every linear layer but the head, with alpha twice the rank
    temperature: Temperature = 1.0
    minibatches: AtLeastOne = 1  # updates per batch; with several the ratio of PPO has something to clip
    epochs: AtLeastOne = 1
    micro_tokens: AtLeastOne = 4096
    tree: bool = True  # with `exact`: rows that share a prefix compute it once
    lag: Count = 0
    exact: bool = True
    drop_idle_rows: bool = True  # train on rows without advantage only where a penalty or entropy gives a gradient
    checkpoint_activations: bool = False  # layers keep their inputs alone and compute the rest again: less memory
    shuffle: bool = False  # deal sessions to minibatches in a seeded random order instead of group after group
    max_skipped_updates: Count = 3  # updates in a row whose gradient is not finite; one more stops the run
    checkpoint_every: Count = 0  # steps; 0: by the clock alone
    checkpoint_minutes: NotNegative = 15.0  # 0: never by the clock
    keep_checkpoints: AtLeastOne = 2
    shard_checkpoint_gib: NotNegative = 8.0  # of weights; above it ranks write the optimiser's state in shards
    offline: bool = False  # samples of a file: their versions count the steps of another run
    max_idle_steps: Count = 3  # steps in a row without a row to train on; one more stops the run
    routing_replay: RoutingReplay = "experts"  # of samples that carry their routing: experts, and their weights too
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "train")


@record
class EvaluationConfig:
    """Held-out tasks every `every` steps (0: never); `patience` evaluations without gain end the run."""

    every: Count = 0
    tasks: AtLeastOne = 64
    attempts: AtLeastOne = 1
    temperature: NotNegative = 0.0
    solved: Finite = 1.0
    patience: Count = 0

    def __post_init__(self) -> None:
        check_fields(self, "evaluation")
        if not is_temperature(self.temperature):
            raise ConfigError(f"evaluation.temperature: {self.temperature!r} must be 0, or from 1e-30 to 1e30")
        if self.patience and not self.every:
            raise ConfigError("evaluation.patience: belongs to evaluation.every, which is 0")
        if self.attempts > 1 and self.temperature == 0:
            raise ConfigError(
                "evaluation.attempts: several attempts at temperature 0 are the same one; set evaluation.temperature"
            )


def learning_rate(optim: OptimConfig, update: int, total: int) -> float:
    peak = optim.lr
    assert peak is not None, "the trainer resolves it by the size of the model"
    if update < optim.warmup:
        return peak * (update + 1) / optim.warmup
    if optim.schedule == "constant":
        return peak
    done = min(1.0, (update - optim.warmup) / max(1, total - optim.warmup))
    shape = 1 - done if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (optim.final + (1 - optim.final) * shape)


def config_hash(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def plain_settings(**parts: Any) -> JsonObject:
    return json.loads(json.dumps(parts, default=_plain))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def list_changes(before: JsonValue, now: JsonValue, key: str = "") -> list[str]:
    """`train.lag: 0, now 1` for each value that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = {**before, **now}
        return [each for name in names for each in list_changes(before.get(name), now.get(name), f"{key}.{name}")]
    return [] if before == now else [f"{key.lstrip('.')}: {before!r}, now {now!r}"]
