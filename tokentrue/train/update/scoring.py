"""Log-probabilities of whole rows under a model: packed through the exact operators, or padded through the model's own
forward; and what the forward passes replay of the rollout: kept ids and experts.

Each row has one float32 value per token: entry i is log p(token i | tokens before i), and entry 0 is 0 by convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tokentrue.mismatch.routing import replay_routing
from tokentrue.numerics import KeptRows
from tokentrue.routing_replay import FREE
from tokentrue.train.config import RoutingReplay
from tokentrue.train.data.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    logprobs: list[Tensor]
    entropy: list[Tensor] | None = None


class Scorer(Protocol):
    """Scores rows in their order. `active()` wraps a training step.

    `kept` has the ids that the sampler's filters kept for each token. `is_padded`: a pass costs rows × longest row.
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
            padded = nn.utils.rnn.pad_sequence(list(temperatures), batch_first=True, padding_value=1.0)
            logits = logits / padded.to(device)[:, 1:, None]
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


def join_kept(rows: Sequence[KeptRows | None], lengths: Sequence[int], *, pad_to: int | None = None) -> KeptRows | None:
    """Rows end to end, each padded with empty ones to `pad_to`."""
    if all(row is None for row in rows):
        return None
    ids: list[Tensor] = []
    counts: list[Tensor] = []
    for row, length in zip(rows, lengths, strict=True):
        own = torch.zeros(length, dtype=torch.int64) if row is None else row.offsets.diff()
        counts.append(own if pad_to is None else nn.functional.pad(own, (0, pad_to - length)))
        if row is not None:
            ids.append(row.token_ids)
    return KeptRows(token_ids=torch.cat(ids), offsets=nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0)))


@contextmanager
def replay_experts(model: nn.Module, rows: Sequence[Row], *, padded: bool, mode: RoutingReplay) -> Iterator[None]:
    """Forward and backward passes over these rows take the recorded experts."""
    known = [row.experts for row in rows if row.experts is not None]
    if mode == "off" or not known:
        yield
        return
    longest, shape = max(row.length for row in rows), known[0].shape[1:]
    lengths = [longest if padded else row.length for row in rows]
    experts = torch.cat(
        [_filled(row.experts, length, shape, FREE, torch.int16) for row, length in zip(rows, lengths, strict=True)]
    )
    weights = None
    if mode == "weights" and all(row.expert_weights is not None for row in rows if row.experts is not None):
        found = [
            _filled(row.expert_weights, length, shape, 0, torch.float32)
            for row, length in zip(rows, lengths, strict=True)
        ]
        weights = torch.cat(found)
    with replay_routing(model, experts, weights):
        yield


def _filled(table: Tensor | None, length: int, shape: torch.Size, value: int, dtype: torch.dtype) -> Tensor:
    whole = torch.full((length, *shape), value, dtype=dtype)
    if table is not None:
        whole[: table.shape[0]] = table
    return whole
