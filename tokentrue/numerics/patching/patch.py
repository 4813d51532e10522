"""`exact(model)`: the operators of a Hugging Face decoder replaced, module by module, by exact ones; undone on leaving,
also on error.

Nothing process-wide is touched: a replaced `forward` sits on the module object, attention goes through transformers'
own AttentionInterface under our name, and the code between modules may call the functions of `functions.py` alone. A
module that holds parameters and is not known here is refused by name; nothing runs inexactly by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from tokentrue.errors import ExactnessError
from tokentrue.numerics.delta import delta_forward, is_gated_delta
from tokentrue.numerics.devices import ops_for
from tokentrue.numerics.fingerprint import Contract, contract_of
from tokentrue.numerics.functions import guard, unguard
from tokentrue.numerics.ops import Ops
from tokentrue.numerics.patching.hf_attention import attach_attention
from tokentrue.numerics.patching.replacements import (
    CONTAINERS,
    HARMLESS,
    Replacement,
    is_router,
    own_parameters,
    replacement_of,
)

SWITCHES = (
    "linear",
    "rms_norm",
    "activation",
    "rotary",
    "router",
    "experts",
    "functions",
    "linear_attention",
    "attention",
)
LOOKED_AT = ("router", "rotary")
"""Kinds whose forward decides itself which of its torch calls are replaced."""
STATE = "_tokentrue_exact"


@dataclass(slots=True)
class State:
    """What `exact` hangs on the model while it is active."""

    ops: Ops
    contract: Contract


@contextmanager
def exact(
    model: nn.Module, *, ops: Ops | None = None, without: frozenset[str] | set[str] = frozenset()
) -> Iterator[Contract]:
    """Run `model` on exact operators inside the block. Backward passes, too, belong inside it (checkpointing runs
    forward again).

    `without` leaves some of SWITCHES as they were: for negative controls, never for training.
    """
    active: State | None = model.__dict__.get(STATE)
    if active is not None:
        yield active.contract
        return
    unknown = set(without) - set(SWITCHES)
    if unknown:
        raise ExactnessError(f"no operators {sorted(unknown)} to leave out; choose from {', '.join(SWITCHES)}")
    device = next(model.parameters()).device
    ops = ops or ops_for(device)
    plan = plan_of(model, ops)
    contract = contract_of(model, ops)
    with ExitStack() as undo:
        for module, kind, forward in plan:
            if kind not in without:
                undo.callback(restore, module, "forward", module.__dict__.get("forward"))
                object.__setattr__(module, "forward", forward)
        if "attention" not in without:
            attach_attention(model, ops, undo)
        object.__setattr__(model, STATE, State(ops=ops, contract=contract))
        undo.callback(restore, model, STATE, None)
        yield contract


def restore(module: nn.Module, name: str, previous: Any) -> None:
    if previous is None:
        module.__dict__.pop(name, None)
    else:
        object.__setattr__(module, name, previous)


def plan_of(model: nn.Module, ops: Ops) -> list[Replacement]:
    """The replacement of every module that computes; raises on the first that has no exact form."""
    plan: list[Replacement] = []
    whole: list[str] = []  # modules replaced with all that is in them
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in whole):
            continue
        if is_gated_delta(module):
            whole.append(name)
            plan.append((module, "linear_attention", unguard(delta_forward(name, module, ops))))
            continue
        known = replacement_of(name, module, ops)
        if known is not None:
            plan.append((known[0], known[1], known[2] if known[1] in LOOKED_AT else unguard(known[2])))
        elif (
            own_parameters(module)
            and not isinstance(module, nn.Embedding)
            and not is_router(module)
            and not has_sinks_alone(module)
        ):
            raise ExactnessError(
                f"{name} ({type(module).__name__}) has no exact form; its parameters are {own_parameters(module)}"
            )
        elif isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            raise ExactnessError(
                f"{name} drops activations with p={module.p}: call model.eval() or set the dropout to 0"
            )
        elif has_own_code(module):
            if not any(module.children()) and not is_router(module):
                raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form")
            if ".layers." in f".{name}":
                plan.append((module, "functions", guard(name, ops, module.forward)))
    return plan


def has_sinks_alone(module: nn.Module) -> bool:
    """An attention whose only parameters are its sinks: they come to `exact_attention` as `s_aux`."""
    return own_parameters(module) == ["sinks"] and hasattr(module, "o_proj")


def has_own_code(module: nn.Module) -> bool:
    """Neither a container nor a leaf that only moves values."""
    return not isinstance(module, (*HARMLESS, *CONTAINERS)) and "RotaryEmbedding" not in type(module).__name__
