"""THE log-probability: one function for engine and trainer, in float32 bits.

    logprob(token) = log_softmax(filter(float32(logits) / temperature))[token]

Filters (top-k, top-p, min-p) set what they remove to -inf, so that the rest is renormalised: the distribution actually
sampled from. Training never materialises all logits: head and log-softmax run over a few rows at a time, forward and
backward. Rows are independent, so the cut changes no bit; gradients of the weight are summed over the pieces in
float32, in order.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.errors import ExactnessError, InputError
from tokentrue.numerics.cpu.arithmetic import multiply
from tokentrue.numerics.exact import STATE, Preparation, exact
from tokentrue.numerics.modules import replace_attribute
from tokentrue.numerics.ops import Ops, Packed, same_bits
from tokentrue.numerics.vision import SeenImages
from tokentrue.records import record

# Rows scored at once.
ROWS = 4096


@record(eq=False)
class KeptRows:
    """The ids that filters kept: row r is `token_ids[offsets[r]:offsets[r + 1]]`; an empty row keeps all."""

    token_ids: Tensor  # int64 [N]
    offsets: Tensor  # int64 [R+1]

    def of(self, rows: slice) -> Self:
        offsets = self.offsets[rows.start : rows.stop + 1]
        return replace(self, token_ids=self.token_ids[int(offsets[0]) : int(offsets[-1])], offsets=offsets - offsets[0])

    def take(self, rows: Tensor) -> Self:
        counts = self.offsets.diff()
        ids = self.token_ids.split(counts.tolist())
        taken = [ids[row] for row in rows.tolist()] or [self.token_ids[:0]]
        return replace(self, token_ids=torch.cat(taken), offsets=F.pad(counts[rows].cumsum(0), (1, 0)))

    def removed(self, vocabulary: int) -> Tensor:
        """bool [R, V]."""
        counts = self.offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        table = (counts > 0)[:, None].expand(-1, vocabulary).clone()
        table[rows, self.token_ids] = False
        return table

    def to(self, device: torch.device) -> Self:
        return replace(self, token_ids=self.token_ids.to(device), offsets=self.offsets.to(device))


def remove_filtered(scaled_RV: Tensor, kept: KeptRows | None) -> Tensor:
    """Scaled logits with -inf where a filter removed the id, as in the sampler."""
    return scaled_RV if kept is None else scaled_RV.masked_fill(kept.removed(scaled_RV.shape[-1]), -torch.inf)


def scale_logits(logits_RV: Tensor, temperature: Tensor | float) -> Tensor:
    """float32 logits over temperature (a number or one per row)."""
    if not isinstance(temperature, Tensor):
        if temperature == 1.0:
            return logits_RV.float()
        # Some devices divide by a Python number by multiplying with its reciprocal, which rounds differently.
        temperature = torch.full((1,), temperature, dtype=torch.float32, device=logits_RV.device)
    return logits_RV.float() / temperature.unsqueeze(-1)


def logprobs_of(ops: Ops, logits_RV: Tensor, ids_R: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """For inference; `score` is differentiable."""
    pieces = []
    for start in range(0, logits_RV.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        per_row = temperature[rows] if isinstance(temperature, Tensor) and temperature.numel() > 1 else temperature
        pieces.append(ops.token_logprobs(scale_logits(logits_RV[rows], per_row), ids_R[rows]))
    return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


def filter_logits(scaled_V: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """One row of scaled logits after top-k, then top-p, then min-p; ties at a boundary are kept."""
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


PIECE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 28}


@record
class HeadSettings:
    ops: Ops
    temperature: float | Tensor  # one, or one per row
    softcap: float | None
    entropy: bool
    kept: KeptRows | None = None  # what the sampler's filters kept for each row
    divisor: float | None = None  # of the logits (Granite)
    more_ids: Tensor | None = None  # int64 [R, K]: ids of each row to score beside the sampled one

    @property
    def is_plain(self) -> bool:
        return not isinstance(self.temperature, Tensor) and self.temperature == 1.0

    def of(self, rows: slice) -> Self:
        temperature = self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
        kept, more = self.kept, self.more_ids
        return replace(
            self,
            temperature=temperature,
            kept=None if kept is None else kept.of(rows),
            more_ids=None if more is None else more[rows],
        )


class HeadScores(torch.autograd.Function):
    """float32 [R, 2 + K]: log-probability of ids[r], entropy of row r (0 unless requested), and log-probabilities of
    more_ids[r]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, settings: HeadSettings
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.settings = settings
        more = settings.more_ids
        width = 2 if more is None else 2 + more.shape[-1]
        out = torch.zeros(hidden.shape[0], width, dtype=torch.float32, device=hidden.device)
        for rows in pieces(hidden.shape[0], weight):
            scaled = scaled_logits_of(hidden[rows], weight, bias, settings.of(rows))[0]
            if not settings.entropy and more is None:
                out[rows, 0] = settings.ops.token_logprobs(scaled, ids[rows])
                continue
            table = settings.ops.log_softmax(scaled.float())
            out[rows, 0] = table.gather(-1, ids[rows, None]).squeeze(-1)
            if settings.entropy:
                out[rows, 1] = -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)
            if more is not None:
                out[rows, 2:] = table.gather(-1, more[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        for rows in pieces(hidden.shape[0], weight):
            d_logits = logits_gradient(hidden[rows], weight, bias, ids[rows], grads[0][rows], ctx.settings.of(rows))
            narrow = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = multiply(narrow, weight)
            if d_weight is not None:
                d_weight += multiply(narrow.t(), hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.float().sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None


def pieces(rows: int, weight: Tensor) -> Iterator[slice]:
    step = max(1, PIECE_LOGITS[weight.device.type] // weight.shape[0])
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def scaled_logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadSettings
) -> tuple[Tensor, Tensor | None]:
    """float32 logits over temperature (unchanged if the operators take them so), and tanh(logits / softcap)."""
    logits, bent = settings.ops.linear(hidden, weight, bias), None
    if settings.divisor is not None:
        logits = logits / settings.divisor
    if settings.softcap is not None:
        bent = torch.tanh(logits / settings.softcap)
        logits = bent * settings.softcap
    if not (settings.ops.reads_16bit and settings.is_plain):
        logits = scale_logits(logits, settings.temperature)
    return remove_filtered(logits, settings.kept), bent


def logits_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, grads: Tensor, settings: HeadSettings
) -> Tensor:
    """[R, V]: gradient with respect to the logits of the scores' sum, each weighted by its gradient."""
    scaled, bent = scaled_logits_of(hidden, weight, bias, settings)
    gradient = settings.ops.logits_gradient(scaled, ids, grads[:, :2].contiguous(), entropy=settings.entropy)
    if settings.more_ids is not None:  # of log p_v: 1 at v, less p everywhere
        wide = grads[:, 2:].float()
        spread = settings.ops.log_softmax(scaled.float()).exp_().mul_(-wide.sum(-1, keepdim=True))
        gradient = gradient.float() + spread.scatter_add_(-1, settings.more_ids, wide)
    if not settings.is_plain:
        divisor = settings.temperature
        gradient = (gradient / (divisor.unsqueeze(-1) if isinstance(divisor, Tensor) else divisor)).to(gradient.dtype)
    if bent is not None:
        gradient = gradient * (1 - bent.float().square())
    return gradient if settings.divisor is None else gradient / settings.divisor


def score(
    model: nn.Module, ids: Tensor, temperature: float | Tensor = 1.0, cu_seqlens: Tensor | None = None, *,
    kept: KeptRows | None = None, images: SeenImages | None = None,
) -> Tensor:  # fmt: skip
    """ids [B,T] -> float32 [B,T-1]: log-probability of ids[:,1:] under softmax(logits / temperature). Differentiable.

    Sequences start at position 0 and may be padded on the right with any id (causality hides it). Packed: ids [1,T] (or
    [T]) with `cu_seqlens` [S+1]; entries that would predict a sequence's first token from the one before it are 0.
    `temperature`: one number, or one per entry of the result. `kept`: for each entry of the result (row by row), the
    ids that the sampler's filters kept. `images`: those in ids [1,T] (or [T]), from `see_rows`. Outside `with exact(model)`, the block is entered for this call.
    """
    return scores_of(model, ids, temperature, cu_seqlens, kept=kept, images=images)[..., 0]


def scores_of(
    model: nn.Module, ids: Tensor, temperature: float | Tensor, cu_seqlens: Tensor | None = None, *, entropy: bool = False,
    kept: KeptRows | None = None, images: SeenImages | None = None, more_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`score`, the entropy (0 unless requested) and the log-probabilities of `more_ids`, [..., K] for each entry of the
    result, in the last dimension: [..., 2 + K]."""
    flat = ids.dim() == 1
    batch = ids[None] if flat else ids
    if batch.dim() != 2 or batch.shape[1] == 0:
        raise InputError(f"score: ids must be [batch, tokens], got {tuple(ids.shape)}")
    packed = None if cu_seqlens is None else packed_of(batch, cu_seqlens)
    targets = batch[:, 1:]
    if isinstance(temperature, Tensor):
        temperature = temperature.float().reshape(-1)
    if kept is not None and len(kept.offsets) != targets.numel() + 1:
        raise InputError(f"score: kept has {len(kept.offsets) - 1} rows for {targets.numel()} scores")
    if more_ids is not None:
        more_ids = more_ids.reshape(targets.numel(), -1)
    found = head_scores(
        model, batch, packed, targets, temperature, entropy=entropy, kept=kept, images=images, more_ids=more_ids
    )
    if packed is not None and len(packed.lengths) > 1:
        inside = torch.ones(found.shape[1], 1, dtype=torch.bool, device=found.device)
        inside[packed.cu_seqlens[1:-1].long() - 1] = False
        found = torch.where(inside, found, found.new_zeros(()))
    return found[0] if flat else found


def head_scores(
    model: Any, ids_BT: Tensor, packed: Packed | None, targets_BR: Tensor, temperature: float | Tensor, *, entropy: bool,
    kept: KeptRows | None, images: SeenImages | None, more_ids: Tensor | None, chosen: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """[B,R,2+K]: scores of the targets, which the `chosen` positions predict; None: all but the last. The output head
    returns them instead of logits (inside forward, for FSDP2)."""
    if not bool((torch.as_tensor(temperature) > 0).all()):
        raise InputError(
            f"score: temperature must be > 0, got {temperature}; greedy decoding has no log-probabilities of its own"
        )
    made: list[Tensor] = []
    with exact(model), ExitStack() as undo:
        active: Preparation = model.__dict__[STATE]
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        if not isinstance(head, nn.Linear):
            raise ExactnessError(
                f"the output head is a {type(head).__name__}, not a plain linear: its scores have no exact form"
            )
        softcap, divisor = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_scaling"))
        settings = HeadSettings(
            ops=active.ops, temperature=temperature, softcap=softcap, divisor=divisor, entropy=entropy, kept=kept,
            more_ids=more_ids,
        )  # fmt: skip

        def forward(hidden: Tensor) -> Tensor:
            used = hidden[:, :-1] if chosen is None else hidden
            flat: Any = used.reshape(-1, hidden.shape[-1])
            flat = flat if chosen is None else TakeRows.apply(flat, chosen)
            scores: Any = HeadScores.apply(flat, head.weight, head.bias, targets_BR.reshape(-1), settings)
            made.append(scores.view(*targets_BR.shape, scores.shape[-1]))
            return made[-1]

        replace_attribute(head, "forward", forward, undo)
        # The model's own code leaves the scores as they are.
        for name, value, neutral in (("final_logit_softcapping", softcap, None), ("logits_scaling", divisor, 1.0)):
            if value is not None:
                undo.callback(setattr, config, name, value)
                setattr(config, name, neutral)
        found = logits_of(model, ids_BT, packed, images)
        if len(made) != 1 or not same_bits(found.detach().float(), made[0].detach()):
            raise ExactnessError(f"{type(model).__name__} changes its logits after the output head: no exact form")
    return found


class TakeRows(torch.autograd.Function):
    """x [T,K] -> [R,K]: the rows that `pieces` name, no piece a row twice. Gradients are added piece by piece, in float32,
    without atomics: equal from run to run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        ctx.pieces, ctx.shape, ctx.dtype = pieces, x.shape, x.dtype
        return x.index_select(0, torch.cat(list(pieces)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grads[0].device)
        for piece, gradient in zip(ctx.pieces, grads[0].split([len(piece) for piece in ctx.pieces]), strict=True):
            total.index_add_(0, piece, gradient.float())
        return total.to(ctx.dtype), None


def logits_of(
    model: nn.Module, ids_BT: Tensor, packed: Packed | None = None, images: SeenImages | None = None
) -> Tensor:
    """Inside `exact`: [B,T,V] in the model's dtype. `ids_BT` may be embeddings [B,T,K]."""
    b, t = ids_BT.shape[:2]
    if packed is None:
        positions = torch.arange(t, device=ids_BT.device).expand(b, t)
        packed = Packed.of((t,) * b, ids_BT.device)
    elif packed.branches is not None:
        positions = packed.branches.positions.long()[None]
    else:
        positions = torch.cat([torch.arange(n, device=ids_BT.device) for n in packed.lengths])[None]
    source = {"inputs_embeds": ids_BT} if ids_BT.is_floating_point() else {"input_ids": ids_BT}
    seen = {"position_ids": positions} if images is None else images.inputs(ids_BT.device)
    return model(**source, **seen, use_cache=False, packed=packed).logits


def packed_of(ids: Tensor, cu_seqlens: Tensor) -> Packed:
    ends = cu_seqlens.tolist()
    if ids.shape[0] != 1 or ends[0] != 0 or ends[-1] != ids.shape[1] or any(b <= a for a, b in pairwise(ends)):
        raise InputError(f"score: cu_seqlens must rise from 0 to {ids.shape[1]} over one row of ids, got {ends}")
    lengths = tuple(b - a for a, b in pairwise(ends))
    return Packed(cu_seqlens=cu_seqlens.to(device=ids.device, dtype=torch.int32), lengths=lengths)
