"""LoRA adapters in the lab: trained alone, and handed to the engine beside the base weights or merged into them.

Merging adds B·A·scale to a weight and rounds the sum to the weight's dtype, as peft's `merge_adapter` does; the trainer, which keeps the
two apart, computes another policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError
from tokentrue.providers.exact import ExactProvider

NAME = "policy"  # of the adapter in the engine
RANK, ALPHA = 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def add_adapter(model: nn.Module) -> nn.Module:
    """The model with an adapter on every linear layer of its decoder; nothing else is trained. B is 0: it starts as the model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("arms with adapters need peft: pip install peft") from error
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), lora_dropout=0.0)
    return get_peft_model(model, settings)  # type: ignore[arg-type]


class AdapterSink:
    """A weight sink that hands the adapter over alone."""

    def __init__(self, provider: ExactProvider) -> None:
        self._provider = provider

    async def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        state = {name: weight.clone() for name, weight in weights if ".lora_" in name}
        settings = {"r": RANK, "lora_alpha": ALPHA}
        await asyncio.to_thread(self._provider.engine.load_adapter, NAME, state, config=settings, version=version)


class MergingSink:
    """A weight sink that merges the adapter into the base weights and hands over the sums."""

    def __init__(self, provider: ExactProvider) -> None:
        self._provider = provider

    async def publish(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        with torch.no_grad():
            await self._provider.publish(merged_weights(dict(weights)), version=version)


def merged_weights(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Under the names that the model has without its adapter."""
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        layer = name.removesuffix(".base_layer.weight")
        low = weights.get(f"{layer}.lora_A.default.weight")
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        if low is None:
            yield plain, weight
        else:
            change = (weights[f"{layer}.lora_B.default.weight"] @ low) * (ALPHA / RANK)
            yield plain, (weight + change).to(weight.dtype)
