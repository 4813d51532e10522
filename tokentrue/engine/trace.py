"""Where two forward passes part: the first operator, in order of computation, whose bits differ, and the first token
that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.engine.model.decoder import LAYOUTS, MIXERS, ROLES
from tokentrue.engine.model.forward import Forward
from tokentrue.numerics import logits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`operator` such as `layers.2.attention`; bits as integers of the first value that differs."""

    token: int
    operator: str
    engine: float
    trainer: float
    differing_tokens: int

    def __str__(self) -> str:
        return (
            f"first difference: token {self.token}, operator {self.operator}: engine {self.engine!r}, trainer {self.trainer!r} "
            f"({self.differing_tokens} tokens differ there)"
        )


def first_difference(engine: Mapping[str, Tensor], trainer: Mapping[str, Tensor]) -> Difference | None:
    """Both map operator -> [tokens, values], in order of computation; operators that one side does not tell are passed
    over."""
    for name, found in engine.items():
        wanted = trainer.get(name)
        if wanted is None:
            continue
        differs = found.view(torch.uint8).ne(wanted.contiguous().view(torch.uint8)).any(-1)
        if bool(differs.any()):
            token = int(differs.nonzero()[0])
            at = int((found[token] != wanted[token]).nonzero()[0]) if bool((found[token] != wanted[token]).any()) else 0
            return Difference(
                token=token, operator=name, engine=float(found[token, at]), trainer=float(wanted[token, at]),
                differing_tokens=int(differs.sum()),
            )  # fmt: skip
    return None


@contextmanager
def engine_trace(forward: Forward) -> Iterator[dict[str, Tensor]]:
    """Collects every operator's results inside the block, rows in order of computation."""
    found: dict[str, Tensor] = {}

    def collect(name: str, tensor: Tensor) -> None:
        found[name] = torch.cat((found[name], tensor)) if name in found else tensor.clone()

    forward.trace = collect
    try:
        yield found
    finally:
        forward.trace = None


def model_trace(model: Any, ids: list[int]) -> dict[str, Tensor]:
    """The same operators of one plain forward of the model (inside `exact`, or not, to see what that costs)."""
    found: dict[str, Tensor] = {}
    device = next(model.parameters()).device
    with ExitStack() as undo, torch.inference_mode():
        for name, module, pick in points(model):
            handle = module.register_forward_hook(keeper(found, name, pick))
            undo.callback(handle.remove)
        logits_of(model, torch.tensor([ids], device=device))
    for index, layer in enumerate(model.model.layers):
        if not has_projections(layer):
            continue
        pieces = [found.pop(f"layers.{index}.{part}") for part in ("q", "k", "v")]
        found[f"layers.{index}.qkv"] = torch.cat(pieces, -1)
    return found


Pick = Callable[[Any, Any], Tensor]


def keeper(found: dict[str, Tensor], name: str, pick: Pick) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found[name] = pick(args, output)[0].clone()

    return keep


def has_projections(layer: Any) -> bool:
    """Plain attention, whose queries, keys and values each come from one product."""
    return hasattr(layer, "self_attn") and hasattr(layer.self_attn, "k_proj")


def points(model: Any) -> Iterator[tuple[str, nn.Module, Pick]]:
    def first_input(args: Any, output: Any) -> Tensor:
        return args[0]

    def result(args: Any, output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else output

    for index, layer in enumerate(model.model.layers):
        name, children = f"layers.{index}", dict(layer.named_children())
        norms = LAYOUTS[frozenset(children) - MIXERS - {"mlp"}]
        yield from (
            (f"{name}.{role}", children[child], result) for role, child in zip(ROLES, norms, strict=True) if child
        )
        attention = children.get("self_attn")
        if attention is None:
            yield f"{name}.out", children["linear_attn"], result
        else:
            if has_projections(layer):
                yield from ((f"{name}.{part}", getattr(attention, f"{part}_proj"), result) for part in ("q", "k", "v"))
            yield f"{name}.attention", attention.o_proj, first_input
            yield f"{name}.out", attention.o_proj, result
        if hasattr(children["mlp"], "down_proj"):
            yield f"{name}.activation", children["mlp"].down_proj, first_input
        yield f"{name}.mlp", children["mlp"], result
    yield "norm", model.model.norm, result
    yield "logits", model.get_output_embeddings(), result
