"""Which layers belong to which stage, and where each weight of the whole model goes."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tokentrue.engine.scheduling.schedule import ScheduleLimits
from tokentrue.errors import ConfigError, ExactnessError
from tokentrue.numerics.fingerprint import ModelShapes

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """What the caller asks for."""

    stages: int
    device: str
    max_positions: int
    kv_tokens: int | None
    limits: ScheduleLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """All that a stage's process is started with; its weights follow by name."""

    index: int
    stages: int
    layers: range
    model_class: type
    config: Any
    shapes: ModelShapes  # of the whole model, so that every stage checks, and falls back on, the same
    device: str
    backend: str
    share: float  # of the device's free memory
    rendezvous: str
    threads: int
    max_positions: int
    kv_tokens: int | None
    limits: ScheduleLimits

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


def cut_layers(layers: int, stages: int) -> list[range]:
    """Contiguous and as even as can be."""
    if not 1 <= stages <= layers:
        raise ConfigError(f"pipeline={stages}: choose 1 to {layers}, the number of the model's layers")
    borders = [round(layers * i / stages) for i in range(stages + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


class WeightRoutes:
    """Name in the whole model -> (stage, name there); tied embeddings go to both ends."""

    def __init__(self, model: Any, layers: list[range]) -> None:
        body, head = getattr(model, "model", None), model.get_output_embeddings()
        if body is None or not hasattr(body, "layers") or not hasattr(body, "norm") or not isinstance(head, nn.Linear):
            raise ExactnessError(
                f"{type(model).__name__} is not a decoder of the known shape (embed_tokens, layers, norm, lm_head)"
            )
        self.layers = layers
        self.tied = head.weight is body.embed_tokens.weight

    def targets(self, name: str) -> list[tuple[int, str]]:
        last = len(self.layers) - 1
        if found := LAYER.fullmatch(name):
            number = int(found[1])
            stage = next(i for i, own in enumerate(self.layers) if number in own)
            return [(stage, f"model.layers.{number - self.layers[stage].start}.{found[2]}")]
        if self.tied and name in {"model.embed_tokens.weight", "lm_head.weight"}:
            return [(0, "model.embed_tokens.weight"), (last, "lm_head.weight")]
        if name.startswith("model.embed_tokens."):
            return [(0, name)]
        if name.startswith(("lm_head.", "model.norm.")):
            return [(last, name)]
        return [(stage, name) for stage in range(last + 1)]


def skeleton_of(model_class: Any, config: Any) -> Any:
    """The model without weights (on the meta device)."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config)).eval().requires_grad_(False)


def stage_model(spec: StageSpec) -> Any:
    """The model's own classes with this stage's layers alone, on the meta device. What other stages do passes hidden
    states through."""
    model = skeleton_of(spec.model_class, spec.config)
    body, config = model.model, model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    body.layers = nn.ModuleList(body.layers[spec.layers.start : spec.layers.stop])
    config.num_hidden_layers = len(spec.layers)
    if kinds is not None:
        config.layer_types = list(kinds[spec.layers.start : spec.layers.stop])
    if not spec.is_first:
        body.embed_tokens = nn.Identity()
        if hasattr(body, "embedding_multiplier"):
            body.embedding_multiplier = 1.0
    if not spec.is_last:
        body.norm = model.lm_head = nn.Identity()
        for name, neutral in (("logits_scaling", 1.0), ("final_logit_softcapping", None)):
            if hasattr(config, name):
                setattr(config, name, neutral)
    return model
