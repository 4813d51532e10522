"""The closed list of torch functions that a model's own code may call between exact modules.

Glue code (residual sums, gates, routers) calls torch directly. While a module of the model runs under `exact`, every
torch function goes through `ExactFunctions`: products and the elementwise functions whose bits depend on an element's
place in memory are computed by the exact operators, functions on the list below pass, and any other is refused by name.
Functions pass for one of two reasons: they move or select values (views, gathers, casts, comparisons), or
`cpu/selftest.py` checks on this machine that their bits do not depend on the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import Ops

MOVES = frozenset(
    {
        "__get__",
        "__set__",
        "__len__",
        "__bool__",
        "__getitem__",
        "__setitem__",
        "__contains__",
        "__iter__",
        "__index__",
        "__int__",
        "__float__",
        "__format__",
        "__repr__",
        "__hash__",
        "_",
        "all",
        "any",
        "arange",
        "argsort",
        "as_tensor",
        "bincount",
        "bool",
        "broadcast_to",
        "cat",
        "chunk",
        "clamp",
        "clamp_",
        "clone",
        "concat",
        "contiguous",
        "copy_",
        "cpu",
        "data_ptr",
        "detach",
        "dim",
        "double",
        "element_size",
        "empty",
        "empty_like",
        "eq",
        "expand",
        "expand_as",
        "flatten",
        "float",
        "flip",
        "full",
        "full_like",
        "gather",
        "ge",
        "gt",
        "half",
        "index_copy",
        "index_select",
        "int",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "isfinite",
        "isinf",
        "isnan",
        "item",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "long",
        "lt",
        "masked_fill",
        "masked_fill_",
        "max",
        "maximum",
        "min",
        "minimum",
        "movedim",
        "narrow",
        "ndimension",
        "ne",
        "new_empty",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
        "nonzero",
        "numel",
        "one_hot",
        "ones",
        "ones_like",
        "pad",
        "permute",
        "relu",
        "repeat",
        "repeat_interleave",
        "requires_grad_",
        "reshape",
        "reshape_as",
        "roll",
        "scatter",
        "scatter_",
        "size",
        "sort",
        "split",
        "split_with_sizes",
        "squeeze",
        "squeeze_",
        "stack",
        "stride",
        "swapaxes",
        "t",
        "tensor",
        "to",
        "tolist",
        "topk",
        "transpose",
        "tril",
        "triu",
        "type",
        "type_as",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "unsqueeze_",
        "view",
        "view_as",
        "where",
        "zero_",
        "zeros",
        "zeros_like",
        "greater",
        "less",
        "bfloat16",
        "dense_dim",
        "is_sparse",
        "__invert__",
        "__and__",
        "__or__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__gt__",
        "__le__",
        "__ge__",
        "__rand__",
        "__ror__",
        "bitwise_not",
        "bitwise_and",
        "bitwise_or",
        "dropout",
        "embedding",
        "unsafe_chunk",
        "is_cuda",
        "register_hook",
        "retain_grad",
        "is_grad_enabled",
        "get_device",
        "is_tensor",
        "result_type",
    }
)
"""Functions that move, select, compare or cast values."""
ARITHMETIC = frozenset(
    {
        "__add__",
        "__radd__",
        "__iadd__",
        "add",
        "add_",
        "__sub__",
        "__rsub__",
        "__isub__",
        "sub",
        "sub_",
        "rsub",
        "__mul__",
        "__rmul__",
        "__imul__",
        "mul",
        "mul_",
        "__truediv__",
        "__rtruediv__",
        "__itruediv__",
        "div",
        "div_",
        "true_divide",
        "__neg__",
        "neg",
        "neg_",
        "__floordiv__",
        "floor_divide",
        "__mod__",
        "square",
        "abs",
        "exp",
        "exp_",
        "log",
        "log1p",
        "tanh",
        "tanh_",
        "sqrt",
        "reciprocal",
        "softmax",
        "sum",
        "mean",
    }
)
"""Functions that compute; `selftest.py` checks those that are more than one rounded operation."""
REPLACED: dict[str, str] = {"sigmoid": "sigmoid", "sigmoid_": "sigmoid", "softplus": "softplus", "silu": "silu"}
"""Functions computed by `Ops.activation` instead."""
TRIGONOMETRIC = frozenset({"cos", "sin"})
"""Functions computed by `Ops.function` instead."""

_state = threading.local()


class ExactFunctions(TorchFunctionMode):
    """Applies the list inside one module's forward; `name` is the module's, for the refusal."""

    def __init__(self, ops: Ops, name: str) -> None:
        super().__init__()
        self.ops = ops
        self.name = name

    @staticmethod
    def active() -> bool:
        return getattr(_state, "active", False)

    def __enter__(self) -> ExactFunctions:
        _state.active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _state.active = False
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Inside a rotary embedding: cos and sin are exact, everything else is as the module has it (its product sums one
    term)."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            if (name := getattr(func, "__name__", "")) in TRIGONOMETRIC:
                return self.ops.function(args[0] if args else kwargs["input"], name)
            return func(*args, **(kwargs or {}))


Forward = Callable[..., Any]


def guard(name: str, ops: Ops, forward: Forward) -> Forward:
    """`forward` of a module with the list applied; inside another guarded module it is applied already."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if ExactFunctions.active():
            return forward(*args, **kwargs)
        with ExactFunctions(ops, name):
            return forward(*args, **kwargs)

    return checked


def unguard(forward: Forward) -> Forward:
    """`forward` of an exact operator: its own torch calls are not looked at."""

    def free(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    return free
