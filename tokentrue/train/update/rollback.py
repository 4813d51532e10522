"""What an update changed, so that it can be undone: master weights and the optimiser's moments, copied to host memory
before a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokentrue.json_types import JsonMapping
from tokentrue.train.update.precision import MasterWeights


class Snapshot:
    """This rank's part of the weights and moments at the time it is made, and the trainer's counters."""

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
