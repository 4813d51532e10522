"""The file of `--trainer-logprobs`: JSON lines `{"sample_id": …, "logprobs": [per token, null where unknown]}`, with an
optional `"entropy"` list of the same length, in nats. Invalid values are refused with line and token.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokentrue.errors import FileFormatError
from tokentrue.plain_json import read_numbered_lines
from tokentrue.samples.shape import decode
from tokentrue.types import Sample

MOST_LOGPROB = 1e-3  # rounding may put the logarithm of probability 1 this far above 0


class TrainerLogprobs(msgspec.Struct, kw_only=True):
    logprobs: list[float | None]
    entropy: list[float | None] | None = None

    def check(self, sample: Sample) -> None:
        for name, values in (("log-probabilities", self.logprobs), ("entropies", self.entropy)):
            if values is not None and len(values) != len(sample.token_ids):
                raise FileFormatError(
                    f"sample {sample.sample_id}: {len(values)} trainer {name} for {len(sample.token_ids)} tokens"
                )


class LogprobsLine(TrainerLogprobs, kw_only=True):
    sample_id: str


def read_trainer_logprobs(path: str | Path) -> dict[str, TrainerLogprobs]:
    found: dict[str, TrainerLogprobs] = {}
    lines: dict[str, int] = {}
    if not Path(path).exists():
        raise FileFormatError(f"{path}: no such file")
    try:
        numbered = list(read_numbered_lines(path))
    except OSError as error:
        raise FileFormatError(f"{path}: {error.strerror or error}") from error
    for number, line in numbered:
        place = f"{path}:{number}"
        try:
            # Not msgspec's reader: Python writes NaN and infinities, and the error below says what to do with them.
            row = decode(json.loads(line.decode(), parse_int=float), LogprobsLine, place)
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{place}: cannot be read as UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{place}: not JSON ({error})") from error
        if (name := row.sample_id) in lines:
            raise FileFormatError(f"{place}: sample_id {name!r} is also in line {lines[name]}; give each sample once")
        _check_numbers(row.logprobs, "log-probability", place, most=MOST_LOGPROB)
        _check_numbers(row.entropy or (), "entropy", place)
        lines[name], found[name] = number, row
    return found


def _check_numbers(values: Sequence[float | None], what: str, place: str, most: float = math.inf) -> None:
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            why = f"the {what} {value} is not finite; write null where it is unknown"
        elif value is not None and value > most:
            why = f"the {what} {value:g} is above 0; pass natural logarithms of probabilities"
        else:
            continue
        raise FileFormatError(f"{place}: token {index}: {why}")
