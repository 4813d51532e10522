"""The data types that every package shares: frozen records.

Glossary: `token_ids` any ids; `prompt_ids` the engine's input; `sampled_ids` what the model chose (its stop token
included); `rollout_logprobs` reported by the sampler; `trainer_logprobs` recomputed by the trainer. A session has
turns, and a turn has one node per choice. Messages and tools are plain mappings in the OpenAI Chat Completions
shape; a read conversation has an image as the part `{"type": "image", "sha256", "media_type", "width", "height"}`."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from functools import cache
from itertools import groupby
from operator import itemgetter
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct

from tokentrue.errors import ConfigError, InputError, SamplingError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.records import record
from tokentrue.routing_replay import RoutedExperts as RoutedExperts
from tokentrue.routing_replay import SamplingMask as SamplingMask
from tokentrue.routing_replay import TopLogprobs as TopLogprobs

Ids = Sequence[int]
Message = JsonMapping
Messages = Sequence[Message]
Tool = JsonMapping
Tools = Sequence[Tool]
TemplateKwargs = JsonMapping

MAX_CHOICES = 128  # answers to one request
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
UNVERSIONED = 0
"""Policy version of an engine that has none set."""


class PastMessages(tuple[Message, ...]):
    """Recorded messages, which nobody modifies. `read`: a renderer, and what it made of the first of them; the messages
    of a later turn go on from it, so that a renderer reads each only once."""

    read: tuple[object, tuple[Any, ...]] = (None, ())

    def followed_by(self, messages: Iterable[Message]) -> "PastMessages":
        longer = PastMessages((*self, *messages))
        longer.read = self.read
        return longer


def is_temperature(value: float) -> bool:
    """0 is greedy; other values must divide logits in float32."""
    return value == 0 or 1e-30 <= value <= 1e30  # false for NaN, too


def choice_seed(seed: int, index: int) -> int:
    return (seed + index + MAX_INT64 + 1) % 2**64 - MAX_INT64 - 1


def is_logprob(value: float) -> bool:
    """Finite, not positive, and no sentinel: engines write -9999 for a missing value."""
    return are_logprobs((value,))


def are_logprobs(values: Sequence[float]) -> bool:
    if len(values) == 1:
        return -9000.0 < values[0] <= 0.0  # false for NaN, too
    # NaN anywhere makes the sum NaN; min and max alone may miss it.
    return not values or (min(values) > -9000.0 and max(values) <= 0.0 and not math.isnan(sum(values)))


def require_mask(mask: SamplingMask | None, token_ids: Sequence[int]) -> None:
    if mask is None:
        return
    if len(mask) != len(token_ids):
        raise TokenContractError(f"the sampling mask has {len(mask)} rows for {len(token_ids)} tokens")
    if (index := mask.first_missing(token_ids)) is not None:
        raise TokenContractError(
            f"token {token_ids[index]} at {index} is not among the ids that its sampling mask kept"
        )


class Finish(StrEnum):
    STOP = "stop"  # a stop token (kept in the sampled ids) or a stop string
    LENGTH = "length"  # the token limit: the turn is left open
    ABORT = "abort"  # cancelled by the caller or the engine: the sampled tokens are kept and labelled


TRUNCATIONS = ("top_p", "top_k", "min_p")
"""Settings that remove ids: a trainer scores over the kept ones."""

PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""They make a token's probability depend on earlier text in a way that no trainer computes."""

FILTERS = frozenset({*TRUNCATIONS, *PENALTIES})
"""All settings that make the sampled distribution differ from softmax(logits / temperature)."""

