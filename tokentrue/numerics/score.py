"""The trainer's log-probabilities: one forward pass over whole sequences on the exact operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tokentrue.errors import ExactnessError, InputError
from tokentrue.numerics.exact import STATE, State, exact
from tokentrue.numerics.logprob import HeadSettings, KeptRows, score_tokens
from tokentrue.numerics.modules import replace_attribute
from tokentrue.numerics.ops import Packed, same_bits


def score(
    model: nn.Module, ids: Tensor, temperature: float | Tensor = 1.0, cu_seqlens: Tensor | None = None, *,
    kept: KeptRows | None = None,
) -> Tensor:  # fmt: skip
    """ids [B,T] -> float32 [B,T-1]: log-probability of ids[:,1:] under softmax(logits / temperature). Differentiable.

    Sequences start at position 0 and may be padded on the right with any id (causality hides it). Packed: ids [1,T] (or
    [T]) with `cu_seqlens` [S+1]; entries that would predict a sequence's first token from the one before it are 0.
    `temperature`: one number, or one per entry of the result. `kept`: for each entry of the result (row by row), the
    ids that the sampler's filters kept. Outside `with exact(model)`, the block is entered for this call.
    """
    return scores_of(model, ids, temperature, cu_seqlens, entropy=False, kept=kept)[..., 0]


def score_with_entropy(
    model: nn.Module, ids: Tensor, temperature: float | Tensor = 1.0, cu_seqlens: Tensor | None = None, *,
    kept: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The log-probabilities of `score`, and the entropy of the distribution of each. Both differentiable."""
    both = scores_of(model, ids, temperature, cu_seqlens, entropy=True, kept=kept)
    return both[..., 0], both[..., 1]


def scores_of(
    model: nn.Module, ids: Tensor, temperature: float | Tensor, cu_seqlens: Tensor | None, *, entropy: bool, kept: KeptRows | None
) -> Tensor:  # fmt: skip
    if not bool((torch.as_tensor(temperature) > 0).all()):
        raise InputError(
            f"score: temperature must be > 0, got {temperature}; greedy decoding has no log-probabilities of its own"
        )
    flat = ids.dim() == 1
    batch = ids[None] if flat else ids
    if batch.dim() != 2 or batch.shape[1] == 0:
        raise InputError(f"score: ids must be [batch, tokens], got {tuple(ids.shape)}")
    if model.__dict__.get(STATE) is None:
        with exact(model):
            return scores_of(model, ids, temperature, cu_seqlens, entropy=entropy, kept=kept)
    packed = None if cu_seqlens is None else packed_of(batch, cu_seqlens)
    targets = torch.cat((batch[:, 1:], batch[:, :1]), 1)  # the last position predicts nothing; its score is dropped
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        temperature = nn.functional.pad(temperature.float().view(batch.shape[0], -1), (0, 1), value=1.0).reshape(-1)
    per_position = None if kept is None else with_last_positions(kept, batch.shape)
    with scoring_head(model, targets, temperature, entropy, per_position) as made:
        found = logits_of(model, batch, packed)
        if len(made) != 1 or not same_bits(found.detach().float(), made[0].detach()):
            raise ExactnessError(f"{type(model).__name__} changes its logits after the output head: no exact form")
    found = found[:, :-1]
    if packed is not None and len(packed.lengths) > 1:
        inside = torch.ones(found.shape[1], 1, dtype=torch.bool, device=found.device)
        inside[packed.cu_seqlens[1:-1].long() - 1] = False
        found = torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))
    return found[0] if flat else found


def with_last_positions(kept: KeptRows, shape: torch.Size) -> KeptRows:
    """From B × (T - 1) rows: adds the last positions, which predict nothing."""
    counts = kept.offsets.diff()
    if counts.numel() != shape[0] * (shape[1] - 1):
        raise InputError(f"score: kept has {counts.numel()} rows for {shape[0]} x {shape[1] - 1} scores")
    counts = nn.functional.pad(counts.view(shape[0], -1), (0, 1)).reshape(-1)
    return KeptRows(token_ids=kept.token_ids, offsets=nn.functional.pad(counts.cumsum(0), (1, 0)))


