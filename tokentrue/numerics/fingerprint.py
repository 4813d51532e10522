"""What the bits depend on besides the inputs, as data: two sides with the same fingerprint compute the same bits."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import Ops
from tokentrue.numerics.patching.replacements import is_experts, is_router


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Every operator with its implementation, tile and dtype, the machine it was checked on, and what had to fall back.

    `fingerprint` is "exact:" and 16 hex digits over all of it; trainer and engine may call a result exact only when
    theirs are equal.
    """

    operators: Mapping[str, str]
    machine: Mapping[str, str]
    dtype: str
    fallbacks: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        text = json.dumps([dict(self.operators), dict(self.machine), self.dtype], sort_keys=True)
        return "exact:" + hashlib.sha256(text.encode()).hexdigest()[:16]

    def require(self, other: str | None) -> None:
        """Raise unless `other` (a completion's fingerprint, say) is ours."""
        if other != self.fingerprint:
            raise ExactnessError(
                f"fingerprints differ ({other} there, {self.fingerprint} here): the numbers may not be called exact"
            )


def machine_of(device: torch.device) -> dict[str, str]:
    if device.type == "cuda":
        import triton

        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        version = str(vars(triton)["__version__"])
        return {
            "torch": torch.__version__,
            "device": name,
            "capability": f"{capability[0]}.{capability[1]}",
            "triton": version,
        }
    return {
        "torch": torch.__version__,
        "device": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "library": library_of(torch.__config__.show()),
    }


def library_of(text: str) -> str:
    """The lines of torch's build description that name its matrix libraries."""
    return "; ".join(line.strip(" -") for line in text.splitlines() if "MKL" in line and "Build settings" not in line)


Linears = set[tuple[int, int, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """(K, N, bias) of every linear by dtype, routers and experts included, and (H, J, D) of every attention."""

    linears: Mapping[torch.dtype, Linears]
    heads: frozenset[tuple[int, int, int]]
    dtype: torch.dtype


def shapes_of(model: nn.Module) -> ModelShapes:
    linears: dict[torch.dtype, Linears] = defaultdict(set)
    heads: set[tuple[int, int, int]] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            linears[module.weight.dtype].add((module.in_features, module.out_features, module.bias is not None))
        parameters = dict(module.named_parameters(recurse=False))
        if is_experts(parameters):
            linears[parameters["down_proj"].dtype].update(expert_shapes(module, parameters))
        elif is_router(module) and not isinstance(module, nn.Linear | nn.Embedding):
            weight = parameters["weight"]
            linears[weight.dtype].add((weight.shape[1], weight.shape[0], "bias" in parameters))
            linears[torch.float32].add(
                (weight.shape[1], weight.shape[0], "bias" in parameters)
            )  # some routers compute in float32
        head_dim, config = head_size(module), getattr(module, "config", None)
        if isinstance(head_dim, int) and hasattr(module, "o_proj") and config is not None:
            heads.add((config.num_attention_heads, config.num_key_value_heads, head_dim))
    dtype = next(p for p in model.parameters() if p.dim() > 1).dtype
    return ModelShapes(linears=dict(linears), heads=frozenset(heads), dtype=dtype)


def expert_shapes(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Linears:
    sizes = [parameters[name].shape for name in ("gate_up_proj", "down_proj")]
    return {(k, n, False) if getattr(module, "is_transposed", False) else (n, k, False) for _, k, n in sizes}


def head_size(module: nn.Module) -> int | None:
    """Of an attention's keys: `head_dim`, or (latent attention) `qk_head_dim`."""
    return getattr(module, "qk_head_dim", getattr(module, "head_dim", None))


def contract_of(model: nn.Module, ops: Ops) -> Contract:
    """Run the self-test for the model's shapes and write down what holds."""
    return contract_for(shapes_of(model), ops, next(model.parameters()).device)


def contract_for(shapes: ModelShapes, ops: Ops, device: torch.device) -> Contract:
    fallbacks: list[str] = []
    for dtype, linears in shapes.linears.items():
        fallbacks += ops.self_test(
            linears=linears, heads=set(shapes.heads) if dtype == shapes.dtype else set(), dtype=dtype
        )
    name = str(shapes.dtype).removeprefix("torch.")
    return Contract(operators=dict(ops.contract()), machine=machine_of(device), dtype=name, fallbacks=tuple(fallbacks))
