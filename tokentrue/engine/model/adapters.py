"""LoRA adapters beside the base weights: read, checked and applied unmerged, in the order of operations that `exact` gives a peft model.

y = linear(x, W) + linear(linear(x, A), B) * scale, summed in the wider of both dtypes and rounded once (`Ops.add_low_rank`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokentrue.engine.model.decoder import Attention, Decoder, Dense
from tokentrue.errors import EngineError, ExactnessError, FileFormatError
from tokentrue.numerics import LowRank, Ops
from tokentrue.numerics.functions import unguard

TARGETS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn", "gate_proj": "mlp", "up_proj": "mlp",
           "down_proj": "mlp"}  # fmt: skip
NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight$")
PLACE = re.compile(r"(?:^|\.)layers\.(\d+)\.(self_attn|mlp)\.(\w+)$")
REFUSED = {"use_dora": "DoRA", "lora_bias": "biases in B", "layer_replication": "replicated layers", "fan_in_fan_out": "transposed weights"}

AdapterSource = str | Path | Mapping[str, Any]
AdapterConfig = Mapping[str, Any]
_loads = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One loaded adapter. `prefix` starts the names of its cache blocks, so that no other weights share them."""

    name: str
    config: AdapterConfig
    weights: Mapping[tuple[int, str], LowRank]  # (layer, projection)
    version: int | None
    prefix: bytes


def read_adapter(
    name: str, source: AdapterSource, config: AdapterConfig | None, *, version: int | None, device: torch.device
) -> Adapter:
    """From a directory that peft saved, or from a state dict with `config` (r, lora_alpha, …: a dict or a peft LoraConfig)."""
    if isinstance(source, str | Path):
        state, config = read_directory(Path(source))
    else:
        state = source
    if config is None:
        raise EngineError(f"adapter {name!r}: a state dict needs config= with r and lora_alpha the first time it is loaded")
    config = cast("AdapterConfig", config if isinstance(config, Mapping) else cast(Any, config).to_dict())
    weights: dict[tuple[int, str], LowRank] = {}
    for module, low in read_pairs(name, state, config).items():
        found = PLACE.search(module)
        if found is None or TARGETS.get(found[3]) != found[2]:
            raise ExactnessError(f"adapter {name!r}: {module} has no exact form; adapters may change {', '.join(TARGETS)} of a layer")
        a, b = (factor.to(device).contiguous() for factor in (low.a, low.b))
        weights[int(found[1]), found[3]] = LowRank(a=a, b=b, scale=low.scale)
    return Adapter(name=name, config=config, weights=weights, version=version, prefix=f"adapter {next(_loads)}".encode())


def read_directory(path: Path) -> tuple[Mapping[str, Any], AdapterConfig]:
    from safetensors.torch import load_file

    if not (path / "adapter_config.json").is_file() or not (path / "adapter_model.safetensors").is_file():
        raise FileFormatError(f"{path} holds no adapter_config.json and adapter_model.safetensors, as peft's save_pretrained writes them")
    return load_file(path / "adapter_model.safetensors"), json.loads((path / "adapter_config.json").read_text())


def read_pairs(name: str, state: Mapping[str, Any], config: AdapterConfig) -> dict[str, LowRank]:
    """A and B of each adapted linear layer, by the layer's name in the model without the adapter."""
    for key, what in REFUSED.items():
        if config.get(key):
            raise ExactnessError(f"adapter {name!r} uses {what} ({key}), which has no exact form")
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        found = NAME.match(key)
        if found is None:
            raise ExactnessError(f"adapter {name!r}: {key} has no exact form; it is not lora_A or lora_B of a linear layer")
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        pairs.setdefault(found[1], {})[found[2]] = value.detach()
    if not pairs:
        raise EngineError(f"adapter {name!r} holds no weights")
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise EngineError(f"adapter {name!r}: {module} has lora_{'/'.join(pair)} alone; send A and B")
    return {
        module: LowRank(a=pair["A"], b=pair["B"], scale=adapter_scale(config, module, pair["A"].shape[0])) for module, pair in pairs.items()
    }


