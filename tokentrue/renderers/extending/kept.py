"""Chooses the earlier messages that the template needs (see history_use). Their number does not grow with the
history.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property, partial
from operator import itemgetter
from typing import NamedTuple, TypeAlias, cast

import orjson

from tokentrue.errors import TokenTrueError
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue, is_array
from tokentrue.plain_json import digest
from tokentrue.renderers.codec import Codec, shield_content
from tokentrue.renderers.extending.contexts import ContextBuilder
from tokentrue.renderers.extending.history_use import HistoryUse, analyse
from tokentrue.renderers.messages import REASONING, normalise_messages
from tokentrue.renderers.template import InputFormat, Template
from tokentrue.types import Messages

MAX_CACHED_CHARS = 32 << 20
EffectKey: TypeAlias = tuple[JsonValue, ...]
Effect: TypeAlias = tuple[str, frozenset[str]]
"""What a message writes, as `HistoryUse.effects` prints it, and the names of the variables."""
NO_EFFECT: Effect = ("", frozenset())


def describe_shape(message: JsonObject) -> Hashable:
    """What can affect structure: role, presence of text, names of calls; never the text."""
    names = tuple(call["function"]["name"] for call in message.get("tool_calls") or ())
    content = message["content"]
    sees = is_array(content) and {"type": "image"} in content
    return message["role"], bool(content), sees, names, message.get("name", ""), "reasoning_content" in message


def make_key(value: JsonValue) -> bytes:
    """Short exact key for a request's tools or system message; empty if there is none."""
    return b"" if value is None else digest(_serialise(value))


def _serialise(value: JsonValue) -> bytes:
    """`True` and `1`, or different key orders, differ."""
    try:
        data = orjson.dumps(value)
    except TypeError:  # not plain JSON
        return repr(value).encode()
    return data + repr(value).encode() if b"null" in data else data  # orjson writes NaN as null


class KeptMessages(NamedTuple):
    """`messages`: the kept ones; a leading system message only if its text is needed. `signature`: what a plan may
    depend on, their shapes and what they write.
    """

    messages: list[JsonObject]
    signature: Hashable