# Types (True is no number), and the values that an engine's integers and float32 can represent.
_NUMBER, _WHOLE, _WHOLE_OR_NONE, _LIST = (float, int), (int,), (int, type(None)), (list, tuple)
_SAMPLING_RULES: Mapping[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "temperature": (_NUMBER, is_temperature, "a number: 0, or from 1e-30 to 1e30"),
    "top_p": (_NUMBER, lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "top_k": (_WHOLE, lambda value: 0 <= value <= MAX_INT32, "from 0 (off) to 2^31 - 1"),
    "min_p": (_NUMBER, lambda value: 0 <= value < 1, "a number in [0, 1)"),
    "max_tokens": (_WHOLE_OR_NONE, lambda value: value is None or 0 < value <= MAX_INT32, "from 1 to 2^31 - 1"),
    "seed": (_WHOLE_OR_NONE, lambda seed: -MAX_INT64 - 1 <= (seed or 0) <= MAX_INT64, "a signed 64-bit integer"),
    "stop": (_LIST, lambda values: all(isinstance(value, str) for value in values), "a list of strings"),
    "stop_token_ids": (
        _LIST,
        lambda ids: all(type(token) is int and 0 <= token <= MAX_INT32 for token in ids),
        "a list of token ids, from 0 to 2^31 - 1",
    ),
    "presence_penalty": (_NUMBER, lambda value: abs(value) <= 1e30, "a number from -1e30 to 1e30"),
    "frequency_penalty": (_NUMBER, lambda value: abs(value) <= 1e30, "a number from -1e30 to 1e30"),
    "repetition_penalty": (_NUMBER, lambda value: 0 < value <= 1e30, "a number > 0, and at most 1e30"),
    "top_logprobs": (_WHOLE, lambda value: 0 <= value <= MAX_INT32, "from 0 to 2^31 - 1"),
    "extra": ((dict, Mapping), lambda _: True, "an object"),
}


@record
class Sampling:
    """Defaults mean "off". `stop_token_ids` are added to the renderer's. `extra` holds settings that a provider
    either knows by name or refuses."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int = 0
    extra: JsonMapping = field(default_factory=JsonObject)

    def __post_init__(self) -> None:
        for name, (kinds, holds, rule) in _SAMPLING_RULES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not holds(value):
                raise SamplingError(f"{name} must be {rule}, got {_show(value)}")
            # 10**20 is a valid temperature, but not an integer that a request's JSON can hold.
            if kinds is _NUMBER and isinstance(value, int) and abs(value) > MAX_INT64:
                object.__setattr__(self, name, float(value))
        self._copy_stops()

    def _copy_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def truncates(self) -> bool:
        return any(name in TRUNCATIONS for name in self.filters)

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(name for name, rest in _FILTERS_AT_REST.items() if getattr(self, name) != rest)


_FILTERS_AT_REST = {name: getattr(Sampling(), name) for name in (*TRUNCATIONS, *PENALTIES)}


def _show(value: object) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of more than 4,300 digits"


@record
class VersionSpan:
    """Sampled tokens `[start, end)` of one completion came from policy `version`."""

    start: int
    end: int
    version: int


def spans_from_runs(runs: Iterable[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """From `(number of tokens, version)`; adjacent runs of one version are merged."""
    spans: list[VersionSpan] = []
    end = 0
    for version, same in groupby((run for run in runs if run[0]), key=itemgetter(1)):
        start, end = end, end + sum(count for count, _ in same)
        spans.append(VersionSpan(start=start, end=end, version=version))
    return tuple(spans)


@record
class Completion:
    """One generation, exactly as the engine reported it. `logprobs` are those of the distribution sampled from;
    `versions` covers the tokens without gap or overlap."""

    token_ids: TokenIds
    logprobs: tuple[float, ...]
    finish: Finish
    versions: tuple[VersionSpan, ...] = ()
    prompt_tokens: int | None = None
    stopped_by: int | str | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    raw_logprobs: tuple[float, ...] | None = None  # of softmax(logits / temperature), before filters, if reported
    routed_experts: RoutedExperts | None = None  # rows for positions of prompt and sampled ids, up to the last input
    sampling_mask: SamplingMask | None = None  # one row per sampled token, if filters removed ids and it is reported
    fingerprint: str | None = None  # of the exact engine's numerics
    prompt_logprobs: tuple[float, ...] | None = None  # of prompt_ids[1:], if requested and supported
    prompt_digest: bytes | None = None  # sha256 of the prompt ids, computed where the request to the engine was built

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TokenIds(self.token_ids))
        if len(self.token_ids) != len(self.logprobs):
            raise TokenContractError(f"{len(self.token_ids)} ids, {len(self.logprobs)} logprobs")
        if not are_logprobs(self.logprobs):
            index, value = next((i, value) for i, value in enumerate(self.logprobs) if not is_logprob(value))
            raise TokenContractError(f"logprob {value!r} at sampled token {index} is not a log-probability")
        end = 0
        for span in self.versions:
            if span.start != end or span.end < span.start:
                raise TokenContractError(f"version spans leave a gap or overlap at sampled token {end}")
            end = span.end
        if self.versions and end != len(self.token_ids):
            raise TokenContractError(f"version spans end at {end} of {len(self.token_ids)} sampled tokens")
        require_mask(self.sampling_mask, self.token_ids)

    @property
    def finish_reason(self) -> str:
        return self.finish.value

    @property
    def policy_version(self) -> int:
        return self.versions[-1].version if self.versions else UNVERSIONED

    @property
    def policy_versions(self) -> tuple[int, ...]:
        return tuple(span.version for span in self.versions for _ in range(span.start, span.end))


@record
class Chunk:
    """A piece of a streamed generation. The last one carries `final`, the whole completion."""

    token_ids: Ids = ()
    logprobs: Sequence[float] = ()
    policy_version: int = UNVERSIONED
    sampling_mask: SamplingMask | None = None  # one row per token, as in `Completion`
    final: Completion | None = None

    def __post_init__(self) -> None:
        require_mask(self.sampling_mask, self.token_ids)


@record
class PromptSpan:
    """Prompt tokens `[start, end)` of message number `message`; None for structure."""

    start: int
    end: int
    role: str
    message: int | None = None


@record
class ImageRun:
    """An image in ids: its `count` placeholder ids begin at `start`. `sha256` (hex) identifies the file's bytes,
    `grid` is the image processor's, in patches (time, height, width), and `processor` its identity."""

    sha256: str
    start: "Count"
    count: "Count"
    grid: tuple[int, ...]
    processor: str


def shift_images(images: Iterable[ImageRun], by: int) -> list[ImageRun]:
    return [replace(run, start=run.start + by) for run in images]


@record
class PromptImage:
    run: ImageRun
    data: bytes
    media_type: str


@record
class Rendered:
    token_ids: TokenIds
    spans: tuple[PromptSpan, ...] = ()
    images: tuple[ImageRun, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TokenIds(self.token_ids))


@record
class Extension:
    """The recorded prefix, untouched, plus `added_ids`: all given, none sampled. `spans` and `images` count from the
    start of `added_ids`. `join`: how the recorded turn ended: at the template's stop token, at an alias of it
    (harmony's <|return|>), at a foreign stop token or at none; then `added_ids` begins with the template's closing
    of the turn."""

    prefix_ids: TokenIds
    added_ids: TokenIds
    spans: tuple[PromptSpan, ...] = ()
    images: tuple[ImageRun, ...] = ()
    join: Literal["stop", "alias", "foreign", "open"] = "stop"

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_ids", TokenIds(self.prefix_ids))
        object.__setattr__(self, "added_ids", TokenIds(self.added_ids))

    @property
    def token_ids(self) -> TokenIds:
        return self.prefix_ids + self.added_ids


@record
class Refusal:
    """`why` is a stable code, `detail` a sentence that names the place and the remedy."""

    why: str
    detail: str = ""


class Status(StrEnum):
    """The result of a tool call that the model tried to write."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    MISSING_NAME = "missing_name"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"


@record
class Attempt:
    """One tool call that the model tried to write, at sampled tokens `[start, end)`."""

    status: Status
    raw: str
    start: int
    end: int
    name: str | None = None
    arguments: Any = None
    detail: str = ""


class Ended(StrEnum):
    STOP = "stop"  # at a stop token
    OPEN = "open"  # no stop token: a length cut-off, a stop string or an abort


@record
class Parsed:
    """A sampled turn as an OpenAI message. `raw` is its whole text (`errors="surrogateescape"` where UTF-8 is cut)."""

    message: Message
    attempts: tuple[Attempt, ...] = ()
    ended: Ended = Ended.STOP
    stop_id: int | None = None
    raw: str = ""
    reasoning_tokens: int = 0


class Delta(Struct, frozen=True, kw_only=True, gc=False):
    """What one streamed piece adds to the message. `call` is the index of the tool call that `call_id`/`name` open
    or `arguments` (JSON text) continue."""

    reasoning: str = ""
    content: str = ""
    call: int | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@record
class TurnRequest:
    """An agent's next model call, with the whole conversation. `request_key` identifies the request for retries.
    `continues` is the node whose answer the caller says it continues: it decides only between equal matches, as
    `messages` is the whole conversation. `prompt_ids` is the exact prompt of a caller that renders by itself."""

    messages: Messages
    tools: Tools | None = None
    sampling: Sampling = field(default_factory=Sampling)
    template_kwargs: TemplateKwargs = field(default_factory=JsonObject)
    n: int = 1
    dialect: str = "openai_chat"
    model: str | None = None  # as requested; one model is served under any name
    request_key: str | None = None
    continues: str | None = None
    prompt_ids: TokenIds | None = None

    def __post_init__(self) -> None:
        if type(self.n) is not int:
            raise InputError(f"n must be a whole number, got {self.n!r}")
        if not isinstance(self.template_kwargs, (dict, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"template_kwargs must be an object, got {self.template_kwargs!r}")


@record
class Reply:
    """A committed turn. `message` is what was served (call ids included)."""

    node: str
    message: Message
    parsed: Parsed
    completion: Completion
    prompt_tokens: int
    given_tokens: int  # prompt tokens that this turn added
    projection: str
    """How the replayed history matched: "exact", "reasoning_dropped+whitespace", …; "root" if nothing was continued."""
    edge_reason: str | None = None  # of a root or a fork; None if nothing had continued the parent before
    from_record: bool = False  # nothing was added for this caller: its key had an answer, or it joined an equal turn


class TurnEvent(Struct, frozen=True, kw_only=True, gc=False):
    """The first event of each choice names its node, the last carries the committed reply."""

    index: int = 0  # which of n choices
    node_id: str = ""
    delta: Delta | None = None
    token_ids: Ids = ()
    logprobs: Sequence[float] = ()
    reply: Reply | None = None


@record
class Span:
    start: "Count"
    end: "Count"
    kind: Literal["given", "sampled"]
    role: str
    turn: "Count"
    policy_version: int | None
    trainable: bool
    why: str


@record
class Certificate:
    """`chain` hashes every node on the sample's path in order; the other two identify what rendered it."""

    chain: str
    template: "Utf8"
    tokenizer: "Utf8"


@record
class Sample:
    """One contiguous training sequence. `rollout_logprobs[i]` is None exactly where token i was not sampled."""

    sample_id: str
    session_id: str
    group: str | None = None
    token_ids: Sequence[int]
    loss_mask: Sequence[Annotated[int, Meta(ge=0, le=1)]]
    rollout_logprobs: Sequence[float | None]
    spans: tuple[Span, ...]
    reward: float | None = None
    finish_reason: str
    metadata: JsonMapping = field(default_factory=JsonObject)
    certificate: Certificate
    routed_experts: RoutedExperts | None = None  # of positions 0 to the last input
    sampling_mask: SamplingMask | None = None  # one row per token; empty if nothing was removed or sampled
    images: tuple[ImageRun, ...] = ()
    top_logprobs: TopLogprobs | None = None  # one row per token

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs))
        if len(set(lengths)) != 1:
            raise TokenContractError(f"sample {self.sample_id}: ids, mask and logprobs differ in length: {lengths}")
        for name, rows in (
            ("sampling mask has", self.sampling_mask),
            ("top log-probabilities have", self.top_logprobs),
        ):
            if rows is not None and len(rows) != lengths[0]:
                raise TokenContractError(
                    f"sample {self.sample_id}: the {name} {len(rows)} rows for {lengths[0]} tokens"
                )


