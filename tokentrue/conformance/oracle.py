"""The judge: rows to train on against the engine's log. It knows ids, log-probabilities and nothing of a gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal

from tokentrue.conformance.standin.generation import Generation
from tokentrue.records import record

Severity = Literal["fatal", "warning", "note"]


@record
class Row:
    """One training sequence. `logprobs` counts only where `mask` is 1; `versions` and `kept` (the ids that a filter
    left) are per token, None where the gateway records none."""

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]
    versions: Sequence[str | int | None] | None = None
    kept: Sequence[Sequence[int] | None] | None = None


@record
class Fault:
    """One broken rule of the specification; `rule` is its number there."""

    rule: str
    severity: Severity
    detail: str
    tokens: int = 0


def merge_calls(calls: Sequence[Row]) -> list[Row]:
    """Rows of a gateway that records one row per call: a call whose prompt begins with all of an earlier row extends
    it, exactly. A second branch from the same turn is a row with its own call trained."""
    rows: list[Row] = []
    for call in calls:
        ids = list(call.ids)
        start = next((at for at, kept in enumerate(call.mask) if kept), len(ids))
        before = [row for row in rows if len(row.ids) <= start and ids[: len(row.ids)] == list(row.ids)]
        if not before:
            rows.append(call)
            continue
        earlier = max(before, key=lambda row: len(row.ids))
        length = len(earlier.ids)
        rows[next(at for at, row in enumerate(rows) if row is earlier)] = Row(
            ids=ids,
            mask=[*earlier.mask, *call.mask[length:]],
            logprobs=[*earlier.logprobs, *call.logprobs[length:]],
            versions=None if call.versions is None else [*(earlier.versions or ()), *call.versions[length:]],
        )
    return rows


Place = tuple[Generation, int]


class Oracle:
    """`log`: what the engine answered in this session, in order. A trained token without a log-probability is found by
    the ids before it."""

    def __init__(self, log: Sequence[Generation]) -> None:
        self._log = log
        self._places = {value: (one, at) for one in log for at, value in enumerate(one.logprobs[: one.delivered])}

    def judge(self, rows: Sequence[Row], *, strict: bool = False) -> Iterator[Fault]:
        """Levels 1 and 2. `strict`: what is recorded with a log-probability and not trained is judged as well."""
        for number, row in enumerate(rows):
            if not len(row.ids) == len(row.mask) == len(row.logprobs):
                sizes = f"{len(row.ids)} ids, {len(row.mask)} mask, {len(row.logprobs)} log-probabilities"
                yield Fault(rule="1.1", severity="fatal", detail=f"row {number} has columns of other lengths: {sizes}")
            else:
                yield from self._judge_row(number, row, strict=strict)
        counts = Counter((one.number, at) for row in rows for _, (one, at) in self.places(row))
        if twice := sum(count > 1 for count in counts.values()):
            detail = f"sampled tokens that are trained more than once: {twice}"
            yield Fault(rule="2.1", severity="fatal", detail=detail, tokens=twice)

    def places(self, row: Row) -> Iterator[tuple[int, Place]]:
        """The trained positions of a row, each with the generation and the position in it."""
        before: Place | None = None
        for at, (mask, value) in enumerate(zip(row.mask, row.logprobs, strict=False)):
            # A token with another log-probability breaks rule 1.2. It is trained all the same.
            found = self._place(row.ids, at, value, before) or self._place(row.ids, at, None, before) if mask else None
            if (before := found) is not None:
                yield at, before

    def _place(self, ids: Sequence[int], at: int, value: float | None, before: Place | None) -> Place | None:
        if value is not None:
            return self._places.get(value)
        if before is not None and list(before[0].sampled[before[1] + 1 : before[1] + 2]) == [ids[at]]:
            return before[0], before[1] + 1
        return self._by_context(ids, at)

    def _by_context(self, ids: Sequence[int], at: int) -> Place | None:
        """Where the engine sampled this token after these ids; of several answers, the one that agrees longest."""
        prefix = tuple(ids[: at + 1])
        found = [one for one in self._log if len(one.prompt) <= at and one.full[: at + 1] == prefix]
        if not found:
            return None
        best = max(
            found,
            key=lambda one: sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.full, ids, strict=False))
            ),
        )
        return best, at - len(best.prompt)

    def _judge_row(self, number: int, row: Row, *, strict: bool) -> Iterator[Fault]:
        wrong: dict[str, list[int]] = {}
        before: Place | None = None
        for at, value in enumerate(row.logprobs):
            if not row.mask[at] and (not strict or value is None):
                before = None
                continue
            place = self._place(row.ids, at, value, before)
            if value is None and place is not None:
                wrong.setdefault("1.2", []).append(at)
            if place is None:
                wrong.setdefault("1.1" if self._by_context(row.ids, at) is None else "1.2", []).append(at)
            elif place[0].sampled[place[1]] != row.ids[at]:
                wrong.setdefault("1.1", []).append(at)
            elif before != (place[0], place[1] - 1) and tuple(row.ids[:at]) != (
                *place[0].prompt,
                *place[0].sampled[: place[1]],
            ):
                wrong.setdefault("1.3", []).append(at)
                continue  # all that follows of this generation is out of its context, too
            before = place
        for rule, places in wrong.items():
            where = f"row {number}, first at position {places[0]} of {len(row.ids)}"
            detail = f"{WRONG[rule]}: {len(places)}; {where}"
            yield Fault(rule=rule, severity="fatal", detail=detail, tokens=len(places))

    def trained(self, rows: Sequence[Row]) -> set[tuple[int, int]]:
        """By number of the generation and position."""
        return {(one.number, at) for row in rows for _, (one, at) in self.places(row)}

    def judge_coverage(
        self, rows: Sequence[Row], reasons: Mapping[str, int], *, continued: Sequence[Generation]
    ) -> Iterator[Fault]:
        """Level 2: what is not trained has a reason, and not one that is false. `continued` are generations whose answer
        the agent sent back in a later request."""
        trained = self.trained(rows)
        missing = {one.number: sum((one.number, at) not in trained for at in range(one.delivered)) for one in self._log}
        lost = [missing[one.number] for one in continued if missing[one.number]]
        if lost:
            told = f"{len(lost)} ({sum(lost)} tokens; {', '.join(reasons) or 'no reason given'})"
            detail = f"turns that the agent continued and that are not trained: {told}"
            yield Fault(rule="2.3", severity="fatal", detail=detail, tokens=sum(lost))
        unexplained = sum(missing.values()) - sum(lost) - sum(reasons.values())
        if unexplained > 0:
            detail = f"sampled tokens that are neither trained nor explained: {unexplained}"
            yield Fault(rule="2.2", severity="fatal", detail=detail, tokens=unexplained)

    def judge_versions(self, rows: Sequence[Row]) -> Iterator[Fault]:
        """Level 6."""
        for number, row in enumerate(rows):
            told = [(at, None if row.versions is None else row.versions[at], where) for at, where in self.places(row)]
            wrong = [
                (at, got, one.version_at(n + 1)) for at, got, (one, n) in told if str(got) != one.version_at(n + 1)
            ]
            if wrong:
                first = "position {}: {} for {}".format(*wrong[0])
                detail = f"row {number}: {len(wrong)} trained tokens without their policy version, first at {first}"
                yield Fault(rule="6.1", severity="fatal", detail=detail, tokens=len(wrong))

    def judge_kept(self, rows: Sequence[Row]) -> Iterator[Fault]:
        """Rule 1.5, for rows that were sampled under a filter."""
        for number, row in enumerate(rows):
            told = [
                (None if row.kept is None else row.kept[at], one.kept[n])
                for at, (one, n) in self.places(row)
                if one.kept
            ]
            if wrong := sum(got is None or sorted(got) != kept for got, kept in told):
                detail = f"row {number}: {wrong} tokens were sampled under a filter without the ids that it kept"
                yield Fault(rule="1.5", severity="warning", detail=detail, tokens=wrong)


WRONG = {
    "1.1": "trained tokens that the engine did not sample there",
    "1.2": "trained tokens with another log-probability than the engine reported",
    "1.3": "trained tokens in a context that the engine was not given",
}
