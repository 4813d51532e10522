"""THE log-probability: one function for engine and trainer, in float32 bits.

    logprob(token) = log_softmax(filter(float32(logits) / temperature))[token]

Temperature is always a tensor: some devices divide by a Python scalar by multiplying with its reciprocal, which rounds
differently. Filters (top-k, top-p, min-p) set what they remove to -inf, so that the rest is renormalised: the
distribution actually sampled from. Training never materialises all logits: head and log-softmax run over a few rows at
a time, forward and backward. Rows are independent, so the cut changes no bit; gradients of the weight are summed over
the pieces in float32, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokentrue.numerics.cpu.arithmetic import multiply
from tokentrue.numerics.ops import Ops

# Rows scored at once.
ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptRows:
    """The ids that filters kept: row r is `token_ids[offsets[r]:offsets[r + 1]]`; an empty row keeps all."""

    token_ids: Tensor  # int64 [N]
    offsets: Tensor  # int64 [R+1]

    def of(self, rows: slice) -> KeptRows:
        offsets = self.offsets[rows.start : rows.stop + 1]
        return KeptRows(token_ids=self.token_ids[int(offsets[0]) : int(offsets[-1])], offsets=offsets - offsets[0])

    def removed(self, vocabulary: int) -> Tensor:
        """bool [R, V]."""
        counts = self.offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        table = (counts > 0)[:, None].expand(-1, vocabulary).clone()
        table[rows, self.token_ids] = False
        return table

    def to(self, device: torch.device) -> KeptRows:
        return KeptRows(token_ids=self.token_ids.to(device), offsets=self.offsets.to(device))


def remove_filtered(scaled_RV: Tensor, kept: KeptRows | None) -> Tensor:
    """Scaled logits with -inf where a filter removed the id, as in the sampler."""
    return scaled_RV if kept is None else scaled_RV.masked_fill(kept.removed(scaled_RV.shape[-1]), -torch.inf)


def scale_logits(logits_RV: Tensor, temperature: Tensor | float) -> Tensor:
    """float32 logits over temperature (a number or one per row)."""
    if not isinstance(temperature, Tensor):
        if temperature == 1.0:
            return logits_RV.float()
        temperature = torch.full((1,), temperature, dtype=torch.float32, device=logits_RV.device)
    return logits_RV.float() / temperature.unsqueeze(-1)


def logprobs_of(ops: Ops, logits_RV: Tensor, ids_R: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    pieces = []
    for start in range(0, logits_RV.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        per_row = temperature[rows] if isinstance(temperature, Tensor) and temperature.numel() > 1 else temperature
        pieces.append(ops.token_logprobs(scale_logits(logits_RV[rows], per_row), ids_R[rows]))
    return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


def filter_logits(scaled_V: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """One row of scaled logits after top-k, then top-p, then min-p; ties at a boundary are kept."""
    kept = scaled_V
    if 0 < top_k < scaled_V.shape[-1]:
        border = torch.topk(scaled_V, top_k).values[-1]
        kept = kept.masked_fill(scaled_V < border, -torch.inf)
    if top_p < 1.0:
        values, order = torch.sort(kept, descending=True, stable=True)
        probs = torch.softmax(values.double(), -1)
        before = probs.cumsum(-1) - probs  # the mass above a token: the first one always stays
        cut = before >= top_p
        kept = kept.clone().scatter_(0, order[cut], -torch.inf)
    if min_p > 0.0:
        probs = torch.softmax(kept.double(), -1)
        kept = kept.masked_fill(probs < min_p * probs.max(), -torch.inf)
    return kept


PIECE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 28}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    ops: Ops
    temperature: float | Tensor  # one, or one per row
    softcap: float | None
    entropy: bool
    kept: KeptRows | None = None  # what the sampler's filters kept for each row
    divisor: float | None = None  # of the logits (Granite)

    def of(self, rows: slice) -> HeadSettings:
        temperature = self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
        return replace(self, temperature=temperature, kept=None if self.kept is None else self.kept.of(rows))


def score_tokens(
    hidden_RK: Tensor, weight_VK: Tensor, bias: Tensor | None, ids_R: Tensor, settings: HeadSettings
) -> Tensor:
    """(grad) float32 [R, 2]: log-probability of ids[r], and entropy of row r (0 unless requested)."""
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
    """float32 logits over temperature (unchanged if the operators take them so), and tanh(logits / softcap)."""
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
    """True if dividing by it changes nothing."""
    return not isinstance(temperature, Tensor) and temperature == 1.0


def logits_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, grads_R2: Tensor, settings: HeadSettings
) -> Tensor:
    """[R, V]: gradient with respect to the logits of both scores' sum, each weighted by its gradient."""
    scaled, bent = scaled_logits_of(hidden, weight, bias, settings)
    gradient = settings.ops.logits_gradient(scaled, ids, grads_R2, entropy=settings.entropy)
    if not is_plain(settings.temperature):
        divisor = settings.temperature
        gradient = (gradient / (divisor.unsqueeze(-1) if isinstance(divisor, Tensor) else divisor)).to(gradient.dtype)
    if bent is not None:
        gradient = gradient * (1 - bent.float().square())
    return gradient if settings.divisor is None else gradient / settings.divisor
