"""Master weights: the optimiser works in float32 whatever the model computes in.

A bfloat16 weight of 0.05 moves in steps of 2.4e-4; an update of 1e-6 is lost in it. So a model in bfloat16 or float16
gets a float32 copy of every parameter, which collects the gradients and takes the updates. The model's own parameters
are the copy rounded: what is scored with and published, bit for bit what the engine has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokentrue.json_types import JsonMapping

START_SCALE = 2.0**15
GROW_AFTER = 200  # updates without overflow


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling for float16; a constant 1 for every other dtype."""

    value: float = 1.0
    good: int = 0
    is_fixed: bool = True

    @staticmethod
    def of(dtype: torch.dtype) -> LossScale:
        return LossScale(value=START_SCALE, is_fixed=False) if dtype == torch.float16 else LossScale()

    def adjust(self, *, overflow: bool) -> None:
        if self.is_fixed:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value = max(1.0, self.value / 2)
        elif self.good >= GROW_AFTER:
            self.value, self.good = self.value * 2, 0


class MasterWeights:
    """A float32 model is its own master."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._pairs = [
            (name, own, own if own.dtype == torch.float32 else nn.Parameter(own.detach().float()))
            for name, own in named
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [master for _, _, master in self._pairs]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, master) for name, _, master in self._pairs)

    def copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, master) for name, own, master in self._pairs if master is not own)

    @torch.no_grad()
    def collect(self, *, unscale: float = 1.0) -> None:
        """Adds the model's gradients to the masters', in float32, and clears them."""
        for _, own, master in self._pairs:
            if own.grad is None:
                continue
            if master is own:
                continue
            found = own.grad.float() / unscale
            master.grad = found if master.grad is None else master.grad.add_(found)
            own.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        for _, own, master in self._pairs:
            if master is not own:
                own.copy_(master)

    def gradient(self) -> Iterator[Tensor]:
        for _, _, master in self._pairs:
            yield torch.zeros_like(master) if master.grad is None else master.grad


class Snapshot:
    """This rank's part of weights and moments, in host memory, and the trainer's counters."""

    def __init__(self, masters: MasterWeights, optimizer: torch.optim.Optimizer, counters: JsonMapping) -> None:
        self.counters = counters
        self._weights = [copy_to_host(parameter) for parameter in masters.parameters]
        self._moments = [
            {name: copy_to_host(value) for name, value in optimizer.state[p].items()} for p in masters.parameters
        ]

    @torch.no_grad()
    def restore(self, masters: MasterWeights, optimizer: torch.optim.Optimizer) -> None:
        """Bit for bit. Moments that did not exist yet are dropped."""
        for parameter, weight, moments in zip(masters.parameters, self._weights, self._moments, strict=True):
            own_part(parameter).copy_(weight)
            if not moments:
                optimizer.state.pop(parameter, None)
            for name, value in moments.items():
                own_part(optimizer.state[parameter][name]).copy_(value)
        masters.write_back()


def copy_to_host(value: Tensor | nn.Parameter) -> Tensor:
    return own_part(value.detach()).to("cpu", copy=True)


def own_part(value: Tensor) -> Tensor:
    """The shard that this rank holds of a sharded tensor."""
    local = getattr(value, "to_local", None)
    return value if local is None else local()
