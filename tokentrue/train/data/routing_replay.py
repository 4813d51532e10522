"""What a row replays in the trainer's forward passes: the ids that the sampler's filters kept, and the experts that the
rollout took.

Rows of one pass are laid end to end (packed) or padded on the right to the longest; a position without a record keeps
all ids and lets the router choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from tokentrue.mismatch.routing import replay_routing, routing_of, routing_weights_of
from tokentrue.numerics import KeptRows
from tokentrue.routing_replay import FREE
from tokentrue.train.config import RoutingReplay
from tokentrue.types import Sample


class Routed(Protocol):
    """A row that may have experts."""

    @property
    def length(self) -> int: ...

    @property
    def experts(self) -> Tensor | None: ...

    @property
    def expert_weights(self) -> Tensor | None: ...


def kept_rows(sample: Sample) -> KeptRows | None:
    """A row for each token of the sample; None where no filter removed anything."""
    mask = sample.sampling_mask
    if mask is None or not mask.token_ids:
        return None
    return KeptRows(token_ids=torch.tensor(mask.token_ids.tolist()), offsets=torch.tensor(mask.offsets.tolist()))


def experts_and_weights(sample: Sample) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if sample.routed_experts is None else (routing_of(sample), routing_weights_of(sample))


def join_kept(rows: Sequence[KeptRows | None], lengths: Sequence[int], *, pad_to: int | None = None) -> KeptRows | None:
    """Rows end to end, each padded with empty ones to `pad_to`; None where no row keeps anything back."""
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
def replay_experts(model: nn.Module, rows: Sequence[Routed], *, padded: bool, mode: RoutingReplay) -> Iterator[None]:
    """Inside the block the forward passes over these rows, and what their backward passes recompute, take the recorded
    experts."""
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
