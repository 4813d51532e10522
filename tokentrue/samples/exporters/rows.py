"""A trainer's row: a sample is read back from it, and the whole row is compared with what the exporter writes for that
sample.

Ids, mask and log-probabilities are read from the trainer's own columns, and the certificate and the seal bind them.
Every other field (reward, status, versions, replay columns …) follows from the sample, so it is made again and
compared.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import islice
from typing import Any, Protocol, cast

from tokentrue.errors import FileFormatError, TokenContractError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.samples.exporters.base import ExportedSample
from tokentrue.samples.shape import SampleColumns, SampleHead, SpanRow, decode, sample_from_parts
from tokentrue.types import Sample


class TrainerColumns(Protocol):
    """The fields of a trainer's row that hold ids, mask and log-probabilities: a msgspec.Struct."""

    def to_sample_columns(self, spans: Sequence[SpanRow]) -> SampleColumns: ...


def read_trainer_row(
    row: JsonMapping,
    *,
    make_row: Callable[[Sample], JsonObject],
    columns: type[TrainerColumns],
    added: Set[str],
    where: str,
) -> ExportedSample:
    """`added` names fields that a user adds to the row: nothing in the file says what they should be."""
    head = decode(row.get("tokentrue"), SampleHead, f"{where}: tokentrue")
    sample = sample_from_parts(head, decode(row, columns, where).to_sample_columns(head.spans), where)
    try:
        written = make_row(sample)
    except (TokenContractError, FileFormatError) as error:
        raise FileFormatError(f"{where}: {error}") from error
    found = {key: value for key, value in row.items() if key != "tokentrue"}
    return ExportedSample(sample=sample, where=where, differences=tuple(find_differences(written, found, added=added)))


def find_differences(written: Any, found: Any, field: str = "", *, added: Set[str] = frozenset()) -> Iterator[str]:
    """Where a row differs from the one that the exporter writes; of a list, the first place."""
    if isinstance(written, dict) and isinstance(found, dict):
        written, found = cast("JsonObject", written), cast("JsonObject", found)
        for key in {**written, **found}:
            name = f"{field}.{key}" if field else key
            if key not in found:
                yield f"{name} is missing"
            elif key in written:
                yield from find_differences(written[key], found[key], name, added=added)
            elif name not in added:
                yield f"{name} is not a field of this export"
    elif isinstance(written, list) and isinstance(found, list):
        written, found = cast("list[Any]", written), cast("list[Any]", found)
        if len(written) != len(found):
            yield f"{field} has {len(found)} entries, the sample gives {len(written)}"
        elif written != found or _is_retyped(_kinds_in(written), _kinds_in(found)):
            pairs = enumerate(zip(written, found, strict=True))
            yield from islice(
                (what for at, pair in pairs for what in find_differences(*pair, f"{field}[{at}]", added=added)), 1
            )
    elif written != found or _is_retyped(_kinds_in([written]), _kinds_in([found])):
        ours, theirs = (
            reprlib.repr(cast("Any", written)),
            reprlib.repr(found),
        )  # short, however long or deep the value is
        yield f"{field} is {theirs}, the sample gives {ours}"


def _is_retyped(written: Set[type], found: Set[type]) -> bool:
    """Python takes True and 1.0 for 1; a trainer need not. A float that is spelled as a whole number is still the
    same."""
    return (bool in written) != (bool in found) or (float in found and float not in written)


def _kinds_in(values: list[Any]) -> set[type]:
    kinds = set(map(type, values))
    if list in kinds:
        kinds.update(*(_kinds_in(cast("list[Any]", value)) for value in values if isinstance(value, list)))
    return kinds
