"""What the rules of a correction decide about a batch, collected while they are applied."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokentrue.mismatch.correction.signals import Signals
from tokentrue.mismatch.layout import Rows


@dataclass(slots=True, kw_only=True, eq=False)
class Judge:
    """What the rules have decided so far about a batch's valid tokens; lives for one call."""

    signals: Signals
    log_clamp: float
    clamp_tokens: bool  # each log-ratio before it is summed, instead of the sum
    weights: Tensor
    unmasked: Tensor  # weights before mode "mask" zeroed any
    dropped: Tensor
    zeroed: Tensor  # weight 0, still counted
    active: Tensor  # tokens that statistics of whole rows are taken over
    hits: dict[str, int] = field(default_factory=dict[str, int])

    @staticmethod
    def of(signals: Signals, *, log_clamp: float, clamp_tokens: bool) -> Judge:
        rows, ones = signals.rows, torch.ones_like(signals.rollout)
        return Judge(
            signals=signals, log_clamp=log_clamp, clamp_tokens=clamp_tokens, weights=ones, unmasked=ones,
            dropped=rows.flags(False), zeroed=rows.flags(False), active=rows.flags(True), hits={"bad": signals.num_bad},
        )  # fmt: skip

    @property
    def rows(self) -> Rows:
        return self.signals.rows

    @property
    def applied(self) -> Tensor:
        """Weights as the loss uses them: 0 where rejected."""
        return self.weights.masked_fill(self.dropped, 0)

    def count(self, name: str, tokens: Tensor) -> None:
        """Counts hit tokens, and the rows that hold one."""
        self.hits[f"{name}_tokens"] = int(tokens.sum())
        self.hits[f"{name}_rows"] = int(self.rows.any(tokens).sum())

    def drop(self, name: str, tokens: Tensor, *, whole_rows: bool = False) -> None:
        """Drops the tokens, or every row that holds one of them."""
        self.count(name, tokens)
        self.dropped |= self.rows.spread(self.rows.any(tokens)) if whole_rows else tokens

    def row_totals(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Row sums over the active tokens, and their number (at least 1)."""
        return self.rows.sum(torch.where(self.active, values, 0.0)), self.rows.count(self.active).clamp(min=1)
