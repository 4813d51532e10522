"""What makes the next request cheap: the bytes of the last one. An agent sends its whole conversation again each turn; where the new
body is the old one with messages appended, only the appended bytes are parsed.

Why it is sound: the old body is `prefix + tail`, cut inside the conversation's array just before its `]`. If the new body is
`prefix + "," + X + tail` and `[X]` is a JSON array, then the new body is the old document with X's elements appended, whatever X says.
A body is kept as it came, and its prefix is looked at in place: nothing of a long conversation is copied or hashed twice.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import orjson

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import Call

_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
KEPT = 8
COMMA = 0x2C


class Cut(NamedTuple):
    """Where a body can be cut for the next time: `raw[:end]` is its prefix, and `hashed` the blake2b over that. `end` is 0 where that is
    not clear; then it is over the whole."""

    raw: bytes
    end: int
    hashed: Any
    tail: bytes
    tail_digest: bytes

    @property
    def prefix(self) -> memoryview:
        return memoryview(self.raw)[: self.end]

    @property
    def digest(self) -> str:
        """The name of the whole body, whichever way it was taken apart."""
        return blake2b(self.hashed.digest() + self.tail_digest, digest_size=16).hexdigest()


class Body(NamedTuple):
    """A request, taken apart. `items` are only the new ones where `after` names the node that the rest led to."""

    call: Call
    items: list[Any]
    start: int  # index of items[0] in the conversation
    digest: str
    after: str | None
    cut: Cut
    extends: Memo | None = None  # the request that this one continues

    @property
    def total(self) -> int:
        return self.start + len(self.items)


class Memo(NamedTuple):
    """`node` is what the request led to; `total` is how many items it had."""

    cut: Cut
    call: Call
    total: int
    node: str


class Memory:
    """The last few requests of one session, newest last: one for each conversation that it carries on."""

    def __init__(self) -> None:
        self._memos: list[Memo] = []

    def appended(self, body: bytes) -> Body | None:
        """`body` as a continuation of a remembered request; None where it is not one, byte for byte."""
        for memo in reversed(self._memos):
            known = memo.cut
            start, end = known.end, len(body) - len(known.tail)
            if end <= start or body[start] != COMMA or not body.endswith(known.tail) or not body.startswith(known.prefix):
                continue
            new = body[start:end]
            try:
                items = orjson.loads(b"[%b]" % new[1:])
            except orjson.JSONDecodeError:
                return None
            hashed = known.hashed.copy()
            hashed.update(new)
            cut = Cut(body, end, hashed, known.tail, known.tail_digest)
            return Body(memo.call, items, memo.total, cut.digest, memo.node, cut, memo)
        return None

    def remember(self, body: Body, node: str) -> None:
        if not body.cut.end:
            return
        memo = Memo(body.cut, body.call, body.total, node)
        if len(self._memos) == 1 and self._memos[0] is body.extends:
            self._memos[0] = memo
            return
        self._memos = [memo for memo in self._memos if not _continues(body, memo)][1 - KEPT :]
        self._memos.append(memo)


def _continues(body: Body, memo: Memo) -> bool:
    """Whether `memo` has served its turn now that `body` has been answered."""
    if body.extends is not None:
        return memo is body.extends
    cut, known = body.cut, memo.cut
    return known.tail == cut.tail and known.end <= cut.end and cut.raw.startswith(known.prefix)


def take_apart(body: bytes, items_key: str) -> tuple[dict[str, Any], list[Any], int]:
    """A body parsed whole: its other fields, its items, and where to cut it for the next time (0 where that is not clear)."""
    try:
        top = _TOP.decode(body)
        raw = bytes(top.pop(items_key, b""))
        head = {name: orjson.loads(bytes(value)) for name, value in top.items()}
        items = orjson.loads(raw) if raw else None
    except msgspec.ValidationError:
        raise MessageError("the body must be a JSON object") from None
    except (msgspec.DecodeError, orjson.JSONDecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"the body is not JSON: {str(error)[:100]}") from None
    if isinstance(items, str):
        items, raw = [{"role": "user", "content": items}], b""
    if not isinstance(items, list) or not items:
        raise MessageError("must be a list with at least one item", field=items_key)
    return head, items, _end(body, raw)


def _end(body: bytes, raw: bytes) -> int:
    at = body.find(raw) if raw else -1
    if at < 0 or body.find(raw, at + 1) >= 0:
        return 0  # its place in the body is not unique
    return len(body[: at + len(raw) - 1].rstrip(b" \t\r\n"))


def body_of(body: bytes, items_key: str, call_of: Any) -> Body:
    """The slow way: everything is parsed."""
    head, items, end = take_apart(body, items_key)
    tail = body[end:] if end else b""
    cut = Cut(body, end, blake2b(body[:end] if end else body, digest_size=16), tail, blake2b(tail, digest_size=16).digest())
    return Body(call_of(head), items, 0, cut.digest, None, cut)