def adapter_scale(config: AdapterConfig, module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) under rslora; alpha by the first key of peft's alpha_pattern that matches the module's name."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def merge_low_rank(weight: Tensor, low: LowRank) -> Tensor:
    """W + B·A·scale, rounded once to the dtype of W."""
    return (weight + (low.b.float() @ low.a.float()) * low.scale).to(weight.dtype)


def check_shapes(adapter: Adapter, decoder: Decoder, modules: Mapping[tuple[int, str], nn.Linear], first: int = 0) -> None:
    """`first` is the number of the decoder's first layer in the whole model."""
    for (layer, projection), low in adapter.weights.items():
        module = modules.get((layer, projection))
        if module is None or not (is_dense(decoder, layer) if TARGETS[projection] == "mlp" else has_plain_attention(decoder, layer)):
            raise ExactnessError(f"adapter {adapter.name!r}: layer {first + layer} has no plain {projection}; it cannot be adapted exactly")
        wanted, found = (module.in_features, module.out_features), (low.a.shape[1], low.b.shape[0])
        if wanted != found or low.a.shape[0] != low.b.shape[1]:
            where = f"layer {first + layer} {projection}"
            raise EngineError(f"adapter {adapter.name!r}: {where} maps {found[0]} to {found[1]}, the model {wanted}")


def is_dense(decoder: Decoder, layer: int) -> bool:
    return isinstance(decoder.layers[layer].mlp, Dense)


def has_plain_attention(decoder: Decoder, layer: int) -> bool:
    return isinstance(decoder.layers[layer].mixer, Attention)


def shapes_by_dtype(adapter: Adapter) -> dict[torch.dtype, set[tuple[int, int, bool]]]:
    """(K, N, bias) of every product of the adapter."""
    shapes: dict[torch.dtype, set[tuple[int, int, bool]]] = {}
    for low in adapter.weights.values():
        for factor in (low.a, low.b):
            shapes.setdefault(factor.dtype, set()).add((factor.shape[1], factor.shape[0], False))
    return shapes


def check_products(adapter: Adapter, ops: Ops) -> None:
    """Has `ops` choose products for the adapter's shapes."""
    for dtype, linears in shapes_by_dtype(adapter).items():
        ops.self_test(linears=linears, heads=set(), dtype=dtype)


def linear_modules(model: Any) -> dict[tuple[int, str], nn.Linear]:
    """The linears of the model's layers that an adapter may change."""
    found: dict[tuple[int, str], nn.Linear] = {}
    for index, layer in enumerate(model.model.layers):
        for projection, parent in TARGETS.items():
            module = getattr(getattr(layer, parent, None), projection, None)
            if isinstance(module, nn.Linear):
                found[index, projection] = module
    return found


@contextmanager
def attach_adapter(model: Any, ops: Ops, adapter: Adapter) -> Iterator[None]:
    """Inside the block the model's own forward computes with the adapter, as `exact` makes a peft model do."""
    check_products(adapter, ops)
    modules = linear_modules(model)
    before = {at: modules[at].__dict__.get("forward") for at in adapter.weights}

    def forward_of(module: nn.Linear, low: LowRank) -> Any:
        return unguard(lambda x: ops.add_low_rank(ops.linear(x, module.weight, module.bias), x, low))

    try:
        for at, low in adapter.weights.items():
            object.__setattr__(modules[at], "forward", forward_of(modules[at], low))
        yield
    finally:
        for at, forward in before.items():
            if forward is None:
                modules[at].__dict__.pop("forward", None)
            else:
                object.__setattr__(modules[at], "forward", forward)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Token rows of a step that one adapter changes."""

    adapter: Adapter
    rows: Tensor

    def apply(self, ops: Ops, layer: int, x: Tensor, y: Tensor, columns: Sequence[tuple[str, int, int]]) -> None:
        """Add the adapter's part to y, in place; `columns` are (projection, first, end) of the merged product."""
        for projection, start, end in columns:
            low = self.adapter.weights.get((layer, projection))
            if low is not None:
                part = y[:, start:end].index_select(0, self.rows)
                y[self.rows, start:end] = ops.add_low_rank(part, x.index_select(0, self.rows), low)
