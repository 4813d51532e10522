"""The check that gives the project its name: tokens sampled by these very weights must have these very bits.

Only tokens whose policy version is the trainer's current one are compared; older ones differ because the policy moved.
Engines with their own arithmetic are held to a bound on each row's mean |δ| instead (`require_near`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokentrue.errors import EngineContractError, ExactnessError, TokenContractError
from tokentrue.train.data.rows import Row

PROBED_TOKENS = 24  # that an engine samples for the probe, whose mean |δ| is the limit of a row's


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """`largest` is the largest |trainer - rollout| among the `differing`."""

    compared: int
    differing: int
    largest: float

    def merge(self, other: Agreement) -> Agreement:
        return Agreement(
            compared=self.compared + other.compared,
            differing=self.differing + other.differing,
            largest=max(self.largest, other.largest),
        )


def agreement(
    rows: Sequence[Row], trainer: Sequence[Tensor], *, version: int, places: list[tuple[int, int]] | None = None
) -> Agreement:
    """Compares bits. `places` collects (row, token) of each row's first difference."""
    compared = differing = 0
    largest = 0.0
    for number, (row, values) in enumerate(zip(rows, trainer, strict=True)):
        current = row.sampled & (row.versions == version)
        mine = values.detach().to(device="cpu", dtype=torch.float32)
        unequal = current & (mine.view(torch.int32) != row.rollout.view(torch.int32))
        compared += int(current.sum())
        if bool(unequal.any()):
            differing += int(unequal.sum())
            largest = max(largest, float((mine - row.rollout)[unequal].abs().max()))
            if places is not None:
                places.append((number, int(unequal.nonzero()[0])))
    return Agreement(compared=compared, differing=differing, largest=largest)


def require_exact(rows: Sequence[Row], trainer: Sequence[Tensor], *, version: int, step: int) -> Agreement:
    """Raises ExactnessError at the first token, in row order, whose bits differ."""
    places: list[tuple[int, int]] = []
    found = agreement(rows, trainer, version=version, places=places)
    if not places:
        return found
    number, token = places[0]
    row = rows[number]
    mine, theirs = float(trainer[number][token]), float(row.rollout[token])
    span = next(s for s in row.sample.spans if s.start <= token < s.end)
    raise ExactnessError(
        f"step {step}: the trainer's log-probability differs from the rollout's. First at sample "
        f"{row.sample.sample_id} "
        f"(session {row.sample.session_id}, turn {span.turn}), token {token}, id {int(row.ids[token])}: "
        f"rollout {theirs!r} ({theirs.hex()}), trainer {mine!r} ({mine.hex()}), {ulps(mine, theirs)} ulp; "
        f"{found.differing} of {found.compared} tokens of policy version {version} differ, by at most "
        f"{found.largest:.3g}. "
        "Score with the engine's operators (train.exact), the same temperature and dtype, or set exact = false"
    )


def require_near(
    compared: Iterable[tuple[Row, Tensor, Tensor, Tensor]], limit: float, *, version: int, doing: str
) -> None:
    """Raises EngineContractError at the first row that an engine computed with other weights than the trainer's.

    `compared` has rows, the trainer's and the engine's log-probabilities, and where they count.
    """
    for row, mine, theirs, counts in compared:
        distances = (mine.detach().double().cpu() - theirs.double())[counts].abs()
        mean = float(distances.sum()) / max(PROBED_TOKENS, distances.numel())
        if mean > limit:
            raise EngineContractError(
                f"sample {row.sample.sample_id}: an engine {doing} it as version {version}, and its log-probabilities "
                f"are {mean:.3g} "
                f"away from those of that version in the mean (limit {limit:.3g}): it has other weights, behind a "
                "router perhaps. "
                "Nothing of it is trained on; restart the engine and run again to resume"
            )


def require_own_versions(rows: Sequence[Row], version: int, *, is_offline: bool) -> None:
    """Versions of a file count another run's steps."""
    for row in rows if not is_offline else ():
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
