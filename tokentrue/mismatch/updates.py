"""Decisions about a whole update rather than its tokens: whether to keep it, and how large the next one may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokentrue.errors import InputError
from tokentrue.mismatch.correction.signals import Batch, BatchOptions, read_signals
from tokentrue.mismatch.estimators import LOG_CLAMP, contribution, k3
from tokentrue.mismatch.layout import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCheck:
    """`gain`: how much better the inference policy does on the old samples after the update. `divergence`: K3 of that
    policy's change."""

    accepted: bool
    gain: float
    divergence: float
    tokens: int


def check_update(
    updated_logprobs: Values,
    rollout_logprobs: Values,
    advantages: Values,
    mask: Values | None = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    min_gain: float = 0.0,
    max_divergence: float | None = None,
) -> UpdateCheck:
    """Whether an update that was already synchronised to the engine improves the policy that samples; MIPU (arXiv
    2606.29526).

    `updated_logprobs` are the engine's log-probabilities of the old samples under the new weights (its prompt
    log-probabilities), `rollout_logprobs` those that it sampled with. The gain is the mean of (r - 1)·A with r =
    updated ÷ rollout: the importance-weighted improvement of the inference policy itself, whatever the trainer's own
    policy did; where no token has an advantage there is nothing to gain, and `min_gain` does not count. An update that
    is not accepted is to be undone: publish the old weights again. The paper accepts by a gap on the inference side;
    this estimator and its bounds are this package's.
    """
    options: BatchOptions = {"cu_seqlens": cu_seqlens, "advantages": advantages}
    batch = Batch.of(updated_logprobs, rollout_logprobs, mask, options)
    with torch.no_grad():
        signals = read_signals(batch)
        if not signals.rows.tokens:
            raise InputError("check_update: no valid token; an update cannot be judged on an empty batch")
        x, per_token = signals.corr.clamp(-LOG_CLAMP, LOG_CLAMP), signals.per_token("advantages")
        has_advantage = bool((per_token != 0).any())
        gain = -float(contribution(x, per_token).mean())
        divergence = float(k3(x).mean())
    accepted = (gain >= min_gain or not has_advantage) and (max_divergence is None or divergence <= max_divergence)
    return UpdateCheck(accepted=accepted, gain=gain, divergence=divergence, tokens=signals.rows.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDecay:
    """Learning rate by response length (the finding of arXiv 2602.01826: a surge in length announces noise and
    mismatch).

    Lengths are smoothed by an exponential average of `window` steps. Each time the average exceeds `surge` times its
    reference (at first the smallest average so far), the rate is multiplied by `factor` and the average becomes the new
    reference; `floor` is the least multiple of the initial rate. The trigger is the paper's; the numbers are this
    package's defaults.
    """

    window: int = 10
    surge: float = 1.25
    factor: float = 0.5
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.window < 1 or self.surge <= 1 or not 0 < self.factor < 1 or not 0 < self.floor <= 1:
            raise InputError("LengthDecay: needs window >= 1, surge > 1, factor in (0, 1) and floor in (0, 1]")

    def scale(self, mean_lengths: Sequence[float]) -> float:
        """The multiple of the initial learning rate for the next step, from the mean response length of every step so
        far."""
        step = 1.0 / self.window
        averages = accumulate(mean_lengths, lambda average, length: average + step * (length - average))
        rate, reference, decayed = 1.0, float("inf"), False
        for average in averages:
            reference = reference if decayed else min(reference, average)
            if average > self.surge * reference:
                rate, reference, decayed = max(self.floor, rate * self.factor), average, True
        return rate
