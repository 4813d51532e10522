"""What the dialects share: the shape they parse to, the seal on reasoning that leaves the house, and error coordinates.

Invariant: a field that is neither understood nor on a dialect's list of hints is refused by name; nothing is silently dropped.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from tokentrue.errors import MessageError
from tokentrue.types import Finish, Message, Reply, Sampling, Tool, TurnEvent

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error on its way to a client: never a stack trace, never a conversation."""

    status: int
    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request without its conversation: everything that stays when only messages are appended.

    `opening` are messages that stand before the conversation (a system prompt outside of it). `options` is what the answer's
    shape depends on, in the dialect's own words. `continues` names an earlier answer whose conversation goes on.
    """

    model: str
    stream: bool = False
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Tool, ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opening: tuple[Message, ...] = ()
    options: Any = None
    continues: str | None = None


class Encoder(Protocol):
    """Turns the events of one streamed turn into the dialect's server-sent events."""

    ping: bytes

    def feed(self, event: TurnEvent) -> bytes:
        """The events for one piece; for the last one of a choice, whatever closes it."""
        ...

    def finish(self) -> bytes:
        """What ends the stream after every choice has its reply."""
        ...

    def error(self, problem: Problem) -> bytes: ...


class Dialect(Protocol):
    name: str
    items_key: str  # the top-level array that grows from turn to turn

    def call(self, head: dict[str, Any]) -> Call:
        """Everything but the conversation."""
        ...

    def messages(self, items: Sequence[Any], call: Call, *, start: int = 0) -> list[Message]:
        """The conversation's items as messages in the OpenAI shape; `start` is the index of the first, for error coordinates."""
        ...

    def answer(self, call: Call, replies: Sequence[Reply], text_of: TextOf) -> dict[str, Any]: ...

    def encoder(self, call: Call, text_of: TextOf) -> Encoder: ...

    def error(self, problem: Problem) -> dict[str, Any]: ...


class TextOf(Protocol):
    """The text of one token, from the renderer; for clients that ask for log-probabilities."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class Seal:
    """Signs reasoning that a client carries for us, so that what comes back is known to be what was served."""

    MARK = "tt1"

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _mac(self, text: str) -> str:
        digest = hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def sign(self, text: str) -> str:
        return f"{self.MARK}.{self._mac(text)}"

    def holds(self, signature: str, text: str) -> bool:
        """True for our own signature of this text and for a foreign signature, which we cannot judge."""
        if not signature.startswith(self.MARK + "."):
            return True
        return hmac.compare_digest(signature.encode(), self.sign(text).encode())

    def wrap(self, text: str) -> str:
        body = base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()
        return f"{self.MARK}.{body}.{self._mac(text)}"

    def unwrap(self, blob: str) -> str | None:
        """The text of `wrap`; None where the blob is not ours."""
        parts = blob.split(".")
        if len(parts) != 3 or parts[0] != self.MARK:
            return None
        try:
            text = base64.urlsafe_b64decode(parts[1]).decode("utf-8", "surrogatepass")
        except (binascii.Error, ValueError):
            return None
        return text if hmac.compare_digest(parts[2].encode(), self._mac(text).encode()) else None


_AT = re.compile(r" - at `\$\.?(.*)`$")


def convert(value: Any, type_: type[S], *, path: str = "") -> S:
    """msgspec's conversion, with its complaint turned into one that names the field."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise complaint(str(error), path) from None
    except RecursionError:
        raise MessageError("nested too deeply", field=path or None) from None


def complaint(text: str, path: str) -> MessageError:
    at = _AT.search(text)
    inner = at.group(1) if at else ""
    where = path + ("." if path and inner and not inner.startswith("[") else "") + inner
    what = text[: at.start()] if at else text
    unknown = re.match(r"Object contains unknown field `(.*)`", what)
    if unknown:
        name = f"{where}.{unknown.group(1)}" if where else unknown.group(1)
        return MessageError("is not supported by this gateway; leave it out", field=name)
    return MessageError(what, field=where or None)


def joined_text(parts: Any, kinds: tuple[str, ...], path: str, *, glue: str) -> str | None:
    """Content as one string: a string stays, text parts are joined, anything that is not text is refused by name."""
    if parts is None or isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise MessageError(f"must be a string or a list of parts, not {type(parts).__name__}", field=path)
    texts: list[str] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
            continue
        where = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise MessageError(f"part of type {shown(kind)} is not supported; this gateway takes {', '.join(sorted(kinds))}", field=where)
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise MessageError("must be a string", field=f"{where}.text")
        texts.append(text)
    return glue.join(texts)


def shown(value: Any) -> str:
    """A short, harmless echo of a foreign value for an error message."""
    return repr(value)[:40]


def encode(value: Any) -> bytes:
    """JSON bytes; a lone surrogate, which no JSON text can carry, becomes U+FFFD."""
    try:
        return orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return orjson.dumps(_presentable(value))


def _presentable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8") if not value.isascii() else value
    if isinstance(value, Mapping):
        return {str(key): _presentable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_presentable(item) for item in value]
    return value


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as the JSON object some dialects demand; what is not an object travels whole under `_raw_arguments`."""
    try:
        value = orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        value = text
    return value if isinstance(value, dict) else {"_raw_arguments": text}


def arguments_text(value: Any) -> str:
    """The inverse of `arguments_object`."""
    if isinstance(value, dict) and value.keys() == {"_raw_arguments"} and isinstance(value["_raw_arguments"], str):
        return value["_raw_arguments"]
    return orjson.dumps(value).decode()


def is_open(finish: Finish) -> bool:
    """A turn that the model did not end itself."""
    return finish is not Finish.STOP
