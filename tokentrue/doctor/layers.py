"""The first layer whose output differs between the reference and the engine's own module, where that module is in this
process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.doctor.context import Examination
from tokentrue.doctor.findings import Finding, Verdict, cannot_tell

TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}  # relative, per layer


def locate_difference(exam: Examination, findings: Sequence[Finding], engine_model: Any) -> list[Finding]:
    """Only where the weights probe found a fault; the finding names a place, the cause is the weights probe's."""
    faulty = any(finding.verdict is Verdict.FAULT and finding.probe.startswith("weights") for finding in findings)
    name = "weights: first layer that differs"
    if not faulty:
        return []
    if engine_model is None:
        return [cannot_tell(name, "the engine's layers cannot be reached from here; --engine hf can be looked into")]
    place, size = first_difference(
        exam.reference.model, engine_model, exam.observations[0].token_ids, TOLERANCES.get(exam.dtype, 1e-4)
    )
    detail = (
        "no single layer differs: the difference is in what surrounds the layers" if not place else f"first in {place}"
    )
    return [
        Finding(probe=name, verdict=Verdict.CANNOT_TELL, figure=f"{size:.2g} relative" if place else "-", detail=detail)
    ]


def first_difference(reference: nn.Module, other: nn.Module, ids: Sequence[int], tolerance: float) -> tuple[str, float]:
    """The name of the first operator, in the order of execution, whose output differs by more than `tolerance`; "" if
    none does."""
    expected, found = outputs_of(reference, ids), outputs_of(other, ids)
    for name, value in expected.items():
        theirs = found.get(name)
        if theirs is None or theirs.shape != value.shape:
            return name, float("inf")
        size = float((theirs - value).norm() / value.norm().clamp(min=1e-12))
        if size > tolerance:
            return name, size
    return "", 0.0


@torch.no_grad()
def outputs_of(model: nn.Module, ids: Sequence[int]) -> dict[str, Tensor]:
    """The output of every operator (a module without children) of one forward pass, in the order of execution."""
    outputs: dict[str, Tensor] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor) and value.is_floating_point():
                outputs.setdefault(name, value.detach().float().cpu())

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(hook_for(name)) for name, module in leaves]
    try:
        model(torch.tensor([list(ids)], device=next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return outputs
