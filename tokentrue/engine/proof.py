"""Proof at load: the paged forward equals the model's own, bit for bit, on prefill, chunk and decode.

If not, reports the first operator that differs and the first token that shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.engine.adapters import Adapter, attach_adapter
from tokentrue.engine.decoder import LAYOUTS, MIXERS, ROLES, body_of
from tokentrue.engine.forward import Forward
from tokentrue.engine.schedule import StepInputs
from tokentrue.errors import ExactnessError
from tokentrue.numerics import logits_of, same_bits
from tokentrue.records import record

PIECES = (77, 61, 1, 1, 1)
Args = tuple[Tensor, ...]
Output = Tensor | tuple[Tensor, ...]
Pick = Callable[[Args, Output], Tensor]


def prove(forward: Forward, model: Any, steps: Sequence[StepInputs], adapter: Adapter | None = None) -> None:
    """Raises ExactnessError with the first differing position. `steps` are pieces of one sequence."""
    with torch.inference_mode():
        with nullcontext() if adapter is None else attach_adapter(model, forward.ops, adapter):
            wanted = model_logits(model, steps, forward.device)
        found = paged_logits(forward, steps)
    if same_bits(found, wanted):
        return
    if adapter is not None:
        raise ExactnessError(f"adapter {adapter.name!r}: engine and trainer forwards differ in bits")
    where = difference_of(forward, model, steps)
    raise ExactnessError(f"{type(model).__name__} has a part without an exact form; {where}")


def model_logits(model: Any, steps: Sequence[StepInputs], device: torch.device) -> Tensor:
    ids = [token for step in steps for token in step.ids]
    images = steps[0].images[0].seen(len(ids)) if steps[0].images and steps[0].images[0] is not None else None
    return logits_of(model, torch.tensor([ids], device=device), images=images)[0]


def paged_logits(forward: Forward, steps: Sequence[StepInputs]) -> Tensor:
    return torch.cat([forward.step(step, range(step.rows)) for step in steps])


@record
class Difference:
    """`operator` such as `layers.2.attention`."""

    token: int
    operator: str
    engine: float
    trainer: float
    differing_tokens: int

    def __str__(self) -> str:
        values = f"engine {self.engine!r}, trainer {self.trainer!r} ({self.differing_tokens} tokens differ there)"
        return f"first difference: token {self.token}, operator {self.operator}: {values}"


def difference_of(forward: Forward, model: Any, steps: Sequence[StepInputs]) -> Difference | None:
    engine: dict[str, Tensor] = {}

    def collect(name: str, tensor: Tensor) -> None:
        engine[name] = torch.cat((engine[name], tensor)) if name in engine else tensor.clone()

    forward.trace = collect
    try:
        paged_logits(forward, steps)
    finally:
        forward.trace = None
    return first_difference(engine, model_trace(model, steps))


def first_difference(engine: Mapping[str, Tensor], trainer: Mapping[str, Tensor]) -> Difference | None:
    """Both map operator -> [tokens, values] in order of computation; skips operators that one side lacks."""
    for name, found in engine.items():
        wanted = trainer.get(name)
        if wanted is None:
            continue
        differs = found.view(torch.uint8).ne(wanted.contiguous().view(torch.uint8)).any(-1)
        if bool(differs.any()):
            token = int(differs.nonzero()[0])
            unequal = (found[token] != wanted[token]).nonzero()
            at = int(unequal[0]) if len(unequal) else 0
            return Difference(
                token=token, operator=name, engine=float(found[token, at]), trainer=float(wanted[token, at]),
                differing_tokens=int(differs.sum()),
            )  # fmt: skip
    return None


def model_trace(model: Any, steps: Sequence[StepInputs]) -> dict[str, Tensor]:
    """The same operators in one plain forward of the model (inside `exact` or not)."""
    found: dict[str, Tensor] = {}

    def keep(name: str, pick: Pick, module: nn.Module, args: Args, output: Output) -> None:
        found[name] = pick(args, output)[0].clone()

    with ExitStack() as undo, torch.inference_mode():
        for name, module, pick in points(model):
            undo.callback(module.register_forward_hook(partial(keep, name, pick)).remove)
        model_logits(model, steps, next(model.parameters()).device)
    for index in range(len(body_of(model).layers)):
        if f"layers.{index}.q" in found:
            pieces = [found.pop(f"layers.{index}.{part}") for part in ("q", "k", "v")]
            found[f"layers.{index}.qkv"] = torch.cat(pieces, -1)
    return found


def points(model: Any) -> Iterator[tuple[str, nn.Module, Pick]]:
    def first_input(args: Args, output: Output) -> Tensor:
        return args[0]

    def result(args: Args, output: Output) -> Tensor:
        return output[0] if isinstance(output, tuple) else output

    for index, layer in enumerate(body_of(model).layers):
        name, children = f"layers.{index}", dict(layer.named_children())
        norms = zip(ROLES, LAYOUTS[frozenset(children) - MIXERS - {"mlp"}], strict=True)
        yield from ((f"{name}.{role}", children[child], result) for role, child in norms if child)
        attention = children.get("self_attn")
        if attention is None:
            yield f"{name}.out", children["linear_attn"], result
        else:
            if hasattr(attention, "k_proj"):  # queries, keys and values each come from one product
                yield from ((f"{name}.{part}", getattr(attention, f"{part}_proj"), result) for part in ("q", "k", "v"))
            yield f"{name}.attention", attention.o_proj, first_input
            yield f"{name}.out", attention.o_proj, result
        if hasattr(children["mlp"], "down_proj"):
            yield f"{name}.activation", children["mlp"].down_proj, first_input
        yield f"{name}.mlp", children["mlp"], result
    yield "norm", body_of(model).norm, result
    yield "logits", model.get_output_embeddings(), result
