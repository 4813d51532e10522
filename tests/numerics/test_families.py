"""gpt-oss, DeepSeek-V3, OLMo-3 and Granite under `exact`: the batch changes no bit, transformers' own forward and
gradients are close."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.world import VOCABULARY, build, engine_of, judge, random_run
from tokentrue.errors import ExactnessError
from tokentrue.numerics import AttentionSpec, ExpertWeights, PagedBatch, exact, logits_of, same_bits, score
from tokentrue.numerics.cpu import CpuOps

KINDS = ["gpt_oss", "deepseek_v3", "olmo3", "granite"]


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def plain_model(kind: str) -> Any:
    """With transformers' own attention and experts in plain torch."""
    model = build(kind, initializer_range=0.05)
    model.set_attn_implementation("eager")
    if kind in {"gpt_oss", "deepseek_v3"}:
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_the_batch_or_on_what_follows(kind: str, dtype: torch.dtype) -> None:
    model, ids = build(kind).to(dtype), ids_of(3, 140)
    with torch.no_grad(), exact(model):
        whole = logits_of(model, ids)
        assert all(same_bits(logits_of(model, ids[i : i + 1]), whole[i : i + 1]) for i in range(3))
        assert all(same_bits(logits_of(model, ids[:1, :n]), whole[:1, :n]) for n in (1, 2, 17, 41, 128, 129))
        packed = torch.cat((ids[0, :33], ids[1, :7], ids[2]))
        found, alone = score(model, packed, cu_seqlens=torch.tensor([0, 33, 40, 180])), score(model, ids)
        assert (
            same_bits(found[:32], alone[0, :32])
            and same_bits(found[33:39], alone[1, :6])
            and same_bits(found[40:], alone[2])
        )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_close_to_transformers_own(kind: str) -> None:
    model, ids = plain_model(kind), ids_of(2, 150)

    def scores() -> Tensor:
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[
            ..., 0
        ]

    def gradients(logprobs: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        logprobs.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = scores()
    wanted = gradients(plain)
    with exact(model):
        found = score(model, ids)
        mine = gradients(found)
    assert (found - plain).abs().max() < 1e-5
    assert mine.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (mine[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
    if kind == "gpt_oss":
        assert any("sinks" in name and gradient.abs().max() > 0 for name, gradient in mine.items())


class WithoutSinks(CpuOps):
    """The engine's side forgets the sinks."""

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec
    ) -> Tensor:
        plain = AttentionSpec(scale=spec.scale, window=spec.window, softcap=spec.softcap)
        return super().paged_attention(q, k_cache, v_cache, batch, plain)


class WithoutBias(CpuOps):
    """Experts without their biases, on both sides of the engine's proof."""

    def experts(self, x: Tensor, index: Tensor, weight: Tensor, experts: ExpertWeights) -> Tensor:
        bare = ExpertWeights(
            gate_up=experts.gate_up, down=experts.down, act=experts.act, interleaved=experts.interleaved
        )
        return super().experts(x, index, weight, bare)


def test_an_engine_that_forgets_the_sinks_is_refused_at_load() -> None:
    with pytest.raises(ExactnessError, match=r"first difference: token \d+, operator layers\.0\.attention"):
        engine_of(build("gpt_oss"), "float32", None, ops=WithoutSinks())


@pytest.mark.slow
def test_experts_without_their_biases_are_caught() -> None:
    run = random_run(build("gpt_oss"), "float32", 3, tokens=100, ops=WithoutBias(), loads=0)
    assert judge(run)[1] > 0
    run.engine.close()


@pytest.mark.parametrize("kind", ["deepseek_v3", "olmo3"])
def test_another_order_of_rotary_values_is_refused_at_load(kind: str) -> None:
    """The negative control of pairs against halves (DeepSeek-V3) and of the dtype of the rotation (OLMo-3,
    bfloat16)."""

    class Turned(CpuOps):
        def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            if kind == "olmo3":
                return super().rotary(x, cos.bfloat16(), sin.bfloat16())
            return super().rotary(x.flip(-1), cos, sin)

    with pytest.raises(ExactnessError, match="first difference: token"):
        engine_of(build(kind), "bfloat16", None, ops=Turned())
