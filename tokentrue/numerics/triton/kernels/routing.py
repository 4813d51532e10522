"""Choice of experts: softmax over the router's logits, the k largest probabilities, divided by their sum; one launch.

One program computes one token, so that its sums have one order whatever the batch. Equal probabilities are taken by
ascending expert.
Legend: T tokens, E experts, k slots.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokentrue.numerics.triton.launch import launch, let_next_start, power_of_two, rows_of, wait_for_inputs


@triton.jit
def _route_kernel(z_ptr, weight_ptr, index_ptr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr,
                  GIVEN: tl.constexpr):  # fmt: skip
    wait_for_inputs()
    let_next_start()
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EP)
    z = tl.load(z_ptr + t * E + at, mask=at < E, other=float("-inf")).to(tl.float32)
    exps = tl.exp(z - tl.max(z, 0))
    probs = exps / tl.sum(exps, 0)
    left = tl.where(at < E, probs, -1.0)
    slots = tl.arange(0, 16)
    chosen = tl.zeros((16,), tl.float32)
    total = tl.zeros((), tl.float32)
    for s in tl.static_range(K):
        if GIVEN:
            expert = tl.load(index_ptr + t * K + s).to(tl.int32)
            best = tl.max(tl.where(at == expert, probs, -1.0), 0)
        else:
            best = tl.max(left, 0)
            expert = tl.min(tl.where(left == best, at, EP), 0)
            tl.store(index_ptr + t * K + s, expert.to(tl.int64))
        chosen = tl.where(slots == s, best, chosen)
        total = total + best
        left = tl.where(at == expert, -1.0, left)
    if NORMALISE:
        chosen = chosen / total
    tl.store(weight_ptr + t * K + slots, chosen.to(weight_ptr.dtype.element_ty), mask=slots < K)


def _forward(
    logits: torch.Tensor, top_k: int, normalise: bool, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    weight = torch.empty((tokens, top_k), dtype=logits.dtype, device=logits.device)
    index = (
        torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device) if given is None else given.contiguous()
    )
    if tokens:
        launch(
            _route_kernel, (tokens,), logits, weight, index, E=experts, EP=power_of_two(experts), K=top_k, NORMALISE=normalise,
            GIVEN=given is not None, num_warps=1,
        )  # fmt: skip
    return weight, index


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, top_k: int, normalise: bool, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight, index = _forward(logits, top_k, normalise, given)
        ctx.save_for_backward(logits, index)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(index)
        return weight, index

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        with torch.enable_grad():
            z = logits.detach().float().requires_grad_()
            weight = torch.softmax(z, -1).gather(-1, index)
            weight = weight / weight.sum(-1, keepdim=True) if ctx.normalise else weight
            (d_logits,) = torch.autograd.grad(weight, z, grads[0].float())
        return d_logits.to(logits.dtype), None, None, None


def fits(logits: torch.Tensor, top_k: int) -> bool:
    return top_k <= 16 and logits.shape[-1] <= 1024


def route(
    logits: torch.Tensor, top_k: int, normalise: bool, given: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts [T, k] of logits [T, E]; weights are differentiable."""
    flat = rows_of(logits)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Route.apply(flat, top_k, normalise, given)  # type: ignore[return-value]
    return _forward(flat, top_k, normalise, given)
