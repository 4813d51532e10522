"""safetensors: all samples in one file, their columns laid end to end; `offsets` cuts them apart. Log-probabilities are
float64, NaN where nothing was sampled; everything else is JSON in the header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokentrue.errors import FileFormatError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import dumps, loads
from tokentrue.samples.exporters.base import ExportedSample
from tokentrue.samples.shape import decode, head_to_json, sample_from_json
from tokentrue.types import Sample

_DTYPES = {"token_ids": "int32", "loss_mask": "uint8", "rollout_logprobs": "float64", "offsets": "int64"}


class TensorsHeader(msgspec.Struct):
    format: Literal["tokentrue samples 1"]
    samples: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Tensors `token_ids` int32, `loss_mask` uint8, `rollout_logprobs` float64, `offsets` int64 (one more than
    samples)."""

    name: str = "safetensors"
    suffix: str = ".safetensors"
    follows: str = "safetensors 0.5 or later"

    def write(self, samples: Iterable[Sample], path: Path) -> int:
        np: Any = import_module("numpy")
        held = list(samples)
        offsets = np.cumsum([0, *(len(sample.token_ids) for sample in held)], dtype=np.int64)
        nan = float("nan")
        tensors: JsonObject = {
            "token_ids": np.array([i for sample in held for i in sample.token_ids], dtype=np.int32),
            "loss_mask": np.array([bit for sample in held for bit in sample.loss_mask], dtype=np.uint8),
            "rollout_logprobs": np.array(
                [nan if v is None else v for sample in held for v in sample.rollout_logprobs], dtype=np.float64
            ),
            "offsets": offsets,
        }
        heads = dumps([head_to_json(sample) for sample in held]).decode()
        import_module("safetensors.numpy").save_file(
            tensors, path, metadata={"format": "tokentrue samples 1", "samples": heads}
        )
        return len(held)

    def read(self, path: Path) -> Iterator[ExportedSample]:
        safetensors: Any = import_module("safetensors")
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                header = decode(file.metadata() or {}, TensorsHeader, f"{path.name}: header")
                heads = decode(loads(header.samples.encode()), list[JsonObject], f"{path.name}: header.samples")
                tensors = {name: file.get_tensor(name) for name in _DTYPES}
        except (safetensors.SafetensorError, TypeError, ValueError, RecursionError, OSError) as error:
            raise FileFormatError(f"{path}: not a safetensors file of samples, or a damaged one: {error}") from error
        require_tensors(tensors, len(heads), path.name)
        ids, mask, logprobs, offsets = (tensors[name] for name in _DTYPES)
        for number, (head, (start, end)) in enumerate(zip(heads, pairwise(offsets.tolist()), strict=True)):
            where = f"{path.name}:sample {number}"
            values = [None if value != value else value for value in logprobs[start:end].tolist()]
            row = {
                **head,
                "token_ids": ids[start:end].tolist(),
                "loss_mask": mask[start:end].tolist(),
                "rollout_logprobs": values,
            }
            yield ExportedSample(sample=sample_from_json(row, where), where=where)


def require_tensors(tensors: JsonMapping, samples: int, where: str) -> None:
    """Raises FileFormatError unless every tensor has its type, and `offsets` cuts all of each column into `samples`
    parts."""
    for name, tensor in tensors.items():
        if tensor.ndim != 1 or str(tensor.dtype) != _DTYPES[name]:
            raise FileFormatError(
                f"{where}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, must be one row of {_DTYPES[name]}"
            )
    offsets = tensors["offsets"].tolist()
    if len(offsets) != samples + 1:
        raise FileFormatError(
            f"{where}: offsets has {len(offsets)} entries for {samples} samples, must have {samples + 1}"
        )
    for name in ("token_ids", "loss_mask", "rollout_logprobs"):
        length = len(tensors[name])
        if offsets[0] != 0 or offsets[-1] != length or any(end < start for start, end in pairwise(offsets)):
            raise FileFormatError(f"{where}: offsets must rise from 0 to {length}, the length of {name}")
