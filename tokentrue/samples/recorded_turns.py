"""Reads the turns on a sample's path from `metadata.tokentrue.nodes`. Samples of other programs record no turns, or
only `given` and `sampled` of each."""

from __future__ import annotations

import msgspec

from tokentrue.errors import TokenContractError
from tokentrue.json_types import JsonObject
from tokentrue.records import record
from tokentrue.samples.shape import decode
from tokentrue.types import PENALTIES, TRUNCATIONS, Count, Coverage, Sample, is_temperature


class TurnRow(msgspec.Struct, kw_only=True):
    """`sampling` holds the settings that differ from the defaults; `versions` are (start, end, policy version)."""

    given: Count
    sampled: Count
    node: str | None = None
    temperature: float | None = None
    sampling: JsonObject = {}
    versions: list[tuple[int, int, int]] = []
    finish: str | None = None
    why: str | None = None
    projection: str | None = None


class MalformedCall(msgspec.Struct, kw_only=True):
    turn: Count
    status: str


class SampleRecord(msgspec.Struct, kw_only=True):
    leaf: str | None = None
    nodes: list[TurnRow] = []
    coverage: Coverage | None = None
    malformed_calls: list[MalformedCall] = []


@record
class RecordedTurn:
    start: int
    end: int
    row: TurnRow

    @property
    def penalties(self) -> list[str]:
        return [name for name in PENALTIES if name in self.row.sampling]

    @property
    def truncations(self) -> list[str]:
        return [name for name in TRUNCATIONS if name in self.row.sampling]


def read_record(sample: Sample) -> SampleRecord:
    return decode(sample.metadata.get("tokentrue", {}), SampleRecord, f"sample {sample.sample_id}: metadata.tokentrue")


def read_turns(sample: Sample) -> list[RecordedTurn]:
    turns: list[RecordedTurn] = []
    at = 0
    for row in read_record(sample).nodes:
        if row.temperature is not None and not is_temperature(row.temperature):
            raise TokenContractError(
                f"sample {sample.sample_id}: no turn can be scored at temperature {row.temperature}"
            )
        start, at = at + row.given, at + row.given + row.sampled
        turns.append(RecordedTurn(start=start, end=at, row=row))
    if turns and at != len(sample.token_ids):
        raise TokenContractError(
            f"sample {sample.sample_id}: its recorded turns hold {at} tokens, the sample {len(sample.token_ids)}"
        )
    return turns


def why_not_scorable(sample: Sample, turn: RecordedTurn) -> str:
    if turn.penalties:
        cure = "a penalty depends on the text before the token, and no trainer scores it; sample without it"
        return f"sampled under {', '.join(turn.penalties)}: {cure}"
    if turn.truncations and sample.sampling_mask is None:
        cure = "have it return its sampling mask (docs/training.md), or sample without filters"
        return f"sampled under {', '.join(turn.truncations)}, and the engine did not report which ids were kept; {cure}"
    return ""


def scoring_temperatures(sample: Sample, default: float = 1.0) -> list[float]:
    """Each token's temperature; `default` if none is recorded and in greedy turns, which engines report at 1. Raises
    TokenContractError for a trained turn that cannot be scored."""
    found = [default] * len(sample.token_ids)
    for number, turn in enumerate(read_turns(sample)):
        if any(sample.loss_mask[turn.start : turn.end]) and (why := why_not_scorable(sample, turn)):
            raise TokenContractError(f"sample {sample.sample_id}, turn {number}: {why}")
        found[turn.start : turn.end] = [turn.row.temperature or default] * (turn.end - turn.start)
    return found
