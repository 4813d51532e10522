"""The exact form of each kind of Hugging Face module, and the closed list of torch functions for the code between them.

Under `exact` each torch call of glue code goes through `ExactFunctions`: products, and elementwise functions whose bits
depend on an element's position in memory, are computed by the exact operators; listed functions pass, because they move
or select values or `CpuOps.self_test` checks them; any other is refused by name. Parameters are read at call time:
FSDP2 gathers them just before.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    resolve_name,
)
from transformers.activations import ACT2CLS, ACT2FN

from tokentrue.errors import ExactnessError
from tokentrue.json_types import read_table
from tokentrue.numerics.cpu.arithmetic import ACTIVATIONS
from tokentrue.numerics.delta import delta_forward, is_gated_delta
from tokentrue.numerics.leaves import is_row_parallel, row_linear, run_experts
from tokentrue.numerics.ops import ClampedSwiglu, ExpertWeights, LowRank, NormForm, Ops
from tokentrue.numerics.vision import tower_form, tower_forward, tower_name

_LISTED = read_table(__file__, "functions.toml")
MOVES, ARITHMETIC = frozenset(_LISTED["moves"]), frozenset(_LISTED["arithmetic"])
# By `Ops.activation`.
REPLACED: dict[str, str] = {"sigmoid": "sigmoid", "sigmoid_": "sigmoid", "softplus": "softplus", "silu": "silu"}
# By `Ops.function`.
TRIGONOMETRIC = frozenset({"cos", "sin"})
Forward = Callable[..., Any]


class ExactFunctions(TorchFunctionMode):
    """Inside one module's forward; `name` is the module's, for the error."""

    def __init__(self, ops: Ops, name: str) -> None:
        super().__init__()
        self.ops = ops
        self.name = name

    @staticmethod
    def active() -> bool:
        return any(isinstance(mode, ExactFunctions) for mode in _get_current_function_mode_stack())

    def __torch_function__(
        self, func: Forward, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in MOVES or name in ARITHMETIC:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if func is F.linear or name == "linear":
                return self.ops.linear(*args, **kwargs)
            if name in REPLACED:
                return self.ops.activation(args[0] if args else kwargs["input"], REPLACED[name])
            if name in TRIGONOMETRIC:
                return self.ops.function(args[0] if args else kwargs["input"], name)
        if not any(isinstance(value, Tensor) and value.is_floating_point() for value in [*args, *kwargs.values()]):
            return func(*args, **kwargs)
        raise ExactnessError(
            f"{resolve_name(func) or name} in {self.name} has no exact form: its bits may depend on the batch"
        )


class ExactAngles(TorchFunctionMode):
    """Makes cos and sin exact inside a rotary embedding; its product sums one term."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(
        self, func: Forward, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            if (name := getattr(func, "__name__", "")) in TRIGONOMETRIC:
                return self.ops.function(args[0] if args else kwargs["input"], name)
            return func(*args, **kwargs)


def replace_attribute(module: nn.Module, name: str, value: object, undo: ExitStack) -> None:
    """Sets it on the object, bypassing `nn.Module.__setattr__`; `undo` restores it."""
    if name in module.__dict__:
        undo.callback(object.__setattr__, module, name, module.__dict__[name])
    else:
        undo.callback(module.__dict__.pop, name, None)
    object.__setattr__(module, name, value)


def guard(name: str, ops: Ops, forward: Forward) -> Forward:
    """`forward` with the list applied; inside another guarded module it already is."""

    def checked(*args: object, **kwargs: object) -> object:
        with nullcontext() if ExactFunctions.active() else ExactFunctions(ops, name):
            return forward(*args, **kwargs)

    return checked


def unguard(forward: Forward) -> Forward:
    """`forward` of an exact operator: its torch calls pass."""

    def free(*args: object, **kwargs: object) -> object:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    return free


Replacement = tuple[nn.Module, Forward]  # a module and its exact forward
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
PLAIN_VARIANT = "MiCALinearVariant"  # of peft's variants of LoRA the one whose forward is the plain one


def plan_of(model: nn.Module, ops: Ops) -> list[Replacement]:
    """The replacement of every module that computes; raises on the first without an exact form."""
    plan: list[Replacement] = []
    whole: list[str] = []  # modules replaced with all that is in them
    tower = tower_name(model)
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in whole):
            continue
        if name == tower:
            plan.append((module, tower_forward(module)))
            continue
        if tower is not None and name.startswith(f"{tower}.") and (form := tower_form(module, ops)) is not None:
            plan.append((module, form))
            continue
        if is_gated_delta(module):
            whole.append(name)
        known = exact_form(name, module, ops)
        if known is not None:
            plan.append((module, known))
        elif computes(name, module) and ".layers." in f".{name}":
            plan.append((module, guard(name, ops, module.forward)))
    return plan


