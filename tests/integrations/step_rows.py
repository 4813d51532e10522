"""Rows and weights for the whole-step comparisons: recorded log-probabilities that are a little off, a policy that left
its reference."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.train.rows import groups_for, small_model
from tokentrue.mismatch import LossConfig
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.types import Sample

GROUPS, SIZE = 3, 4
PROMPT = 3  # given tokens at the start of every row of `groups_for`
# AdamW's first step is lr · g / (|g| + eps): with the usual eps of 1e-8 it turns the rounding of a gradient of 1e-8
# into a third of lr.
OPTIM = OptimConfig(lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0, clip_norm=1.0)


def policy() -> Any:
    """The shipped model, moved away from its own weights: a KL penalty against those has a gradient."""
    model = small_model()
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * parameter.abs().mean() * torch.randn(parameter.shape, generator=chance))
    return model


def rows() -> list[list[Sample]]:
    """Given tokens in the middle of every completion; the sampler's log-probabilities are off by 0.2 in the mean
    square."""
    chance = random.Random(7)
    found = groups_for(policy(), groups=GROUPS, size=SIZE, seed=3)
    return [
        [
            replace(
                sample,
                rollout_logprobs=[
                    None if x is None else min(0.0, x + chance.gauss(0, 0.2)) for x in sample.rollout_logprobs
                ],
            )
            for sample in group
        ]
        for group in found
    ]


def our_step(loss: LossConfig, *, updates: int, groups: list[list[Sample]], **train: Any) -> dict[str, torch.Tensor]:
    """Parameters after one step of `updates` optimiser updates on the same rows."""
    settings: Mapping[str, Any] = {
        "baseline": "dr_grpo",
        "exact": False,
        "micro_tokens": 256,
        "epochs": updates,
        **train,
    }
    trainer = Trainer(policy(), config=TrainConfig(**settings), optim=OPTIM, loss=loss, reference=small_model())
    trainer.step(groups)
    return {name: value.detach().clone() for name, value in trainer.weights()}


def distance(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any parameter."""
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
