"""Log-probabilities of whole rows under a model: packed through the exact operators, or padded through the model's own forward.

Both return, for each row, one float32 value per token: entry i is log p(token i | tokens before i), and entry 0 is 0 by convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn


class Scorer(Protocol):
    """`ids` are rows; the answer is in the same order. `active()` wraps a training run (exact mode of the model, or nothing)."""

    name: str

    def __call__(self, model: nn.Module, ids: Sequence[Tensor], *, temperature: float) -> list[Tensor]: ...

    def active(self, model: nn.Module) -> AbstractContextManager[object]: ...


class ExactScorer:
    """The engine's own operators: the same bits whatever is packed together."""

    name = "exact"

    def __call__(self, model: nn.Module, ids: Sequence[Tensor], *, temperature: float) -> list[Tensor]:
        from tokentrue.numerics import score

        lengths = [int(row.shape[0]) for row in ids]
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        device = next(model.parameters()).device
        flat = score(model, torch.cat(list(ids)).to(device), cu_seqlens=bounds.to(device), temperature=temperature)
        return aligned(flat, lengths)

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[object]:
        from tokentrue.numerics import exact

        with exact(model) as found:
            yield found


class PlainScorer:
    """The model's own forward pass on right-padded rows: what an ordinary trainer computes."""

    name = "plain"

    def __call__(self, model: nn.Module, ids: Sequence[Tensor], *, temperature: float) -> list[Tensor]:
        device = next(model.parameters()).device
        ids_BT = nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(device)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        if temperature != 1.0:
            logits = logits / temperature
        values_BT = torch.log_softmax(logits, dim=-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        return [nn.functional.pad(values_BT[i, : row.shape[0] - 1], (1, 0)) for i, row in enumerate(ids)]

    def active(self, model: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()


def aligned(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Rows of a packed score of N-1 entries; the one that would predict a row's first token is already 0, but for the first row's."""
    return list(nn.functional.pad(flat, (1, 0)).split(list(lengths)))
