"""Which turns were cut off at their limit of tokens.

The sample names how its last turn ended. An earlier turn has its `finish` in the sample's record; in records that do not say, it counts as
cut off where its last token ends no turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokentrue.train.data.batch import Row
from tokentrue.types import Finish


def end_token_ids(model: Any) -> frozenset[int]:
    """The ids that end a turn by the model's configuration; a model without one has none."""
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids: int | Sequence[int] | None = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def truncated_rows(rows: Sequence[Row], end_ids: Iterable[int]) -> list[bool]:
    """Whether each row has a turn that was cut off. Besides `end_ids`, what ended a row that stopped by itself ends turns."""
    ends = {*end_ids, *(int(row.ids[-1]) for row in rows if row.sample.finish_reason == Finish.STOP and row.length)}
    return [has_truncated_turn(row, ends) for row in rows]


def has_truncated_turn(row: Row, ends: set[int]) -> bool:
    if row.sample.finish_reason == Finish.LENGTH:
        return True
    at = 0
    for node in row.sample.metadata.get("tokentrue", {}).get("nodes", ())[:-1]:
        at += node["given"] + node["sampled"]
        finish = node.get("finish")
        if finish == Finish.LENGTH or (finish is None and node["sampled"] and int(row.ids[at - 1]) not in ends):
            return True
    return False
