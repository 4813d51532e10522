"""`exact(model)`: the operators of a Hugging Face decoder replaced, module by module, by exact ones; undone on leaving, also on error.

Nothing process-wide is touched: a replaced `forward` sits on the module object, attention goes through transformers' own
AttentionInterface under our name, and parameters are read from the module at call time (FSDP2 gathers them just before). A module that
holds parameters and is not known here is refused by name; nothing runs inexactly by default.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS, ACT2FN
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from tokentrue.errors import ExactnessError
from tokentrue.numerics.cpu.elementwise import ACTIVATIONS
from tokentrue.numerics.devices import ops_for
from tokentrue.numerics.fingerprint import Contract, contract_of
from tokentrue.numerics.ops import AttentionSpec, Ops, Packed

ATTENTION = "tokentrue_exact"
SWITCHES = ("linear", "rms_norm", "activation", "rotary", "experts", "attention")
STATE = "_tokentrue_exact"
HARMLESS = (nn.Embedding, nn.Dropout, nn.Identity)


@dataclass(slots=True)
class State:
    """What `exact` hangs on the model while it is active."""

    ops: Ops
    contract: Contract


@contextmanager
def exact(model: nn.Module, *, ops: Ops | None = None, without: frozenset[str] | set[str] = frozenset()) -> Iterator[Contract]:
    """Run `model` on exact operators inside the block. Backward passes, too, belong inside it (checkpointing runs forward again).

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


Forward = Callable[..., Any]
Replacement = tuple[nn.Module, str, Forward]


def plan_of(model: nn.Module, ops: Ops) -> list[Replacement]:
    """The replacement of every module that computes; raises on the first that has no exact form."""
    plan: list[Replacement] = []
    for name, module in model.named_modules():
        known = replacement_of(name, module, ops)
        if known is not None:
            plan.append(known)
        elif own_parameters(module) and not isinstance(module, nn.Embedding):
            raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form; its parameters are {own_parameters(module)}")
        elif isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            raise ExactnessError(f"{name} drops activations with p={module.p}: call model.eval() or set the dropout to 0")
        elif not any(module.children()) and not isinstance(module, HARMLESS) and "RotaryEmbedding" not in type(module).__name__:
            raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form")
    return plan


def own_parameters(module: nn.Module) -> list[str]:
    return [name for name, value in module.named_parameters(recurse=False) if value is not None]


def replacement_of(name: str, module: nn.Module, ops: Ops) -> Replacement | None:
    if isinstance(module, nn.Linear):
        return module, "linear", lambda x, m=module: ops.linear(x, m.weight, m.bias)
    if type(module).__name__.endswith("RMSNorm"):
        eps, offset = norm_kind(name, module)
        return module, "rms_norm", lambda x, m=module: ops.rms_norm(x, m.weight, eps, unit_offset=offset)  # pyright: ignore
    if "RotaryEmbedding" in type(module).__name__:
        return rounded_rotary(name, module)
    kind = activation_kind(module)
    if kind is not None:
        return module, "activation", lambda x: ops.activation(x, kind)
    parameters = dict(module.named_parameters(recurse=False))
    if is_experts(parameters):
        return module, "experts", experts_forward(name, module, ops)
    if list(parameters) == ["weight"] and parameters["weight"].dim() == 2 and not isinstance(module, nn.Embedding):
        return module, "linear", router_forward(module, ops)
    return None


