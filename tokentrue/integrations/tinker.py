"""Tinker: recorded samples as `Datum`s for `forward_backward(data, "importance_sampling")`, with group advantages.

Input is `ids[:-1]`, targets are `ids[1:]`. Tokens that were not sampled have advantage 0: Tinker removes the mask.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from tokentrue.integrations.rollouts import centre_rewards
from tokentrue.json_types import JsonObject
from tokentrue.samples.trainer_rows import tinker_row
from tokentrue.types import Sample


def datums(samples: Sequence[Sample]) -> list[Any]:
    """One `Datum` per sample, with its session's group advantage."""
    return [datum(sample, advantage) for sample, advantage in zip(samples, centre_rewards(samples), strict=True)]


def datum(sample: Sample, advantage: float) -> Any:
    tinker: Any = import_module("tinker")
    recorded = tinker_row(sample)
    inputs: JsonObject = {
        name: tinker.TensorData(**recorded["loss_fn_inputs"][name]) for name in ("target_tokens", "logprobs")
    }
    values = [advantage * bit for bit in sample.loss_mask[1:]]
    inputs["advantages"] = tinker.TensorData(data=values, dtype="float32", shape=[len(values)])
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(sample.token_ids[:-1])), loss_fn_inputs=inputs)
