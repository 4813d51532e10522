"""Log-probabilities of whole rows, replaying the rollout's kept ids and experts. Entry i of a row is log p(token i |
tokens before i), and entry 0 is 0.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from tokentrue.numerics import KeptRows, TokenTree, exact, score_tree, see_rows
from tokentrue.numerics.routing import replay_routing
from tokentrue.pixels import PixelReader, check_runs, plain_inputs
from tokentrue.records import record
from tokentrue.routing_replay import FREE
from tokentrue.train.config import RoutingReplay
from tokentrue.train.rows import ScoredRow, join_tables, token_names


@record(eq=False)
class Scores:
    logprobs: list[Tensor]
    entropy: list[Tensor] | None = None
    head: list[Tensor] | None = None  # of each row's `head_ids`


class Scorer(Protocol):
    """`active()` wraps a training step. `is_padded`: a pass costs rows × longest row; `tree`: shared prefixes cost
    once."""

    is_padded: bool
    tree: bool

    def __call__(self, model: nn.Module, rows: Sequence[ScoredRow], *, entropy: bool = False) -> Scores: ...

    def active(self, model: nn.Module) -> AbstractContextManager[object]: ...


class ExactScorer:
    """The engine's own operators: the same bits whatever is packed together. `leaves`: the engine's."""

    is_padded = False

    def __init__(self, reader: PixelReader | None = None, *, leaves: int = 1, tree: bool = False) -> None:
        self.reader = reader
        self.leaves = leaves
        self.tree = tree

    def __call__(self, model: nn.Module, rows: Sequence[ScoredRow], *, entropy: bool = False) -> Scores:
        with self.active(model):
            more = [row.head_ids for row in rows if row.head_ids is not None]
            found = score_tree(
                model,
                lay_out(rows, tree=self.tree, device=next(model.parameters()).device),
                torch.cat([row.ids for row in rows]),
                torch.cat([row.temperatures for row in rows]),
                join_kept(rows),
                entropy=entropy,
                images=see_rows(model, [(row.ids, row.images) for row in rows], self.reader),
                more_ids=torch.cat(more) if more else None,
            )
        return Scores(
            logprobs=[values[:, 0] for values in found],
            entropy=[values[:, 1] for values in found] if entropy else None,
            head=[values[:, 2:] for values in found] if more else None,
        )

    def active(self, model: nn.Module) -> AbstractContextManager[object]:
        return exact(model, leaves=self.leaves)


class PlainScorer:
    """The model's own forward pass on right-padded rows: what an ordinary trainer computes."""

    is_padded = True
    tree = False

    def __init__(self, reader: PixelReader | None = None) -> None:
        self.reader = reader

    def __call__(self, model: nn.Module, rows: Sequence[ScoredRow], *, entropy: bool = False) -> Scores:
        device = next(model.parameters()).device
        ids_BT = nn.utils.rnn.pad_sequence([row.ids for row in rows], batch_first=True).to(device)
        for row in rows:
            check_runs(row.ids, row.images, model.config, "a row")
        seen = plain_inputs(model, ids_BT, [row.images for row in rows], self.reader)
        logits = model(input_ids=ids_BT, use_cache=False, **seen).logits[:, :-1].float()
        heats = nn.utils.rnn.pad_sequence([row.temperatures for row in rows], batch_first=True, padding_value=1.0)
        if bool((heats != 1).any()):
            logits = logits / heats.to(device)[:, 1:, None]
        joined = join_kept(rows, pad_to=ids_BT.shape[1])
        if joined is not None:
            removed = joined.to(device).removed(logits.shape[-1]).view(*ids_BT.shape, -1)
            logits = logits.masked_fill(removed[:, 1:], -torch.inf)
        logp_BTV = torch.log_softmax(logits, dim=-1)

        def unpad(values_BT: Tensor) -> list[Tensor]:
            first = values_BT.new_zeros(1, *values_BT.shape[2:])
            return [torch.cat((first, values_BT[i, : row.length - 1])) for i, row in enumerate(rows)]

        logprobs, head, spread = unpad(logp_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)), None, None
        if ids := [row.head_ids for row in rows if row.head_ids is not None]:
            more_BTK = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)[:, 1:]
            head = unpad(logp_BTV.gather(-1, more_BTK))
        if entropy:
            terms_BTV = logp_BTV.exp() * logp_BTV.masked_fill(logp_BTV == -torch.inf, 0.0)
            spread = unpad(-terms_BTV.sum(-1))
        return Scores(logprobs=logprobs, entropy=spread, head=head)

    def active(self, model: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()


def lay_out(rows: Sequence[ScoredRow], *, tree: bool, device: torch.device | str = "cpu") -> TokenTree:
    """Each shared prefix once, or (with images, too) the rows back to back."""
    return TokenTree.of(token_names(rows), shared=tree and not any(row.images for row in rows), device=device)


def join_kept(rows: Sequence[ScoredRow], *, pad_to: int | None = None) -> KeptRows | None:
    """End to end, each row padded with empty ones to `pad_to`."""
    ids = [row.kept.token_ids for row in rows if row.kept is not None]
    if not ids:
        return None
    counts = [
        nn.functional.pad(
            torch.zeros(row.length, dtype=torch.int64) if row.kept is None else row.kept.offsets.diff(),
            (0, 0 if pad_to is None else pad_to - row.length),
        )
        for row in rows
    ]
    return KeptRows(token_ids=torch.cat(ids), offsets=nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0)))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout: what is recomputed must be the policy that samples."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def replay_experts(
    model: nn.Module, rows: Sequence[ScoredRow], *, scorer: Scorer, mode: RoutingReplay
) -> Iterator[None]:
    known = [row for row in rows if row.experts is not None]
    if mode == "off" or not known:
        yield
        return

    def join(tables: Sequence[Tensor | None], fill: int) -> Tensor:
        whole = join_tables(rows, tables, fill)
        if scorer.is_padded:
            return nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=fill).flatten(0, 1)
        return torch.cat(whole)[lay_out(rows, tree=scorer.tree).source]

    experts, weights = join([row.experts for row in rows], FREE), None
    if mode == "weights" and all(row.expert_weights is not None for row in known):
        weights = join([row.expert_weights for row in rows], 0)
    with replay_routing(model, experts, weights):
        yield