def computes(name: str, module: nn.Module) -> bool:
    """Whether a module without an exact form has code; raises if that code may not be exact."""
    parameters = [name for name, value in module.named_parameters(recurse=False) if value is not None]
    what = f"{name} ({type(module).__name__}) has no exact form"
    sinks_alone = parameters == ["sinks"] and hasattr(module, "o_proj")  # they reach `exact_attention` as `s_aux`
    if parameters and not sinks_alone and not isinstance(module, nn.Embedding) and not is_router(module):
        raise ExactnessError(f"{what}; its parameters are {parameters}")
    if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
        raise ExactnessError(f"{name} drops activations with p={module.p}: call model.eval() or set the dropout to 0")
    if isinstance(module, (nn.Embedding, nn.Dropout, nn.Identity, *CONTAINERS)):
        return False
    if not any(module.children()) and not is_router(module):
        raise ExactnessError(what)
    return True


def exact_form(name: str, module: Any, ops: Ops) -> Forward | None:
    if is_gated_delta(module):
        return unguard(delta_forward(name, module, ops))
    if all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B", "scaling")):
        return unguard(adapted_forward(name, module, ops))
    if isinstance(module, nn.Linear):
        if is_row_parallel(name):
            return unguard(lambda x: row_linear(ops, x, module.weight, module.bias))
        return unguard(lambda x: ops.linear(x, module.weight, module.bias))
    if type(module).__name__.endswith("RMSNorm"):
        eps, form = norm_kind(name, module)
        return unguard(lambda x: ops.rms_norm(x, module.weight, eps, form=form))
    if "RotaryEmbedding" in type(module).__name__:
        return rotary_forward(name, module, ops)
    if (kind := activation_kind(module)) is not None:
        return unguard(lambda x: ops.activation(x, kind))
    if (normalise := softmax_router(module)) is not None:
        return router_forward(module, ops, normalise)
    if is_experts(module):
        return unguard(experts_forward(name, module, ops))
    return None


def adapted_forward(name: str, module: Any, ops: Ops) -> Forward:
    """base(x) + B(A(x)) * scale for the one active adapter, in the engine's order."""
    base = module.base_layer
    biases = (name for name, bias in module.lora_bias.items() if bias)
    other = (*module.lora_magnitude_vector, *module.lora_embedding_A, *biases)
    # Of DoRA, aLoRA, KaSA, …
    variants = {type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()}
    if not isinstance(base, nn.Linear) or other or variants - {PLAIN_VARIANT}:
        raise ExactnessError(
            f"{name} ({type(base).__name__} with an adapter) has no exact form: plain LoRA of linears alone"
        )

    def forward(x: Tensor) -> Tensor:
        y = ops.linear(x, base.weight, base.bias)
        active = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.lora_A]
        if module.merged or len(active) > 1:
            what = "merged" if module.merged else f"several active adapters {active}"
            raise ExactnessError(f"{name}: {what} has no exact form; unmerge, and activate one adapter")
        for adapter in active:
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            low = LowRank(a=a, b=b, scale=module.scaling[adapter])
            y = ops.add_low_rank(y, module.lora_dropout[adapter](x), low)
        return y

    return forward


def is_router(module: nn.Module) -> bool:
    """A bare weight [experts, hidden] (and perhaps a bias) read by the module's own code."""
    parameters = dict(module.named_parameters(recurse=False))
    return parameters.keys() in ({"weight"}, {"weight", "bias"}) and parameters["weight"].dim() == 2


def softmax_router(module: Any) -> bool | None:
    """Whether the router divides the chosen probabilities by their sum, found by its code on another weight; None if it
    is not a plain softmax router."""
    top_k = getattr(module, "top_k", None)
    if not isinstance(top_k, int) or not is_router(module) or list(module.buffers()):
        return None
    generator, (experts, size) = torch.Generator().manual_seed(0), module.weight.shape
    x, w = torch.randn(6, size, generator=generator), torch.randn(experts, size, generator=generator) / size**0.5
    has_bias = isinstance(getattr(module, "bias", None), nn.Parameter)
    bias = torch.randn(experts, generator=generator) if has_bias else None
    found = run_stand_in(module, x, w, bias)
    probs, index = torch.topk(torch.softmax(F.linear(x, w, bias), -1), top_k, dim=-1)
    if not isinstance(found, tuple) or len(found) != 3 or not torch.equal(found[2], index):
        return None
    for normalise, wanted in ((True, probs / probs.sum(-1, keepdim=True)), (False, probs)):
        if found[1].shape == wanted.shape and torch.allclose(found[1], wanted, atol=1e-5):
            return normalise
    return None


def router_forward(module: Any, ops: Ops, normalise: bool) -> Forward:
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C.DisableTorchFunction():
            logits = ops.linear(x.reshape(-1, x.shape[-1]), module.weight, getattr(module, "bias", None))
            weight, index = ops.route(logits, module.top_k, normalise)
        if isinstance(_get_current_function_mode(), ExactFunctions | None):
            return logits, weight, index
        # Another mode may choose the experts (a replay does, through topk): then its choice counts.
        scores = torch.softmax(logits.float(), -1)
        taken = torch.topk(scores, module.top_k, dim=-1)[1]
        with torch._C.DisableTorchFunction():
            own = torch.topk(scores, module.top_k, dim=-1)[1]
            taken = torch.where((taken == own).all(-1, keepdim=True), index, taken)
            weight, index = ops.route(logits, module.top_k, normalise, taken)
        return logits, weight, index

    return forward


