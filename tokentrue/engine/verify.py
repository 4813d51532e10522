"""Drawing proposed tokens again from the trainer's logits: the heart of verified speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokentrue.engine.sample import sample, sampling_row
from tokentrue.engine.scheduling.request import Request, Sampled
from tokentrue.numerics import logits_of
from tokentrue.types import Sampling

if TYPE_CHECKING:
    from tokentrue.engine.core import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    token_id: int
    logprob: float
    raw_logprob: float
    top: dict[int, float]
    kept: bytes = b""


@torch.no_grad()
def redraw(core: Core, ids: Sequence[int], proposed: Sequence[int], sampling: Sampling, seed: int) -> list[Draw]:
    """What the trainer draws after `ids`: proposed tokens as long as it agrees, then its own. One token more than
    agreed, always."""
    device = core.forward.device
    room = core.capacity - len(ids)
    proposed = list(proposed)[: room - 1] if room > 0 else []
    logits = logits_of(core.model, torch.tensor([[*ids, *proposed]], device=device))[0, len(ids) - 1 :]
    requests = [
        Request(prompt_ids=(*ids, *proposed[:count]), sampling=sampling, seed=seed, stop_ids=frozenset(), max_tokens=1)
        for count in range(len(proposed) + 1)
    ]
    draws: list[Draw] = []
    for count, result in enumerate(sample(core.forward.ops, logits, [sampling_row(request) for request in requests])):
        if not isinstance(result, Sampled):
            raise result
        draws.append(
            Draw(
                token_id=result.token_id,
                logprob=result.logprob,
                raw_logprob=result.raw_logprob,
                top=result.top or {},
                kept=result.kept,
            )
        )
        if count == len(proposed) or result.token_id != proposed[count]:
            break
    return draws
