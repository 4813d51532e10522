"""Bits that do not depend on how many processes share a layer (tensor and expert parallelism).

The row-parallel products (an attention's output, an MLP's down) cut K into a fixed number of leaves. Each leaf is one
exact float32 product, one binary tree joins neighbouring leaves in float32, and the total is rounded once. A rank has
whole subtrees, so the tree goes on over the ranks' totals, which are gathered, not reduced: the order of a reduction
depends on their number. Columns, heads and experts do not enter sums with others, so each rank computes its own ones;
experts' rows are gathered and added in slot order.

A model without leaves (`leaves=1`) has other bits: both sides must use the same number, and the fingerprint names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError, ExactnessError
from tokentrue.numerics.cpu.arithmetic import Linear
from tokentrue.numerics.ops import (
    AttentionSpec,
    ExpertWeights,
    Heads,
    Linears,
    Ops,
    Packed,
    join,
    round_sum,
    same_bits,
)

LEAVES = 8  # unless another number is asked for
CHOICES = (1, 2, 4, 8, 16)
FAMILIES = ("llama", "qwen3", "qwen3_moe")
COLUMNS = 16  # the vocabulary is cut at multiples of this


def leaves_for(tensor: int | None, leaves: int | None) -> int:
    """What an engine with these settings has."""
    return leaves if leaves is not None else 1 if tensor in (None, 1) else LEAVES


def is_row_parallel(name: str) -> bool:
    return name.endswith((".o_proj", ".down_proj"))


def row_linear(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(grad) `Ops.linear`, summed by leaves if the operators have them, over all ranks."""
    if ops.leaves == 1:
        return ops.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        y: Any = Linear.apply(flat, weight, bias, partial(sum_leaves, ops))
    else:
        y = sum_leaves(ops, flat, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def sum_leaves(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if ops.ranks is None:
        return ops.leaf_product(x, weight, bias, ops.leaves)
    own = ops.leaf_product(x, weight, None, ops.leaves // ops.ranks.size, rounded=False)
    return round_sum(join(ops.ranks.gather(own)), bias, x.dtype)


def run_experts(ops: Ops, x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights) -> Tensor:
    """(grad) `Ops.experts`; with ranks, `experts` are this rank's, and every other row comes from its own rank."""
    if ops.ranks is None:
        return ops.experts(x, index, weight, experts)
    number = experts.gate_up.shape[0]
    own = torch.where(index // number == ops.ranks.index, index % number, number)
    rows = torch.stack(list(ops.ranks.gather(ops.expert_rows(x, own, experts))))
    pairs = index.reshape(-1)
    return ops.add_slots(rows[pairs // number, torch.arange(len(pairs), device=x.device)], weight)


# ---- which models, and how they are cut
def check_leaves(model: Any, leaves: int) -> None:
    """Raises unless every row-parallel product of the model can be cut into this many leaves."""
    if leaves not in CHOICES:
        raise ConfigError(f"leaves={leaves}: choose one of {', '.join(map(str, CHOICES))}")
    kind = getattr(model.config, "model_type", type(model).__name__)
    if hasattr(model, "peft_config"):
        raise ExactnessError("leaves with an adapter have no exact form yet: merge it, or leave out leaves and tensor")
    if kind not in FAMILIES:
        raise ExactnessError(
            f"{type(model).__name__} ({kind}) has no form with leaves or tensor parallelism yet; "
            f"families that have: {', '.join(FAMILIES)}"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_row_parallel(name) and module.in_features % leaves:
            raise ExactnessError(
                f"leaves={leaves}: {name} has {module.in_features} inputs, which {leaves} does not divide"
            )


def check_ranks(model: Any, size: int, leaves: int) -> None:
    """Raises unless `size` ranks can share the model's layers."""
    check_leaves(model, leaves)
    config, sizes = model.config, [choice for choice in CHOICES if choice <= leaves]
    if size not in sizes:
        raise ConfigError(
            f"tensor={size}: with leaves={leaves} choose one of {', '.join(map(str, sizes))}: ranks have whole subtrees"
        )
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    counts = {
        "attention heads": heads,
        "experts": getattr(config, "num_experts", 0),
        "values of an MLP": config.intermediate_size,
    }
    for what, count in counts.items():
        if count % size:
            raise ConfigError(f"tensor={size}: {type(model).__name__} has {count} {what}, which {size} does not divide")
    if key_heads % size and size % key_heads:
        raise ConfigError(
            f"tensor={size}: {type(model).__name__} has {key_heads} key heads; choose a divisor or a multiple of them"
        )
    if config.vocab_size < size * COLUMNS:
        raise ConfigError(f"tensor={size}: a vocabulary of {config.vocab_size} is too small; at least {size * COLUMNS}")


def cut_evenly(count: int, size: int, unit: int = 1) -> list[range]:
    """`size` neighbouring ranges, cut at multiples of `unit`."""
    units = -(-count // unit)
    borders = [min(count, units * i // size * unit) for i in range(size + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


def cut_key_heads(key_heads: int, size: int) -> list[range]:
    """Of each rank; ranks beyond the number of key heads share them."""
    return [
        range(i * key_heads // size, max(i * key_heads // size + 1, (i + 1) * key_heads // size)) for i in range(size)
    ]


# ---- checks at the start
def cut_shapes(name: str, module: nn.Linear, leaves: int) -> Iterator[tuple[torch.dtype, tuple[int, int, bool]]]:
    """dtype and (K, N, bias) of the parts of a linear on any number of ranks: engines of all sizes, and the trainer,
    check the same shapes and fall back alike."""
    k, n, bias = module.in_features, module.out_features, module.bias is not None
    if is_row_parallel(name):
        yield torch.float32, (k // leaves, n, False)
        return
    for size in CHOICES:
        if 1 < size <= leaves and n >= size:
            unit = COLUMNS if name == "lm_head" else 1
            yield from ((module.weight.dtype, (k, len(part), bias)) for part in cut_evenly(n, size, unit) if len(part))


def cut_heads(heads: tuple[int, int, int], leaves: int) -> Iterator[tuple[int, int, int]]:
    h, j, d = heads
    for size in CHOICES:
        if size <= leaves and h % size == 0 and (j % size == 0 or size % j == 0):
            yield h // size, max(1, j // size), d


def check_slices(ops: Ops, linears: Linears, heads: Heads, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Compares columns of whole products, and heads of whole attentions, with those of their parts."""
    notes: list[str] = []
    with torch.no_grad():
        for k, bias in sorted({(k, bias) for k, _, bias in linears}):
            widths = sorted(n for other, n, has in linears if other == k and has == bias)
            if columns_agree(ops, k, widths, bias, dtype, device):
                continue
            if dtype != torch.float32 or not ops.fall_back(k) or not columns_agree(ops, k, widths, bias, dtype, device):
                raise ExactnessError(
                    f"linear over {k} inputs in {dtype}: a column's bits depend on the columns beside it"
                )
            notes.append(f"linear over {k} inputs: columns depend on their number here; a safer form instead")
        for h, j, d in sorted(heads):
            wider = [(many, keys) for many, keys, size in heads if size == d and many > h and keys >= j]
            if wider and not heads_agree(ops, max(wider), (h, j), d, dtype, device):
                raise ExactnessError(
                    f"attention with {h}/{j} heads of {d}: bits differ from those among {max(wider)} heads"
                )
    return notes


def columns_agree(ops: Ops, k: int, widths: list[int], bias: bool, dtype: torch.dtype, device: torch.device) -> bool:
    generator, n = torch.Generator(device).manual_seed(k), widths[-1]

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x, w, b = randn(33, k), randn(n, k) * k**-0.5, randn(n) if bias else None
    whole = ops.linear(x, w, b)
    cuts = [(start, start + width) for width in widths for start in {0, n - width, (n - width) // 2}]
    parts = ((ops.linear(x, w[i:e].contiguous(), None if b is None else b[i:e]), whole[:, i:e]) for i, e in cuts)
    return all(same_bits(part, wanted) for part, wanted in parts)


def heads_agree(
    ops: Ops, whole: tuple[int, int], part: tuple[int, int], d: int, dtype: torch.dtype, device: torch.device
) -> bool:
    generator, tokens = torch.Generator(device).manual_seed(d), 300
    q, k, v = (
        torch.randn(tokens, n, d, generator=generator, device=device).to(dtype) for n in (whole[0], whole[1], whole[1])
    )
    packed, spec, (h, j) = Packed.of((tokens,), device), AttentionSpec(scale=d**-0.5), part
    wanted = ops.attention(q, k, v, packed, spec)
    first = ops.attention(*(x[:, :n].contiguous() for x, n in ((q, h), (k, j), (v, j))), packed, spec)
    last = ops.attention(*(x[:, -n:].contiguous() for x, n in ((q, h), (k, j), (v, j))), packed, spec)
    return same_bits(first, wanted[:, :h].contiguous()) and same_bits(last, wanted[:, -h:].contiguous())
