"""Random batches for comparisons: ragged lengths, holes, empty and one-token rows, scales up to |δ| = 15; float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    trainer: Tensor
    rollout: Tensor
    current: Tensor
    advantages: Tensor  # [B, T]
    mask: Tensor  # bool [B, T]

    @property
    def float_mask(self) -> Tensor:
        return self.mask.to(self.trainer.dtype)

    @property
    def delta(self) -> Tensor:
        return self.trainer - self.rollout


def make(seed: int, *, empty_rows: bool = True, sequence_advantages: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows, width = integer(1, 7), integer(1, 40)
    scale = float(10 ** (uniform(1) * 5 - 4))  # 1e-4 … 10
    trainer = -uniform(rows, width) * 8
    gap = (normal(rows, width) * scale).clamp(-15, 15)
    gap[uniform(rows, width) < 0.1] = 0.0
    rollout = trainer - gap
    current = trainer + (normal(rows, width) * scale * 0.3).clamp(-4, 4)
    lengths = torch.randint(0 if empty_rows else 1, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths
    if integer(0, 2):
        mask = mask & (uniform(rows, width) < 0.8)
    if not empty_rows:
        mask[:, 0] = True
    if not mask.any():
        mask[0, 0] = True
    advantages = normal(rows, 1).expand(rows, width).clone() if sequence_advantages else normal(rows, width)
    return Batch(trainer=trainer, rollout=rollout, current=current, advantages=advantages, mask=mask)
