"""Which earlier messages a prompt's end depends on: those that `history_use` found the template to need, chosen from a
request's history. Their number does not grow with the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from tokentrue.errors import TokenTrueError
from tokentrue.renderers.codec.codec import Codec
from tokentrue.renderers.codec.shield import ContentShield, needs_shield
from tokentrue.renderers.extending.history_use import HistoryUse, analyse
from tokentrue.renderers.extending.plan_key import MessageShape, describe_shape, spell
from tokentrue.renderers.json_types import JsonObject
from tokentrue.renderers.messages import REASONING, fill_in_tool_names, normalise_messages
from tokentrue.renderers.template import InputFormat
from tokentrue.types import Messages

MAX_CACHED_CHARS = 32 << 20
Effect: TypeAlias = tuple[str, frozenset[str]]
"""What a message writes, as `HistoryUse.effects` prints it, and the variables among that."""
NO_EFFECT: Effect = ("", frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMessages:
    """`messages` are the kept ones without a leading system message, unless that one is needed for its text.
    `signature` is what a plan may depend on: their shapes and what they write."""

    messages: Sequence[JsonObject]
    signature: tuple[tuple[MessageShape, str], ...]


class MessageKeeper:
    """Chooses the messages; what a message writes is worked out once for each text."""

    def __init__(self, source: str, codec: Codec, inputs: InputFormat, *, safe: bool, fill_in: bool) -> None:
        self._source, self._codec, self._inputs, self._safe, self._fill_in = source, codec, inputs, safe, fill_in
        self._effects: dict[tuple[Any, ...], Effect] = {}
        self._cached_chars = 0

    @cached_property
    def use(self) -> HistoryUse:
        return analyse(self._source)

    def choose(self, messages: Messages, kwargs: Mapping[str, Any], dummy: JsonObject) -> KeptMessages | None:
        """From the messages before the recorded turn, which is the last one; None where the template needs them all."""
        use, end = self.use, len(messages) - 1
        start = 1 if end and messages[0].get("role") in ("system", "developer") else 0
        if use.why or end == start:
            return None
        try:
            writers = self._find_last_writers(messages[:end], kwargs)
            asked = {start} if use.second or (use.first and not start) else set[int]()
            if use.neighbour:
                asked.add(end - 1)
            if use.gaps:
                asked |= {index + 1 for index in (*writers, *asked) if index + 1 < end}
            chosen = asked.union(writers)
            needs_dummy = chosen <= set(range(start))  # some message must precede the turn
            if needs_dummy and self._find_effect(dummy, kwargs)[0]:
                chosen.add(start)  # the dummy would write what no message of the history does
                needs_dummy = False
            kept = [self._normalise(messages, index) for index in sorted(chosen)] + ([dummy] if needs_dummy else [])
            signature = tuple((describe_shape(message), self._find_effect(message, kwargs)[0]) for message in kept)
            return KeptMessages(messages=kept, signature=signature)
        except TokenTrueError:
            raise
        except Exception:  # a template may fail on a message for any reason; the real history shows whether it does
            return None

    def _find_last_writers(self, history: Messages, kwargs: Mapping[str, Any]) -> list[int]:
        """Indices of the last message that writes each variable, and of the last one of each role that is asked for."""
        missing, roles = set(self.use.variables), set(self.use.roles)
        found: list[int] = []
        for index in range(len(history) - 1, -1, -1):
            if not missing and not roles:
                break
            message = history[index]
            written = self._find_effect(message, kwargs)[1] if missing else frozenset[str]()
            if (roles and message.get("role") in roles) or not missing.isdisjoint(written):
                missing -= written
                roles.discard(message["role"])
                found.append(index)
        return found

    def _find_effect(self, message: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Effect:
        if self.use.effects is None:
            return NO_EFFECT
        given = [message.get(name) for name in self._fields]
        if kwargs:
            given.append(repr(sorted(kwargs.items())))
        try:
            known = self._effects.get(tuple(given))
        except TypeError:  # a list
            known = None
        return known or self._render_effect(message, kwargs, given)

    def _render_effect(self, message: Mapping[str, Any], kwargs: Mapping[str, Any], given: list[Any]) -> Effect:
        key = tuple(value if type(value) is str or value is None else spell(value) for value in given)
        if known := self._effects.get(key):
            return known
        normal = normalise_messages([message], self._inputs)
        if self._safe and needs_shield(self._codec, normal):
            normal = [ContentShield(self._codec, normal).shield(normal[0])]
        text: str = self.use.effects.render({**kwargs, "history": normal, "add_generation_prompt": True})
        effect = text, frozenset(part.partition("=")[0] for part in text.split("\0")[1:])
        self._cached_chars += sum(len(part) for part in key if part)
        if self._cached_chars > MAX_CACHED_CHARS:
            self._effects.clear()
            self._cached_chars = 0
        self._effects[key] = effect
        return effect

    @cached_property
    def _fields(self) -> tuple[str, ...]:
        fields = self.use.fields
        return fields if set(fields).isdisjoint(REASONING) else (*fields, *REASONING)

    def _normalise(self, messages: Messages, index: int) -> JsonObject:
        if messages[index].get("role") != "tool" or not self._fill_in:
            return normalise_messages(messages[index : index + 1], self._inputs, first=index)[0]
        first = index  # a result has the name of its call, which is in the turn before it or in an older one
        while first and messages[first].get("role") == "tool":
            first -= 1
        calls = messages[first].get("tool_calls") or ()
        ids = {call.get("id") for call in calls}
        first = first if messages[index].get("tool_call_id") in ids else 0
        return fill_in_tool_names(normalise_messages(messages[first : index + 1], self._inputs, first=first))[-1]
