"""The proof at load: this engine's forward over pages equals the model's own forward, bit for bit, on prefill, chunk
and decode."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tokentrue.engine.model.adapters import Adapter, attach_adapter
from tokentrue.engine.model.forward import Forward
from tokentrue.engine.model.step import StepInputs
from tokentrue.engine.trace import Difference, engine_trace, first_difference, model_trace
from tokentrue.errors import ExactnessError
from tokentrue.numerics import logits_of, same_bits

PIECES = (77, 61, 1, 1, 1)


def prove(forward: Forward, model: Any, steps: Sequence[StepInputs], adapter: Adapter | None = None) -> None:
    """Raise ExactnessError with the first position that differs. `steps` are pieces of one sequence, with the loaded
    `adapter` where one is given."""
    ids = [token for step in steps for token in step.ids]
    with torch.inference_mode():
        with nullcontext() if adapter is None else attach_adapter(model, forward.ops, adapter):
            wanted = logits_of(model, torch.tensor([ids], device=forward.device))[0]
        found = paged_logits(forward, steps)
    if same_bits(found, wanted):
        return
    if adapter is not None:
        raise ExactnessError(f"adapter {adapter.name!r}: engine and trainer forwards differ in bits")
    raise ExactnessError(
        f"{type(model).__name__} has a part without an exact form; {difference_of(forward, model, steps)}"
    )


def difference_of(forward: Forward, model: Any, steps: Sequence[StepInputs]) -> Difference | None:
    with engine_trace(forward) as engine:
        paged_logits(forward, steps)
    return first_difference(engine, model_trace(model, [token for step in steps for token in step.ids]))


def paged_logits(forward: Forward, steps: Sequence[StepInputs]) -> Tensor:
    """Logits of every position, step by step through the pages."""
    return torch.cat([forward.step(step, range(step.rows)) for step in steps])
