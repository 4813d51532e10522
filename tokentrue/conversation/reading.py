"""A request's messages, parsed once. An agent sends its whole conversation with every turn: leading messages with the
same bytes (`sources`) as a cached conversation are shared."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from hashlib import sha256
from itertools import takewhile
from operator import attrgetter, eq
from typing import overload

from msgspec import Raw

from tokentrue.conversation.images import REFERENCE, ImageReader, ReadImages, list_parts
from tokentrue.conversation.match_keys import (
    START_KEY,
    CallRef,
    call_ids_of,
    candidate_key,
    chain_key,
    note_calls,
    read_role,
)
from tokentrue.errors import MessageError
from tokentrue.images import ImageFile
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.plain_json import digest, dumps, freeze
from tokentrue.records import record
from tokentrue.types import Message, Messages, Tools

_KEPT = 8  # conversations of one session: parallel branches, other dialects
_MESSAGE_BYTES = 1000  # estimate of one message's objects, without its text
_OWN = b"\0"  # before the source of a message that no dialect parses; no JSON begins so
_DIGEST = attrgetter("digest")
_HASHED, _LONG_SOURCE = b"\1", 1 << 16  # a longer source is kept as its hash: images are most of it


class ConversationMessage:
    """`digest` identifies it exactly, `key` loosely. `images`: the files that the request had for it."""

    __slots__ = ("call_id", "call_ids", "digest", "images", "key", "message", "num_images", "role", "size")

    def __init__(self, message: Message, field: str, files: Mapping[str, ImageFile] | None = None) -> None:
        self.message, self.role = message, read_role(message, field)
        text, call_id = dumps(message), message.get("tool_call_id")
        self.key, self.digest = candidate_key(message, field), digest(text)
        self.call_ids = call_ids_of(message)
        self.call_id = call_id if isinstance(call_id, str) and self.role != "assistant" else None
        parts = list_parts(message, REFERENCE)
        self.num_images = len(parts)
        self.images = tuple(files[part["sha256"]] for part in parts if files and part["sha256"] in files)
        self.size = _MESSAGE_BYTES + 2 * len(text) + sum(len(image.data) for image in self.images)

    def repeats(self, recorded: Message) -> bool:
        """Call ids aside: the key covers which call a result answers."""
        return dumps(_comparable(recorded)) == dumps(_comparable(self.message))


def _comparable(value: JsonMapping) -> JsonObject:
    """Without cache marks, which no template prints, and the call id, which is restored to the served one."""
    fields = {name: item for name, item in value.items() if name not in ("tool_call_id", "cache_control")}
    if isinstance(content := fields.get("content"), list):
        fields["content"] = [
            {name: item for name, item in part.items() if name != "cache_control"} if isinstance(part, dict) else part
            for part in content
        ]
    return fields


@record(eq=False)
class Conversation(Sequence[Message]):
    """`keys`: the chained loose key after each message. `sources`: the bytes of the messages, in the items of dialect
    `format`; `ends[i]` counts the messages of the first i + 1 sources. It is None where an assistant turn is still open
    after item i (`Dialect.splits_turns`), and from the first unsettled item on (`Dialect.is_settled`): no prefix that
    ends there is shared."""

    facts: Sequence[ConversationMessage] = ()
    keys: Sequence[bytes] = ()
    references: Sequence[CallRef | str | None] = ()  # for tool results: the call each one answers
    calls: Mapping[str, CallRef] = field(default_factory=dict[str, CallRef])  # the last call of each id
    tools: Tools | None = None
    tools_source: bytes = b"null"
    tools_digest: bytes = digest(None)
    format: str = ""
    sources: Sequence[Raw] = ()
    ends: Sequence[int | None] = ()
    messages_size: int = 0

    @property
    def size(self) -> int:
        return self.messages_size + 3 * len(self.tools_source)

    def __len__(self) -> int:
        return len(self.facts)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return [read.message for read in self.facts[index]] if isinstance(index, slice) else self.facts[index].message

    def __iter__(self) -> Iterator[Message]:
        return map(attrgetter("message"), self.facts)

    @property
    def digest(self) -> bytes:
        return digest(b"".join(map(_DIGEST, self.facts)), self.tools_digest)

    @property
    def num_images(self) -> int:
        return sum(map(attrgetter("num_images"), self.facts))

    @property
    def files(self) -> dict[str, ImageFile]:
        return {image.sha256: image for read in self.facts for image in read.images}

    def name_first(self, depth: int) -> bytes:
        return digest(b"".join(map(_DIGEST, self.facts[:depth])))

    def append(
        self, facts: Sequence[ConversationMessage], *, sources: Sequence[Raw] = (), ends: Sequence[int | None] = ()
    ) -> "Conversation":
        keys, references, calls = list(self.keys), list(self.references), dict(self.calls)
        key = keys[-1] if keys else START_KEY
        for index, read in enumerate(facts, len(keys)):
            reference = None if read.call_id is None else calls.get(read.call_id, read.call_id)
            key = chain_key(key, read.key, reference)
            note_calls(calls, index, read.call_ids)
            keys.append(key)
            references.append(reference)
        added = sum(read.size for read in facts) + sum(map(len, map(memoryview, sources)))
        return replace(
            self,
            facts=[*self.facts, *facts],
            keys=keys,
            references=references,
            calls=calls,
            sources=[*self.sources, *sources],
            ends=[*self.ends, *ends],
            messages_size=self.messages_size + added,
        )

    def replace_first(self, length: int, messages: Messages) -> "Conversation":
        first = [ConversationMessage(message, f"messages[{index}]") for index, message in enumerate(messages)]
        if [read.digest for read in first] == [read.digest for read in self.facts[:length]]:
            return self
        tools = Conversation(tools=self.tools, tools_source=self.tools_source, tools_digest=self.tools_digest)
        return tools.append([*first, *self.facts[length:]])

    def count_shared(self, sources: Sequence[Raw]) -> int:
        """Number of equal leading sources, up to the end of a turn."""
        shared = count_equal(self.sources, sources)
        while shared and self.ends[shared - 1] is None:
            shared -= 1
        return shared

    def cut(self, num_sources: int) -> "Conversation":
        if num_sources == len(self.sources):
            return self
        depth = (self.ends[num_sources - 1] or 0) if num_sources else 0
        return Conversation(format=self.format).append(
            self.facts[:depth], sources=self.sources[:num_sources], ends=self.ends[:num_sources]
        )


def count_equal(one: Sequence[Raw], other: Sequence[Raw]) -> int:
    return sum(takewhile(bool, map(eq, one, other)))


def own_source(message: Message) -> Raw:
    return shorten_source(Raw(_OWN + dumps(message)))


def shorten_source(source: Raw) -> Raw:
    data = memoryview(source)
    return Raw(_HASHED + sha256(data).digest()) if len(data) > _LONG_SOURCE else source


@record(eq=False)
class ParsedConversation:
    """The cached `base` that a request begins with, and its further messages."""

    base: Conversation
    messages: Messages
    sources: Sequence[Raw]
    ends: Sequence[int | None]
    tools: Tools | None


class ByteBudget:
    """Of all sessions of this process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Conversations:
    """Newest first. Limited in bytes, per session and per process."""

    def __init__(
        self, limit_bytes: int = 32 << 20, budget: ByteBudget | None = None, images: ImageReader | None = None
    ) -> None:
        self._limit, self.budget = limit_bytes, budget or ByteBudget(limit_bytes)
        self._images = images or ImageReader()
        self._kept: list[Conversation] = []
        self.used = 0

    def read(self, messages: Messages, tools: Tools | None) -> Conversation:
        """Notices messages changed in place."""
        return messages if isinstance(messages, Conversation) else self.add(self.parse(messages, tools))

    def parse(self, messages: Messages, tools: Tools | None) -> ParsedConversation:
        own = _freeze_objects(messages, "messages")
        if not own:
            raise MessageError("at least one message is needed", field="messages")
        sources = list(map(own_source, own))
        base = self.find("", sources)
        ends, start = range(len(base) + 1, len(own) + 1), len(base)
        return ParsedConversation(base=base, messages=own[start:], sources=sources[start:], ends=ends, tools=tools)

    def find(self, format: str, sources: Sequence[Raw]) -> Conversation:
        """The longest prefix of `sources` that a cached conversation of dialect `format` has."""
        best, most = Conversation(format=format), 0
        for kept in self._kept:
            shared = kept.count_shared(sources) if kept.format == format else 0
            if shared > most:
                best, most = kept, shared
        return best.cut(most)

    def read_images(self, parsed: ParsedConversation) -> ReadImages:
        """Blocks. May run in another thread."""
        base = parsed.base
        return self._images.read(parsed.messages, first=len(base), before=base.num_images)

    def add(self, parsed: ParsedConversation, images: ReadImages | None = None) -> Conversation:
        """Caches the result: the messages must not be modified any more."""
        base, read = parsed.base, images or self.read_images(parsed)
        facts = [
            ConversationMessage(message, f"messages[{at}]", read.files)
            for at, message in enumerate(read.messages, len(base))
        ]
        conversation = self._add_tools(base.append(facts, sources=parsed.sources, ends=parsed.ends), parsed.tools)
        self._keep(conversation)
        return conversation

    def _add_tools(self, conversation: Conversation, tools: Tools | None) -> Conversation:
        own = (_freeze_objects(tools, "tools") or None) if tools else None
        source = dumps(own)
        for known in (conversation, *self._kept):
            if known.tools_source == source:
                return replace(
                    conversation, tools=known.tools, tools_source=known.tools_source, tools_digest=known.tools_digest
                )
        return replace(conversation, tools=own, tools_source=source, tools_digest=digest(source))

    def _keep(self, conversation: Conversation) -> None:
        size = conversation.size
        if size > self._limit:
            return
        for kept in list(self._kept):
            if kept.format == conversation.format and kept.sources == conversation.sources[: len(kept.sources)]:
                self._drop(kept)
        while self._kept and (self.used + size > self._limit or len(self._kept) >= _KEPT or self._is_over_budget(size)):
            self._drop(self._kept[-1])
        if not self._is_over_budget(size):
            self._kept.insert(0, conversation)
            self.used += size
            self.budget.used += size

    def _is_over_budget(self, more: int) -> bool:
        return self.budget.used + more > self.budget.limit

    def _drop(self, conversation: Conversation) -> None:
        self._kept.remove(conversation)
        self.used -= conversation.size
        self.budget.used -= conversation.size

    def close(self) -> None:
        """A request may still be using the session."""
        self._limit = 0
        while self._kept:
            self._drop(self._kept[-1])


def _freeze_objects(values: JsonValue, field: str) -> list[JsonValue]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise MessageError(f"must be a list of objects, got {type(values).__name__}", field=field)
    own: list[JsonValue] = []
    for index, value in enumerate(values):
        if not isinstance(value, (dict, Mapping)):
            raise MessageError(f"must be an object, got {type(value).__name__}", field=f"{field}[{index}]")
        own.append(freeze(value, f"{field}[{index}]"))
    return own
