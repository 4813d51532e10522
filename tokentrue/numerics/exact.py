"""`exact(model)`: replaces the operators of a Hugging Face decoder by exact ones; undone on exit, also on error.

No process-wide state changes: a replaced `forward` is set on the module object, and attention goes through
transformers' AttentionInterface under our name.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from operator import is_
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from tokentrue.errors import ExactnessError
from tokentrue.numerics.cpu import CpuOps
from tokentrue.numerics.leaves import check_leaves, check_parts, cut_heads, cut_shapes, is_row_parallel
from tokentrue.numerics.modules import Replacement, is_experts, is_router, plan_of, replace_attribute
from tokentrue.numerics.ops import AttentionSpec, Linears, ModelShapes, Ops, Packed
from tokentrue.records import record


@record
class Contract:
    """What the bits depend on besides the inputs: every operator with its implementation, the machine it was checked
    on, and the fallbacks. Two sides with the same fingerprint compute the same bits."""

    operators: Mapping[str, str]
    machine: Mapping[str, str]
    dtype: str
    fallbacks: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        text = json.dumps([dict(self.operators), dict(self.machine), self.dtype], sort_keys=True)
        return "exact:" + hashlib.sha256(text.encode()).hexdigest()[:16]

    def require(self, other: str | None) -> None:
        if other != self.fingerprint:
            raise ExactnessError(
                f"fingerprints differ ({other} there, {self.fingerprint} here): the numbers may not be called exact"
            )


def machine_of(device: torch.device) -> dict[str, str]:
    if device.type == "cuda":
        import triton

        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        found = {"device": name, "capability": "{}.{}".format(*capability), "triton": str(vars(triton)["__version__"])}
    else:
        built = torch.__config__.show().splitlines()
        found = {
            "device": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "library": "; ".join(line.strip(" -") for line in built if "MKL" in line and "Build settings" not in line),
        }
    return {"torch": torch.__version__, **found}


def shapes_of(model: nn.Module, leaves: int = 1) -> ModelShapes:
    """With leaves, also of the parts that any number of ranks computes."""
    linears: dict[torch.dtype, Linears] = defaultdict(set)
    heads, rows = set[tuple[int, int, int]](), set[tuple[int, int]]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            linears[module.weight.dtype].add((module.in_features, module.out_features, module.bias is not None))
            if leaves > 1:
                rows |= {(module.in_features, module.out_features)} if is_row_parallel(name) else set()
                for dtype, shape in cut_shapes(name, module, leaves):
                    linears[dtype].add(shape)
        if isinstance(module, nn.Conv3d):  # of patches
            n, k = module.weight.flatten(1).shape
            linears[module.weight.dtype].add((k, n, module.bias is not None))
        parameters = dict(module.named_parameters(recurse=False))
        if is_experts(module):
            for name in ("gate_up_proj", "down_proj"):
                _, n, k = parameters[name].shape
                shape = (n, k, False) if getattr(module, "is_transposed", False) else (k, n, False)
                linears[parameters["down_proj"].dtype].add(shape)
        elif is_router(module) and not isinstance(module, nn.Linear | nn.Embedding):
            weight = parameters["weight"]
            for dtype in (weight.dtype, torch.float32):  # some routers compute in float32
                linears[dtype].add((weight.shape[1], weight.shape[0], "bias" in parameters))
        head_dim, config = head_size(module), getattr(module, "config", None)
        if isinstance(head_dim, int) and hasattr(module, "o_proj") and config is not None:
            heads.update(cut_heads((config.num_attention_heads, config.num_key_value_heads, head_dim), leaves))
    dtype = next(p for p in model.parameters() if p.dim() > 1).dtype
    return ModelShapes(linears=dict(linears), heads=frozenset(heads), dtype=dtype, rows=frozenset(rows))


def head_size(module: nn.Module) -> int | None:
    return getattr(module, "qk_head_dim", getattr(module, "head_dim", None))


def contract_for(shapes: ModelShapes, ops: Ops, device: torch.device) -> Contract:
    fallbacks: list[str] = []
    for dtype, linears in shapes.linears.items():
        heads = set(shapes.heads) if dtype == shapes.dtype else set()
        if device.type == "cuda" and dtype != shapes.dtype:  # its leaves have a kernel
            linears = linears - {(k // ops.leaves, n, False) for k, n in shapes.rows}
        fallbacks += ops.self_test(linears=linears, heads=heads, dtype=dtype)
    name = str(shapes.dtype).removeprefix("torch.")
    operators = dict(ops.contract())
    if ops.leaves > 1:
        check_parts(ops, shapes, device)
        operators["row_linear"] = f"{ops.leaves} leaves of K, joined by a binary tree in float32, one rounding"
    return Contract(operators=operators, machine=machine_of(device), dtype=name, fallbacks=tuple(fallbacks))


ATTENTION = "tokentrue_exact"
OPS = "_tokentrue_ops"


@record
class AttentionParts:
    configs: tuple[Any, ...]
    modules: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        owned = (getattr(module, "config", None) for module in model.modules())
        configs = {id(config): config for config in owned if hasattr(config, "_attn_implementation")}
        modules = (
            module
            for module in model.modules()
            if (hasattr(module, "layer_idx") and hasattr(module, "o_proj")) or is_tower_attention(module)
        )
        return cls(configs=tuple(configs.values()), modules=tuple(modules))

    def attach(self, ops: Ops, undo: ExitStack) -> None:
        AttentionInterface.register(ATTENTION, exact_attention)
        AttentionMaskInterface.register(ATTENTION, padding_mask)
        for config in self.configs:
            undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = ATTENTION
        for module in self.modules:
            replace_attribute(module, OPS, ops, undo)


def is_tower_attention(module: nn.Module) -> bool:
    return hasattr(module, "qkv") and getattr(module, "is_causal", None) is False


def padding_mask(
    *args: object, kv_length: int, attention_mask: Tensor | None = None, **kwargs: object
) -> Tensor | None:
    """None if nothing is padded."""
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    return None if bool(attention_mask.all()) else attention_mask


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, packed: Packed | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [B,H,T,D] -> [B,T,H,D]: whole sequences from position 0, padded on either side or packed; or one image."""
    ops: Ops = module.__dict__[OPS]
    (b, h, t, d), narrow, mask = query.shape, value.shape[-1], attention_mask
    if dropout:
        raise ExactnessError(f"attention dropout {dropout} has no exact form: set it to 0 or call model.eval()")
    if t != key.shape[2]:
        raise ExactnessError(
            "exact(model) scores whole sequences; for generation with a cache use ExactEngine (here: use_cache=False)"
        )
    if narrow > d:
        raise ExactnessError(f"attention values of {narrow} per head are wider than its keys of {d}: no exact form")
    if mask is not None and mask.dim() != 2:
        raise ExactnessError(
            "exact attention knows padding masks [batch, tokens] and packed sequences, not a free 4-D mask"
        )
    spec = AttentionSpec(
        scale=scaling or d**-0.5, window=sliding_window, softcap=softcap, sinks=kwargs.get("s_aux"),
        causal=not is_tower_attention(module),
    )  # fmt: skip
    with torch._C.DisableTorchFunction():
        # Zero padding is safe: every column of the result has its own sum.
        value = F.pad(value, (0, d - narrow)) if narrow < d else value
        q, k, v = (x.transpose(1, 2).reshape(b * t, -1, d) for x in (query, key, value))
        if mask is not None:  # real rows are one run per sequence; padding rows are returned as zeros
            rows = mask.reshape(-1).nonzero().squeeze(-1)
            inside = ops.attention(q[rows], k[rows], v[rows], Packed.of(tuple(mask.sum(-1).tolist()), q.device), spec)
            out = torch.zeros_like(q).index_copy(0, rows, inside)
        else:
            packed = packed or packed_from_positions(kwargs.get("position_ids"), b, t)
            out = ops.attention(q, k, v, packed or Packed.of((t,) * b, q.device), spec)
        return out.view(b, t, h, d)[..., :narrow], None


