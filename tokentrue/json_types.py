"""JSON types for the type checker, and tables that are data files."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

JsonValue = Any
"""None, bool, int, float, str, or a list or object of them. Readers check what they use."""
JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]


def is_object(value: object) -> TypeGuard[JsonMapping]:
    return isinstance(value, (dict, Mapping))


def is_array(value: object) -> TypeGuard[Sequence[JsonValue]]:
    return isinstance(value, (list, Sequence)) and not isinstance(value, (str, bytes, bytearray))


def read_table(module: str, name: str) -> JsonObject:
    """A TOML or JSON file beside `module`, which gives its `__file__`."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else tomllib.loads(text)
