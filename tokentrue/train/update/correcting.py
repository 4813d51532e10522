"""The correction of a whole minibatch, and the divergence from the reference model.

Some rules look at the minibatch as a whole (a mean that weights are normalised by, M2PO's second moment, the counts
that a loss divides by). So every rank gathers the log-probabilities of all rows, corrects the whole minibatch in one
call, and takes its own rows from it. Log-probabilities are four bytes a token; correcting is 0.2% of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokentrue.errors import ConfigError
from tokentrue.mismatch import Corrected, Correction, LossConfig, Metrics, correct
from tokentrue.mismatch.metrics import ESTIMATORS
from tokentrue.train.config import KlConfig
from tokentrue.train.data.planning import Minibatch
from tokentrue.train.data.rows import Row, list_sessions
from tokentrue.train.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinibatchCorrection:
    """Weights and kept tokens by row number, and the whole minibatch's counts; a session counts as one sequence."""

    correction: Correction
    weights: Mapping[int, Tensor] | None
    kept: Mapping[int, Tensor]
    metrics: Metrics
    num_tokens: float
    num_sessions: float
    session_tokens: Mapping[int, float]  # of each row's whole session

    def of(self, numbers: Sequence[int], device: torch.device) -> Corrected | None:
        """The part that `policy_loss` needs for some rows."""
        if self.weights is None:
            return None
        weights, kept = [self.weights[i].to(device) for i in numbers], [self.kept[i].to(device) for i in numbers]
        return Corrected(weights=weights, mask=kept, metrics=Metrics({}), correction=self.correction)


def in_one_call(loss: LossConfig) -> LossConfig:
    weights = loss.correction.weights
    if weights is None or weights.normalise is None:
        return loss
    weights = replace(weights, normalise=replace(weights.normalise, scope="call"))
    return replace(loss, correction=replace(loss.correction, weights=weights))


def correct_minibatch(
    rows: Sequence[Row],
    part: Minibatch,
    loss: LossConfig,
    *,
    recomputed: Mapping[int, Tensor],
    current: Mapping[int, Tensor],
    advantages: Sequence[float],
    version: int,
    ranks: Ranks,
) -> MinibatchCorrection:
    """`recomputed` and `current` hold this rank's rows; every rank calls it."""
    made: Corrected | None = None
    if loss.correction.is_active or loss.correction.non_finite != "raise":
        old = gather_rows(recomputed, part, ranks)
        now = old if current is recomputed else gather_rows(current, part, ranks)
        chosen = [rows[i] for i in part.rows]
        made = correct(
            [old[i] for i in part.rows],
            [row.rollout for row in chosen],
            [row.mask for row in chosen],
            loss.correction,
            logprobs=[now[i] for i in part.rows],
            advantages=[per_token(rows[i], advantages[i], torch.device("cpu")) for i in part.rows],
            versions=[row.versions for row in chosen],
            version=version,
        )
    masks = [rows[i].mask for i in part.rows]
    counts = [
        int(mask.sum()) for mask in (masks if made is None or loss.correction.loss_counts == "original" else made.mask)
    ]
    sessions = list_sessions([rows[i] for i in part.rows])
    totals = [sum(counts[k] for k in numbers) for numbers in sessions]
    return MinibatchCorrection(
        correction=loss.correction,
        weights=None if made is None else dict(zip(part.rows, made.weights, strict=True)),
        kept=dict(zip(part.rows, masks if made is None else made.mask, strict=True)),
        metrics=Metrics({}) if made is None else made.metrics,
        num_tokens=float(sum(counts)),
        num_sessions=float(sum(tokens > 0 for tokens in totals)),
        session_tokens={
            part.rows[k]: float(total) for numbers, total in zip(sessions, totals, strict=True) for k in numbers
        },
    )


def gather_rows(values: Mapping[int, Tensor], part: Minibatch, ranks: Ranks) -> dict[int, Tensor]:
    mine = {i: values[i].detach().cpu() for i in part.mine}
    return {i: value for found in ranks.all_gather_object(mine) for i, value in found.items()}


def per_token(row: Row, value: float, device: torch.device) -> Tensor:
    return torch.full((row.length,), value, dtype=torch.float64, device=device)


LARGEST_ERROR = 0.2  # of kl / target - 1


@dataclass(slots=True)
class KlCoefficient:
    """Of the reward's divergence, or of the loss's penalty."""

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
    """Over each row's trained tokens, for the rows of all ranks."""
    estimate = ESTIMATORS[config.reward_estimator]
    mine: dict[int, float] = {}
    for i, values in policy.items():
        x = reference[i].double() - values.double()
        mine[i] = float(estimate(x)[rows[i].mask.to(x.device)].sum())
    return {i: value for found in ranks.all_gather_object(mine) for i, value in found.items()}