def packed_from_positions(position_ids: Tensor | None, batch: int, tokens: int) -> Packed | None:
    """One row whose positions restart at 0 is several sequences, as transformers reads it."""
    if position_ids is None or batch != 1 or position_ids.shape[-1] != tokens:
        return None
    starts = (position_ids.reshape(-1) == 0).nonzero().squeeze(-1).tolist()
    if len(starts) < 2:
        return None
    return Packed.of(tuple(end - start for start, end in pairwise([*starts, tokens])), position_ids.device)


def on_device(device: torch.device | str) -> AbstractContextManager[object]:
    """Makes a GPU this thread's current one inside the block; CUDA keeps that setting per thread."""
    where = torch.device(device)
    return torch.cuda.device(where) if where.type == "cuda" else nullcontext()


def ops_for(device: torch.device | str, leaves: int = 1) -> Ops:
    """A fresh object each time: fallbacks belong to one model on one machine."""
    kind = torch.device(device).type
    if kind == "cuda":
        from tokentrue.numerics.triton import TritonOps  # machines without a GPU may not have triton

        ops: Ops = TritonOps()
    elif kind == "cpu":
        ops = CpuOps()
    else:
        raise ExactnessError(f"no exact operators for device {kind!r}; use cpu or cuda")
    ops.leaves = leaves
    return ops