class MessageKeeper:
    """Chooses the messages; caches what each text writes."""

    def __init__(self, template: Template, codec: Codec, inputs: InputFormat, *, safe: bool, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self._template, self._codec, self._inputs, self._safe = template, codec, inputs, safe
        self._effects: dict[str, dict[EffectKey, Effect]] = {}  # by kwargs, then by the message's `_fields`
        self._cached_chars = 0

    @cached_property
    def use(self) -> HistoryUse:
        if not self._is_allowed:
            return HistoryUse(why="short plans gave other ids than the real history")
        return analyse(self._template.source)

    def choose(
        self, messages: Messages, last: JsonObject, kwargs: JsonMapping, kwargs_key: str, contexts: ContextBuilder
    ) -> KeptMessages | None:
        """Chooses from `messages`, whose last one is the recorded turn; None if the template needs them all. `last` is
        that turn, normalised.
        """
        use, end, dummy = self.use, len(messages) - 1, contexts.dummy_user
        start = 1 if end and messages[0].get("role") in ("system", "developer") else 0
        if use.why or end == start:
            return None
        try:
            known = self._effects.setdefault(kwargs_key, {})
            find_effect = partial(self._find_effect, kwargs=kwargs, known=known)
            missing = {**use.variables}
            if missing and {"role", "tool_calls"}.issuperset(use.fields):  # the turn is rendered with other texts
                turn = contexts.build_turn({**last, "content": ""}, "content", real=False)
                for name in find_effect(turn)[1] & find_effect(messages[end])[1]:
                    missing.pop(name, None)
            writers, roles = self._find_last_writers(messages, end, missing, known, find_effect)
            asked = {start} if use.first and not start else set[int]()
            if use.gaps:
                asked |= {index + 1 for index in (*writers, *asked, *roles.values()) if index + 1 < end}
            asked.update(roles.values())
            chosen = asked.union(writers)
            dummy_effect = find_effect(dummy)
            if chosen <= set(range(start)):  # some message must precede the turn
                if not dummy_effect[0] and (roles.get("user") is not None or "user" not in use.roles):
                    return _keep([(dummy, dummy_effect)])
                chosen.add(start)  # the dummy would write what no message of the history does
            kept: list[tuple[JsonObject, Effect]] = []
            for index in sorted(chosen):
                effect = find_effect(messages[index])
                if kept and kept[-1][0]["role"] == messages[index]["role"] == "user" and not use.gaps:
                    # some templates require alternating turns
                    answer = {"role": "assistant", "content": dummy["content"]}
                    if not (answer_effect := find_effect(answer))[0]:
                        kept.append((answer, answer_effect))
                is_like_dummy = index not in asked and effect == dummy_effect and messages[index]["role"] == "user"
                kept.append((dummy if is_like_dummy else self._normalise(messages, index), effect))
            return _keep(kept)
        except TokenTrueError:
            raise
        except Exception:  # a template may fail on a message for any reason; the real history shows whether it does
            return None

    def _find_last_writers(
        self,
        history: Messages,
        end: int,
        missing: dict[str, frozenset[str] | None],
        known: Mapping[EffectKey, Effect],
        find_effect: Callable[[JsonMapping], Effect],
    ) -> tuple[list[int], dict[str, int]]:
        """Indices of the last message before `end` that writes each of the `missing` variables, and of the last message
        of each role that is read.
        """
        read_fields, writers = self._read_fields, list[int]()
        last: dict[str, int] = {}
        wanted = _list_roles(missing, self.use.roles)
        for index in range(end - 1, -1, -1):
            if not missing and len(last) == len(self.use.roles):
                break
            role = history[index]["role"]
            if wanted is not None and role not in wanted:
                continue
            if role in self.use.roles:
                last.setdefault(role, index)
            if not missing:
                continue
            try:  # fast path: a long history is scanned at every turn and most messages are cached
                written = known[read_fields(history[index])][1]
            except (KeyError, TypeError):
                written = find_effect(history[index])[1]
            if not written.isdisjoint(missing):
                writers.append(index)
                missing = {name: roles for name, roles in missing.items() if name not in written}
                wanted = _list_roles(missing, self.use.roles)
        return writers, last

    def _find_effect(self, message: JsonMapping, *, kwargs: JsonMapping, known: dict[EffectKey, Effect]) -> Effect:
        if self.use.effects is None:
            return NO_EFFECT
        given = [message.get(name, ...) for name in self._fields]
        key = tuple(
            value if type(value) is str or value is None or value is ... else _serialise(value) for value in given
        )
        if key in known:
            return known[key]
        normal = normalise_messages([message], self._inputs)
        if self._safe:
            normal, _ = shield_content(self._codec, normal)
        text = self._template.render_other(self.use.effects, kwargs, history=normal)
        self._cached_chars += sum(len(part) for part in key if isinstance(part, (str, bytes)))
        if self._cached_chars > MAX_CACHED_CHARS:
            self._effects.clear()
            self._cached_chars = 0
        effect = known[key] = text, frozenset(part.partition("=")[0] for part in text.split("\0")[1:])
        return effect

    @cached_property
    def _fields(self) -> tuple[str, ...]:
        """At least two, so that `_read_fields` returns a tuple."""
        fields = ("role", *(self.use.fields or ("role",)))
        return fields if set(fields).isdisjoint(REASONING) else (*fields, *REASONING)

    @cached_property
    def _read_fields(self) -> itemgetter[EffectKey]:
        return cast("itemgetter[EffectKey]", itemgetter(*self._fields))

    def _normalise(self, messages: Messages, index: int) -> JsonObject:
        first = index
        if messages[index].get("role") == "tool" and self._safe:
            # a result has the name of its call, which is in the turn before it or in an older one
            while first and messages[first].get("role") == "tool":
                first -= 1
            ids = {call.get("id") for call in messages[first].get("tool_calls") or ()}
            first = first if messages[index].get("tool_call_id") in ids else 0
        return normalise_messages(messages[first : index + 1], self._inputs, first=first, named=self._safe)[-1]


def _keep(kept: list[tuple[JsonObject, Effect]]) -> KeptMessages:
    signature = tuple((describe_shape(message), effect[0]) for message, effect in kept)
    return KeptMessages([message for message, _ in kept], signature)


def _list_roles(missing: Mapping[str, frozenset[str] | None], asked: frozenset[str]) -> set[str] | None:
    """Roles that can write these variables; None for any. A developer message may become a system message."""
    found = {"developer", *asked}
    for roles in missing.values():
        if roles is None:
            return None
        found |= roles
    return found
