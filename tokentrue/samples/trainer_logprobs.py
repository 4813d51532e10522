"""The file of `--trainer-logprobs`: JSON lines `{"sample_id": …, "logprobs": [per token, null where unknown]}`, with
an optional `"entropy"` list of the same length, in nats. Invalid values are refused with line and token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokentrue.errors import FileFormatError
from tokentrue.json_types import JsonValue
from tokentrue.types import Sample

MOST_LOGPROB = 1e-3  # rounding may put the logarithm of probability 1 this far above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLogprobs:
    """One value per token; None if unknown."""

    logprobs: Sequence[float | None]
    entropy: Sequence[float | None] | None = None

    def check(self, sample: Sample) -> None:
        for name, values in (("log-probabilities", self.logprobs), ("entropies", self.entropy)):
            if values is not None and len(values) != len(sample.token_ids):
                raise FileFormatError(
                    f"sample {sample.sample_id}: {len(values)} trainer {name} for {len(sample.token_ids)} tokens"
                )


def read_trainer_logprobs(path: str | Path) -> dict[str, TrainerLogprobs]:
    """By sample id."""
    source = Path(path)
    if not source.exists():
        raise FileFormatError(f"{source}: no such file")
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{source}: cannot be read as UTF-8 text ({error})") from error
    found: dict[str, TrainerLogprobs] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            name, given = _read_line(line, f"{source}:{number}")
            if name in lines:
                raise FileFormatError(
                    f"{source}:{number}: sample_id {name!r} is also in line {lines[name]}; give each sample once"
                )
            lines[name], found[name] = number, given
    return found


def _read_line(line: str, place: str) -> tuple[str, TrainerLogprobs]:
    try:
        row: JsonValue = json.loads(line, parse_int=float)
        name, logprobs, entropy = row["sample_id"], row["logprobs"], row.get("entropy")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f'{place}: not a JSON object with "sample_id" and "logprobs" ({error})') from error
    if not isinstance(name, str) or not isinstance(logprobs, list) or not isinstance(entropy, list | None):
        raise FileFormatError(f'{place}: "sample_id" must be text, "logprobs" and "entropy" lists')
    values = _read_numbers(cast("list[object]", logprobs), "log-probability", place)
    for index, value in enumerate(values):
        if value is not None and value > MOST_LOGPROB:
            cure = "pass natural logarithms of probabilities"
            raise FileFormatError(f"{place}: token {index}: the log-probability {value:g} is above 0; {cure}")
    return name, TrainerLogprobs(
        logprobs=values,
        entropy=None if entropy is None else _read_numbers(cast("list[object]", entropy), "entropy", place),
    )


def _read_numbers(values: Sequence[object], what: str, place: str) -> list[float | None]:
    for index, value in enumerate(values):
        if value is not None and not isinstance(value, float):
            raise FileFormatError(
                f"{place}: token {index}: {value!r} is not a number; write null where the {what} is unknown"
            )
        if value is not None and not math.isfinite(value):
            raise FileFormatError(
                f"{place}: token {index}: the {what} {value} is not finite; write null where it is unknown"
            )
    return cast("list[float | None]", values)