STATE = "_tokentrue_exact"  # the active `Preparation`, inside an exact block
PREPARED = "_tokentrue_prepared"
PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
CONTAINERS = frozenset({dict, list, tuple, set})
# Attributes of every nn.Module that decide no operator; of `training`, only a dropout's does.
BOOKKEEPING = frozenset(nn.Module().__dict__) | {STATE, OPS, PREPARED}


@record(eq=False)
class Signature:
    """What plan and contract follow from: plain values are compared, all other objects are the same ones."""

    values: tuple[object, ...]
    objects: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        values, objects = list[object](), list[object]()
        stack, seen, configs = [model], set[int](), dict[int, Any]()
        while stack:  # `named_modules` costs more than the rest
            module = stack.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            kind, own = type(module), module.__dict__
            objects += (module, kind.forward)
            values += own["_modules"]
            stack += own["_modules"].values()
            if isinstance(module, nn.Dropout):
                values.append(module.training)
            for key, tensor in own["_parameters"].items():
                # Values are read at call time, so another parameter of the same form changes nothing here.
                values += (key,) if tensor is None else (key, type(tensor), tensor.shape, tensor.dtype, tensor.device)
            for key, tensor in own["_buffers"].items():  # rotary frequencies are compared with fresh ones
                values += (key, None if tensor is None or tensor.is_inference() else tensor._version)
                objects.append(tensor)
            for key in own.keys() - BOOKKEEPING:
                value = own[key]
                kind = type(value)  # asking a configuration for its class is slow
                if kind in PLAIN:
                    values += (key, value)
                elif kind in CONTAINERS:
                    values += (key, repr(value))
                else:
                    values.append(key)
                    objects.append(value)
                    if issubclass(kind, PreTrainedConfig):
                        configs[id(value)] = value
        values += (repr(vars(config)) for config in configs.values())
        return cls(values=tuple(values), objects=tuple(objects))

    def matches(self, other: Self) -> bool:
        same = len(self.objects) == len(other.objects) and all(map(is_, self.objects, other.objects))
        return same and self.values == other.values


@record(eq=False)
class Preparation:
    """Plan and contract, attached to the model after its first `exact`: entering again costs little."""

    signature: Signature
    ops: Ops
    plan: list[Replacement]
    attention: AttentionParts
    contract: Contract

    @classmethod
    def of(cls, model: nn.Module, ops: Ops, shapes: ModelShapes | None = None) -> Self:
        if ops.leaves != 1 and shapes is None:
            check_leaves(model, ops.leaves)
        plan, attention = plan_of(model, ops), AttentionParts.of(model)
        contract = contract_for(shapes or shapes_of(model, ops.leaves), ops, next(model.parameters()).device)
        return cls(signature=Signature.of(model), ops=ops, plan=plan, attention=attention, contract=contract)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled model has none: the plan is of this model's modules."""
        return type(None), ()

    def __deepcopy__(self, memo: object) -> None:
        return None


def prepare(model: nn.Module, leaves: int) -> Preparation:
    """The attached one, unless model, leaves or machine have changed."""
    device, known = next(model.parameters()).device, model.__dict__.get(PREPARED)
    if (
        known is None
        or known.ops.leaves != leaves
        or known.contract.machine != machine_of(device)
        or not known.signature.matches(Signature.of(model))
    ):
        known = Preparation.of(model, ops_for(device, leaves))
        model.__dict__[PREPARED] = known
    return known


@contextmanager
def exact(
    model: nn.Module, *, ops: Ops | None = None, leaves: int | None = None, shapes: ModelShapes | None = None
) -> Iterator[Contract]:
    """Runs `model` on exact operators inside the block; backward passes belong inside, too (checkpointing reruns
    forward).

    `leaves`: as many as an engine with tensor parallelism has (`engine.leaves`). `shapes`: of the whole model, if this
    is a part of one.
    """
    active: Preparation | None = model.__dict__.get(STATE)
    if active is not None:
        if leaves not in (None, active.ops.leaves):
            raise ExactnessError(f"leaves={leaves} inside an exact block of this model with leaves={active.ops.leaves}")
        yield active.contract
        return
    found = prepare(model, 1 if leaves is None else leaves) if ops is None else Preparation.of(model, ops, shapes)
    with ExitStack() as undo:
        for module, forward in found.plan:
            replace_attribute(module, "forward", forward, undo)
        found.attention.attach(found.ops, undo)
        replace_attribute(model, STATE, found, undo)
        yield found.contract
