"""Log-probabilities of whole rows under a model: packed through the exact operators, or padded through the model's own
forward.

Both return, for each row, one float32 value per token: entry i is log p(token i | tokens before i), and entry 0 is 0 by
convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tokentrue.numerics import KeptRows
from tokentrue.train.data.routing_replay import join_kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """By row; `entropy` where it was asked for."""

    logprobs: list[Tensor]
    entropy: list[Tensor] | None = None


class Scorer(Protocol):
    """`ids` and `temperatures` are rows of equal lengths; the answer is in the same order. `active()` wraps a training
    step.

    `kept` has, for each row, the ids that the sampler's filters kept for each of its tokens: the scores are of what is
    left. `is_padded`: a forward pass costs rows × longest row instead of the sum of the rows.
    """

    name: str
    is_padded: bool

    def __call__(
        self,
        model: nn.Module,
        ids: Sequence[Tensor],
        temperatures: Sequence[Tensor],
        *,
        entropy: bool = False,
        kept: Sequence[KeptRows | None] | None = None,
    ) -> Scores: ...

    def active(self, model: nn.Module) -> AbstractContextManager[object]: ...


class ExactScorer:
    """The engine's own operators: the same bits whatever is packed together."""

    name = "exact"
    is_padded = False

    def __call__(
        self,
        model: nn.Module,
        ids: Sequence[Tensor],
        temperatures: Sequence[Tensor],
        *,
        entropy: bool = False,
        kept: Sequence[KeptRows | None] | None = None,
    ) -> Scores:
        from tokentrue.numerics import score, score_with_entropy

        lengths = [int(row.shape[0]) for row in ids]
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        device = next(model.parameters()).device
        temperature = one_temperature(temperatures) or torch.cat(list(temperatures))[1:].to(device)
        packed, bounds = torch.cat(list(ids)).to(device), bounds.to(device)
        joined = join_kept(kept or [None] * len(ids), lengths)
        rows = None if joined is None else joined.of(slice(1, len(packed))).to(device)
        if not entropy:
            return Scores(logprobs=split_rows(score(model, packed, temperature, bounds, kept=rows), lengths))
        flat, spread = score_with_entropy(model, packed, temperature, bounds, kept=rows)
        return Scores(logprobs=split_rows(flat, lengths), entropy=split_rows(spread, lengths))

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[object]:
        from tokentrue.numerics import exact

        with exact(model) as found:
            yield found


class PlainScorer:
    """The model's own forward pass on right-padded rows: what an ordinary trainer computes."""

    name = "plain"
    is_padded = True

    def __call__(
        self,
        model: nn.Module,
        ids: Sequence[Tensor],
        temperatures: Sequence[Tensor],
        *,
        entropy: bool = False,
        kept: Sequence[KeptRows | None] | None = None,
    ) -> Scores:
        device = next(model.parameters()).device
        ids_BT = nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(device)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        if one_temperature(temperatures) != 1.0:
            logits = (
                logits
                / nn.utils.rnn.pad_sequence(list(temperatures), batch_first=True, padding_value=1.0).to(device)[
                    :, 1:, None
                ]
            )
        lengths = [int(row.shape[0]) for row in ids]
        joined = join_kept(kept or [None] * len(ids), lengths, pad_to=ids_BT.shape[1])
        if joined is not None:
            removed = joined.to(device).removed(logits.shape[-1]).view(*ids_BT.shape, -1)
            logits = logits.masked_fill(removed[:, 1:], -torch.inf)
        logp_BTV = torch.log_softmax(logits, dim=-1)
        values_BT = logp_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        spread_BT = -(logp_BTV.exp() * logp_BTV.masked_fill(logp_BTV == -torch.inf, 0.0)).sum(-1) if entropy else None
        return Scores(
            logprobs=unpad(values_BT, lengths), entropy=None if spread_BT is None else unpad(spread_BT, lengths)
        )

    def active(self, model: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()


def one_temperature(temperatures: Sequence[Tensor]) -> float | None:
    """The temperature that all tokens share, if they do."""
    first = float(temperatures[0][0])
    return first if all(bool((row == first).all()) for row in temperatures) else None


def unpad(values_BT: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [nn.functional.pad(values_BT[i, : length - 1], (1, 0)) for i, length in enumerate(lengths)]


def split_rows(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Rows of a packed score of N-1 entries; the one that would predict a row's first token is already 0, but for the
    first row's."""
    return list(nn.functional.pad(flat, (1, 0)).split(list(lengths)))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout: what is recomputed must be the policy that samples."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
