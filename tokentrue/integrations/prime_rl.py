"""prime-rl: recorded samples as its own `TrainingSample`s, with group advantages on the sampled tokens."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tokentrue.integrations.rollouts import centre_rewards
from tokentrue.samples.trainer_rows import prime_rl_row
from tokentrue.types import Sample

FIELDS = ("token_ids", "mask", "logprobs", "temperatures", "env_name")


def training_samples(samples: Sequence[Sample]) -> list[Any]:
    """One `TrainingSample` per sample, with its session's group advantage."""
    kind: Any = import_module("prime_rl.transports.rollouts.types").TrainingSample

    made: list[Any] = []
    for sample, advantage in zip(samples, centre_rewards(samples), strict=True):
        recorded = prime_rl_row(sample)
        advantages = [advantage * bit for bit in sample.loss_mask]
        made.append(kind(**{name: recorded[name] for name in FIELDS}, advantages=advantages))
    return made
