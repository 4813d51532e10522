"""Scores without the table of logits: the bits of the table, its gradients and entropies, and memory that does not grow
with the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.world import VOCABULARY, build
from tokentrue.errors import ExactnessError
from tokentrue.numerics import (
    exact,
    logits_of,
    logprob,
    logprobs_of,
    ops_for,
    same_bits,
    score,
    scores_of,
)
from tokentrue.numerics.exact import STATE


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "PIECE_LOGITS", {"cpu": 7 * VOCABULARY})


def table_scores(model: Any, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """By way of the whole table, with ordinary autograd."""
    logits = logits_of(model, ids)[:, :-1].float() / torch.tensor(temperature)
    table = torch.log_softmax(logits, -1)
    return table.gather(-1, ids[:, 1:, None]).squeeze(-1), -(table.exp() * table).sum(-1)


def with_entropy(model: Any, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    both = scores_of(model, ids, temperature, entropy=True)
    return both[..., 0], both[..., 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "llama"])
@pytest.mark.usefixtures("small_pieces")
def test_bits_are_those_of_the_table(kind: str, dtype: torch.dtype) -> None:
    model, ids = build(kind).to(dtype), ids_of(2, 45)
    if kind == "gemma3":
        model.config.final_logit_softcapping = 20.0
    with torch.no_grad(), exact(model):
        logits = logits_of(model, ids)[:, :-1]
        wanted = logprobs_of(
            model.__dict__[STATE].ops, logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1), 0.7
        ).view(2, -1)
        assert same_bits(score(model, ids, 0.7), wanted)
        logprobs, entropy = with_entropy(model, ids, 0.7)
        assert same_bits(logprobs, wanted)
        assert torch.allclose(entropy, table_scores(model, ids, 0.7)[1], atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.usefixtures("small_pieces")
def test_gradients_are_those_of_the_table(kind: str) -> None:
    model, ids = build(kind), ids_of(2, 45)
    if kind == "gemma3":
        model.config.final_logit_softcapping = 20.0

    def gradients(scores: Any) -> list[Tensor]:
        model.zero_grad()
        with exact(model):
            logprobs, entropy = scores(model, ids, 0.7)
            (logprobs * torch.linspace(-1, 2, 44) + 0.3 * entropy).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    mine, theirs = gradients(with_entropy), gradients(table_scores)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6
    assert all(same_bits(a, b) for a, b in zip(mine, gradients(with_entropy), strict=True))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.usefixtures("small_pieces")
def test_other_ids_have_the_bits_and_gradients_of_the_table(kind: str) -> None:
    """Log-probabilities of several ids a row, beside the sampled one's, which keeps its bits; packed rows too."""
    model, ids = build(kind), ids_of(2, 45)
    if kind == "gemma3":
        model.config.final_logit_softcapping = 20.0
    more = torch.stack([torch.randperm(VOCABULARY)[:6] for _ in range(2 * 44)]).view(2, 44, 6)
    weight = torch.randn(2, 44, 6)

    def by_table() -> tuple[Tensor, Tensor]:
        table = torch.log_softmax(logits_of(model, ids)[:, :-1].float() / torch.tensor(0.7), -1)
        return table.gather(-1, ids[:, 1:, None]).squeeze(-1), table.gather(-1, more)

    def by_head() -> tuple[Tensor, Tensor]:
        found = scores_of(model, ids, 0.7, more_ids=more)
        return found[..., 0], found[..., 2:]

    def gradients(scores: Any) -> list[Tensor]:
        model.zero_grad()
        with exact(model):
            own, others = scores()
            (own.sum() * 0.5 + (others * weight).sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with torch.no_grad(), exact(model):
        own, others = by_head()
        assert same_bits(own, score(model, ids, 0.7))
        assert torch.allclose(others, by_table()[1], atol=1e-6)
        packed = scores_of(model, ids.flatten(), 0.7, torch.tensor([0, 45, 90]), more_ids=pack_rows(more))
        assert same_bits(packed[:44, 2:], others[0]) and same_bits(packed[45:, 2:], others[1])
        assert not packed[44].any()
    for a, b in zip(gradients(by_head), gradients(by_table), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6


def pack_rows(more: Tensor) -> Tensor:
    return torch.cat((more[0], torch.zeros_like(more[0, :1]), more[1]))


@pytest.mark.usefixtures("small_pieces")
def test_checkpointing_and_packed_rows_keep_the_bits() -> None:
    model, ids = build("qwen3").train(), ids_of(1, 60)

    def run() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        with exact(model):
            found = score(model, ids, cu_seqlens=torch.tensor([0, 21, 60]))
            found.sum().backward()
        return found.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain, plain_grads = run()
    assert plain[0, 20] == 0.0
    with torch.no_grad():
        assert same_bits(plain[:, :20], score(model, ids[:, :21]))
        assert same_bits(plain[:, 21:], score(model, ids[:, 21:]))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, again_grads = run()
    assert same_bits(plain, again) and all(same_bits(a, b) for a, b in zip(plain_grads, again_grads, strict=True))


def test_no_tensor_of_the_head_grows_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest table of logits in a pass, forward and backward, at two lengths."""
    monkeypatch.setattr(logprob, "PIECE_LOGITS", {"cpu": 32 * VOCABULARY})
    model, seen = build("qwen3"), []
    original = logprob.scaled_logits_of

    def watched(hidden: Tensor, *rest: Any) -> Any:
        found = original(hidden, *rest)
        seen.append(found[0].shape[0])
        return found

    monkeypatch.setattr(logprob, "scaled_logits_of", watched)
    for tokens in (64, 400):
        score(model, ids_of(1, tokens)).sum().backward()
        assert max(seen) == 32 and len(seen) >= 2 * (tokens // 32)
        seen.clear()


def test_a_model_that_changes_its_logits_after_the_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    plain = type(model).forward

    def bent(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        found.logits = found.logits * 2
        return found

    monkeypatch.setattr(type(model), "forward", bent)
    with torch.no_grad(), pytest.raises(ExactnessError, match="LlamaForCausalLM changes its logits"):
        score(model, ids_of(1, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_over_a_divisor_are_scored_as_the_model_divides_them(dtype: torch.dtype) -> None:
    """Granite: scores and their gradients are those of the table that the model itself makes; its configuration is left
    as it was."""
    model, ids = build("granite").to(dtype), ids_of(2, 40)
    with exact(model):
        found = score(model, ids)
        found.sum().backward()
        mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        table = ops_for("cpu").log_softmax(logits_of(model, ids)[:, :-1].float())
        wanted = table.gather(-1, ids[:, 1:, None])[..., 0]
        wanted.sum().backward()
    assert same_bits(found.detach(), wanted.detach()) and model.config.logits_scaling == 3.0
    for a, b in zip(mine, (p.grad for p in model.parameters() if p.grad is not None), strict=True):
        assert (
            b is not None
            and (a.float() - b.float()).norm() <= (2e-2 if dtype is torch.bfloat16 else 1e-4) * b.float().norm() + 1e-6
        )
