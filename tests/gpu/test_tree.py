"""Shared prefixes computed once on CUDA: the bits of separate rows, and gradients as near to float64 as theirs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gpu.test_families import model_of
from tokentrue.numerics import AttentionSpec, Packed, TokenTree, ops_for, same_bits, score, score_tree, shares_prefixes

LENGTHS = (1, 15, 63, 64, 65, 127, 200, 700)


def random_rows(seed: int, count: int = 7) -> list[Tensor]:
    """Rows that continue a prefix of an earlier one; the last two are equal."""
    rng = random.Random(seed)

    def draw() -> list[int]:
        return [rng.randrange(1000, 100_000) for _ in range(rng.choice(LENGTHS))]

    made = [draw() + draw()]
    while len(made) < count - 1:
        before = rng.choice(made)
        made.append([*before[: rng.randint(0, len(before))], *draw()])
    return [torch.tensor(ids) for ids in (*made, made[-1])]


def tree_of(rows: list[Tensor]) -> TokenTree:
    return TokenTree.of([ids.numpy()[:, None].view(np.uint8) for ids in rows], device="cuda")


def specs(heads: int, size: int) -> list[AttentionSpec]:
    scale, sinks = size**-0.5, torch.linspace(-1, 1, heads, device="cuda")
    return [
        AttentionSpec(scale=scale),
        AttentionSpec(scale=scale, window=70),
        AttentionSpec(scale=scale, softcap=20.0),
        AttentionSpec(scale=scale, window=128, sinks=sinks),
    ]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """One sequence, with a table of scores."""
    group, tokens = q.shape[1] // k.shape[1], q.shape[0]
    s = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * spec.scale
    if spec.softcap is not None:
        s = torch.tanh(s / spec.softcap) * spec.softcap
    distance = torch.arange(tokens, device="cuda")[:, None] - torch.arange(tokens, device="cuda")[None]
    s = s.masked_fill((distance < 0) | (distance >= (spec.window or tokens)), -torch.inf)
    if spec.sinks is not None:
        s = torch.cat((s, spec.sinks.to(s.dtype)[:, None, None].expand(-1, tokens, 1)), -1)
    p = s.softmax(-1)[..., :tokens]
    return torch.einsum("hts,shd->thd", p, v.repeat_interleave(group, 1))


def gradients(tensors: list[Tensor], loss: Tensor) -> list[Tensor]:
    return [g.double() for g in torch.autograd.grad(loss, tensors)]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


def check_attention(heads: int, key_heads: int, size: int, dtype: torch.dtype, seed: int, kinds: slice) -> None:
    ops, rows = ops_for("cuda"), random_rows(seed)
    tree = tree_of(rows)
    assert tree.packed.branches is not None
    nodes, count = torch.from_numpy(tree.nodes).cuda(), len(tree.source)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(count, n, size, device="cuda", dtype=dtype) for n in (heads, key_heads, key_heads))
    wanted = torch.randn(len(nodes), heads, size, device="cuda")  # by each row of its own tokens
    apart = Packed.of(tree.lengths, "cuda")
    for spec in specs(heads, size)[kinds]:
        what = f"{heads}/{key_heads} heads of {size}, {dtype}, {spec}"
        with torch.no_grad():
            assert same_bits(ops.attention(q, k, v, tree.packed, spec)[nodes], ops.attention(q[nodes], k[nodes], v[nodes], apart, spec)), what  # fmt: skip
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        found = []
        for _ in range(2):
            out = ops.attention(*leaves, tree.packed, spec)
            rows_of_out = torch.cat([out.float().index_select(0, own) for own in nodes.split(tree.lengths)])
            found.append(gradients(leaves, (rows_of_out * wanted).sum()))
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True)), what
        several = [x[nodes].clone().requires_grad_() for x in (q, k, v)]
        single = gradients(several, (ops.attention(*several, apart, spec).float() * wanted).sum())
        summed = [torch.zeros(x.shape, dtype=torch.float64, device="cuda").index_add_(0, nodes, g) for x, g in zip(leaves, single, strict=True)]  # fmt: skip
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        parts = nodes.split(tree.lengths)
        total = sum((plain_attention(*(x[own] for x in wide), spec) * w.double()).sum() for own, w in zip(parts, wanted.split(tree.lengths), strict=True))  # fmt: skip
        right = gradients(wide, total)  # type: ignore[arg-type]
        joined, separate = distance(found[0], right), distance(summed, right)
        # Independent roundings of the rows average out; the tree rounds a sum once.
        assert joined <= len(rows) ** 0.5 * separate, f"{what}: {joined} beside {separate}"


def test_tree_attention_has_the_bits_of_rows_and_their_gradients() -> None:
    check_attention(16, 8, 128, torch.bfloat16, 0, slice(None))
    check_attention(6, 6, 96, torch.bfloat16, 1, slice(1))
    check_attention(8, 2, 64, torch.float32, 2, slice(1))
    check_attention(8, 1, 64, torch.float16, 3, slice(3, 4))


def differing(model: Any, rows: list[Tensor]) -> int:
    with torch.no_grad():
        ids = torch.cat(rows)
        found = score_tree(model, tree_of(rows), ids, torch.ones(len(ids)))
        alone = [score(model, row[None].cuda())[0] for row in rows]
    return sum(not same_bits(a[1:, 0].contiguous(), b) for a, b in zip(found, alone, strict=True))


def check_families(*families: str) -> None:
    for family in families:
        model = model_of(family)
        with torch.no_grad():
            assert shares_prefixes(model), family
        for seed in range(2):
            assert differing(model, random_rows(seed)) == 0, family


def test_windows_sinks_and_latent_attention_have_the_bits_of_rows() -> None:
    check_families("gpt_oss", "deepseek_v3")


def test_other_families_have_the_bits_of_rows() -> None:
    check_families("qwen3", "olmo3", "granite", "glm4_moe")
    with torch.no_grad():
        assert not shares_prefixes(model_of("qwen3_next"))
