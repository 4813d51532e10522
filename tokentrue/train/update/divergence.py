"""The divergence from the reference model: what it costs a session's reward, and a coefficient that follows a
target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tokentrue.errors import ConfigError
from tokentrue.mismatch import LossConfig
from tokentrue.mismatch.estimators import ESTIMATORS
from tokentrue.train.config import KlConfig
from tokentrue.train.data.batch import Row
from tokentrue.train.ranks import Ranks

LARGEST_ERROR = 0.2  # of kl / target - 1


@dataclass(slots=True)
class KlCoefficient:
    """The coefficient in use: of the reward's divergence, or of the loss's penalty."""

    config: KlConfig
    value: float

    @staticmethod
    def of(config: KlConfig, loss: LossConfig) -> KlCoefficient:
        penalty = 0.0 if loss.penalty is None else loss.penalty.coefficient
        if config.target and config.reward_coefficient and penalty:
            raise ConfigError(
                "train.kl.target: adapts one coefficient; use train.kl.reward_coefficient or loss.penalty, not both"
            )
        if config.target and not (config.reward_coefficient or penalty):
            raise ConfigError(
                "train.kl.target: there is no coefficient to adapt; set train.kl.reward_coefficient or loss.penalty"
            )
        return KlCoefficient(config=config, value=config.reward_coefficient or penalty)

    def adapt(self, kl: float, sessions: int) -> None:
        """After a step whose mean divergence was `kl`; without a target nothing changes."""
        if self.config.target:
            error = max(-LARGEST_ERROR, min(LARGEST_ERROR, kl / self.config.target - 1))
            self.value *= 1 + error * sessions / self.config.horizon


def divergence_sums(
    rows: Sequence[Row], policy: Mapping[int, Tensor], reference: Mapping[int, Tensor], config: KlConfig, ranks: Ranks
) -> dict[int, float]:
    """The sum over each row's trained tokens, for the rows of all ranks; `policy` and `reference` hold this rank's."""
    estimate = ESTIMATORS[config.reward_estimator]
    mine: dict[int, float] = {}
    for i, values in policy.items():
        x = reference[i].double() - values.double()
        mine[i] = float(estimate(x)[rows[i].mask.to(x.device)].sum())
    return {i: value for found in ranks.all_gather_object(mine) for i, value in found.items()}
