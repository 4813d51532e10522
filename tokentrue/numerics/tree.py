"""Rows that share a prefix as one pack: a shared token is computed once, and its descendants follow it depth first.

Positions, ancestors and the order of every sum are those of the row by itself, so scores have its bits. A token that
several rows hold has a score for each temperature and set of kept ids.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokentrue.errors import ExactnessError
from tokentrue.numerics.logprob import KeptRows, head_scores
from tokentrue.numerics.ops import Branches, Packed, same_bits
from tokentrue.numerics.vision import SeenImages
from tokentrue.records import record

Array = np.ndarray[Any, np.dtype[Any]]


def sort_by_prefix(names: Sequence[Array]) -> tuple[list[int], list[int]]:
    """Rows in lexicographic order, and how many tokens each shares with the one before it."""
    order = sorted(range(len(names)), key=lambda row: names[row].tobytes())
    shared = [0] if order else []
    for a, b in pairwise(order):
        least = min(len(names[a]), len(names[b]))
        differs = (names[a][:least] != names[b][:least]).any(1)
        shared.append(int(differs.argmax()) if differs.any() else least)
    return order, shared


@record(eq=False)
class TokenTree:
    lengths: tuple[int, ...]  # of the rows, which lie end to end
    nodes: Array  # of each place in the rows: its token in the pack
    source: Array  # of each token of the pack: its place in a row
    depths: Array  # of each token of the pack: its position in that row
    packed: Packed

    @classmethod
    def of(cls, names: Sequence[Array], *, shared: bool = True, device: torch.device | str = "cpu") -> Self:
        """`names`: uint8 [T, W] of each row; tokens with equal bytes after equal prefixes are one if `shared`."""
        lengths = tuple(map(len, names))
        order, common = sort_by_prefix(names) if shared else (list(range(len(names))), [0] * len(names))
        starts = list(accumulate(lengths, initial=0))
        nodes, sources, count = np.empty(starts[-1], np.int64), list[Array](), 0
        before = nodes[:0]
        for row, known in zip(order, common, strict=True):
            own, fresh = nodes[starts[row] : starts[row + 1]], lengths[row] - known
            own[:known], own[known:] = before[:known], np.arange(count, count + fresh)
            sources.append(np.arange(starts[row] + known, starts[row + 1]))
            before, count = own, count + fresh
        source = np.concatenate([nodes[:0], *sources])
        depths = source - np.repeat(starts[:-1], lengths)[source]
        packed = pack_segments(nodes, source, depths, device)
        return cls(lengths=lengths, nodes=nodes, source=source, depths=depths, packed=packed)


def pack_segments(nodes: Array, source: Array, depths: Array, device: torch.device | str) -> Packed:
    """Cuts the tokens where one has several children, or does not continue the one before it."""
    count = len(source)
    parents = np.where(depths > 0, nodes[source - 1], -1)
    children = np.bincount(parents[parents >= 0], minlength=count)
    firsts = np.flatnonzero((depths == 0) | (parents != np.arange(count) - 1) | (children[parents] > 1))
    lengths = np.diff(firsts, append=count)
    packed = Packed.of(tuple(lengths.tolist()), device)
    if not depths[firsts].any():
        return packed
    ends, open_ = np.full(len(firsts), count), list[int]()
    for segment, first in enumerate(firsts):
        while open_ and depths[firsts[open_[-1]]] >= depths[first]:
            ends[open_.pop()] = first
        open_.append(segment)
    lasts = firsts + lengths - 1

    def integers(values: Array) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    table = np.stack((source[lasts] - depths[lasts], depths[lasts] + 1, ends), 1)
    branches = Branches(path=integers(nodes), table=integers(table), positions=integers(depths))
    return replace(packed, branches=branches)


def score_tree(
    model: nn.Module, tree: TokenTree, ids: Tensor, temperatures: Tensor, kept: KeptRows | None = None, *, entropy: bool = False,
    images: SeenImages | None = None, more_ids: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """For each row float32 [T, 2 + K]: the scores of `scores_of`; 0 for the first token. Arguments are of the rows end
    to end, on the host; images only if nothing is shared. Differentiable."""
    device = next(model.parameters()).device
    places, of_place = distinct_scores(tree, temperatures, kept, apart=more_ids is not None)
    parents = tree.nodes[places - 1]
    order = np.argsort(parents, kind="stable")
    turns = np.arange(len(order)) - np.searchsorted(parents[order], parents[order])  # of a token among its siblings
    order = order[np.argsort(turns, kind="stable")]  # first children, then second ones, …
    pieces = np.split(parents[order], np.bincount(turns).cumsum()[:-1])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    at = torch.from_numpy(places[order])
    heats = temperatures[at]
    scores = head_scores(
        model,
        ids[torch.from_numpy(tree.source)][None].to(device),
        tree.packed,
        ids[at][None].to(device),
        float(heats[0]) if len(heats.unique()) == 1 else heats.to(device),
        entropy=entropy,
        kept=None if kept is None else kept.take(at).to(device),
        images=images,
        more_ids=None if more_ids is None else more_ids[at].to(device),
        chosen=[torch.from_numpy(piece).to(device) for piece in pieces],
    )
    padded = F.pad(scores[0], (0, 0, 1, 0))  # of first tokens, which nothing predicts
    index = torch.from_numpy(np.append(rank + 1, 0)[of_place]).to(device)
    # A row names no score twice: no two gradients meet in one addition.
    return [padded.index_select(0, own) for own in index.split(tree.lengths)]


def distinct_scores(
    tree: TokenTree, temperatures: Tensor, kept: KeptRows | None, *, apart: bool
) -> tuple[Array, Array]:
    """A place in the rows for each score that is computed, and each place's score number (first tokens: -1)."""
    heats = np.unique(temperatures.numpy(), return_inverse=True)[1]
    keys = tree.nodes * (heats.max(initial=0) + 1) + heats
    if kept is not None:
        codes, lists = dict[bytes, int](), kept.token_ids.split(kept.offsets.diff().tolist())
        filters = [codes.setdefault(ids.numpy().tobytes(), len(codes)) for ids in lists]
        keys = keys * (len(codes) + 1) + np.array(filters)
    if apart:
        keys = np.arange(len(keys))
    later = np.flatnonzero(tree.depths[tree.nodes] > 0)
    _, first, inverse = np.unique(keys[later], return_index=True, return_inverse=True)
    of_place = np.full(len(keys), -1)
    of_place[later] = inverse
    return later[first], of_place


def shares_prefixes(model: nn.Module) -> bool:
    """Whether a tree has the bits of its rows under this model, in evaluation mode."""
    table: Any = model.get_input_embeddings()  # pyright: ignore
    first, second, third = torch.randint(table.num_embeddings, (3, 140), generator=torch.Generator().manual_seed(7))
    branch = torch.cat((first[:90], second[:60]))
    rows = [first, branch, torch.cat((branch[:135], third[:20])), torch.cat((first[:131], third[:9]))]
    names = [row.numpy()[:, None].view(np.uint8) for row in rows]
    ids, heats, device = torch.cat(rows), torch.ones(sum(map(len, rows))), next(model.parameters()).device
    apart = score_tree(model, TokenTree.of(names, shared=False, device=device), ids, heats)
    try:
        joined = score_tree(model, TokenTree.of(names, device=device), ids, heats)
    except ExactnessError:
        return False
    return all(same_bits(a, b) for a, b in zip(apart, joined, strict=True))
