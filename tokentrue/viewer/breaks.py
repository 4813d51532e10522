"""Compares a branch's recorded ids with the ids of the same conversation rendered again.

The latter are what a message-based pipeline would train on: earlier turns rendered from their messages by the chat
template, the last turn encoded from its text. Both sequences are split at the tokens that open a message, aligned by
message and then by token. Every difference is named, and counted by the sampled tokens that it touches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from tokentrue.comparison import compare
from tokentrue.comparison.alignment import align
from tokentrue.errors import TokenTrueError
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.types import Ids, Sample
from tokentrue.viewer.blocks import messages_from_tokens
from tokentrue.viewer.records import Branch, TurnMessages, ViewRenderer

Mode = Literal["render", "retokenise"]
NAMES = {
    "resplit": "same text, other tokens",
    "reasoning": "reasoning removed",
    "call": "tool call rewritten",
    "whitespace": "whitespace changed",
    "special": "special token differs",
    "missing": "text missing",
    "extra": "text added",
    "changed": "text changed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Recorded tokens `[start, end)` and the tokens `[other_start, other_end)` that a render has in their place."""

    name: str
    start: int
    end: int
    other_start: int
    other_end: int
    turn: int
    sampled: bool  # it touches sampled tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerender:
    """The other token sequence. `mode`: "render" from messages, or "retokenise" from text alone, with the reason in
    `why`."""

    token_ids: Ids
    mode: Mode
    why: str = ""
    dropped: bool = False  # the client replayed its history without reasoning, and it is rendered so


def rerender(branch: Branch, renderer: ViewRenderer) -> Rerender:
    ids = branch.sample.token_ids
    turns, why = branch.turns, ""
    if turns is None:
        turns, why = _recover_turns(branch, renderer)
    if turns is not None:
        try:
            dropped = "reasoning_dropped" in branch.projection
            rendered = renderer.render(
                _prompt(turns, dropped=dropped), branch.tools, template_kwargs=branch.template_kwargs or None
            )
            last = [span for span in branch.sample.spans if span.kind == "sampled" and span.turn == len(turns) - 1]
            answer = renderer.encode_sampled(renderer.decode(ids[last[0].start : last[-1].end])) if last else []
            return Rerender(token_ids=(*rendered.token_ids, *answer), mode="render", dropped=dropped)
        except TokenTrueError as error:
            why = f"the template refuses to render this conversation: {error}"
    return Rerender(token_ids=renderer.encode_sampled(renderer.decode(ids)), mode="retokenise", why=why)


def _prompt(turns: Sequence[TurnMessages], *, dropped: bool) -> list[JsonValue]:
    messages: list[JsonValue] = []
    for number, turn in enumerate(turns):
        messages += turn.given
        if number < len(turns) - 1 and turn.served is not None:
            messages.append(
                {key: value for key, value in turn.served.items() if not dropped or key != "reasoning_content"}
            )
    return messages


def _recover_turns(branch: Branch, renderer: ViewRenderer) -> tuple[tuple[TurnMessages, ...] | None, str]:
    """None unless the parsed messages render to the recorded first prompt."""
    turns = messages_from_tokens(branch, renderer)
    sampled = next((span.start for span in branch.sample.spans if span.kind == "sampled"), len(branch.sample.token_ids))
    try:
        first = renderer.render(turns[0].given).token_ids if turns and turns[0].given else ()
    except TokenTrueError:
        first = ()
    if tuple(first) == tuple(branch.sample.token_ids[:sampled]) and all(turn.served is not None for turn in turns):
        return turns, ""
    why = "a samples file holds neither messages nor tools, and this prompt cannot be rebuilt from its tokens; open the store for a render"
    return None, why


def find_breaks(
    sample: Sample, other: Ids, turns: Sequence[TurnMessages] | None, renderer: ViewRenderer
) -> list[Break]:
    structure = renderer.structure
    kinds, numbers = _columns(sample)
    found: list[Break] = []
    for start, end, other_start, other_end in differing_ranges(
        sample.token_ids, other, structure.openers | structure.stops
    ):
        at = min(start, len(numbers) - 1)
        touched = range(start, max(end, start + 1)) if end > start else (max(start - 1, 0), at)
        sampled = any(kinds[i] for i in touched if i < len(kinds))
        served = turns[numbers[at]].served if turns is not None and numbers[at] < len(turns) else None
        name = _name(sample.token_ids[start:end], other[other_start:other_end], served, renderer)
        found.append(
            Break(
                name=name,
                start=start,
                end=end,
                other_start=other_start,
                other_end=other_end,
                turn=numbers[at],
                sampled=sampled,
            )
        )
    return found


