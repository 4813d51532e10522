"""Causal attention on the CPU with one reduction order for training, prefill and decode.

A query's result is a float32 fold over key blocks of 128, in order: scores by one product over the head size, the
maximum over all visible keys, exp, then per block the product with the values and the sum, a sink last. Masked and
padded keys have weight exactly 0, so padding changes nothing. A product gives a row the same bits from a minimum number
of rows on, which the self-test finds.

Legend: X batch of (key head, sequence), M query rows (position-major, then heads of the group), N keys (a multiple of
128), D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokentrue.numerics.ops import AttentionSpec, Packed, PagedBatch

# Keys per block of the fold: both sides must share it.
KEYS = 128
# Query positions per product; a chunk takes the smallest that holds it.
TILES = (1, 8, 32, 64, 128)
# Most weights of a call kept for the backward pass (64 MiB); beyond, they are computed again.
KEPT = 1 << 24


def fold(
    q_XMD: Tensor, k_XND: Tensor, v_XND: Tensor, hidden: Tensor, softcap: float | None, sink: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Output [X,M,D], maximum and total [X,M,1], weights before division [X,M,N]. `hidden`: mask over the last keys,
    broadcast over X. `sink` [X,M,1]: an additional score of each row."""
    s_XMN = torch.bmm(q_XMD, k_XND.transpose(1, 2))
    if softcap is not None:
        s_XMN = s_XMN.div_(softcap).tanh_().mul_(softcap)
    s_XMN[..., s_XMN.shape[-1] - hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
    top = s_XMN.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    p_XMN = s_XMN.sub_(top).exp_()
    x, m, n = p_XMN.shape
    total = p_XMN.view(x, m, n // KEYS, KEYS).sum(-1)
    if n > KEYS:
        total = total.cumsum(-1)[..., -1:]  # sequential, so that blocks of zeros at the end change nothing
    if sink is not None:
        total = total + torch.exp(sink - top)
    out = torch.bmm(p_XMN[..., :KEYS], v_XND[:, :KEYS])
    for start in range(KEYS, n, KEYS):
        out += torch.bmm(p_XMN[..., start : start + KEYS], v_XND[:, start : start + KEYS])
    return out.div_(total), top, total, p_XMN


def sink_rows(sinks_H: Tensor | None, heads: int, sequences: int, positions: int, rows: int) -> Tensor | None:
    """float32 [J*C, rows, 1]; rows beyond the `positions` of a tile are padding."""
    if sinks_H is None:
        return None
    groups = sinks_H.shape[0] // heads
    every = sinks_H.float().view(heads, 1, 1, groups).expand(heads, sequences, positions, groups)
    return F.pad(every.reshape(heads * sequences, positions * groups, 1), (0, 0, 0, rows - positions * groups))


@lru_cache(maxsize=256)
def hidden_keys(first: int, positions: int, key_first: int, keys: int, window: int | None, groups: int) -> Tensor:
    """True where query `first + i` does not see key `key_first + j`; rows repeat per head of the group. Read-only."""
    distance = torch.arange(first, first + positions)[:, None] - torch.arange(key_first, key_first + keys)[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return hidden.repeat_interleave(groups, 0)


def up_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Chunk:
    first: int
    tile: int
    keys: int  # a multiple of KEYS
    hidden: Tensor  # over the last keys


def chunks(start: int, stop: int, window: int | None, groups: int, seen: int | None = None) -> Iterator[Chunk]:
    """Tiles of positions [start, stop), none crossing a multiple of 128. `seen`: every query sees that many keys."""
    first = start
    while first < stop:
        length = min(stop, up_to(first + 1, KEYS)) - first
        tile = next(t for t in TILES if t >= length)
        keys = up_to(first + length if seen is None else seen, KEYS)
        if seen is not None:
            hidden = past_the_end()[seen - keys + KEYS][None]
        elif window is None:  # only the last block holds the diagonal
            hidden = hidden_keys(first % KEYS, tile, 0, KEYS, None, groups)
        else:
            hidden = hidden_keys(first, tile, 0, keys, window, groups)
        yield Chunk(first, tile, keys, hidden)
        first += length


class PackedAttention(torch.autograd.Function):
    """q [C,Q,H,D], k/v [C,T,J,D]: the last Q of T positions (multiples of 128) of C padded sequences. Padded rows are
    undefined. `seen`: the keys that every query sees, without causality."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec, seen: int | None = None
    ) -> Tensor:
        scale, window, softcap = spec.scale, spec.window, spec.softcap
        q_XTGD, k_XND, v_XND = head_major(q, k, v, scale)
        (x, count, g, d), t = q_XTGD.shape, k.shape[1]
        out = torch.empty_like(q_XTGD)
        totals, kept = [], []
        keep = softcap is None and x * count * g * t <= 2 * KEPT
        for chunk in chunks(t - count, t, window, g, seen):
            at, m, n = chunk.first - (t - count), chunk.tile * g, chunk.keys
            rows = slice(at, at + chunk.tile)
            sink = sink_rows(sinks, k.shape[2], k.shape[0], chunk.tile, m)
            o, top, total, p = fold(
                q_XTGD[:, rows].reshape(x, m, d), k_XND[:, :n], v_XND[:, :n], chunk.hidden, softcap, sink
            )
            out[:, rows] = o.view(x, chunk.tile, g, d)
            totals += [top, total]
            kept += [p] if keep else []
        ctx.save_for_backward(q, k, v, sinks, out, *totals, *kept)
        ctx.spec = (scale, window, softcap, keep, seen)
        return token_major(out, q.shape).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, *rest = ctx.saved_tensors
        scale, window, softcap, keep, seen = ctx.spec
        q_XTGD, k_XND, v_XND = head_major(q, k, v, scale)
        (x, count, g, d), t = q_XTGD.shape, k.shape[1]
        do = head_major_one(grads[0], k.shape[2])
        dq, dk, dv = torch.empty_like(q_XTGD), torch.zeros_like(k_XND), torch.zeros_like(v_XND)
        d_sinks = None if sinks is None else torch.zeros(k.shape[2], g, dtype=torch.float32)
        pieces = list(chunks(t - count, t, window, g, seen))
        kept = rest[2 * len(pieces) :]
        for index, chunk in enumerate(pieces):
            at, m, n = chunk.first - (t - count), chunk.tile * g, chunk.keys
            rows = slice(at, at + chunk.tile)
            top, total = rest[2 * index], rest[2 * index + 1]
            q_XMD = q_XTGD[:, rows].reshape(x, m, d)
            do_XMD = do[:, rows].reshape(x, m, d) / total
            p, slope = (kept[index], None) if keep else weights_again(q_XMD, k_XND[:, :n], top, chunk, softcap)
            dv[:, :n].baddbmm_(p.transpose(1, 2), do_XMD)
            inner = (do_XMD * out[:, rows].reshape(x, m, d)).sum(-1, keepdim=True)
            sink = sink_rows(sinks, k.shape[2], k.shape[0], chunk.tile, m)
            if d_sinks is not None and sink is not None:
                d_sinks -= (torch.exp(sink - top) * inner).view(k.shape[2], -1, g).sum(1)
            ds = torch.bmm(do_XMD, v_XND[:, :n].transpose(1, 2)).sub_(inner).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            dq[:, rows] = torch.bmm(ds, k_XND[:, :n]).view(x, chunk.tile, g, d)
            dk[:, :n].baddbmm_(ds.transpose(1, 2), q_XMD)
        return (
            token_major(dq.mul_(scale), q.shape).to(q.dtype),
            token_major(dk.unsqueeze(2), k.shape).to(k.dtype),
            token_major(dv.unsqueeze(2), v.shape).to(v.dtype),
            None if d_sinks is None or sinks is None else d_sinks.flatten().to(sinks.dtype),
            None,
            None,
        )


def weights_again(
    q_XMD: Tensor, k_XND: Tensor, top: Tensor, chunk: Chunk, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """The weights of `fold` again, and the slope of the soft cap."""
    s = torch.bmm(q_XMD, k_XND.transpose(1, 2))
    slope = None
    if softcap is not None:
        s = s.div_(softcap).tanh_()
        slope = 1 - s * s
        s = s.mul_(softcap)
    s[..., s.shape[-1] - chunk.hidden.shape[-1] :].masked_fill_(chunk.hidden, -torch.inf)
    return s.sub_(top).exp_(), slope


def head_major_one(q_CTHD: Tensor, heads: int) -> Tensor:
    """[C,T,H,D] -> float32 [J*C, T, G, D]."""
    c, t, h, d = q_CTHD.shape
    return q_CTHD.float().view(c, t, heads, h // heads, d).permute(2, 0, 1, 3, 4).reshape(heads * c, t, h // heads, d)


def head_major(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[2]
    return head_major_one(q, heads) * scale, head_major_one(k, heads).squeeze(2), head_major_one(v, heads).squeeze(2)


def token_major(x_XTGD: Tensor, shape: torch.Size) -> Tensor:
    c, t, h, d = shape
    g = x_XTGD.shape[2]
    return x_XTGD.view(h // g, c, t, g, d).permute(1, 2, 0, 3, 4).reshape(c, t, h, d)


def attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, spec: AttentionSpec) -> Tensor:
    """q [T,H,D], k/v [T,J,D], sequences back to back; those of equal padded length share a product if causal.

    The keys of a tree's segment are gathered along its row, and its queries begin with the block of its first token:
    the products are those of the row by itself.
    """
    lengths, tree = packed.lengths, packed.branches
    if not spec.causal:
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([attend_all(*qkv, spec) for qkv in parts])
    if tree is None and lengths[0] % KEYS == 0 and len(set(lengths)) == 1:
        even_q, even_k, even_v = (x.unflatten(0, (-1, lengths[0])) for x in (q, k, v))
        return PackedAttention.apply(even_q, even_k, even_v, spec.sinks, spec).view(q.shape)  # pyright: ignore
    starts = list(accumulate(lengths, initial=0))
    bases, contexts, path = starts, lengths, torch.arange(starts[-1])
    if tree is not None:
        bases, contexts = tree.table[:, :2].t().tolist()
        path, k, v = tree.path, k.float(), v.float()  # gradients of a shared key are added before they are rounded
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        buckets.setdefault(((context - length) // KEYS * KEYS, up_to(context, KEYS)), []).append(index)
    rows, results = [], []
    for (begin, padded), members in buckets.items():
        # The last row repeated as padding: finite, and hidden from every real query.
        index = torch.stack([path[torch.arange(padded).clamp_(max=contexts[i] - 1) + bases[i]] for i in members])
        tensors = (
            x.index_select(0, which.reshape(-1)).view(*which.shape, *x.shape[1:])
            for x, which in ((q, index[:, begin:]), (k, index), (v, index))
        )
        out = PackedAttention.apply(*tensors, spec.sinks, spec)
        firsts = [contexts[i] - lengths[i] - begin + row * (padded - begin) for row, i in enumerate(members)]
        keep = torch.cat([torch.arange(first, first + lengths[i]) for first, i in zip(firsts, members, strict=True)])
        rows.append(torch.cat([torch.arange(starts[i], starts[i + 1]) for i in members]))
        results.append(out.view(-1, *out.shape[2:]).index_select(0, keep))  # pyright: ignore
    if len(buckets) == 1:  # in order
        return results[0]
    return torch.cat(results).index_select(0, torch.cat(rows).argsort())


def attend_all(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    length = q.shape[0]
    padded = (F.pad(x, (0, 0, 0, 0, 0, up_to(length, KEYS) - length))[None] for x in (q, k, v))
    return PackedAttention.apply(*padded, None, spec, length)[0, :length]  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Plan:
    """Sequences that are computed together: as many queries each, and about as many keys."""

    rows: Tensor | None  # of their queries; None: all of the step
    sequences: int
    pages: Tensor
    keys: int  # padding included
    first: int  # position of the first query (unless they are decodes)
    chunks: list[Chunk]


class PagedAttention:
    def __init__(self, page: int) -> None:
        self.page = page
        self.rows = 8  # least rows of a product; the self-test finds it
        self._buffers: dict[str, Tensor] = {}
        self._plans: tuple[PagedBatch, dict[tuple[int | None, int, int], list[Plan]]] | None = None

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, spec: AttentionSpec) -> Tensor:
        if self._plans is None or self._plans[0] is not batch:
            self._plans = (batch, {})
        heads = k_cache.shape[1]
        key = (spec.window, heads, q.shape[1] // heads)
        plans = self._plans[1].get(key)  # the same for every layer of a step
        if plans is None:
            plans = self._plans[1][key] = self.plan(batch, *key)
        if len(plans) == 1 and plans[0].rows is None:
            return self.compute(q, k_cache, v_cache, plans[0], spec)
        out = q.new_empty(q.shape)
        for plan in plans:
            out[plan.rows] = self.compute(q[plan.rows], k_cache, v_cache, plan, spec)
        return out

    def plan(self, batch: PagedBatch, window: int | None, heads: int, groups: int) -> list[Plan]:
        """Decodes of padded lengths within a factor of two share a product (others would pay for the longest), and so
        do prefills alike."""
        buckets: dict[tuple[int, int], list[int]] = {}
        for i, (queries, context) in enumerate(zip(batch.q_lens, batch.contexts, strict=True)):
            alike = (0, ((context - 1) // KEYS).bit_length()) if i < batch.num_decodes else (queries, context)
            buckets.setdefault(alike, []).append(i)
        starts = list(accumulate(batch.q_lens, initial=0))
        plans = []
        for members in buckets.values():
            queries, contexts = batch.q_lens[members[0]], [batch.contexts[i] for i in members]
            keys, first = up_to(max(contexts), KEYS), contexts[0] - queries
            if members[0] < batch.num_decodes:
                hidden = hidden_decode(contexts, keys, window)
                chunked = [Chunk(first, 1, keys, hidden.repeat(heads, 1, 1) if len(members) > 1 else hidden)]
            else:
                chunked = list(chunks(first, contexts[0], window, groups))
            whole = len(members) == len(batch.q_lens)
            rows = None if whole else torch.cat([torch.arange(starts[i], starts[i + 1]) for i in members])
            tables, pages = batch.block_tables if whole else batch.block_tables[members], keys // self.page
            tables = F.pad(tables[:, :pages], (0, max(0, pages - tables.shape[1])))
            plans.append(Plan(rows, len(members), tables.reshape(-1), keys, first, chunked))
        return plans

    def compute(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, spec: AttentionSpec) -> Tensor:
        shape = (plan.sequences, q.shape[0] // plan.sequences, *q.shape[1:])
        j, s, t = k_cache.shape[1], *shape[:2]
        k, v = self.gather(k_cache, plan, "k"), self.gather(v_cache, plan, "v")
        q_XTGD = head_major_one(q.view(shape), j) * spec.scale
        x, _, g, d = q_XTGD.shape
        out = torch.empty_like(q_XTGD)
        for chunk in plan.chunks:
            at, hidden = chunk.first - plan.first, chunk.hidden
            stop, least = min(chunk.tile, t - at), max(chunk.tile * g, self.rows)
            rows = F.pad(q_XTGD[:, at : at + stop].reshape(x, -1, d), (0, 0, 0, least - stop * g))
            if hidden.shape[-2] not in (1, least):
                hidden = F.pad(hidden, (0, 0, 0, least - hidden.shape[-2]))
            sink = sink_rows(spec.sinks, j, s, stop, least)
            result = fold(rows, k[:, : chunk.keys], v[:, : chunk.keys], hidden, spec.softcap, sink)[0]
            out[:, at : at + stop] = result[:, : stop * g].view(x, stop, g, d)
        return token_major(out, torch.Size(shape)).to(q.dtype).view(q.shape)

    def gather(self, cache: Tensor, plan: Plan, name: str) -> Tensor:
        """float32 [J*S, keys, D], in a buffer that the next call with this name reuses."""
        source = cache.transpose(0, 1)
        j, _, b, d = source.shape
        size = j * plan.pages.shape[0] * b * d
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != cache.dtype:
            buffer = self._buffers[name] = torch.empty(size, dtype=cache.dtype)
        out = buffer[:size].view(j, plan.pages.shape[0], b, d)
        torch.index_select(source, 1, plan.pages, out=out)
        return out.view(-1, plan.keys, d).float()


@lru_cache(maxsize=1)
def past_the_end() -> Tensor:
    """Row c: the keys of a block after its first c. Read-only."""
    return torch.arange(KEYS)[None, :] >= torch.arange(KEYS + 1)[:, None]


def hidden_decode(contexts: list[int], keys: int, window: int | None) -> Tensor:
    """[S,1,N]: mask of hidden keys; only over the last block if that suffices."""
    first = keys - KEYS
    if window is None and min(contexts) > first:
        return past_the_end()[[context - first for context in contexts]].unsqueeze(1)
    ends = torch.tensor(contexts).view(-1, 1, 1)
    at = torch.arange(keys).view(1, 1, -1)
    hidden = at >= ends
    return hidden if window is None else hidden | (at < ends - window)
