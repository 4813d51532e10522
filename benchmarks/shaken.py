"""Exact engines that run under conditions no user meets: random pages and prompt pieces, operators that are not exact."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from tokentrue.engine import ExactEngine
from tokentrue.engine.core import Core
from tokentrue.engine.runner import PIECES, Difference, difference_of
from tokentrue.engine.schedule import Request, cut_steps


class UnprovenEngine(ExactEngine):
    """Runs operators that the proof at load refuses, rightly: for negative controls."""

    def _prove(self) -> None:
        pass


def shake(engine: ExactEngine, rng: random.Random) -> None:
    """Random pages, and random pieces of prompts: no bit may depend on either."""
    pool, scheduler = engine.core.pool, engine.core.scheduler
    order = list(pool._free)
    rng.shuffle(order)
    pool._free = OrderedDict.fromkeys(order)
    piece = scheduler.piece

    def random_piece(request: Request, budget: int) -> int:
        most = piece(request, budget)
        return piece(request, rng.choice([most, rng.randint(1, most)]))

    scheduler.piece = random_piece  # type: ignore[method-assign]


def compare(
    core: Core, ids: Sequence[int], model: nn.Module | None = None, pieces: Sequence[int] = PIECES
) -> Difference | None:
    """First operator whose bits differ between the paged forward and that of `model` (default: the engine's)."""
    steps = cut_steps(core.scheduler, ids, pieces)
    return difference_of(core.local.forward, model or core.local.model, steps)
