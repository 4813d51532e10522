"""Which tokens of a prompt come from which message: the template's own text is known from a marked render, the rest is content.

Spans cover all tokens without gap or overlap. A token that holds both structure and content counts as content. Where the places cannot be
told (a normalizer that changed the text, a template that writes otherwise than it marked), everything is structure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from tokentrue.renderers.encoding import Codec
from tokentrue.types import PromptSpan


def joins_of(text: str, words: Sequence[str]) -> tuple[str, ...]:
    """The template's own text around the marked words; empty where they are not there once and in order."""
    out: list[str] = []
    for word in words:
        before, found, text = text.partition(word)
        if not found:
            return ()
        out.append(before)
    return (*out, text)


def spans_of(codec: Codec, text: str, mark: str, ids: Sequence[int], joins: Sequence[str], roles: Sequence[str]) -> tuple[PromptSpan, ...]:
    """`text` is what `ids` encode; `joins` go around the contents of the messages of these `roles`, in order."""
    places = _places(text, mark, joins)
    ends = _ends(codec, text, mark, ids) if places else None
    if not ids:
        return ()
    if ends is None:
        return (PromptSpan(start=0, end=len(ids), role="assistant" if not roles else roles[-1]),)
    contents: list[tuple[int, int]] = []
    done = 0
    for start, end in places:
        first = max(bisect_right(ends, start), done)
        done = max(bisect_left(ends, end) + 1, first) if end > start else first
        contents.append((first, done))
    return spans_around(contents, roles, len(ids))


def spans_around(contents: Iterable[tuple[int, int]], roles: Sequence[str], total: int) -> tuple[PromptSpan, ...]:
    """`contents` are the tokens of each message's content, in order; all others of `total` are structure."""
    out: list[PromptSpan] = []
    done = 0
    for index, ((first, last), role) in enumerate(zip(contents, roles, strict=True)):
        if first > done:
            out.append(PromptSpan(start=done, end=first, role=role))
        if last > first:
            out.append(PromptSpan(start=first, end=last, role=role, message=index))
        done = last
    if done < total:
        out.append(PromptSpan(start=done, end=total, role="assistant"))
    return tuple(out)


def _places(text: str, mark: str, joins: Sequence[str]) -> list[tuple[int, int]]:
    """Where each content stands, in bytes of the text without marks."""
    if len(joins) < 2 or not text.startswith(joins[0]):
        return []
    chars: list[tuple[int, int]] = []
    at = len(joins[0])
    for join in joins[1:-1]:
        end = text.find(join, at) if join else -1
        if end < 0:
            return []
        chars.append((at, end))
        at = end + len(join)
    end = len(text) - len(joins[-1])
    if end < at or not text.endswith(joins[-1]):
        return []
    chars.append((at, end))
    if text.isascii():
        return chars

    def offset(place: int) -> int:
        before = text[:place]
        return len((before.replace(mark, "") if mark else before).encode())

    return [(offset(start), offset(end)) for start, end in chars]


def _ends(codec: Codec, text: str, mark: str, ids: Sequence[int]) -> list[int] | None:
    """Where each token ends, in bytes of the text; None where they do not spell it (a normalizer changed it)."""
    whole = text.replace(mark, "") if mark else text
    sizes = codec.sizes(ids)
    if sizes is not None:
        ends = list(accumulate(sizes))
        if ends and ends[-1] == (len(whole) if whole.isascii() else len(whole.encode())):
            return ends
    return _walked(codec, whole.encode("utf-8", "surrogatepass"), ids)


def _walked(codec: Codec, data: bytes, ids: Sequence[int]) -> list[int] | None:
    """Token by token: SentencePiece puts a blank of its own before text behind an added token, some tokens eat the blanks behind them."""
    ends: list[int] = []
    at, opens = 0, True
    piece = codec.spelling.piece
    for index in ids:
        spelled = piece(index)
        if data.startswith(spelled, at):
            at += len(spelled)
        elif opens and spelled[:1] == b" " and data.startswith(spelled[1:], at):
            at += len(spelled) - 1
        else:
            return None
        literal = codec.texts.get(index)
        while literal in codec.eats and data[at : at + 1].isspace():
            at += 1
        opens = literal is not None
        ends.append(at)
    return ends if at == len(data) else None
