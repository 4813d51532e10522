"""Tokens sampled by these very weights must have these very bits. Engines with their own arithmetic are held to a bound
on each row's mean |δ| instead (`require_near`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokentrue.errors import EngineContractError, ExactnessError, TokenContractError
from tokentrue.records import record
from tokentrue.train.ranks import Ranks
from tokentrue.train.rows import Row

PROBED_TOKENS = 24  # that an engine samples for the probe, whose mean |δ| is the limit of a row's


@record
class Agreement:
    """`largest` |trainer - rollout| among the `differing`, and a description of the `first`."""

    compared: int = 0
    differing: int = 0
    largest: float = 0.0
    first: str = ""

    def merge(self, other: "Agreement") -> "Agreement":
        return Agreement(
            compared=self.compared + other.compared,
            differing=self.differing + other.differing,
            largest=max(self.largest, other.largest),
            first=self.first or other.first,
        )


def agreement(rows: Sequence[Row], trainer: Sequence[Tensor], *, version: int) -> Agreement:
    found = Agreement()
    for row, values in zip(rows, trainer, strict=True):
        current = row.sampled & (row.versions == version)
        mine = values.detach().to(device="cpu", dtype=torch.float32)
        unequal = current & (mine.view(torch.int32) != row.rollout.view(torch.int32))
        differing = int(unequal.sum())
        largest = float((mine - row.rollout)[unequal].abs().max()) if differing else 0.0
        first = describe_difference(row, mine, int(unequal.nonzero()[0])) if differing and not found.first else ""
        found = found.merge(Agreement(compared=int(current.sum()), differing=differing, largest=largest, first=first))
    return found


def describe_difference(row: Row, trainer: Tensor, token: int) -> str:
    mine, theirs = float(trainer[token]), float(row.rollout[token])
    turn = next(span.turn for span in row.sample.spans if span.start <= token < span.end)
    return (
        f"sample {row.sample.sample_id} (session {row.sample.session_id}, turn {turn}), token {token}, "
        f"id {int(row.ids[token])}: rollout {theirs!r} ({theirs.hex()}), trainer {mine!r} ({mine.hex()}), "
        f"{ulps(mine, theirs)} ulp"
    )


def require_exact(found: Agreement, *, version: int) -> None:
    if found.differing:
        raise ExactnessError(
            f"step {version}: the trainer's log-probability differs from the rollout's. First at {found.first}; "
            f"{found.differing} of {found.compared} tokens of policy version {version} differ, by at most "
            f"{found.largest:.3g}. Score with the engine's operators (train.exact), the same temperature, dtype and "
            "leaves, or set exact = false"
        )


def require_near(
    rows: Sequence[Row], trainer: Sequence[Tensor], limit: float | None, *, version: int, ranks: Ranks
) -> None:
    if limit is None:
        return
    trouble: EngineContractError | None = None
    for row, mine in zip(rows, trainer, strict=True):
        distances = (mine.detach().double().cpu() - row.rollout.double())[row.sampled & (row.versions == version)].abs()
        mean = float(distances.sum()) / max(PROBED_TOKENS, distances.numel())
        if mean > limit and trouble is None:
            trouble = EngineContractError(
                f"sample {row.sample.sample_id}: an engine sampled it as version {version}, and its log-probabilities "
                f"are {mean:.3g} away from those of that version in the mean (limit {limit:.3g}): it has other "
                "weights, behind a router perhaps. Nothing of it is trained on; restart the engine and run again to "
                "resume"
            )
    ranks.raise_together(trouble, "compare its rows with the engines'")


def require_own_versions(rows: Sequence[Row], version: int) -> None:
    for row in rows:
        newest = int(row.versions.max())
        if newest > version:
            raise TokenContractError(
                f"sample {row.sample.sample_id} was sampled by policy version {newest}, and this run is at {version}: "
                "the engine counts another run's versions; restart it, or train from a file"
            )


def ulps(a: float, b: float) -> int:
    """How many float32 values lie between two finite float32 numbers."""
    bits = torch.tensor([a, b], dtype=torch.float32).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return int((ordered[0] - ordered[1]).abs())
