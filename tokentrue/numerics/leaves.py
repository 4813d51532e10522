"""Bits that do not depend on how many ranks share a layer (tensor and expert parallelism).

Row-parallel products (`o_proj`, `down_proj`) cut K into a fixed number of leaves, each one float32 product; one binary
tree joins neighbours in float32, and the total is rounded once. A rank has a whole subtree, and the tree goes on over
the ranks' totals: gathered, because the order of a reduction depends on their number. Columns, heads and experts are in
no sum with others; the rows of experts are gathered and added in slot order. Leaves change the bits: both sides need
the same number, which the fingerprint names.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.errors import ConfigError, ExactnessError
from tokentrue.numerics.cpu.arithmetic import Linear
from tokentrue.numerics.ops import AttentionSpec, ExpertWeights, ModelShapes, Ops, Packed, join, round_sum, same_bits

LEAVES = 8  # unless another number is asked for
CHOICES = (1, 2, 4, 8)
FAMILIES = ("llama", "qwen3", "qwen3_moe")
COLUMNS = 16  # the vocabulary is cut at multiples of this


def leaves_for(tensor: int | None, leaves: int | None) -> int:
    return leaves if leaves is not None else 1 if tensor in (None, 1) else LEAVES


def is_row_parallel(name: str) -> bool:
    return name.endswith((".o_proj", ".down_proj"))


def row_linear(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(grad) `Ops.linear`, by leaves if the operators have them."""
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
    """(grad) `Ops.experts`; with ranks, `experts` are this rank's, and others' rows come from theirs."""
    if ops.ranks is None:
        return ops.experts(x, index, weight, experts)
    number = experts.gate_up.shape[0]
    own = torch.where(index // number == ops.ranks.index, index % number, number)
    rows = torch.stack(list(ops.ranks.gather(ops.expert_rows(x, own, experts))))
    pairs = index.reshape(-1)
    return ops.add_slots(rows[pairs // number, torch.arange(len(pairs), device=x.device)], weight)


# ---- which models, and how they are cut
def check_leaves(model: Any, leaves: int) -> None:
    if leaves not in CHOICES:
        raise ConfigError(f"leaves={leaves}: choose one of {', '.join(map(str, CHOICES))}")
    kind = getattr(model.config, "model_type", "")
    if hasattr(model, "peft_config"):
        raise ExactnessError("an adapter with leaves has no exact form yet: merge it, or leave out leaves and tensor")
    if kind not in FAMILIES:
        raise ExactnessError(
            f"{type(model).__name__} ({kind}) has no form with leaves or tensor parallelism yet; "
            f"families that have: {', '.join(FAMILIES)}"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_row_parallel(name) and module.in_features % leaves:
            raise ExactnessError(f"leaves={leaves}: {name} has {module.in_features} inputs, not a multiple of {leaves}")


def check_ranks(model: Any, size: int, leaves: int) -> None:
    check_leaves(model, leaves)
    config, sizes = model.config, sizes_for(leaves)
    if size not in sizes:
        choices = ", ".join(map(str, sizes))
        raise ConfigError(f"tensor={size}: with leaves={leaves} choose one of {choices}: ranks have whole subtrees")
    keys, vocabulary = config.num_key_value_heads, config.vocab_size
    heads, experts = config.num_attention_heads, getattr(config, "num_experts", 0)
    for what, count, fits in (
        ("attention heads", heads, heads % size == 0),
        ("key heads", keys, keys % size == 0 or size % keys == 0),
        ("values of an MLP", config.intermediate_size, config.intermediate_size % size == 0),
        ("experts", experts, experts % size == 0),
        ("tokens in its vocabulary", vocabulary, vocabulary >= size * COLUMNS),
    ):
        if not fits:
            raise ConfigError(
                f"tensor={size}: {type(model).__name__} has {count} {what}, which {size} ranks cannot share"
            )


def sizes_for(leaves: int) -> tuple[int, ...]:
    return CHOICES[: CHOICES.index(leaves) + 1]


def cut_evenly(count: int, size: int, unit: int = 1) -> list[range]:
    """`size` neighbouring ranges, cut at multiples of `unit`."""
    borders = [min(count, -(-count // unit) * i // size * unit) for i in range(size + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


def cut_key_heads(count: int, size: int) -> list[range]:
    """Where there are more ranks than key heads, they share them."""
    return [range(i * count // size, max(i * count // size + 1, (i + 1) * count // size)) for i in range(size)]


# ---- checks at the start
def cut_shapes(name: str, module: nn.Linear, leaves: int) -> set[tuple[torch.dtype, tuple[int, int, bool]]]:
    """dtype and (K, N, bias) of a linear's parts for any number of ranks, so that all sizes fall back alike."""
    k, n, kind = module.in_features, module.out_features, module.weight.dtype
    if is_row_parallel(name):
        return {(torch.float32, (k // leaves, n, False))}
    parts = (part for size in sizes_for(leaves) for part in cut_evenly(n, size, COLUMNS if name == "lm_head" else 1))
    return {(kind, (k, len(part), module.bias is not None)) for part in parts if part}


def cut_heads(heads: tuple[int, int, int], leaves: int) -> set[tuple[int, int, int]]:
    h, j, d = heads
    sizes = (size for size in sizes_for(leaves) if h % size == 0 and (j % size == 0 or size % j == 0))
    return {(h // size, max(1, j // size), d) for size in sizes}


@torch.no_grad()
def check_parts(ops: Ops, shapes: ModelShapes, device: torch.device) -> None:
    """Raises where columns, heads and sums over leaves differ from those that ranks compute."""
    for dtype, linears in shapes.linears.items():
        for k in {k for k, _, _ in linears}:
            if not columns_agree(ops, k, sorted({n for other, n, _ in linears if other == k}), dtype, device):
                raise ExactnessError(f"linear over {k} inputs in {dtype}: a column depends on those beside it here")
    for h, j, d in shapes.heads:
        if not heads_agree(ops, max(other for other in shapes.heads if other[2] == d), (h, j), shapes.dtype, device):
            raise ExactnessError(f"attention with {h}/{j} heads of {d} has other bits than with more heads here")
    for k, n in shapes.rows:
        if not leaves_agree(ops, k, n, shapes.dtype, device):
            raise ExactnessError(f"linear {k}x{n} in {ops.leaves} leaves: bits depend on rows or ranks here")


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(sum(shape)), device=device).to(dtype)


def columns_agree(ops: Ops, k: int, widths: list[int], dtype: torch.dtype, device: torch.device) -> bool:
    n = widths[-1]
    x, w = randn(33, k, dtype=dtype, device=device), randn(n, k, dtype=dtype, device=device)
    whole = ops.linear(x, w)
    cuts = [slice(start, start + width) for width in widths for start in (0, n - width)]
    return all(same_bits(ops.linear(x, w[cut].contiguous()), whole[:, cut]) for cut in cuts)


def heads_agree(
    ops: Ops, heads: tuple[int, int, int], part: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> bool:
    (many, keys, d), (h, j), tokens = heads, part, 300
    q, k, v = (randn(tokens, n, d, dtype=dtype, device=device) for n in (many, keys, keys))
    packed, spec = Packed.of((tokens,), device), AttentionSpec(scale=d**-0.5)
    wanted = ops.attention(q, k, v, packed, spec)
    q, k, v = q[:, many - h :].contiguous(), k[:, keys - j :].contiguous(), v[:, keys - j :].contiguous()
    return same_bits(ops.attention(q, k, v, packed, spec), wanted[:, many - h :].contiguous())


def leaves_agree(ops: Ops, k: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    x, w = randn(300, k, dtype=dtype, device=device), randn(n, k, dtype=dtype, device=device)
    whole = ops.leaf_product(x, w, None, ops.leaves)
    found = [ops.leaf_product(x[:m].contiguous(), w, None, ops.leaves) for m in (1, 5, 17, 33, 64, 100, 200)]
    for size in sizes_for(ops.leaves):
        pairs, count = zip(x.chunk(size, -1), w.chunk(size, -1), strict=True), ops.leaves // size
        totals = [ops.leaf_product(a.contiguous(), b.contiguous(), None, count, rounded=False) for a, b in pairs]
        found.append(round_sum(join(totals), None, dtype))
    return all(same_bits(part, whole[: len(part)]) for part in found)
