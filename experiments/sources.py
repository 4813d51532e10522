"""Where mismatch comes from: ways in which a rollout's weights or arithmetic differ from the trainer's. All of them
exist in the field.

A source turns the trainer's weights into the weights that the rollout engine holds. The engine itself is exact in every
arm, so that the source is the only difference there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from tokentrue.errors import ConfigError
from tokentrue.protocols import WeightSink

Weights = Iterable[tuple[str, Tensor]]


def quantise(weight: Tensor, bits: int) -> Tensor:
    """Symmetric rounding to `bits` bits with one scale per output row, as weight-only quantised engines do."""
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / top
    return (weight / scale).round().clamp(-top, top) * scale


def fp8(weight: Tensor) -> Tensor:
    """float8 e4m3 with one scale per output row."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def bf16(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).to(weight.dtype)


SOURCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda weight: weight,
    "bf16": bf16,
    "fp8": fp8,
    "int8": lambda weight: quantise(weight, 8),
    "int6": lambda weight: quantise(weight, 6),
    "int5": lambda weight: quantise(weight, 5),
    "int4": lambda weight: quantise(weight, 4),
    "int3": lambda weight: quantise(weight, 3),
}


def rollout_weights(weights: Weights, source: str) -> Iterator[tuple[str, Tensor]]:
    """The engine's weights: matrices through the source, norms as they are."""
    if source not in SOURCES:
        raise ConfigError(f"no source of mismatch {source!r}; choose one of {', '.join(SOURCES)}")
    change = SOURCES[source]
    for name, weight in weights:
        yield name, change(weight) if weight.dim() >= 2 else weight


class SourceSink:
    """A weight sink that passes weights on through a source of mismatch."""

    def __init__(self, sink: WeightSink, source: str) -> None:
        self._sink = sink
        self._source = source

    async def publish(self, weights: Weights, *, version: int) -> None:
        with torch.no_grad():
            await self._sink.publish(rollout_weights(weights, self._source), version=version)