def norm_kind(name: str, module: nn.Module) -> tuple[float, bool]:
    """(eps, weight is an offset from 1), found by running the module's own code on a stand-in weight."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1:
        raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form: not an RMS norm over the last dimension")
    stand_in = copy.copy(module)
    generator = torch.Generator().manual_seed(0)
    size = weight.shape[0]
    x, w = torch.randn(3, size, generator=generator), torch.rand(size, generator=generator) + 0.5
    stand_in.__dict__ = {**module.__dict__, "_parameters": {"weight": nn.Parameter(w)}}
    stand_in.__dict__.pop("forward", None)
    with torch.no_grad():
        found = type(module).forward(stand_in, x)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    for offset, expected in ((False, normed * w), (True, normed * (1 + w))):
        if torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            return eps, offset
    raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form: its formula is neither x·w nor x·(1+w) over the RMS")


def rounded_rotary(name: str, module: Any) -> Replacement | None:
    """`model.bfloat16()` rounds the frequencies, a model loaded in bfloat16 keeps them in float32: always the latter, made anew."""
    if all(buffer.dtype == torch.float32 for buffer in module.buffers(recurse=False)):
        return None
    if not hasattr(module, "config"):
        raise ExactnessError(f"{name} ({type(module).__name__}) has rounded frequencies: load the model with dtype=, do not cast it")
    device = next(module.buffers(recurse=False)).device
    fresh = type(module)(module.config).to(device)
    return module, "rotary", fresh.forward


def activation_kind(module: nn.Module) -> str | None:
    """The name in ACT2FN under which transformers builds this module, if it is one of ours."""
    for kind in ACTIVATIONS:
        if kind in ACT2CLS and type(module) is type(ACT2FN[kind]):
            return kind
    if type(module).__module__ == "transformers.activations":
        raise ExactnessError(f"activation {type(module).__name__} has no exact form; known: {', '.join(ACTIVATIONS)}")
    return None


def is_experts(parameters: dict[str, nn.Parameter]) -> bool:
    return {"gate_up_proj", "down_proj"} <= parameters.keys() and parameters["gate_up_proj"].dim() == 3


def experts_forward(name: str, module: nn.Module, ops: Ops) -> Forward:
    extra = set(own_parameters(module)) - {"gate_up_proj", "down_proj"}
    plain = getattr(module, "is_concatenated", True) and not getattr(module, "is_transposed", False)
    kind = activation_kind(getattr(module, "act_fn", nn.Identity()))
    if extra or not plain or kind is None:
        what = f"with {sorted(extra)}" if extra else "in another layout or with another activation"
        raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form: experts {what}")

    def forward(hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        if ops.routes is not None:
            ops.routes.append(index)
        return ops.experts(hidden, index, weight, module.gate_up_proj, module.down_proj, kind)  # pyright: ignore

    return forward


class ExactLinears(TorchFunctionMode):
    """Inside one module's forward: F.linear on a bare parameter (a router) goes to the exact linear."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return self.ops.linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def router_forward(module: nn.Module, ops: Ops) -> Forward:
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExactLinears(ops):
            return original(module, *args, **kwargs)

    return forward


# ---- attention --------------------------------------------------------------------------------------------------------------------------
def attach_attention(model: nn.Module, ops: Ops, undo: ExitStack) -> None:
    AttentionInterface.register(ATTENTION, exact_attention)
    AttentionMaskInterface.register(ATTENTION, padding_mask)
    owners: list[Any] = [m for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")]
    configs = {id(m.config): m.config for m in owners}
    for config in configs.values():
        undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        config._attn_implementation = ATTENTION
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
            undo.callback(restore, module, STATE, module.__dict__.get(STATE))
            object.__setattr__(module, STATE, ops)


def padding_mask(*args: Any, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """None where nothing is padded, else the two-dimensional mask."""
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    return None if bool(attention_mask.all()) else attention_mask


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, packed: Packed | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [B,H,T,D] -> [B,T,H,D]: whole sequences from position 0, padded on either side or packed."""
    ops: Ops = module.__dict__[STATE]
    if dropout:
        raise ExactnessError(f"attention dropout {dropout} has no exact form: set it to 0 or call model.eval()")
    if kwargs.get("s_aux") is not None:
        raise ExactnessError("attention sinks have no exact form")
    if query.shape[2] != key.shape[2]:
        raise ExactnessError("exact(model) scores whole sequences; for generation with a cache use ExactEngine (here: use_cache=False)")
    spec = AttentionSpec(scale=scaling or query.shape[-1] ** -0.5, window=sliding_window, softcap=softcap)
    b, h, t, d = query.shape
    q, k, v = (x.transpose(1, 2).reshape(b * t, -1, d) for x in (query, key, value))
    if attention_mask is not None:
        return attend_unpadded(ops, q, k, v, attention_mask, spec).view(b, t, h, d), None
    packed = packed or packed_from_positions(kwargs.get("position_ids"), b, t) or Packed.of((t,) * b, query.device)
    return ops.attention(q, k, v, packed, spec).view(b, t, h, d), None


def attend_unpadded(ops: Ops, q: Tensor, k: Tensor, v: Tensor, mask_BT: Tensor, spec: AttentionSpec) -> Tensor:
    """Rows that are padding come back as zeros; real ones must be one run per sequence."""
    if mask_BT.dim() != 2:
        raise ExactnessError("exact attention knows padding masks [batch, tokens] and packed sequences, not a free 4-D mask")
    lengths = mask_BT.sum(-1)
    rows = mask_BT.reshape(-1).nonzero().squeeze(-1)
    packed = Packed.of(tuple(lengths.tolist()), q.device)
    out = ops.attention(q[rows], k[rows], v[rows], packed, spec)
    return torch.zeros_like(q).index_copy(0, rows, out)


def packed_from_positions(position_ids: Tensor | None, batch: int, tokens: int) -> Packed | None:
    """A single row whose positions start again at 0 is several sequences, as transformers reads it."""
    if position_ids is None or batch != 1 or position_ids.shape[-1] != tokens:
        return None
    starts = (position_ids.reshape(-1) == 0).nonzero().squeeze(-1).tolist()
    if len(starts) < 2:
        return None
    ends = [*starts[1:], tokens]
    return Packed.of(tuple(end - start for start, end in zip(starts, ends, strict=True)), position_ids.device)
