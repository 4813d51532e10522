"""The bodies that an administrator sends."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokentrue.errors import InputError
from tokentrue.gateway.dialects.base import S, decode_body
from tokentrue.json_types import JsonObject


class CreateSession(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str | None = None
    group: str | None = None
    metadata: JsonObject = {}
    sampling: JsonObject = {}
    history: Literal["keep", "template"] | None = None
    training: bool | None = None
    pin: list[str] | None = None


class GiveReward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    leaf: str | None = None
    metadata: JsonObject = {}
    group: str | None = None


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """`drain`: answer only when nothing is in flight any more, or after `timeout_s`.

    `abort`: break off what the engine is sampling; it goes on after resume, from the tokens it has.
    """

    drain: bool = False
    abort: bool = False
    timeout_s: float = 60.0


class Version(msgspec.Struct, forbid_unknown_fields=True):
    version: int

    def check(self) -> None:
        if not 0 <= self.version < 1 << 63:
            raise InputError("version: must be a whole number from 0 to 2^63 - 1")


def decode_admin(body: bytes, type_: type[S]) -> S:
    """An empty body is an empty object."""
    return decode_body(body if body.strip() else b"{}", type_)