def _columns(sample: Sample) -> tuple[list[bool], list[int]]:
    kinds, numbers = [False] * len(sample.token_ids), [0] * len(sample.token_ids)
    for span in sample.spans:
        size = span.end - span.start
        kinds[span.start : span.end] = [span.kind == "sampled"] * size
        numbers[span.start : span.end] = [span.turn] * size
    return kinds, numbers


def _name(mine: Ids, theirs: Ids, served: JsonValue, renderer: ViewRenderer) -> str:
    here, there = renderer.decode(mine), renderer.decode(theirs)
    reasoning = "" if served is None else str(served.get("reasoning_content") or "").strip()
    special = renderer.structure.special
    if here == there:
        return "resplit"
    if reasoning and reasoning[:40] in here and reasoning[:40] not in there:
        return "reasoning"
    if "".join(here.split()) == "".join(there.split()):
        return "whitespace"
    if any(token in special for token in (*mine, *theirs)):
        return "special"
    if served is not None and served.get("tool_calls"):
        return "call"
    return "missing" if not there else "extra" if not here else "changed"


def differing_ranges(recorded: Ids, other: Ids, cuts: frozenset[int]) -> list[tuple[int, int, int, int]]:
    """`(start, end, other_start, other_end)` of each difference, in order, aligned by message and then by token."""
    mine, theirs = _message_starts(recorded, cuts), _message_starts(other, cuts)
    keys = [tuple(recorded[a:b]) for a, b in pairwise(mine)], [tuple(other[a:b]) for a, b in pairwise(theirs)]
    found: list[tuple[int, int, int, int]] = []
    for first, last, other_first, other_last in _gaps(*keys):
        start, other_start = mine[first], theirs[other_first]
        inner = tuple(recorded[start : mine[last]]), tuple(other[other_start : theirs[other_last]])
        found += [(start + a, start + b, other_start + c, other_start + d) for a, b, c, d in _gaps(*inner)]
    return found


def _message_starts(ids: Ids, cuts: frozenset[int]) -> list[int]:
    """With the end appended, so that adjacent entries enclose a message."""
    return sorted({0, len(ids), *(i for i, token in enumerate(ids) if token in cuts)})


def _gaps(mine: Sequence[Any], theirs: Sequence[Any]) -> Iterator[tuple[int, int, int, int]]:
    at = other_at = 0
    for i, j in [*align(mine, theirs), (len(mine), len(theirs))]:
        if i is not None and j is not None:
            if i > at or j > other_at:
                yield at, i, other_at, j
            at, other_at = i + 1, j + 1


def breaks_to_json(branch: Branch, renderer: ViewRenderer) -> JsonObject:
    sample = branch.sample
    other = rerender(branch, renderer)
    turns = branch.turns if branch.turns is not None else messages_from_tokens(branch, renderer)
    found = find_breaks(sample, other.token_ids, turns, renderer)
    graded: dict[str, int] = {}
    for mismatch in compare(other.token_ids, list(sample.token_ids), renderer=renderer):
        graded[mismatch.kind] = graded.get(mismatch.kind, 0) + 1
    sampled = [value is not None for value in sample.rollout_logprobs]
    first = found[0].start if found else len(sampled)
    by_name: dict[str, dict[str, int]] = {}
    for item in found:
        row = by_name.setdefault(item.name, {"count": 0, "lost": 0, "unsampled": 0})
        row["count"] += 1
        row["lost"] += sum(sampled[item.start : item.end])
        row["unsampled"] += item.other_end - item.other_start if item.sampled else 0
    return {
        "mode": other.mode,
        "why": other.why,
        "dropped": other.dropped,
        "other_ids": list(other.token_ids),
        "breaks": [[NAMES[b.name], b.start, b.end, b.other_start, b.other_end, b.turn, int(b.sampled)] for b in found],
        "names": [
            {"name": NAMES[name], **counts}
            for name, counts in sorted(by_name.items(), key=lambda item: -item[1]["lost"])
        ],
        "graded": graded,
        "sampled": sum(sampled),
        "lost": sum(row["lost"] for row in by_name.values()),
        "unsampled": sum(row["unsampled"] for row in by_name.values()),
        "displaced": sum(sampled[first:]),
        "first": first if found else None,
    }
