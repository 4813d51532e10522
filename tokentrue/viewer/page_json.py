"""JSON for the page, spelled as `JSON.stringify` spells it: the page finds the answers of an export by that text."""

from __future__ import annotations

import json
from typing import Any

import orjson

from tokentrue.errors import FileFormatError
from tokentrue.plain_json import is_utf8

NAMES = ("session_id", "sample_id", "group")


def encode_json(value: Any) -> bytes:
    """Lone surrogates are escapes (`\\ud800`), all other text is itself; numbers that are not finite are null, long
    integers whole."""
    try:
        return orjson.dumps(value)
    except (
        TypeError
    ):  # orjson refuses lone surrogates and integers beyond 64 bits, which a sample's texts and metadata may hold
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def check_names(record: Any) -> None:
    """Refuses a sample, or the summary of a session, with a name that no address of the page can hold: they are
    UTF-8."""
    for field in NAMES:
        name = getattr(record, field, None) or ""
        if not is_utf8(name):
            raise FileFormatError(f"{field} {name!r} holds a lone surrogate, which no page address can hold; rename it")
