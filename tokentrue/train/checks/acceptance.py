"""Is the policy that samples better after an update? The engines score the step's rows with the new weights, and a bad
update is undone.

The trainer's own log-probabilities cannot tell: where engine and trainer differ, an update may improve the one and harm
the other (MIPU, arXiv 2606.29526). The criterion is `tokentrue.mismatch.check_update`. Nothing is sampled between the
publication of an update and its acceptance, so that refused weights leave no token behind: the weights before are
published again under the same version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from tokentrue.errors import (
    ConfigError,
    EngineContractError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    TrainingError,
)
from tokentrue.mismatch import UpdateCheck, check_update
from tokentrue.protocols import Provider, Scoring
from tokentrue.train.config import AcceptanceConfig
from tokentrue.train.data.batch import Row
from tokentrue.train.ranks import Ranks
from tokentrue.train.update.correcting import per_token

IN_FLIGHT = 32  # rows that an engine is asked to score at once


class UpdateGate:
    """`engines` gives the engines that are in use; the first rank's score the rows, and every rank calls it."""

    def __init__(self, config: AcceptanceConfig, engines: Callable[[], Sequence[Provider]]) -> None:
        self.config = config
        self._engines = engines
        self.refused = 0  # updates in a row

    async def __call__(
        self,
        rows: Sequence[Row],
        advantages: Sequence[float],
        ranks: Ranks,
        *,
        require: Callable[[Sequence[Tensor]], Awaitable[None]] | None = None,
    ) -> UpdateCheck:
        """Judges the weights that the engines have now. `require` raises where the scores are of other weights."""
        updated = await self._score_on_first(rows, ranks)
        if require is not None:
            await require(updated)
        cpu = torch.device("cpu")
        scored = [slice(len(values)) for values in updated]
        found = check_update(
            updated,
            [row.rollout[part] for row, part in zip(rows, scored, strict=True)],
            [per_token(row, value, cpu)[part] for row, value, part in zip(rows, advantages, scored, strict=True)],
            [row.mask[part] for row, part in zip(rows, scored, strict=True)],
            min_gain=self.config.min_gain,
            max_divergence=self.config.max_divergence or None,
        )
        self.refused = 0 if found.accepted else self.refused + 1
        return found

    def require_scoring(self) -> None:
        """Raises ConfigError where an engine cannot judge."""
        for engine in self._engines():
            require_scoring(engine)

    def require_progress(self, found: UpdateCheck, *, step: int) -> None:
        """Raises TrainingError when too many updates in a row were refused."""
        if self.refused > self.config.max_refused:
            raise TrainingError(
                f"step {step}: {self.refused} updates in a row were refused by update acceptance and undone (the last: gain "
                f"{found.gain:.3g}, divergence {found.divergence:.3g}); lower optim.lr, look at the mismatch of engine and trainer, or "
                "change train.acceptance"
            )

    async def _score_on_first(self, rows: Sequence[Row], ranks: Ranks) -> list[Tensor]:
        """The scores of the first rank's engines, on every rank. Where they fail, all ranks stop together."""
        mine, trouble = list[Tensor](), None
        try:
            mine = await self._score(rows) if ranks.first else mine
        except Exception as error:  # told to all ranks
            trouble = error
        await ranks.meet()
        ranks.raise_together(trouble, "judge the update")
        return ranks.from_first(mine)

    async def _score(self, rows: Sequence[Row]) -> list[Tensor]:
        """Rows are dealt to the engines in turn; those of an engine that cannot be reached go to the next one.

        An engine samples one more token to score a row, and refuses one that fills its context: that is scored without
        its last token.
        """
        engines = deque(require_scoring(engine) for engine in self._engines())
        gate = asyncio.Semaphore(IN_FLIGHT * len(engines))

        async def score(row: Row) -> Tensor:
            require_plain_sampling(row)
            engines.rotate()
            order = list(engines)  # now: rows that wait at the gate have their turn already
            ids = row.ids.tolist()
            async with gate:
                try:
                    values = await score_with_first(order, ids)
                except EngineRejected:
                    del ids[-1]
                    values = await score_with_first(order, ids)
            if len(values) != len(ids) - 1:
                raise EngineContractError(
                    f"an engine gave {len(values)} log-probabilities of {len(ids)} tokens, not {len(ids) - 1}"
                )
            return torch.tensor([0.0, *values], dtype=torch.float64).float()

        return list(await asyncio.gather(*(score(row) for row in rows)))


async def score_with_first(engines: Sequence[Scoring], token_ids: Sequence[int]) -> Sequence[float]:
    """The answer of the first engine that can be reached."""
    for engine in engines[:-1]:
        with contextlib.suppress(EngineUnreachable, EngineTimeout):
            return await engine.score(token_ids)
    return await engines[-1].score(token_ids)


def require_scoring(engine: Provider) -> Scoring:
    if not isinstance(engine, Scoring):
        raise ConfigError(
            f"train.acceptance: engine {engine.name!r} does not score given tokens; use exact or vllm, or turn it off"
        )
    return engine


def require_plain_sampling(row: Row) -> None:
    """Engines score given tokens at temperature 1 without filters: the ratio to anything else would not be the
    update's."""
    if row.kept is not None or bool((row.temperatures[row.mask] != 1.0).any()):
        raise ConfigError(
            f"train.acceptance: sample {row.sample.sample_id} was sampled at another temperature than 1, or under filters; engines score "
            "given tokens without them"
        )
