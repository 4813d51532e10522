"""Score centering (arXiv 2609.20807) and A-3PO (2512.06547) against what their papers describe.

The expectations are sums over the whole vocabulary of plain numpy arrays: no log-probability of a chosen id, no
coefficient and no autograd of the code under test is in them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch import PRESETS, Correction, LossConfig, ScoreCentering, Weights, policy_loss

ROWS, VOCABULARY = 7, 24
CENTRED = {None: "score_centering", 2.0: "score_centering_tis"}


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def weigh(ratio: np.ndarray, cap: float | None) -> np.ndarray:
    return np.ones_like(ratio) if cap is None else np.minimum(ratio, cap)


def centred_gradient(
    logits: np.ndarray, q: np.ndarray, chosen: np.ndarray, advantages: np.ndarray, k: int, cap: float | None
) -> np.ndarray:
    """d loss / d logits of -A·(w(p_y/q_y)·∇log p_y - E_q[w(p/q)·∇log p]), the mean over the tokens.

    Beyond the sampler's k most likely ids its probabilities are modelled as p times a constant.
    """
    p = softmax(logits)
    found = np.zeros_like(p)
    for row in range(len(p)):
        top = np.argsort(-q[row])[:k]
        model = np.zeros(VOCABULARY)
        model[top] = q[row, top]
        rest = np.setdiff1d(np.arange(VOCABULARY), top)
        if len(rest):
            model[rest] = p[row, rest] * (1 - q[row, top].sum()) / p[row, rest].sum()
        scores = np.eye(VOCABULARY) - p[row]  # row v: the gradient of log p_v with respect to the logits
        expected = sum(model[v] * weigh(p[row, v] / model[v], cap) * scores[v] for v in range(VOCABULARY))
        own = weigh(p[row, chosen[row]] / q[row, chosen[row]], cap) * scores[chosen[row]]
        found[row] = -advantages[row] * (own - expected)
    return found / len(p)


def batch(seed: int = 0, spread: float = 0.7) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, VOCABULARY)) * 2
    q = softmax(logits + spread * rng.normal(size=logits.shape))
    chosen = np.array([rng.choice(VOCABULARY, p=row) for row in q])
    return logits, q, chosen, rng.normal(size=ROWS)


def centred_loss(
    logits: Tensor, q: np.ndarray, chosen: np.ndarray, advantages: np.ndarray, k: int, config: Any
) -> tuple[Tensor, Any]:
    """As a trainer calls it: one padded row."""
    table, sampler = torch.log_softmax(logits, -1), torch.tensor(q).log()
    own, top = torch.tensor(chosen)[:, None], sampler.topk(k).indices
    return policy_loss(
        table.gather(-1, own).T,
        None,
        sampler.gather(-1, own).T,
        torch.tensor(advantages)[None],
        None,
        config,
        head_logprobs=table.gather(-1, top)[None],
        rollout_head_logprobs=sampler.gather(-1, top)[None],
    )


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("k", [VOCABULARY, 8, 1])
def test_gradient_is_that_of_the_paper(k: int, cap: float | None) -> None:
    for seed in range(20):
        logits, q, chosen, advantages = batch(seed)
        given = torch.tensor(logits, requires_grad=True)
        loss, metrics = centred_loss(given, q, chosen, advantages, k, PRESETS[CENTRED[cap]])
        loss.backward()
        wanted = centred_gradient(logits, q, chosen, advantages, k, cap)
        assert given.grad is not None
        np.testing.assert_allclose(given.grad.numpy(), wanted, atol=1e-9 if k < VOCABULARY else 1e-6)
        assert metrics["centering/head_mass"] == pytest.approx(np.sort(q)[:, -k:].sum(-1).mean())


def test_gradient_by_finite_differences() -> None:
    """Of the loss with its coefficients held where they are: they are constants to the gradient."""
    logits, q, chosen, advantages = batch(3)
    k, cap, step = 6, 2.0, 1e-6
    p = softmax(logits)
    top = np.argsort(-q, axis=-1)[:, :k]
    p_top, q_top = np.take_along_axis(p, top, -1), np.take_along_axis(q, top, -1)
    tail = (1 - q_top.sum(-1)) / (1 - p_top.sum(-1))
    constant = q_top * weigh(p_top / q_top, cap) - (tail * weigh(1 / tail, cap))[:, None] * p_top
    at = np.arange(ROWS)
    own = weigh(p[at, chosen] / q[at, chosen], cap)

    def frozen(values: np.ndarray) -> float:
        table = np.log(softmax(values))
        inner = own * table[at, chosen] - (constant * np.take_along_axis(table, top, -1)).sum(-1)
        return float((-advantages * inner).mean())

    given = torch.tensor(logits, requires_grad=True)
    loss, _ = centred_loss(given, q, chosen, advantages, k, PRESETS["score_centering_tis"])
    assert float(loss.detach()) == pytest.approx(frozen(logits), rel=1e-6)
    loss.backward()
    assert given.grad is not None
    for place in ((0, 0), (1, int(chosen[1])), (4, int(top[4, 2])), (6, 23)):
        moved = np.zeros_like(logits)
        moved[place] = step
        slope = (frozen(logits + moved) - frozen(logits - moved)) / (2 * step)
        assert float(given.grad[place]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("centred", [True, False])
def test_the_drift_is_gone(centred: bool) -> None:
    """A constant advantage teaches nothing; without centering the mean gradient over the sampler pulls the trainer."""
    logits, q, _, _ = batch(5)
    preset = PRESETS["score_centering"] if centred else PRESETS["bypass_pg_geo_rs"]
    config = preset if centred else Correction(denominator="rollout", surrogate=preset.surrogate)
    given = torch.tensor(logits, requires_grad=True)
    total = torch.zeros_like(given)
    for token in range(VOCABULARY):
        loss, _ = centred_loss(given, q, np.full(ROWS, token), np.ones(ROWS), VOCABULARY, config)
        (grad,) = torch.autograd.grad(loss, given)
        total += grad * torch.tensor(q[:, token])[:, None]
    assert (float(total.abs().max()) < 1e-9) == centred


@pytest.mark.parametrize("k", [VOCABULARY, 4])
@pytest.mark.parametrize("name", CENTRED.values())
def test_agreement_is_plain_reinforce(name: str, k: int) -> None:
    logits, _, chosen, advantages = batch(2)
    q, grads = softmax(logits), []
    for config in (PRESETS[name], Correction(denominator="rollout", surrogate="reinforce")):
        given = torch.tensor(logits, requires_grad=True)
        centred_loss(given, q, chosen, advantages, k, config)[0].backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_kept_set_is_summed_exactly(cap: float | None) -> None:
    """Under top-p both sides are distributions over the kept ids, and those of them that were recorded are all: the sum
    is that over the whole support, without a model of a tail."""
    logits, q, chosen, advantages = batch(8)
    kept = np.argsort(-q, axis=-1)[:, :9]
    inside = np.zeros_like(q, dtype=bool)
    np.put_along_axis(inside, kept, True, -1)
    chosen = kept[np.arange(ROWS), chosen % 9]
    limited, q = np.where(inside, logits, -np.inf), np.where(inside, q, 0) / np.where(inside, q, 0).sum(-1)[:, None]
    p, wanted = softmax(limited), np.zeros_like(q)
    for row in range(ROWS):
        scores = np.eye(VOCABULARY) - p[row]
        expected = sum(q[row, v] * weigh(p[row, v] / q[row, v], cap) * scores[v] for v in kept[row])
        own = weigh(p[row, chosen[row]] / q[row, chosen[row]], cap) * scores[chosen[row]]
        wanted[row] = np.where(inside[row], -advantages[row] * (own - expected) / ROWS, 0)
    given = torch.tensor(logits, requires_grad=True)
    masked = given.masked_fill(torch.tensor(~inside), -torch.inf)
    # 12 ids are asked for and 9 were kept: the rest of a row is empty.
    centred_loss(masked, q, chosen, advantages, 12, PRESETS[CENTRED[cap]])[0].backward()
    assert given.grad is not None
    np.testing.assert_allclose(given.grad.numpy(), wanted, atol=1e-9)


def test_every_layout_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths, k = [3, 1, 4], 5

    def column(*shape: int) -> list[Tensor]:
        return [-torch.rand(n, *shape, generator=generator, dtype=torch.float64) - 2 for n in lengths]

    own, rollout, head, sampler, advantages = column(), column(), column(k), column(k), column()
    sampler[1][0, 3:] = -torch.inf

    def pad(rows: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)

    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    layouts: list[tuple[Any, Any, dict[str, Any]]] = [
        (list, None, {}),
        (torch.cat, None, {"cu_seqlens": [0, 3, 4, 8]}),
        (pad, mask, {}),
    ]
    found = [
        policy_loss(
            make(own), None, make(rollout), make(advantages), valid, PRESETS["score_centering_tis"],
            head_logprobs=make(head), rollout_head_logprobs=make(sampler), **more,
        )[0]
        for make, valid, more in layouts
    ]  # fmt: skip
    assert found[0] == found[1] == found[2] and torch.isfinite(found[0])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Correction(centering=ScoreCentering()), "surrogate='reinforce'"),
        (
            lambda: Correction(
                surrogate="reinforce", centering=ScoreCentering(), weights=Weights(level="sequence", upper=2.0)
            ),
            "token weights",
        ),
        (
            lambda: LossConfig(correction=PRESETS["score_centering"], aggregate="seq_mean_token_mean"),
            "weighs every token alike",
        ),
    ],
)
def test_what_the_paper_excludes_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_without_the_samplers_ids_the_loss_is_refused() -> None:
    values = torch.full((1, 3), -1.0)
    with pytest.raises(InputError, match=r"head_logprobs, rollout_head_logprobs: .* ScoreCentering needs them"):
        policy_loss(values, None, values, torch.ones(1), None, PRESETS["score_centering"])
    with pytest.raises(InputError, match="head_logprobs: needs K values"):
        policy_loss(
            values, None, values, torch.ones(1), None, PRESETS["score_centering"],
            head_logprobs=values, rollout_head_logprobs=values,
        )  # fmt: skip


def test_the_interpolated_policy_is_that_of_the_paper() -> None:
    """log π_prox = log π_b + α·(log π_θ - log π_b), α = (v_prox - v_b)/(v_θ - v_b), v_prox = v_θ - 1: the decoupled
    loss π_prox/π_b · max(-A·r, -A·clip(r)) with r = π_θ/π_prox, token by token, and its gradient through π_θ alone."""
    rng = np.random.default_rng(4)
    current, rollout = -rng.random((2, 3, 6)) * 3
    advantages, versions, now = rng.normal(size=(3, 6)), rng.integers(3, 10, size=(3, 6)), 9
    versions[0, 0], versions[0, 1] = 9, 8
    total, slopes = 0.0, np.zeros((3, 6))
    for place in np.ndindex(3, 6):
        theta, behave, a, born = current[place], rollout[place], advantages[place], versions[place]
        alpha = 0.0 if born == now else ((now - 1) - born) / (now - born)
        prox = behave + alpha * (theta - behave)
        ratio, weight = np.exp(theta - prox), np.exp(prox - behave)
        clipped = min(max(ratio, 0.8), 1.2)
        total += weight * max(-a * ratio, -a * clipped)
        slopes[place] = weight * -a * ratio if -a * ratio >= -a * clipped else 0.0
    given = torch.tensor(current, requires_grad=True)
    loss, _ = policy_loss(
        given, None, torch.tensor(rollout), torch.tensor(advantages), None, PRESETS["a3po"],
        versions=torch.tensor(versions), version=now,
    )  # fmt: skip
    loss.backward()
    assert given.grad is not None and float(loss.detach()) == pytest.approx(total / 18, rel=1e-12)
    np.testing.assert_allclose(given.grad.numpy(), slopes / 18, atol=1e-12)
    assert "no extra forward pass" in PRESETS["a3po"].explain()
    with pytest.raises(InputError, match=r"versions, version: .* missing"):
        policy_loss(given, None, torch.tensor(rollout), torch.tensor(advantages), None, PRESETS["a3po"])