@record
class Untrained:
    node: str
    tokens: int
    why: str


@record
class Coverage:
    """`pinned_turns` were sampled under a pinned system prompt; `rejoined_turns` after turns that were sampled
    elsewhere and are given, untrained."""

    sampled: int
    trained: int
    untrained: tuple[Untrained, ...] = ()
    pinned_turns: int = 0
    rejoined_turns: int = 0

    @property
    def ratio(self) -> float:
        return self.trained / self.sampled if self.sampled else 1.0

    @property
    def untrained_by_reason(self) -> Counter[str]:
        found = Counter[str]()
        for item in self.untrained:
            found[item.why] += item.tokens
        return found


# Validation of configuration records by the annotations of their fields.
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Finite = Annotated[float, Meta()]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Utf8 = Annotated[str, Meta(pattern=r"^[^\ud800-\udfff]*$")]
"""Text without lone surrogates, which JSON can escape and UTF-8 cannot encode."""


class Checked:
    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self, type(self).__name__)


def check_fields(record: object, owner: str) -> None:
    """Raises ConfigError if a value is not in its field's Literal, or not a finite number within its bounds."""
    for name, options in _checked_fields(type(record)):
        value = getattr(record, name)
        if value is None and type(None) in options:
            continue
        if any(isinstance(option, type) and isinstance(value, option) for option in options):
            continue
        for option in options:
            if get_origin(option) is Literal and value not in get_args(option):
                known = ", ".join(map(repr, get_args(option)))
                raise ConfigError(f"{owner}.{name}: {value!r} is not one of {known}")
            if get_origin(option) is Annotated:
                _check_number(f"{owner}.{name}", value, get_args(option)[1])


@cache
def _checked_fields(kind: type[Any]) -> list[tuple[str, tuple[Any, ...]]]:
    found: list[tuple[str, tuple[Any, ...]]] = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if any(get_origin(option) in (Literal, Annotated) for option in options):
            found.append((name, options))
    return found


def _check_number(key: str, value: object, bounds: Meta) -> None:
    low, high = bounds.ge if bounds.gt is None else bounds.gt, bounds.le if bounds.lt is None else bounds.lt
    inside = is_finite(value) and (low is None or value >= low) and (high is None or value <= high)
    if inside and value not in (bounds.gt, bounds.lt):
        return
    if low is not None and high is not None:
        limits = f" and in {'[' if bounds.gt is None else '('}{low:g}, {high:g}{']' if bounds.lt is None else ')'}"
    else:
        limits = "" if low is None else f" and {'>=' if bounds.gt is None else '>'} {low:g}"
    raise ConfigError(f"{key}: {value!r} must be finite{limits}")


def is_finite(value: object) -> TypeGuard[float]:
    """False for True, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
