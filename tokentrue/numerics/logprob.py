"""THE log-probability: one function for engine and trainer, in float32 bits.

    logprob(token) = log_softmax(filter(float32(logits) / temperature))[token]

Temperature is always a tensor: division by a Python scalar is a multiplication by the reciprocal on some devices, which
rounds otherwise. Filters (top-k, top-p, min-p) set what they remove to -inf, so that the rest is renormalised: the
distribution actually sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.numerics.ops import Ops

ROWS = 4096
"""Rows scored at once: rows are independent, so the cut changes nothing but memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptRows:
    """The ids that filters kept, as compressed sparse rows: row r is `token_ids[offsets[r]:offsets[r + 1]]`; an empty
    row keeps all."""

    token_ids: Tensor  # int64 [N]
    offsets: Tensor  # int64 [R+1]

    def of(self, rows: slice) -> KeptRows:
        """Some rows, counted from 0."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return KeptRows(token_ids=self.token_ids[int(offsets[0]) : int(offsets[-1])], offsets=offsets - offsets[0])

    def removed(self, vocabulary: int) -> Tensor:
        """bool [R, V]: True where a filter removed the id."""
        counts = self.offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        table = (counts > 0)[:, None].expand(-1, vocabulary).clone()
        table[rows, self.token_ids] = False
        return table

    def to(self, device: torch.device) -> KeptRows:
        return KeptRows(token_ids=self.token_ids.to(device), offsets=self.offsets.to(device))


def remove_filtered(scaled_RV: Tensor, kept: KeptRows | None) -> Tensor:
    """Scaled logits with -inf where a filter removed the id, as the sampler had them."""
    return scaled_RV if kept is None else scaled_RV.masked_fill(kept.removed(scaled_RV.shape[-1]), -torch.inf)


def scale_logits(logits_RV: Tensor, temperature: Tensor | float) -> Tensor:
    """float32 logits over temperature (a number or one per row)."""
    if not isinstance(temperature, Tensor):
        if temperature == 1.0:
            return logits_RV.float()
        temperature = torch.full((1,), temperature, dtype=torch.float32, device=logits_RV.device)
    return logits_RV.float() / temperature.unsqueeze(-1)


def logprobs_of(ops: Ops, logits_RV: Tensor, ids_R: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Log-probability of one token per row, float32 [R]."""
    pieces = []
    for start in range(0, logits_RV.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        per_row = temperature[rows] if isinstance(temperature, Tensor) and temperature.numel() > 1 else temperature
        pieces.append(ops.token_logprobs(scale_logits(logits_RV[rows], per_row), ids_R[rows]))
    return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


def filter_logits(scaled_V: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """One row of scaled logits with -inf where top-k, then top-p, then min-p removes a token; ties at a border are
    kept."""
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
