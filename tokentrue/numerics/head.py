"""Log-probabilities and entropies from hidden states, without the table of logits [tokens, vocabulary].

The head's product and the log-softmax run over a few rows at a time, forward and backward, so that the head's memory
does not depend on the number of tokens. Rows are independent under exact operators, so the cut changes no bit. The
backward pass computes each piece's logits again; gradients of the weight are summed over the pieces in float32, in
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokentrue.numerics.cpu.products import multiply
from tokentrue.numerics.logprob import KeptRows, remove_filtered, scale_logits
from tokentrue.numerics.ops import Ops

PIECE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Logits computed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """How hidden states become a distribution."""

    ops: Ops
    temperature: float | Tensor  # one, or one per row
    softcap: float | None
    entropy: bool
    kept: KeptRows | None = None  # what the sampler's filters kept for each row
    divisor: float | None = None  # of the logits (Granite)

    def of(self, rows: slice) -> HeadSettings:
        """The settings of some rows."""
        temperature = self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
        return replace(self, temperature=temperature, kept=None if self.kept is None else self.kept.of(rows))


def score_tokens(
    hidden_RK: Tensor, weight_VK: Tensor, bias: Tensor | None, ids_R: Tensor, settings: HeadSettings
) -> Tensor:
    """(grad) float32 [R, 2]: log-probability of ids[r] and entropy of row r (0 unless asked for)."""
    return HeadScores.apply(hidden_RK, weight_VK, bias, ids_R, settings)  # pyright: ignore[reportReturnType]


class HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: HeadSettings
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.settings = settings
        out = torch.zeros(hidden.shape[0], 2, dtype=torch.float32, device=hidden.device)
        for rows in pieces(hidden.shape[0], weight):
            scaled = scaled_logits_of(hidden[rows], weight, bias, settings.of(rows))[0]
            if settings.entropy:
                table = settings.ops.log_softmax(scaled.float())
                out[rows, 0] = table.gather(-1, ids[rows, None]).squeeze(-1)
                out[rows, 1] = -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)
            else:
                out[rows, 0] = settings.ops.token_logprobs(scaled, ids[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        for rows in pieces(hidden.shape[0], weight):
            d_logits = logits_gradient(hidden[rows], weight, bias, ids[rows], grads[0][rows], ctx.settings.of(rows))
            narrow = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = multiply(narrow, weight)
            if d_weight is not None:
                d_weight += multiply(narrow.t(), hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.float().sum(0)
        return (
            d_hidden, None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype), None, None,
        )  # fmt: skip


def pieces(rows: int, weight: Tensor) -> Iterator[slice]:
    step = max(1, PIECE_LOGITS[weight.device.type] // weight.shape[0])
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def scaled_logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadSettings
) -> tuple[Tensor, Tensor | None]:
    """float32 logits over temperature (as they are, where the operators take them), and tanh(logits / softcap) where
    that is set."""
    logits, bent = settings.ops.linear(hidden, weight, bias), None
    if settings.divisor is not None:
        logits = logits / settings.divisor
    if settings.softcap is not None:
        bent = torch.tanh(logits / settings.softcap)
        logits = bent * settings.softcap
    if not (settings.ops.reads_16bit and is_plain(settings.temperature)):
        logits = scale_logits(logits, settings.temperature)
    return remove_filtered(logits, settings.kept), bent


def is_plain(temperature: float | Tensor) -> bool:
    """True where dividing by it changes nothing: one temperature for all rows, and it is 1."""
    return not isinstance(temperature, Tensor) and temperature == 1.0


def logits_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, grads_R2: Tensor, settings: HeadSettings
) -> Tensor:
    """[R, V]: of the sum of both scores, each times its gradient, with respect to the logits."""
    scaled, bent = scaled_logits_of(hidden, weight, bias, settings)
    gradient = settings.ops.logits_gradient(scaled, ids, grads_R2, entropy=settings.entropy)
    if not is_plain(settings.temperature):
        divisor = settings.temperature
        gradient = (gradient / (divisor.unsqueeze(-1) if isinstance(divisor, Tensor) else divisor)).to(gradient.dtype)
    if bent is not None:
        gradient = gradient * (1 - bent.float().square())
    return gradient if settings.divisor is None else gradient / settings.divisor
