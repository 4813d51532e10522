"""Truncated sampling (top-p, top-k, min-p): the sampler renormalised over what it kept, the trainer scores the whole vocabulary.

Then the mean ratio is about the kept mass instead of 1, on every token. With the log of the trainer's mass on the kept tokens the two
are of the same kind again: `Correction(align_support=True)` and `support_log_mass=` subtract it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokentrue.errors import InputError


def support_log_mass(logits: Tensor, kept: Tensor) -> Tensor:
    """log Σ over the kept tokens of the trainer's probabilities, differentiable.

    `logits` `[..., V]` after temperature. `kept` is a boolean `[..., V]`, or token ids `[..., K]` padded with -1. Each position must
    keep at least one token.
    """
    whole = logits.double().logsumexp(dim=-1)
    if kept.dtype == torch.bool:
        if kept.shape != logits.shape:
            raise InputError(f"kept: shape {list(kept.shape)} does not match the logits' {list(logits.shape)}")
        inside, some = logits.double().masked_fill(~kept, -torch.inf), kept.any(dim=-1)
    else:
        if kept.shape[:-1] != logits.shape[:-1] or int(kept.max()) >= logits.shape[-1]:
            raise InputError(f"kept: ids of shape {list(kept.shape)} do not index logits of shape {list(logits.shape)}")
        inside = logits.double().gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)
        some = (kept >= 0).any(dim=-1)
    if not bool(some.all()):
        raise InputError("kept: a position keeps no token; the sampled one at least must be among them")
    return inside.logsumexp(dim=-1) - whole
