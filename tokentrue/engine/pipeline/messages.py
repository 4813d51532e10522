"""What the driver and a stage say to each other over their pipe. A stage answers in the order in which it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokentrue.engine.execute import Experts, StepWants
from tokentrue.engine.model.adapters import Adapter
from tokentrue.engine.model.step import StepInputs
from tokentrue.numerics import Contract


# ---- to a stage ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tensor:
    """The tensor's bytes follow. It replaces the weight or buffer of that name (before `Build`), or is copied into
    it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """All tensors are there: answer with `Built`, or with an `Outcome` that says why not."""


@dataclass(frozen=True, slots=True)
class Allocate:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Step:
    """The last stage answers with a StepResult; all, where experts are wanted, with `Chosen` before."""

    inputs: StepInputs
    wants: StepWants


@dataclass(frozen=True, slots=True)
class Prove:
    """Compute these steps, compare their bits with the model's own forward over the same tokens: answer with
    `Outcome`."""

    steps: Sequence[StepInputs]
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Refresh:
    """The weights have changed: answer with `Outcome`."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Zero every page."""


@dataclass(frozen=True, slots=True)
class CheckAdapter:
    """Answer with `Outcome`; where it is good, steps may name the adapter from now on."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


# ---- from a stage -------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Built:
    """What the stage checked on its device, and the cache blocks that fit there."""

    contract: Contract
    num_blocks: int
    num_states: int | None
    block_size: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """For each request that wants them, the experts of this stage's layers; empty where they have none."""

    parts: list[Experts]


@dataclass(frozen=True, slots=True)
class Outcome:
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The stage cannot go on."""

    text: str
