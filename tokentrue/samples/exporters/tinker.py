"""Tinker: a `Datum` per line. Position i of the input predicts token i + 1, so every column is shifted by one.

Advantages are the algorithm's business and not in the file: add `loss_fn_inputs["advantages"]`, zero where `mask` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from tokentrue.json_types import JsonObject
from tokentrue.samples.exporters.base import fill_logprobs, unfill_logprobs
from tokentrue.samples.shape import MaskBit, SampleColumns, SpanRow
from tokentrue.types import Sample


def row(sample: Sample) -> JsonObject:
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


def _tensor(data: Sequence[float], dtype: str) -> JsonObject:
    return {"data": list(data), "dtype": dtype, "shape": [len(data)]}


class TinkerChunk(msgspec.Struct):
    tokens: list[int]


class TinkerInput(msgspec.Struct):
    chunks: Annotated[list[TinkerChunk], msgspec.Meta(min_length=1)]


class TinkerInts(msgspec.Struct):
    data: list[int]


class TinkerFloats(msgspec.Struct):
    data: list[float]


class TinkerLossInputs(msgspec.Struct):
    target_tokens: TinkerInts
    logprobs: TinkerFloats
    mask: TinkerFloats


class TinkerColumns(msgspec.Struct):
    model_input: TinkerInput
    loss_fn_inputs: TinkerLossInputs

    def to_sample_columns(self, spans: Sequence[SpanRow]) -> SampleColumns:
        """The targets, and the first token before them; the rest of `model_input` repeats the targets."""
        inputs = self.loss_fn_inputs
        ids = [*self.model_input.chunks[0].tokens[:1], *inputs.target_tokens.data]
        mask: list[MaskBit] = [0, *(1 if bit == 1.0 else 0 for bit in inputs.mask.data)]
        return SampleColumns(ids, mask, unfill_logprobs(inputs.logprobs.data, spans, length=len(ids)))
