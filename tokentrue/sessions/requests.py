"""What a request may ask: sizes, sampling, enforced formats; its identity; the thread for its rendering and parsing."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import ParamSpec, TypeVar, cast

from tokentrue.conversation import Conversation
from tokentrue.errors import InputError, LimitExceeded, MessageError, SamplingError
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.plain_json import digest, dumps, echo, freeze
from tokentrue.protocols import Provider, Renderer
from tokentrue.records import record
from tokentrue.sessions.journal.rows import sampling_to_json
from tokentrue.types import MAX_CHOICES, PENALTIES, Sampling, TurnRequest

_FIELDS = frozenset(field.name for field in fields(Sampling))
_CURE = "switch it off, or use a session with training=False"
P = ParamSpec("P")
T = TypeVar("T")
INLINE_CHARS = 16_000
HUGE_CHARS = 500_000
CHARS_PER_ID = 4
# Encoding takes about a hundred times a text's size in memory: huge ones run one at a time.
HUGE = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokentrue-huge")


@record
class SessionLimits:
    """None: no limit. `max_tokens` counts recorded tokens, `max_new_chars` a request's characters that are not recorded
    yet. `conversation_bytes` bounds the cache of conversations; 0 disables it."""

    max_nodes: int | None = 10_000
    max_tokens: int | None = 20_000_000
    max_prompt_tokens: int | None = None
    max_new_chars: int | None = 8_000_000
    max_in_flight: int | None = 256
    max_n: int = MAX_CHOICES
    conversation_bytes: int = 32 << 20

    def check_turn(self, *, n: int, nodes: int, tokens: int, in_flight: int) -> None:
        if not 1 <= n <= self.max_n:
            raise InputError(f"n must be between 1 and {self.max_n}, got {n}")
        for name, count in (("max_nodes", nodes + n - 1), ("max_in_flight", in_flight), ("max_tokens", tokens)):
            limit: int | None = getattr(self, name)
            if limit is not None and count >= limit:
                cure, after_s = ("try again", 1.0) if name == "max_in_flight" else ("end the session", None)
                raise LimitExceeded(
                    f"session limit {name}={limit} reached; {cure}, or raise the limit", retry_after_s=after_s
                )

    def check_text(self, chars: int) -> None:
        if self.max_new_chars is not None and chars > self.max_new_chars:
            raise LimitExceeded(
                f"the request has {chars} new characters, the limit is max_new_chars={self.max_new_chars}; "
                "shorten them or raise it"
            )

    def check_prompt(self, length: int) -> None:
        if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
            raise LimitExceeded(
                f"the prompt has {length} tokens, the limit is max_prompt_tokens={self.max_prompt_tokens}; "
                "shorten the conversation"
            )


def check_pinned(sampling: Sampling | JsonMapping | None) -> JsonMapping:
    """Sampling values of a session that override the client's: of a `Sampling` every field, of a mapping those it
    names. (Pinned prompts are in `stages/pinning`.)"""
    if isinstance(sampling, Sampling):
        return {name: getattr(sampling, name) for name in _FIELDS}
    values = dict(sampling or {})
    if unknown := sorted(set(values) - _FIELDS):
        raise SamplingError(f"no sampling setting named {', '.join(unknown)}; known: {', '.join(sorted(_FIELDS))}")
    Sampling(**values)  # refuses bad values now, not at the first turn
    return values


def resolve_sampling(sampling: Sampling, pinned: JsonMapping, *, renderer: Renderer, training: bool) -> Sampling:
    """Pinned values over the client's, plus the renderer's stop tokens. Refuses penalties if a trainer will score
    the tokens."""
    if pinned:
        values = Sampling(**pinned)
        sampling = replace(sampling, **{name: getattr(values, name) for name in pinned})
    stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *sampling.stop_token_ids)))
    sampling = replace(sampling, stop_token_ids=stops, extra=freeze(sampling.extra, "sampling.extra"))
    if training and (penalties := [name for name in sampling.filters if name in PENALTIES]):
        raise SamplingError(f"no trainer can score tokens sampled under {', '.join(penalties)}; {_CURE}")
    return sampling


async def check_truthful(sampling: Sampling, provider: Provider) -> None:
    """Refuses filters under which the engine does not report the log-probabilities that it sampled from."""
    if not sampling.filters:
        return
    if provider.truthful_filters is None:
        await provider.health()
    truthful = provider.truthful_filters or frozenset()
    if blind := [name for name in sampling.filters if name not in truthful]:
        raise SamplingError(f"{provider.name} cannot report true log-probabilities under {', '.join(blind)}; {_CURE}")


def identify_request(request: TurnRequest, conversation: Conversation, sampling: Sampling) -> bytes:
    settings = dumps([sampling_to_json(sampling), request.template_kwargs])
    named = () if request.continues is None else (request.continues.encode(),)
    if request.prompt_ids is not None:
        named = (*named, request.prompt_ids.tobytes())
    return digest(conversation.digest, settings, b"%d" % request.n, request.dialect.encode(), *named)


def format_identity(identity: bytes) -> str:
    """Nodes without the prefix identify a request by looser keys."""
    return f"exact:{identity.hex()}"


def is_same_request(recorded: str | None, identity: bytes) -> bool:
    return recorded is None or not recorded.startswith("exact:") or recorded == format_identity(identity)


# `tool_choice` and `response_format`, as in Chat Completions.
def constraints_from(
    choice: str | JsonObject | None, format_: JsonObject | None, tools: tuple[JsonObject, ...] | None
) -> tuple[JsonObject, tuple[JsonObject, ...] | None]:
    """Entries for `Sampling.extra` that the engine enforces, and the prompt's tools (none for "none")."""
    extra: JsonObject = {}
    if choice == "none":
        tools = None
    elif choice not in (None, "auto"):
        if isinstance(choice, str) and choice != "required":
            raise MessageError(
                f"must be 'auto', 'none', 'required' or a named function, not {echo(choice)}", field="tool_choice"
            )
        if not tools:
            raise MessageError("needs tools", field="tool_choice")
        extra["tool_choice"] = named_choice(choice, tools) if isinstance(choice, dict) else choice
    if format_ is not None and format_.get("type") != "text":
        if format_.get("type") not in ("json_object", "json_schema"):
            raise MessageError(f"type {echo(format_.get('type'))} is not supported", field="response_format.type")
        if format_["type"] == "json_schema" and not isinstance(read_object(format_, "json_schema").get("schema"), dict):
            raise MessageError("must have a JSON schema", field="response_format.json_schema.schema")
        if "tool_choice" in extra:
            raise MessageError(
                "cannot be enforced together with tool_choice; send one of them", field="response_format"
            )
        extra["response_format"] = format_
    return extra, tools


def read_object(outer: JsonObject, name: str) -> JsonObject:
    return cast("JsonObject", outer[name]) if isinstance(outer.get(name), dict) else {}


def named_choice(choice: JsonObject, tools: tuple[JsonObject, ...]) -> JsonObject:
    name = read_object(choice, "function").get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise MessageError("must be 'auto', 'none', 'required' or a named function", field="tool_choice")
    if all(tool["function"]["name"] != name for tool in tools):
        raise MessageError(f"names {echo(name)}, which is not among the tools", field="tool_choice.function.name")
    return {"type": "function", "function": {"name": name}}


# Threads: large inputs must not stall other sessions.
async def run_by_size(work: Callable[P, T], chars: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
    if chars < INLINE_CHARS:
        return work(*args, **kwargs)
    if chars < HUGE_CHARS:
        return await asyncio.to_thread(work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(HUGE, partial(work, *args, **kwargs))


def count_chars(messages: Iterable[JsonMapping]) -> int:
    return sum(_count_in(value) for message in messages for value in message.values())


def _count_in(value: JsonValue) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_in, cast("JsonObject", value).values()))
    return sum(map(_count_in, cast("list[JsonValue]", value))) if isinstance(value, (list, tuple)) else 8
