"""Tensor and expert parallelism: processes that share every layer, with the bits of one process.

Each rank has a part of the heads (and their pages), of the MLP's values, of the experts and of the vocabulary; the rest
is whole everywhere. All ranks run the same steps and gather where `numerics.leaves` joins their parts; rank 0 samples.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.engine.processes.pipeline import Pipeline, Stage, StageSpec, WeightRoutes, skeleton_of
from tokentrue.engine.proof import paged_logits
from tokentrue.engine.runner import StepResult, StepWants, answer, routes_from
from tokentrue.engine.schedule import StepInputs
from tokentrue.errors import ExactnessError
from tokentrue.numerics import logits_of, same_bits
from tokentrue.numerics.leaves import COLUMNS, check_ranks, cut_evenly, cut_key_heads
from tokentrue.numerics.modules import is_experts
from tokentrue.numerics.ops import Ranks

KEYS = re.compile(r".*\.[kv]_proj\.(weight|bias)")
FIRST = re.compile(r".*\.((q|gate|up)_proj\.(weight|bias)|experts\.(gate_up|down)_proj)")  # cut along dimension 0
SECOND = re.compile(r".*\.(o|down)_proj\.weight")


class RankRoutes(WeightRoutes):
    """Every rank has every name; of some tensors it has a part."""

    def __init__(self, model: Any, size: int) -> None:
        super().__init__(model, [range(len(model.model.layers))] * size)
        self.key_heads = model.config.num_key_value_heads

    def targets(self, name: str) -> list[tuple[int, str]]:
        both = ("model.embed_tokens.weight", "lm_head.weight")
        names = both if self.tied and name in both else (name,)
        return [(rank, local) for rank in range(len(self.layers)) for local in names]

    def part(self, stage: int, name: str, value: Tensor) -> Tensor:
        size = len(self.layers)
        if FIRST.fullmatch(name):
            return value.chunk(size)[stage]
        if SECOND.fullmatch(name):
            return value.chunk(size, 1)[stage]
        if KEYS.fullmatch(name):
            own = cut_key_heads(self.key_heads, size)[stage]
            return value.unflatten(0, (self.key_heads, -1))[own.start : own.stop].flatten(0, 1)
        if name.startswith("lm_head."):
            own = cut_evenly(len(value), size, COLUMNS)[stage]
            return value[own.start : own.stop]
        return value


class TensorRanks(Pipeline):
    name, part = "tensor parallelism", "rank"

    def _cut(self, model: Any, stages: int, leaves: int) -> tuple[WeightRoutes, type[Stage], int]:
        check_ranks(model, stages, leaves)
        return RankRoutes(model, stages), Rank, 1

    def _build(self, model: Any) -> None:
        super()._build(model)
        self.sizes = replace(self.sizes, vocabulary=model.get_output_embeddings().weight.shape[0])

    def finish(self) -> StepResult:
        self._wants.popleft()
        return self._hear(self._stages[0])


def rank_model(spec: StageSpec) -> Any:
    """The model with this rank's part of every layer, on the meta device."""
    config, size, index = copy.deepcopy(spec.config), spec.stages, spec.index
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.num_key_value_heads = len(cut_key_heads(config.num_key_value_heads, size)[index])
    config.num_attention_heads //= size
    config.intermediate_size //= size
    model = skeleton_of(spec.model_class, config)
    columns = cut_evenly(config.vocab_size, size, COLUMNS)[index]
    with torch.device("meta"):
        model.lm_head = nn.Linear(config.hidden_size, len(columns), bias=model.lm_head.bias is not None)
    for module in model.modules():
        if is_experts(dict(module.named_parameters(recurse=False))):
            for name, value in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(value.chunk(size)[index], requires_grad=False))
    return model


class Rank(Stage):
    def _make_model(self) -> Any:
        spec = self._spec
        self._columns = cut_evenly(spec.config.vocab_size, spec.stages, COLUMNS)
        return rank_model(spec)

    def _connect(self) -> None:
        super()._connect()
        self._ops.ranks = Ranks(index=self._spec.index, size=self._spec.stages, gather=self._gather)

    def _gather(self, value: Tensor) -> list[Tensor]:
        sent = value.to(self._wire).contiguous().view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self._spec.stages)]
        dist.all_gather(parts, sent)
        return [part.view(value.dtype).to(self._device) for part in parts]

    def step(self, inputs: StepInputs, wants: StepWants) -> None:
        forward, routes = self._forward, []
        with torch.inference_mode():
            with forward.routes() if wants.routing else nullcontext() as chosen:
                hidden = forward.compute(inputs, forward.embed(inputs))
                if chosen is not None:
                    routes = [routes_from(*chosen(*part)) for part in wants.routing]
            logits = self._whole_logits(forward.logits_of_rows(hidden, wants.rows))
            if self._spec.index == 0:
                self._pipe.send(replace(answer(forward, logits, wants), routes=routes))

    def _whole_logits(self, own: Tensor) -> Tensor:
        """Some ranks have a few columns more than others."""
        widest = max(map(len, self._columns))
        parts = self._gather(F.pad(own, (0, widest - own.shape[1]))) if len(own) else [own] * len(self._columns)
        return torch.cat([part[:, : len(columns)] for part, columns in zip(parts, self._columns, strict=True)], -1)

    def prove(self, steps: Sequence[StepInputs], adapter_name: str | None = None) -> None:
        """Every rank raises if one finds a difference."""
        ids = [token for step in steps for token in step.ids]
        with torch.inference_mode():
            wanted = logits_of(self._model, torch.tensor([ids], device=self._device))[0]
            same = same_bits(paged_logits(self._forward, steps), wanted)
            if all(self._gather(torch.tensor([same], device=self._device))):
                return
        raise ExactnessError(
            f"{self._spec.model_class.__name__} has a part without an exact form; tensor=1, leaves={self._spec.leaves} names it"
        )
