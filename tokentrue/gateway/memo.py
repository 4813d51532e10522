"""What makes the next request cheap: the bytes of the last one. An agent sends its whole conversation again each turn; where the new
body is the old one with messages appended, only the appended bytes are parsed.

Why it is sound: the old body is `prefix + tail`, cut inside the conversation's array just before its `]`. If the new body is
`prefix + "," + X + tail` and `[X]` is a JSON array, then the new body is the old document with X's elements appended, whatever X says.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import orjson

from tokentrue.errors import MessageError
from tokentrue.gateway.dialects.base import Call

_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request, taken apart. `items` are only the new ones where `after` names the node that the rest led to."""

    call: Call
    items: list[Any]
    start: int  # index of items[0] in the conversation
    digest: str
    after: str | None
    prefix: bytes
    tail: bytes
    state: Any  # blake2b over prefix
    extends: Memo | None = None  # the request that this one continues

    @property
    def total(self) -> int:
        return self.start + len(self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """`node` is what the request `prefix + tail` led to; `total` is how many items it had."""

    prefix: bytes
    tail: bytes
    state: Any
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
            if not body.startswith(memo.prefix) or not body.endswith(memo.tail):
                continue
            end = len(body) - len(memo.tail)
            if end <= len(memo.prefix) or body[len(memo.prefix)] != 0x2C:
                continue
            try:
                items = orjson.loads(b"[" + body[len(memo.prefix) + 1 : end] + b"]")
            except orjson.JSONDecodeError:
                return None
            state = memo.state.copy()
            state.update(body[len(memo.prefix) : end])
            return Body(
                call=memo.call,
                items=items,
                start=memo.total,
                digest=_digest(state, memo.tail),
                after=memo.node,
                prefix=body[:end],
                tail=memo.tail,
                state=state,
                extends=memo,
            )
        return None

    def remember(self, body: Body, node: str) -> None:
        if not body.prefix:
            return
        self._memos = [memo for memo in self._memos if not _continues(body, memo)][1 - KEPT :]
        memo = Memo(prefix=body.prefix, tail=body.tail, state=body.state, call=body.call, total=body.total, node=node)
        self._memos.append(memo)


def _continues(body: Body, memo: Memo) -> bool:
    """Whether `memo` has served its turn now that `body` has been answered."""
    return memo is body.extends or (body.extends is None and memo.tail == body.tail and body.prefix.startswith(memo.prefix))


def _digest(state: Any, tail: bytes) -> str:
    whole = state.copy()
    whole.update(tail)
    return whole.hexdigest()


def take_apart(body: bytes, items_key: str) -> tuple[dict[str, Any], list[Any], bytes, bytes]:
    """A body parsed whole: its other fields, its items, and where to cut it for the next time (empty where that is not clear)."""
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
    prefix, tail = _cut(body, raw)
    return head, items, prefix, tail


def _cut(body: bytes, raw: bytes) -> tuple[bytes, bytes]:
    at = body.find(raw) if raw else -1
    if at < 0 or body.find(raw, at + 1) >= 0:  # its place in the body is not unique
        return b"", b""
    prefix = body[: at + len(raw) - 1].rstrip(b" \t\r\n")
    return prefix, body[len(prefix) :]


def body_of(body: bytes, items_key: str, call_of: Any) -> Body:
    """The slow way: everything is parsed."""
    head, items, prefix, tail = take_apart(body, items_key)
    state = blake2b(prefix or body, digest_size=16)
    digest = _digest(state, tail)
    return Body(call=call_of(head), items=items, start=0, digest=digest, after=None, prefix=prefix, tail=tail, state=state)
