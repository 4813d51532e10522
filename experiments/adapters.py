"""LoRA adapters in the lab: trained alone, and handed to the engine beside the base weights or merged into them.

Merging adds B·A·scale to a weight and rounds the sum to the weight's dtype, as peft's `merge_adapter` does; the
trainer, which keeps the two apart, computes another policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tokentrue.engine.adapters import TARGETS, merge_low_rank, read_pairs
from tokentrue.errors import ConfigError
from tokentrue.providers.exact import ExactProvider

NAME = "policy"  # of the adapter in the engine
SETTINGS = {"r": 16, "lora_alpha": 32}
PREFIX = "base_model.model."


def add_adapter(model: nn.Module) -> nn.Module:
    """The model with an adapter on every linear layer of its decoder; nothing else is trained. B is 0: it starts as the
    model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("arms with adapters need peft: pip install peft") from error
    return get_peft_model(model, LoraConfig(**SETTINGS, target_modules=list(TARGETS), lora_dropout=0.0))  # type: ignore[arg-type]


class AdapterSink:
    """A weight sink that hands the adapter over alone."""

    def __init__(self, provider: ExactProvider) -> None:
        self._provider = provider

    async def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        state = {name: weight.clone() for name, weight in weights if ".lora_" in name}
        await asyncio.to_thread(self._provider.engine.load_adapter, NAME, state, config=SETTINGS, version=version)


class MergingSink:
    """A weight sink that merges the adapter into the base weights and hands over the sums."""

    def __init__(self, provider: ExactProvider) -> None:
        self._provider = provider

    async def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        with torch.no_grad():
            await self._provider.publish(merged_weights(dict(weights)), version=version)


def merged_weights(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Under the names that the model has without its adapter."""
    pairs = read_pairs(NAME, {name: weight for name, weight in weights.items() if ".lora_" in name}, SETTINGS)
    for name, weight in weights.items():
        if ".lora_" not in name:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            low = pairs.get(plain.removesuffix(".weight"))
            yield plain, weight if low is None else merge_low_rank(weight, low)
