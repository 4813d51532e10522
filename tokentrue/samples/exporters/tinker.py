"""Tinker: a `Datum` per line. Position i of the input predicts token i + 1, so every column is shifted by one.

Advantages are the algorithm's business and not in the file: add `loss_fn_inputs["advantages"]`, zero where `mask` is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokentrue.samples.exporters.base import Columns, fill_logprobs, unfill_logprobs
from tokentrue.types import Sample


def row(sample: Sample) -> dict[str, Any]:
    ids = list(sample.token_ids)
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": ids[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": _tensor(ids[1:], "int64"),
            "logprobs": _tensor(fill_logprobs(sample.rollout_logprobs)[1:], "float32"),
            "mask": _tensor([float(bit) for bit in sample.loss_mask[1:]], "float32"),
        },
        "reward": sample.reward,
    }


def _tensor(data: Sequence[float], dtype: str) -> dict[str, Any]:
    return {"data": list(data), "dtype": dtype, "shape": [len(data)]}


def columns(row: Mapping[str, Any], head: Mapping[str, Any]) -> Columns:
    inputs = row["loss_fn_inputs"]
    shown, targets = row["model_input"]["chunks"][0]["tokens"], inputs["target_tokens"]["data"]
    if shown[1:] != targets[:-1]:
        raise IndexError("model_input and target_tokens are not one sequence shifted by one")
    ids = [*shown[:1], *targets]
    mask = [0, *(int(bit) for bit in inputs["mask"]["data"])]
    return ids, mask, unfill_logprobs(inputs["logprobs"]["data"], head["spans"], length=len(ids))
