"""Hybrid linear attention (Qwen3-Next, Qwen3.5): one order of the gated delta rule for training, prefill and decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.world import VOCABULARY, build, judge, random_run
from tokentrue.engine.schedule import StatePool
from tokentrue.numerics import exact, logits_of, same_bits, score

KINDS = ["qwen3_next", "qwen3_5"]


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_the_batch_or_on_what_follows(kind: str, dtype: torch.dtype) -> None:
    model, ids = build(kind).to(dtype), ids_of(3, 80)
    with torch.no_grad(), exact(model):
        whole = logits_of(model, ids)
        assert all(same_bits(logits_of(model, ids[i : i + 1]), whole[i : i + 1]) for i in range(3))
        assert all(same_bits(logits_of(model, ids[:1, :n]), whole[:1, :n]) for n in (1, 2, 3, 4, 5, 31, 63, 64, 65))
        packed = torch.cat((ids[0, :33], ids[1, :7], ids[2]))
        found = score(model, packed, cu_seqlens=torch.tensor([0, 33, 40, 120]))
        alone = score(model, ids)
        assert (
            same_bits(found[:32], alone[0, :32])
            and same_bits(found[33:39], alone[1, :6])
            and same_bits(found[40:], alone[2])
        )


@pytest.mark.parametrize("kind", KINDS)
def test_close_to_transformers_own_forward_also_when_padded(kind: str) -> None:
    model, ids = build(kind, initializer_range=0.05), ids_of(2, 70)
    if kind == "qwen3_next":
        model.set_experts_implementation("eager")
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with exact(model):
            assert (logits_of(model, ids) - plain).abs().max() < 2e-4
            mask = torch.ones(1, 80, dtype=torch.long)
            mask[:, :10] = 0
            positions = torch.cat((torch.zeros(10, dtype=torch.long), torch.arange(70)))[None]
            longer = torch.cat((ids[:1, :10], ids[:1]), 1)
            left = model(input_ids=longer, attention_mask=mask, position_ids=positions, use_cache=False).logits
            assert same_bits(left[:, 10:], logits_of(model, ids[:1]))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_model_and_repeat_under_checkpointing(kind: str) -> None:
    model, ids = build(kind, initializer_range=0.05).train(), ids_of(2, 70)
    if kind == "qwen3_next":
        model.set_experts_implementation("eager")

    def gradients(scores: Any) -> list[Tensor]:
        model.zero_grad()
        scores().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def exactly() -> list[Tensor]:
        with exact(model):
            return gradients(lambda: score(model, ids))

    mine = exactly()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(same_bits(a, b) for a, b in zip(mine, exactly(), strict=True))
    model.gradient_checkpointing_disable()

    def plain() -> Tensor:
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
        return table.gather(-1, ids[:, 1:, None])

    for a, b in zip(mine, gradients(plain), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-6


def test_a_prefix_without_its_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: cached keys are shared, the recurrent state starts from zero."""
    monkeypatch.setattr(StatePool, "restore", lambda self, name: self.take())
    run = random_run(build("qwen3_5"), "float32", 3, tokens=150, loads=0)
    assert run.engine.core.scheduler.prefix_hits > 0
    assert judge(run)[1] > 0
    run.engine.close()


def test_snapshots_give_way_oldest_first_and_copies_keep_their_order() -> None:
    pool = StatePool(4)
    first, second = pool.take(), pool.take()
    pool.snapshot(b"a", first)
    pool.snapshot(b"b", second)
    assert pool.has(b"b") and not pool.has(b"a"), "one slot to spare"
    pool.release(first)
    again = pool.restore(b"b")
    assert again == first and pool.take_copies()[-2:] == [(0, first), (3, first)]
    pool.forget()
    assert not pool.has(b"b") and pool.take_copies() == []
