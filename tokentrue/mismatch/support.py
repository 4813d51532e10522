"""Truncated sampling (top-p, top-k, min-p): the sampler renormalised over what it kept, the trainer scores the whole
vocabulary.

Then the mean ratio is about the kept mass instead of 1, on every token. With the log of the trainer's mass on the kept
tokens the two
are of the same kind again: `Correction(align_support=True)` and `support_log_mass=` subtract it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.types import Sample


def support_log_mass(logits: Tensor, kept: Tensor) -> Tensor:
    """log Σ over the kept tokens of the trainer's probabilities, differentiable.

    `logits` `[..., V]` after temperature. `kept` is a boolean `[..., V]`, or token ids `[..., K]` padded with -1. Each
    position must keep at least one token.
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


def support_log_mass_of(sample: Sample, logits: Tensor) -> Tensor:
    """`support_log_mass` of a sample's recorded sampling mask, `[T]`: 0 where no filter removed an id.

    `logits` `[T, V]` after temperature, row i being the distribution that token i was drawn from (a model's output,
    moved by one).
    """
    mask = sample.sampling_mask
    if mask is None:
        raise InputError(f"sample {sample.sample_id} has no sampling mask; have the engine return it when rolling out")
    if logits.shape[0] != len(sample.token_ids):
        raise InputError(
            f"sample {sample.sample_id}: {logits.shape[0]} rows of logits for {len(sample.token_ids)} tokens"
        )
    rows = [mask.row(index).tolist() for index in range(len(mask))]
    filtered = [index for index, row in enumerate(rows) if row]
    found = torch.zeros(len(rows), dtype=torch.float64, device=logits.device)
    if not filtered:
        return found
    ids = [torch.tensor(rows[index]) for index in filtered]
    kept = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1).to(logits.device)
    at = torch.tensor(filtered, device=logits.device)
    return found.index_put((at,), support_log_mass(logits[at], kept))