@contextmanager
def scoring_head(
    model: Any, targets_BT: Tensor, temperature: float | Tensor, entropy: bool, kept: KeptRows | None = None
) -> Iterator[list[Tensor]]:
    """While the block runs, the output head returns scores [B,T,2] instead of logits (inside forward, for FSDP2)."""
    state: State = model.__dict__[STATE]
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    if not isinstance(head, nn.Linear):
        raise ExactnessError(
            f"the output head is a {type(head).__name__}, not a plain linear: its scores have no exact form"
        )
    bent = {
        name: value
        for name in ("final_logit_softcapping", "logits_scaling")
        if (value := getattr(config, name, None)) is not None
    }
    settings = HeadSettings(
        ops=state.ops, temperature=temperature, softcap=bent.get("final_logit_softcapping"), divisor=bent.get("logits_scaling"),
        entropy=entropy, kept=kept,
    )  # fmt: skip
    made: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        scores = score_tokens(
            hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, targets_BT.reshape(-1), settings
        )
        made.append(scores.view(*hidden.shape[:-1], 2))
        return made[-1]

    with ExitStack() as undo:
        replace_attribute(head, "forward", forward, undo)
        for name, value in bent.items():  # the model's own code leaves the scores as they are
            undo.callback(setattr, config, name, value)
            setattr(config, name, 1.0 if name == "logits_scaling" else None)
        yield made


def logits_of(model: nn.Module, ids_BT: Tensor, packed: Packed | None = None) -> Tensor:
    """Plain forward pass inside `exact`: [B,T,V] in the model's dtype. `ids_BT` may be embeddings [B,T,K]."""
    b, t = ids_BT.shape[:2]
    if packed is None:
        positions = torch.arange(t, device=ids_BT.device).expand(b, t)
        packed = Packed.of((t,) * b, ids_BT.device)
    else:
        positions = torch.cat([torch.arange(n, device=ids_BT.device) for n in packed.lengths])[None]
    source = {"inputs_embeds": ids_BT} if ids_BT.is_floating_point() else {"input_ids": ids_BT}
    return model(**source, position_ids=positions, use_cache=False, packed=packed).logits


def packed_of(ids: Tensor, cu_seqlens: Tensor) -> Packed:
    ends = cu_seqlens.tolist()
    if ids.shape[0] != 1 or ends[0] != 0 or ends[-1] != ids.shape[1] or any(b <= a for a, b in pairwise(ends)):
        raise InputError(f"score: cu_seqlens must rise from 0 to {ids.shape[1]} over one row of ids, got {ends}")
    lengths = tuple(b - a for a, b in pairwise(ends))
    return Packed(cu_seqlens=cu_seqlens.to(device=ids.device, dtype=torch.int32), lengths=lengths)


# (index, log-probabilities [T-1] of that sequence) -> its share of the loss, a scalar.
SequenceLoss = Callable[[int, Tensor], Tensor]


def deterministic_grad(
    model: nn.Module, sequences: Sequence[Tensor], loss: SequenceLoss, *, temperature: float = 1.0, first: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Adds the gradient of sum_i loss(first + i, log-probabilities of sequences[i]) to `.grad`; returns that sum and
    the log-probabilities.

    The order of sums is fixed (one sequence, one backward pass), so the cut into micro-batches changes no bit:
    `deterministic_grad(m, a, f); deterministic_grad(m, b, f, first=len(a))` equals `deterministic_grad(m, a + b, f)`.
    The cost: no batching in the backward pass. Without it, gradients are still equal from run to run.
    """
    total = torch.zeros((), dtype=torch.float64)
    found: list[Tensor] = []
    with exact(model):
        for index, ids in enumerate(sequences):
            logprobs = score(model, ids[None], temperature)[0]
            share = loss(first + index, logprobs)
            share.backward()
            total += share.detach().double().cpu()
            found.append(logprobs.detach())
    return total, found
