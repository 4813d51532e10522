"""What a rollout is told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tokentrue.environments.base import Split
from tokentrue.errors import ConfigError, SamplingError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """`tasks` groups of `group_size` rollouts each. `sampling` values are pinned on every session, whatever the agent
    asks for."""

    environment: str = "calculator"
    options: JsonMapping = field(default_factory=JsonObject)
    split: Split = "train"
    tasks: int = 8
    group_size: int = 8
    temperature: float = 1.0
    max_tokens: int = 64
    pin: tuple[str, ...] | None = (
        None  # ("system",) keeps the first system prompt of each conversation; None: as the environment asks
    )
    concurrency: int = 64
    timeout_s: float = 120.0
    max_failed: float = 0.5  # share of a training round's rollouts that may fail; more stop the run
    resample: int = (
        0  # of a training round: how often groups whose rewards are all equal are replaced by groups of other tasks
    )
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks", "group_size", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name}: {getattr(self, name)!r} must be at least 1")
        if self.resample < 0:
            raise ConfigError(f"rollout.resample: {self.resample!r} must be >= 0")
        if any(name != "system" for name in self.pin or ()):
            raise ConfigError(f'rollout.pin: {list(self.pin or ())!r} must be ["system"] or []')
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(f"rollout.max_failed: {self.max_failed!r} must be in [0, 1]")
        if not self.timeout_s > 0:
            raise ConfigError(f"rollout.timeout_s: {self.timeout_s!r} must be > 0")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"rollout.temperature: {self.temperature!r} must be finite and >= 0")
        try:
            Sampling(**self.sampling)
        except SamplingError as error:
            raise ConfigError(f"rollout.{error}") from error

    @property
    def sampling(self) -> JsonMapping:
        """Filters are pinned off: agents ask for them, and log-probabilities would then be those of another
        distribution."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, "top_p": 1.0, "top_k": 0}
