"""Our own JSON: what the administrator sends, checked; and the envelope of its errors."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import orjson

from tokentrue.errors import InputError, MessageError
from tokentrue.gateway.dialects.base import S, convert


class CreateSession(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str | None = None
    group: str | None = None
    metadata: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    history: Literal["keep", "template"] | None = None
    training: bool | None = None


class GiveReward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    leaf: str | None = None
    metadata: dict[str, Any] = {}

    def check(self) -> None:
        if not math.isfinite(self.reward):
            raise InputError("reward: must be a finite number")


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """`drain`: answer only when nothing is in flight any more, or after `timeout_s`.

    `abort`: break off what the engine is sampling; it goes on after resume, from the tokens it has.
    """

    drain: bool = False
    abort: bool = False
    timeout_s: float = 60.0


class Version(msgspec.Struct, forbid_unknown_fields=True):
    version: int


def parsed(body: bytes, type_: type[S]) -> S:
    try:
        value = orjson.loads(body) if body.strip() else {}
    except orjson.JSONDecodeError as error:
        raise MessageError(f"the body is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise MessageError("the body must be a JSON object")
    return convert(value, type_)
