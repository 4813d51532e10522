"""safetensors: all samples in one file, their columns laid end to end; `offsets` cuts them apart. Log-probabilities are float64,
NaN where nothing was sampled; everything else is JSON in the header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tokentrue.errors import FileFormatError
from tokentrue.samples.shape import head_to_json, sample_from_parts
from tokentrue.sessions.plain_json import dumps, loads
from tokentrue.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Tensors `token_ids` int32, `loss_mask` uint8, `rollout_logprobs` float64, `offsets` int64 (one more than samples)."""

    name: str = "safetensors"
    suffix: str = ".safetensors"
    follows: str = "safetensors 0.5 or later"

    def write(self, samples: Iterable[Sample], path: Path) -> int:
        np: Any = import_module("numpy")
        held = list(samples)
        offsets = np.cumsum([0, *(len(sample.token_ids) for sample in held)], dtype=np.int64)
        nan = float("nan")
        tensors: dict[str, Any] = {
            "token_ids": np.array([i for sample in held for i in sample.token_ids], dtype=np.int32),
            "loss_mask": np.array([bit for sample in held for bit in sample.loss_mask], dtype=np.uint8),
            "rollout_logprobs": np.array([nan if v is None else v for sample in held for v in sample.rollout_logprobs], dtype=np.float64),
            "offsets": offsets,
        }
        heads = dumps([head_to_json(sample) for sample in held]).decode()
        import_module("safetensors.numpy").save_file(tensors, path, metadata={"format": "tokentrue samples 1", "samples": heads})
        return len(held)

    def read(self, path: Path) -> Iterator[Sample]:
        safetensors: Any = import_module("safetensors")
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                heads = loads(str(file.metadata()["samples"]).encode())
                ids, mask, logprobs, offsets = (file.get_tensor(name) for name in ("token_ids", "loss_mask", "rollout_logprobs", "offsets"))
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise FileFormatError(f"{path}: not a safetensors file of samples, or a damaged one: {error}") from error
        for number, head in enumerate(heads):
            cut = slice(int(offsets[number]), int(offsets[number + 1]))
            values = [None if value != value else value for value in logprobs[cut].tolist()]
            yield sample_from_parts(head, (ids[cut].tolist(), mask[cut].tolist(), values), f"{path.name}:sample {number}")
