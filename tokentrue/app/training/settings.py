"""The configuration of `tokentrue train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tokentrue.app.configuration import NONE, build
from tokentrue.app.libraries import require_dtype
from tokentrue.app.wiring import AtLeastOne, EngineConfig, ModelConfig
from tokentrue.environments import SMALL_MODEL, RolloutConfig
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.train.config import EvaluationConfig, LoggerName, OptimConfig, TrainConfig

if TYPE_CHECKING:
    from tokentrue.mismatch import Correction, LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """`name` is one of `tokentrue.mismatch.LOSSES`; `options` override fields of its `LossConfig`.

    `correction` names a preset, or is a table of `Correction` fields that override the loss's correction or the one
    named by `preset`.
    """

    name: str = "dapo"
    options: JsonMapping = field(default_factory=JsonObject)
    correction: str | JsonMapping | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    gateways: AtLeastOne = 2
    workers: AtLeastOne = 2
    nodes: AtLeastOne = 1  # at least one gateway and one worker on each


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRun:
    """`samples` trains from a file; without it rounds are sampled live by the `rollout` section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossSpec = field(default_factory=LossSpec)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    samples: Path | None = None
    out: Path = Path("out/train")
    device: str = "cpu"
    dtype: str = "float32"
    threads: AtLeastOne = 2
    log: tuple[LoggerName, ...] = ("tensorboard",)  # besides metrics.jsonl

    def __post_init__(self) -> None:
        for name in ("temperature", "seed"):
            wanted, default = getattr(self.rollout, name), TrainConfig.__dataclass_fields__[name].default
            if getattr(self.train, name) not in (default, wanted):
                raise ConfigError(f"train.{name}: set rollout.{name}, which rollouts and trainer both use")
        require_dtype(self.dtype)
        if self.samples is not None:
            self._require_no_live_settings()
        elif self.train.exact and self.engine.name != "exact":
            raise ConfigError(
                f"train.exact: engine {self.engine.name!r} is not exact; set train.exact=false, or use the exact engine"
            )
        if self.train.acceptance.enabled and (self.samples is not None or self.rollout.temperature != 1.0):
            raise ConfigError(
                "train.acceptance: needs live rollouts at rollout.temperature=1: engines score given tokens at that one"
            )

    def _require_no_live_settings(self) -> None:
        # Settings of engine and rollouts are allowed: one configuration file serves `tokentrue rollout` and this.
        # Settings of engine and rollouts are allowed: one configuration file serves `tokentrue rollout` and this.
        for section, wanted, default in (
            ("ray", self.ray, RayConfig()),
            ("evaluation", self.evaluation, EvaluationConfig()),
        ):
            for key in (each.name for each in fields(wanted)):
                if getattr(wanted, key) != getattr(default, key):
                    raise ConfigError(
                        f"{section}.{key}: has no effect with samples, which train from a file; leave one of them out"
                    )

    @property
    def model_path(self) -> str:
        return self.model.path or str(SMALL_MODEL)


def loss_for(spec: LossSpec) -> LossConfig:
    from tokentrue.mismatch import LOSSES, loss_named

    if spec.name not in LOSSES:
        raise ConfigError(f"loss.name: no loss {spec.name!r}; choose one of {', '.join(LOSSES)}")
    options = dict(spec.options)
    if "correction" in options:
        raise ConfigError("loss.options.correction: belongs to loss.correction")
    base = loss_named(spec.name)
    surrogate = options.get("surrogate", base.surrogate)
    implied = {} if surrogate in (None, NONE) else {"surrogate": surrogate}
    values = {**options, "correction": correction_for(spec, base.correction, implied)}
    return build(type(base), values, path="loss.options", base=base)


def correction_for(spec: LossSpec, own: Correction, implied: JsonMapping) -> Correction:
    from tokentrue.mismatch import PRESETS

    table = dict(spec.correction) if isinstance(spec.correction, Mapping) else {}
    preset = table.pop("preset", None) if isinstance(spec.correction, Mapping) else spec.correction
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"loss.correction: no preset {preset!r}; choose one of {', '.join(PRESETS)}")
    base = own if preset is None else PRESETS[preset]
    return build(type(base), {**implied, **table}, path="loss.correction", base=base) if table else base
