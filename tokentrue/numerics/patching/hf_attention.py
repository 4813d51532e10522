"""Attention of Hugging Face models on exact operators, through transformers' own AttentionInterface."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from tokentrue.errors import ExactnessError
from tokentrue.numerics.ops import AttentionSpec, Ops, Packed

ATTENTION = "tokentrue_exact"
OPS = "_tokentrue_ops"


def attach_attention(model: nn.Module, ops: Ops, undo: ExitStack) -> None:
    AttentionInterface.register(ATTENTION, exact_attention)
    AttentionMaskInterface.register(ATTENTION, padding_mask)
    owners: list[Any] = [
        m for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")
    ]
    configs = {id(m.config): m.config for m in owners}
    for config in configs.values():
        undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        config._attn_implementation = ATTENTION
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
            undo.callback(module.__dict__.pop, OPS, None)
            object.__setattr__(module, OPS, ops)


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
    ops: Ops = module.__dict__[OPS]
    if dropout:
        raise ExactnessError(f"attention dropout {dropout} has no exact form: set it to 0 or call model.eval()")
    if query.shape[2] != key.shape[2]:
        raise ExactnessError(
            "exact(model) scores whole sequences; for generation with a cache use ExactEngine (here: use_cache=False)"
        )
    spec = AttentionSpec(
        scale=scaling or query.shape[-1] ** -0.5, window=sliding_window, softcap=softcap, sinks=kwargs.get("s_aux")
    )
    with torch._C.DisableTorchFunction():
        return attend(ops, query, key, value, attention_mask, packed, kwargs.get("position_ids"), spec), None


def attend(
    ops: Ops, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, packed: Packed | None, positions: Tensor | None,
    spec: AttentionSpec,
) -> Tensor:  # fmt: skip
    b, h, t, d = query.shape
    narrow = value.shape[-1]
    if narrow > d:
        raise ExactnessError(f"attention values of {narrow} per head are wider than its keys of {d}: no exact form")
    value = F.pad(value, (0, d - narrow)) if narrow < d else value  # zeros: every column of the result has its own sum
    q, k, v = (x.transpose(1, 2).reshape(b * t, -1, d) for x in (query, key, value))
    if mask is not None:
        out = attend_unpadded(ops, q, k, v, mask, spec)
    else:
        out = ops.attention(
            q, k, v, packed or packed_from_positions(positions, b, t) or Packed.of((t,) * b, query.device), spec
        )
    return out.view(b, t, h, d)[..., :narrow]


def attend_unpadded(ops: Ops, q: Tensor, k: Tensor, v: Tensor, mask_BT: Tensor, spec: AttentionSpec) -> Tensor:
    """Rows that are padding come back as zeros; real ones must be one run per sequence."""
    if mask_BT.dim() != 2:
        raise ExactnessError(
            "exact attention knows padding masks [batch, tokens] and packed sequences, not a free 4-D mask"
        )
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
