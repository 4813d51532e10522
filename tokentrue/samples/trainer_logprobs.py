"""The file of `--trainer-logprobs`: JSON lines `{"sample_id": …, "logprobs": [per token, null where unknown]}`, with
an optional `"entropy"` list of the same length, in nats. Invalid values are refused with line and token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from tokentrue.errors import FileFormatError
from tokentrue.json_types import JsonValue, is_array
from tokentrue.records import record
from tokentrue.types import Sample

MOST_LOGPROB = 1e-3  # rounding may put the logarithm of probability 1 this far above 0


@record
class TrainerLogprobs:
    """One value per token; None if unknown."""

    logprobs: Sequence[float | None]
    entropy: Sequence[float | None] | None = None

    def to_line(self, sample: Sample) -> str:
        return json.dumps({"sample_id": sample.sample_id, "logprobs": list(self.logprobs)}) + "\n"

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
        if not line.strip():
            continue
        place = f"{source}:{number}"
        try:
            row: JsonValue = json.loads(line, parse_int=float)
            name, logprobs, entropy = row["sample_id"], row["logprobs"], row.get("entropy")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileFormatError(f'{place}: not a JSON object with "sample_id" and "logprobs" ({error})') from error
        if not isinstance(name, str) or not is_array(logprobs) or not (entropy is None or is_array(entropy)):
            raise FileFormatError(f'{place}: "sample_id" must be text, "logprobs" and "entropy" lists')
        if name in lines:
            raise FileFormatError(f"{place}: sample_id {name!r} is also in line {lines[name]}; give each sample once")
        _check_numbers(logprobs, "log-probability", place, most=MOST_LOGPROB)
        _check_numbers(entropy or (), "entropy", place)
        lines[name], found[name] = number, TrainerLogprobs(logprobs=logprobs, entropy=entropy)
    return found


def _check_numbers(values: Sequence[JsonValue], what: str, place: str, most: float = math.inf) -> None:
    for index, value in enumerate(values):
        why = ""
        if value is not None and not isinstance(value, float):
            why = f"{value!r} is not a number; write null where the {what} is unknown"
        elif value is not None and not math.isfinite(value):
            why = f"the {what} {value} is not finite; write null where it is unknown"
        elif value is not None and value > most:
            why = f"the {what} {value:g} is above 0; pass natural logarithms of probabilities"
        if why:
            raise FileFormatError(f"{place}: token {index}: {why}")
