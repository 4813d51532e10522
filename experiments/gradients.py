"""The gradient that a training step would take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokentrue.train import Trainer
from tokentrue.train.ranks import whole
from tokentrue.types import Sample


def flat_gradient(trainer: Trainer, groups: Sequence[Sequence[Sample]]) -> tuple[Tensor, dict[str, float]]:
    """The flat gradient of the whole batch, without a step, and its metrics."""
    with trainer.scoring():
        batch = trainer.recompute(trainer.rows(groups))
        (part,) = batch.parts
        merged, loss = trainer.accumulate(batch, part, is_first=True)
        found = {**trainer.measure(batch), **dict(merged), "loss": loss}
    gradients = [parameter.grad for parameter in trainer.masters.parameters]
    flat = torch.cat([whole(each).flatten() for each in gradients if each is not None])
    trainer.optimizer.zero_grad(set_to_none=True)
    return flat, found