def norm_kind(name: str, module: nn.Module) -> tuple[float, NormForm]:
    """eps and form, found by the module's code on another weight: formula in float32, rounding in bfloat16."""
    what = f"{name} ({type(module).__name__}) has no exact form"
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1:
        raise ExactnessError(f"{what}: not an RMS norm over the last dimension")
    generator, size = torch.Generator().manual_seed(0), weight.shape[0]
    x, w = torch.randn(8, size, generator=generator), torch.rand(size, generator=generator) + 0.5
    found = run_stand_in(module, x, w)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if torch.allclose(found, normed * (1 + w), rtol=1e-4, atol=1e-5):
        return eps, NormForm.UNIT_OFFSET
    if not torch.allclose(found, normed * w, rtol=1e-4, atol=1e-5):
        raise ExactnessError(f"{what}: its formula is neither x·w nor x·(1+w) over the RMS")
    x, w = x.bfloat16(), w.bfloat16()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    found = run_stand_in(module, x, w)
    twice, once = (int((found != y).sum()) for y in (w * normed.bfloat16(), (w.float() * normed).bfloat16()))
    return eps, NormForm.PLAIN if twice <= once else NormForm.ONE_ROUNDING


def run_stand_in(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The code of the module's class on other parameters."""
    stand_in = copy.copy(module)
    parameters = {"weight": nn.Parameter(weight), **({} if bias is None else {"bias": nn.Parameter(bias)})}
    stand_in.__dict__ = {**module.__dict__, "_parameters": parameters}
    with torch.no_grad():
        return type(module).forward(stand_in, x)


def rotary_forward(name: str, module: Any, ops: Ops) -> Forward:
    """With float32 frequencies as the host computes them: `model.bfloat16()` rounds them, and a model built on a GPU
    has different last bits. Frequencies that are not the config's are unchanged."""
    own = list(module.buffers(recurse=False))
    is_rounded = any(buffer.dtype != torch.float32 for buffer in own)
    if hasattr(module, "config"):
        with torch.device("cpu"):
            fresh = type(module)(module.config)
        pairs = [(one.cpu(), other) for one, other in zip(own, fresh.buffers(recurse=False), strict=True)]
        is_close = all(torch.allclose(*pair, rtol=1e-5, atol=0.0) for pair in pairs if not is_rounded)
        if is_rounded or (is_close and not all(torch.equal(*pair) for pair in pairs)):
            module = fresh.to(own[0].device)
    elif is_rounded:
        raise ExactnessError(
            f"{name} ({type(module).__name__}) has rounded frequencies: load the model with dtype=, do not cast it"
        )
    own_forward = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        with ExactAngles(ops):
            return own_forward(*args, **kwargs)

    return forward


def activation_kind(module: nn.Module) -> str | None:
    for kind in ACTIVATIONS:
        if kind in ACT2CLS and type(module) is type(ACT2FN[kind]):
            return kind
    if type(module).__module__ == "transformers.activations":
        raise ExactnessError(f"activation {type(module).__name__} has no exact form; known: {', '.join(ACTIVATIONS)}")
    return None


def is_experts(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return {"gate_up_proj", "down_proj"} <= parameters.keys() and parameters["gate_up_proj"].dim() == 3


def experts_forward(name: str, module: Any, ops: Ops) -> Forward:
    known = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
    extra = {name for name, _ in module.named_parameters(recurse=False)} - known
    interleaved = getattr(module, "is_transposed", False)
    act = expert_activation(module)
    if extra or interleaved == getattr(module, "is_concatenated", True) or act is None:
        what = f"with {sorted(extra)}" if extra else "in another layout or with another activation"
        raise ExactnessError(f"{name} ({type(module).__name__}) has no exact form: experts {what}")

    def forward(hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        if ops.routes is not None:
            ops.routes.append((index, weight))
        experts = ExpertWeights(
            gate_up=module.gate_up_proj, down=module.down_proj, act=act, interleaved=interleaved,
            gate_up_bias=getattr(module, "gate_up_proj_bias", None), down_bias=getattr(module, "down_proj_bias", None),
        )  # fmt: skip
        return run_experts(ops, hidden, index, weight, experts)

    return forward


def expert_activation(module: Any) -> str | ClampedSwiglu | None:
    """The function between an expert's products; None if unknown. Checks a clamped gate against the module's code."""
    if not hasattr(module, "limit") or not hasattr(module, "_apply_gate"):
        return activation_kind(getattr(module, "act_fn", nn.Identity()))
    act = ClampedSwiglu(alpha=module.alpha, limit=module.limit)
    both = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).mul_(2 * act.limit)
    gate, up = both[:, ::2].clamp(max=act.limit), both[:, 1::2].clamp(min=-act.limit, max=act.limit)
    wanted = (up + 1) * gate * torch.sigmoid(gate * act.alpha)
    return act if torch.allclose(module._apply_gate(both), wanted, rtol=1e-4, atol=1e-5) else None
