"""The judge: rows to train on against the engine's log, without knowledge of a gateway."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

from tokentrue.conformance.standin.generation import Generation
from tokentrue.conformance.standin.vocabulary import ImagePlace
from tokentrue.records import record

Severity = Literal["fatal", "warning", "note"]
COLUMNS = ("ids", "mask", "logprobs", "versions", "kept")
REASONS = ("retried", "not_chosen", "abandoned")
"""Why an answered turn may be left out: it was asked again, it is one of several answers to one request, or the agent
went back before it and continued another answer."""


@record
class Row:
    """One training sequence. `logprobs` counts only where `mask` is 1; `versions` and `kept` (the ids that a filter
    left) are per token, None where the gateway records none. `images`: the SHA-256 of each file, its first token and
    number of tokens."""

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]
    versions: Sequence[str | int | None] | None = None
    kept: Sequence[Sequence[int] | None] | None = None
    images: Sequence[ImagePlace] = ()


@record
class Fault:
    """One broken rule of the specification; `rule` is its number there."""

    rule: str
    detail: str
    severity: Severity = "fatal"
    tokens: int = 0


def merge_calls(calls: Sequence[Row]) -> list[Row]:
    """Rows of a gateway that records one per call: a call whose prompt begins with all of an earlier row extends it. A
    second branch from the same turn is a row with its own call trained."""
    rows: list[Row] = []
    for call in calls:
        start = next((at for at, kept in enumerate(call.mask) if kept), len(call.ids))
        before = [at for at, row in enumerate(rows) if len(row.ids) <= start and begins_with(call, row)]
        if not before:
            rows.append(call)
            continue
        at = max(before, key=lambda at: len(rows[at].ids))
        both = {name: (getattr(rows[at], name), getattr(call, name)) for name in COLUMNS[1:]}
        joined = {
            name: None if old is None or new is None else [*old, *new[len(old) :]] for name, (old, new) in both.items()
        }
        rows[at] = replace(call, **joined)
    return rows


def begins_with(call: Row, row: Row) -> bool:
    """Also in images: two pictures of one size have the same placeholders."""
    length = len(row.ids)
    images = [tuple(image) for image in call.images if image[1] < length]
    return list(call.ids[:length]) == list(row.ids) and images == [tuple(image) for image in row.images]


def find_uneven(rows: Sequence[Row]) -> Iterator[Fault]:
    """Rule 0.2: a row whose columns have different lengths cannot be read."""
    for number, row in enumerate(rows):
        sizes = {name: len(value) for name in COLUMNS if (value := getattr(row, name)) is not None}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{count} {name}" for name, count in sizes.items())
            yield Fault(rule="0.2", detail=f"row {number} has columns of different lengths: {told}")


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
            yield from self._judge_row(number, row, strict=strict)
        counts = Counter((one.number, at) for row in rows for _, (one, at) in self.places(row))
        if twice := sum(count > 1 for count in counts.values()):
            yield Fault(rule="2.1", detail=f"sampled tokens that are trained more than once: {twice}", tokens=twice)

    def places(self, row: Row) -> Iterator[tuple[int, Place]]:
        """Trained positions, each with the generation and the position in it."""
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

        def agreement(one: Generation) -> int:
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.full, ids, strict=False)))

        best = max(found, key=agreement)
        return best, at - len(best.prompt)

    def _judge_row(self, number: int, row: Row, *, strict: bool) -> Iterator[Fault]:
        wrong, before = defaultdict[str, list[int]](list), None
        for at, value in enumerate(row.logprobs):
            if not row.mask[at] and (not strict or value is None):
                before = None
                continue
            place = self._place(row.ids, at, value, before)
            if place is None:
                wrong["1.1" if self._by_context(row.ids, at) is None else "1.2"].append(at)
                before = None
                continue
            one, n = place
            if value is None:
                wrong["1.2"].append(at)
            if one.sampled[n] != row.ids[at]:
                wrong["1.1"].append(at)
            elif before != (one, n - 1) and tuple(row.ids[:at]) != (*one.prompt, *one.sampled[:n]):
                wrong["1.3"].append(at)
                continue  # all that follows of this generation is out of its context, too
            before = place
        for rule, places in wrong.items():
            detail = f"{WRONG[rule]}: {len(places)}; row {number}, first at position {places[0]} of {len(row.ids)}"
            yield Fault(rule=rule, detail=detail, tokens=len(places))

    def trained(self, rows: Sequence[Row]) -> set[tuple[int, int]]:
        """By number of the generation and position."""
        return {(one.number, at) for row in rows for _, (one, at) in self.places(row)}

    def judge_coverage(
        self, rows: Sequence[Row], reasons: Mapping[str, int], *, continued: set[int], excusable: set[int]
    ) -> Iterator[Fault]:
        """Level 2, by numbers of generations: `continued`: the agent sent the answer back later; `excusable`: a reason
        can be true of it."""
        trained = self.trained(rows)
        missing = {one.number: sum((one.number, at) not in trained for at in range(one.delivered)) for one in self._log}
        lost = [missing[number] for number in continued if missing[number]]
        told = ", ".join(reasons) or "no reason given"
        if lost:
            tokens = f"{sum(lost)} tokens; {told}"
            detail = f"turns that the agent continued and that are not trained: {len(lost)} ({tokens})"
            yield Fault(rule="2.3", detail=detail, tokens=sum(lost))
        excused = sum(count for number, count in missing.items() if number in excusable)
        unexplained = sum(missing.values()) - sum(lost) - excused
        unexplained += max(0, excused - sum(reasons.get(name, 0) for name in REASONS))
        if unexplained:
            what = "sampled tokens that are not trained, without a reason that is true of them"
            detail = f"{what}: {unexplained} ({told})"
            yield Fault(rule="2.2", detail=detail, tokens=unexplained)

    def judge_versions(self, rows: Sequence[Row]) -> Iterator[Fault]:
        """Level 6."""
        told: list[tuple[Any, ...]] = []
        for number, row in enumerate(rows):
            versions = row.versions or [None] * len(row.ids)
            told += [(number, at, versions[at], one.version_at(n + 1)) for at, (one, n) in self.places(row)]
        if wrong := [one for one in told if str(one[2]) != one[3]]:
            first = "row {}, position {}: {} for {}".format(*wrong[0])
            detail = f"{len(wrong)} trained tokens without their policy version, first in {first}"
            yield Fault(rule="6.1", detail=detail, tokens=len(wrong))

    def judge_kept(self, rows: Sequence[Row]) -> Iterator[Fault]:
        """Rule 1.5, for rows that were sampled under a filter."""
        told: list[tuple[Any, list[int]]] = []
        for row in rows:
            kept = row.kept or [None] * len(row.ids)
            told += [(kept[at], one.kept[n]) for at, (one, n) in self.places(row) if one.kept]
        if wrong := sum(got is None or sorted(got) != wanted for got, wanted in told):
            detail = f"{wrong} tokens were sampled under a filter without the ids that it kept"
            yield Fault(rule="1.5", severity="warning", detail=detail, tokens=wrong)

    def judge_images(self, rows: Sequence[Row]) -> Iterator[Fault]:
        """Rule 9.1: before each trained token, a row has the images of the engine's prompt."""
        for number, row in enumerate(rows):
            for one in {one.number: one for _, (one, _) in self.places(row)}.values():
                got = [(name, at, count) for name, at, count in row.images if at < len(one.prompt)]
                if got != list(one.images):
                    detail = f"row {number} has the images {_list(got)}; the engine was given {_list(one.images)}"
                    yield Fault(rule="9.1", detail=detail, tokens=len(one.sampled))


def _list(images: Sequence[ImagePlace]) -> str:
    return ", ".join(f"{name[:8]} at {at} ({count} tokens)" for name, at, count in images) or "none"


WRONG = {
    "1.1": "trained tokens that the engine did not sample there",
    "1.2": "trained tokens with another log-probability than the engine reported",
    "1.3": "trained tokens in a context that the engine was not given",
}
