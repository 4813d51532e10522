"""One model over several processes that share every layer: tensor and expert parallelism, with the bits of one process.

Each rank has a part of the heads, of the MLP's values, of the experts and of the vocabulary, and the pages of its own
key heads; embeddings, norms and routers are whole everywhere. Ranks run the same steps. Where `numerics.leaves` joins
their parts, they gather them; rank 0 gathers the logits, samples and answers. The driver sends every rank the sampled
tokens with the next step, so no rank can see others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.engine.processes.pipeline import Pipeline, Stage, StageSpec, WeightRoutes, skeleton_of
from tokentrue.engine.proof import difference_of, paged_logits
from tokentrue.engine.runner import StepResult, StepWants, answer, routes_from
from tokentrue.engine.schedule import StepInputs
from tokentrue.errors import ExactnessError
from tokentrue.numerics import logits_of, same_bits
from tokentrue.numerics.leaves import COLUMNS, check_ranks, cut_evenly, cut_key_heads
from tokentrue.numerics.modules import is_experts
from tokentrue.numerics.ops import Ranks

BY_OUTPUT = ("q_proj.weight", "q_proj.bias", "gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias")
BY_KEY_HEAD = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
BY_INPUT = ("o_proj.weight", "mlp.down_proj.weight")
BY_EXPERT = ("experts.gate_up_proj", "experts.down_proj")


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
        if name.endswith(BY_OUTPUT + BY_EXPERT):
            return value.chunk(size)[stage]
        if name.endswith(BY_INPUT):
            return value.chunk(size, 1)[stage]
        if name.endswith(BY_KEY_HEAD):
            own, rows = cut_key_heads(self.key_heads, size)[stage], value.shape[0] // self.key_heads
            return value[own.start * rows : own.stop * rows]
        if name.startswith("lm_head."):
            own = cut_evenly(value.shape[0], size, COLUMNS)[stage]
            return value[own.start : own.stop]
        return value


class TensorRanks(Pipeline):
    """A `Runner` over several processes with a part of every layer of `model` each."""

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
            for name in ("gate_up_proj", "down_proj"):
                own = nn.Parameter(getattr(module, name).chunk(size)[index], requires_grad=False)
                setattr(module, name, own)
    return model


class Rank(Stage):
    """The driver calls the methods without an underscore."""

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
        forward, is_first = self._forward, self._spec.index == 0
        with torch.inference_mode():
            with forward.routes() if wants.routing else nullcontext() as chosen:
                hidden = forward.compute(inputs, forward.embed(inputs))
                parts = wants.routing if is_first and chosen is not None else []
                routes = [routes_from(*chosen(*part)) for part in parts] if chosen is not None else []
            logits = self._whole_logits(forward.logits_of_rows(hidden, wants.rows))
            if is_first:
                self._pipe.send(replace(answer(forward, logits, wants), routes=routes))

    def _whole_logits(self, own: Tensor) -> Tensor:
        """All columns; ranks may have a few columns more or less than others."""
        widest = max(map(len, self._columns))
        parts = self._gather(F.pad(own, (0, widest - own.shape[1]))) if len(own) else [own] * len(self._columns)
        return torch.cat([part[:, : len(columns)] for part, columns in zip(parts, self._columns, strict=True)], -1)

    def prove(self, steps: Sequence[StepInputs], adapter_name: str | None = None) -> None:
        """All ranks find a difference if one does: the search for it runs on all."""
        forward, model = self._forward, self._model
        ids = [token for step in steps for token in step.ids]
        with torch.inference_mode():
            wanted = logits_of(model, torch.tensor([ids], device=self._device))[0]
            same = same_bits(paged_logits(forward, steps), wanted)
            if all(bool(flag) for flag in self._gather(torch.tensor([same], device=self._device))):
                return
            where = difference_of(forward, model, steps)
        raise ExactnessError(
            f"{self._spec.model_class.__name__} has a part without an exact form; {where or 'seen on another rank'}"
        )
