"""Negative controls: the bit test finds what is wrong when something is wrong.

First kind: both sides run the same ordinary torch operator instead of the exact one, as most systems do. Second kind:
one side computes the same mathematics by another formula.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from tests.engine.world import build, engine_of, judge, random_run
from tests.marks import slow_except
from tokentrue.errors import ExactnessError
from tokentrue.numerics import AttentionSpec, ExpertWeights, Packed, PagedBatch
from tokentrue.numerics.cpu import CpuOps
from tokentrue.numerics.ops import NormForm


class Plain(CpuOps):
    """Ordinary torch for the named operators."""

    def __init__(self, *plain: str) -> None:
        super().__init__()
        self.ordinary = set(plain)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias) if "linear" in self.ordinary else super().linear(x, weight, bias)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return F.silu(x) if "activation" in self.ordinary else super().activation(x, kind)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
        if "attention" not in self.ordinary:
            return super().attention(q, k, v, packed, spec)
        pieces = (x.split(packed.lengths) for x in (q, k, v))
        return torch.cat([sdpa(a, b, c, spec) for a, b, c in zip(*pieces, strict=True)])

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        if "attention" not in self.ordinary:
            return super().paged_attention(q, k_cache, v_cache, batch, spec)
        outs, start = [], 0
        for i, (count, context) in enumerate(zip(batch.q_lens, batch.contexts, strict=True)):
            k, v = (c[batch.block_tables[i].long()].transpose(1, 2).flatten(0, 1)[:context] for c in (k_cache, v_cache))
            outs.append(sdpa(q[start : start + count], k, v, spec))
            start += count
        return torch.cat(outs)


def sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    inputs = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=spec.scale, enable_gqa=True)[0].transpose(0, 1)


class Other(CpuOps):
    """The same mathematics by another formula."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.other = other

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, form: NormForm = NormForm.PLAIN) -> Tensor:
        if self.other != "rms_norm":
            return super().rms_norm(x, weight, eps, form=form)
        square = (x.double() ** 2).mean(-1, keepdim=True)
        return (x / (square + eps).sqrt().float()) * weight

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.other != "rotary":
            return super().rotary(x, cos, sin)
        half = cos.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return (x.double() * cos[:, None] + x.double().roll(half, -1) * signed[:, None]).to(x.dtype)

    def log_softmax(self, logits: Tensor) -> Tensor:
        if self.other != "log_softmax":
            return super().log_softmax(logits)
        return torch.softmax(logits, -1).log()

    def experts(self, x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights) -> Tensor:
        if self.other == "experts":  # the order of the slots
            return super().experts(x, index.flip(-1), weight.flip(-1), experts) + 0
        return super().experts(x, index, weight, experts)

    def act_mul(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        if self.other != "act_mul":
            return super().act_mul(gate, up, kind)
        return F.silu(gate.double()).to(gate.dtype) * up

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        if self.other == "store_kv":  # a cache of fewer bits
            k, v = k.to(torch.bfloat16).float(), v.to(torch.bfloat16).float()
        super().store_kv(k, v, k_cache, v_cache, slots)


@pytest.fixture(scope="module")
def wide() -> Any:
    """Large enough that ordinary kernels change with the batch."""
    return build("qwen3", hidden_size=270, intermediate_size=500, num_hidden_layers=3)


@pytest.mark.parametrize(
    "names", slow_except({"linear", "attention"}, ["linear", "attention", "activation", "linear attention activation"])
)
def test_ordinary_operators_on_both_sides_are_caught(wide: Any, names: str) -> None:
    plain = names.split()
    run = random_run(wide, "float32", 3, tokens=150, ops=Plain(*plain), loads=0, unproven=True)
    compared, different, first = judge(run, ops=Plain(*plain))
    assert different > 0, f"{plain}: none of {compared} differ"
    assert "operator layers." in first and "token" in first, first
    if len(plain) == 1:  # the named part of a layer has the operator taken out
        wanted = {"linear": ("attention", "mlp"), "attention": ("attention",), "activation": ("mlp",)}[plain[0]]
        assert any(name in first for name in wanted), first
    run.engine.close()


def test_exact_operators_on_the_same_model_pass(wide: Any) -> None:
    run = random_run(wide, "float32", 3, tokens=150, loads=0)
    compared, different, first = judge(run)
    assert (compared >= 150, different) == (True, 0), first
    run.engine.close()


LEFT_OUT = [
    ("linear", "qwen3"),
    ("activation", "qwen3"),
    ("attention", "qwen3"),
    ("linear", "qwen3_moe"),
    ("experts", "qwen3_moe"),
]


def compute_in_float64(model: nn.Module) -> None:
    """Another formula in the modules themselves: on some processors the ordinary one has the exact operators' bits."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: (
                (x.double() @ m.weight.double().t()).to(x.dtype) + (0.0 if m.bias is None else m.bias)
            )
        elif isinstance(module, SiLUActivation):
            module.forward = lambda x: F.silu(x.double()).to(x.dtype)


@pytest.mark.parametrize(
    ("left_out", "kind"), slow_except({"linear-qwen3", "experts-qwen3_moe"}, LEFT_OUT, name="-".join)
)
def test_each_operator_that_the_trainer_leaves_out_is_caught(left_out: str, kind: str) -> None:
    sizes = {"moe_intermediate_size": 120} if kind == "qwen3_moe" else {}
    model = build(kind, hidden_size=264, intermediate_size=501, **sizes)
    run = random_run(model, "float32", 5, tokens=150, loads=0)
    compute_in_float64(run.trainer)
    assert judge(run)[1] == 0
    compared, different, _ = judge(
        run, without=frozenset({left_out, "functions", "router"})
    )  # the list of functions would put it right
    assert different > 0, f"{left_out} left out: none of {compared} differ"
    run.engine.close()


@pytest.mark.parametrize(
    "other",
    slow_except({"rms_norm", "log_softmax"}, ["rms_norm", "experts", "act_mul", "log_softmax", "store_kv"]),
)
def test_another_formula_on_one_side_is_caught(other: str) -> None:
    model = build("qwen3_moe" if other == "experts" else "qwen3")
    run = random_run(model, "float32", 3, tokens=150, ops=Other(other), loads=0, unproven=True)
    compared, different, _ = judge(run)
    assert different > 0, f"none of {compared} differ"
    run.engine.close()


@pytest.mark.parametrize("other", ["rotary", "act_mul", "store_kv"])
def test_what_only_the_engine_runs_is_refused_at_load(other: str) -> None:
    with pytest.raises(ExactnessError, match="first difference: token"):
        engine_of(build("qwen3"), "float32", None, ops=Other(other))
