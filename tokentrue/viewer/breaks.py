"""Compares a branch's recorded ids with those of the same conversation rendered again, which a message-based pipeline
would train on. Both are split at the tokens that open a message, aligned by message and then by token. Every difference
is named, and counted by the sampled tokens that it touches."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from tokentrue.comparison.compare import find_gaps
from tokentrue.errors import TokenTrueError
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.samples.shape import spread_spans
from tokentrue.types import Ids, Message
from tokentrue.viewer.blocks import messages_from_tokens
from tokentrue.viewer.records import Branch, TurnMessages, ViewRenderer

NO_PROMPT = (
    "a samples file holds neither messages nor tools, and this prompt cannot be rebuilt from its tokens; open the "
    "store for a render"
)


def breaks_to_json(branch: Branch, renderer: ViewRenderer) -> JsonObject:
    """`mode`: "render" from messages, or "retokenise" from text alone (`why`). `dropped`: rendered without reasoning,
    as the client replayed it. A break has its name, both ranges, its turn and whether it touches sampled tokens."""
    ids = branch.sample.token_ids
    turns = branch.turns if branch.turns is not None else messages_from_tokens(branch, renderer)
    dropped, why = "reasoning_dropped" in branch.projection, NO_PROMPT
    other: Ids | None = None
    if branch.turns is not None or can_rebuild(branch, turns, renderer):
        try:
            other = render_again(branch, turns, renderer, dropped=dropped)
        except TokenTrueError as error:
            why = f"the template refuses to render this conversation: {error}"
    is_rendered = other is not None
    if other is None:
        other = renderer.encode_sampled(renderer.decode(ids))
    is_sampled = spread_spans(branch.sample, lambda span: span.kind == "sampled", False)
    turn_numbers = spread_spans(branch.sample, lambda span: span.turn, 0)
    has_logprob = [value is not None for value in branch.sample.rollout_logprobs]
    breaks: list[tuple[str, int, int, int, int, int, int]] = []
    by_name: dict[str, Counter[str]] = {}
    cuts = renderer.structure.openers | renderer.structure.stops
    for start, end, other_start, other_end in differing_ranges(ids, other, cuts):
        at = min(start, len(ids) - 1)
        touched = is_sampled[start:end] if end > start else (is_sampled[max(start - 1, 0)], is_sampled[at])
        number = turn_numbers[at]
        served = turns[number].served if number < len(turns) else None
        name = name_break(ids[start:end], other[other_start:other_end], served, renderer)
        breaks.append((name, start, end, other_start, other_end, number, int(any(touched))))
        counts = by_name.setdefault(name, Counter(count=0, lost=0, unsampled=0))
        unsampled = other_end - other_start if any(touched) else 0
        counts.update(count=1, lost=sum(has_logprob[start:end]), unsampled=unsampled)
    first = breaks[0][1] if breaks else None
    total = sum(by_name.values(), Counter[str]())
    return {
        "mode": "render" if is_rendered else "retokenise",
        "why": "" if is_rendered else why,
        "dropped": is_rendered and dropped,
        "other_ids": list(other),
        "breaks": breaks,
        "names": [
            {"name": name, **counts} for name, counts in sorted(by_name.items(), key=lambda item: -item[1]["lost"])
        ],
        "sampled": sum(has_logprob),
        "lost": total["lost"],
        "unsampled": total["unsampled"],
        "displaced": 0 if first is None else sum(has_logprob[first:]),
        "first": first,
    }


def can_rebuild(branch: Branch, turns: Sequence[TurnMessages], renderer: ViewRenderer) -> bool:
    sampled = next((span.start for span in branch.sample.spans if span.kind == "sampled"), len(branch.sample.token_ids))
    try:
        first = renderer.render(turns[0].given).token_ids if turns and turns[0].given else ()
    except TokenTrueError:
        first = ()
    is_same = tuple(first) == tuple(branch.sample.token_ids[:sampled])
    return is_same and all(turn.served is not None for turn in turns)


def render_again(branch: Branch, turns: Sequence[TurnMessages], renderer: ViewRenderer, *, dropped: bool) -> Ids:
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        messages += turn.given
        if number < len(turns) - 1 and turn.served is not None:
            messages.append({k: v for k, v in turn.served.items() if not dropped or k != "reasoning_content"})
    rendered = renderer.render(messages, branch.tools, template_kwargs=branch.template_kwargs or None)
    last = [span for span in branch.sample.spans if span.kind == "sampled" and span.turn == len(turns) - 1]
    if not last:
        return rendered.token_ids
    text = renderer.decode(branch.sample.token_ids[last[0].start : last[-1].end])
    return (*rendered.token_ids, *renderer.encode_sampled(text))


def name_break(mine: Ids, theirs: Ids, served: JsonMapping | None, renderer: ViewRenderer) -> str:
    here, there = renderer.decode(mine), renderer.decode(theirs)
    reasoning = "" if served is None else str(served.get("reasoning_content") or "").strip()[:40]
    if here == there:
        return "same text, other tokens"
    if reasoning and reasoning in here and reasoning not in there:
        return "reasoning removed"
    if "".join(here.split()) == "".join(there.split()):
        return "whitespace changed"
    if any(token in renderer.structure.special for token in (*mine, *theirs)):
        return "special token differs"
    if served is not None and served.get("tool_calls"):
        return "tool call rewritten"
    return "text missing" if not there else "text added" if not here else "text changed"


def differing_ranges(recorded: Ids, other: Ids, cuts: frozenset[int]) -> list[tuple[int, int, int, int]]:
    # with the end appended, so that adjacent entries enclose a message
    mine, theirs = (
        sorted({0, len(ids), *(i for i, token in enumerate(ids) if token in cuts)}) for ids in (recorded, other)
    )
    keys = [tuple(recorded[a:b]) for a, b in pairwise(mine)], [tuple(other[a:b]) for a, b in pairwise(theirs)]
    found: list[tuple[int, int, int, int]] = []
    for first, last, other_first, other_last in find_gaps(*keys):
        start, other_start = mine[first], theirs[other_first]
        inner = find_gaps(tuple(recorded[start : mine[last]]), tuple(other[other_start : theirs[other_last]]))
        gaps = ((start + a, start + b, other_start + c, other_start + d) for a, b, c, d in inner)
        found += [gap for gap in gaps if gap[0] < gap[1] or gap[2] < gap[3]]
    return found
