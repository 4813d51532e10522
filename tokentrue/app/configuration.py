"""TOML and `--set a.b=c` into frozen dataclasses: an unknown key, a wrong type or a bad value is one line that names
the key.

Worked example: `read(ServeConfig, Path("serve.toml"), ["server.port=9000"])`. `as_mapping(config)` is the way back, for
the copy that is written beside every output.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tokentrue.errors import ConfigError, InputError
from tokentrue.json_types import JsonMapping, JsonObject

T = TypeVar("T")
NONE = "none"


def read(
    type_: type[T],
    path: Path | None = None,
    sets: Sequence[str] = (),
    overrides: JsonMapping | None = None,
    defaults: JsonMapping | None = None,
) -> T:
    """The dataclasses' defaults, then `defaults` (dotted keys of one command), then the file, then `overrides` (dotted
    keys from flags; None means not given), then `--set`."""
    values: JsonObject = {}
    for dotted, value in (defaults or {}).items():
        set_dotted(values, dotted, value)
    merge(values, _file(path) if path is not None else {})
    for dotted, value in (overrides or {}).items():
        if value is not None:
            set_dotted(values, dotted, value)
    for text in sets:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted.strip():
            raise ConfigError(f"--set {text!r}: write key.path=value")
        set_dotted(values, dotted.strip(), literal(value.strip()))
    return build(type_, values)


def merge(values: JsonObject, over: JsonMapping) -> None:
    """Puts the keys of `over` over those of `values`, table by table."""
    for name, value in over.items():
        known = values.get(name)
        if isinstance(known, dict) and isinstance(value, Mapping):
            merge(cast("JsonObject", known), cast("JsonMapping", value))
        else:
            values[name] = value


def _file(path: Path) -> JsonObject:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def literal(text: str) -> Any:
    """A TOML value; what is none is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def set_dotted(values: JsonObject, dotted: str, value: Any) -> None:
    *folders, name = dotted.split(".")
    for folder in folders:
        inner: Any = values.setdefault(folder, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{dotted}: {folder} is a value, not a table")
        values = cast("JsonObject", inner)
    values[name] = value


def build(type_: type[T], values: JsonMapping, *, path: str = "") -> T:
    """A dataclass from plain values."""
    hints = get_type_hints(type_)
    known = {field.name: field for field in dataclasses.fields(type_) if field.init}  # pyright: ignore[reportArgumentType]
    for name in values:
        if name not in known:
            raise ConfigError(f"{_at(path, name)}: unknown key; known here: {', '.join(sorted(known))}")
    for name, field in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(f"{_at(path, name)}: is needed")
    made = {name: _value(hints[name], value, _at(path, name)) for name, value in values.items()}
    try:
        return type_(**made)
    except InputError as error:
        raise ConfigError(f"{path + ': ' if path else ''}{error}") from error


def change(base: T, values: JsonMapping, *, path: str = "") -> T:
    """The same dataclass with other values, checked like those of `build`. A table changes the record that is there,
    field by field."""
    type_ = type(base)
    hints = get_type_hints(type_)
    known = sorted(field.name for field in dataclasses.fields(cast("Any", base)) if field.init)
    made: JsonObject = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{_at(path, name)}: unknown key; known here: {', '.join(known)}")
        current = getattr(base, name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(current):
            made[name] = change(current, cast("JsonMapping", value), path=_at(path, name))
        else:
            made[name] = _value(hints[name], value, _at(path, name))
    try:
        return cast("T", dataclasses.replace(cast("Any", base), **made))
    except InputError as error:
        raise ConfigError(f"{path + ': ' if path else ''}{error}") from error


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _value(hint: Any, value: Any, path: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, path)
    if origin is Literal:
        if value not in inner:
            raise ConfigError(f"{path}: must be one of {', '.join(map(str, inner))}, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: must be a table")
        return build(cast("type[Any]", hint), cast("JsonMapping", value), path=path)
    if origin is tuple or origin in (list, Sequence):
        return _sequence(origin, inner, value, path)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: must be a table")
        return dict(cast("Mapping[Any, Any]", value))
    return _plain(hint, value, path)


def _one_of(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    """The first of several types that the value is of. "none" stands for None where text is not expected: TOML has no
    word for it."""
    if type(None) in hints and (value is None or (value == NONE and str not in hints)):
        return None
    failure: ConfigError | None = None
    for hint in sorted(hints, key=lambda hint: dataclasses.is_dataclass(hint) != isinstance(value, Mapping)):
        if hint is not type(None):
            try:
                return _value(hint, value, path)
            except ConfigError as error:
                failure = failure or error
    raise failure or ConfigError(f"{path}: has no value")


def _sequence(origin: Any, inner: tuple[Any, ...], value: Any, path: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{path}: must be a list")
    made = [
        _value(inner[0] if inner else Any, item, f"{path}[{index}]")
        for index, item in enumerate(cast("Sequence[Any]", value))
    ]
    return tuple(made) if origin is tuple else made


def _plain(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise ConfigError(f"{path}: must be {hint.__name__}, got {value!r}")
    return value


def as_mapping(config: Any) -> Any:
    """Plain values again; `None` is left out, as TOML has none."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        pairs = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
        return {name: as_mapping(value) for name, value in pairs if value is not None}
    if isinstance(config, Mapping):
        return {
            str(name): as_mapping(value)
            for name, value in cast("Mapping[Any, Any]", config).items()
            if value is not None
        }
    if isinstance(config, list | tuple):
        return [as_mapping(value) for value in cast("Sequence[Any]", config)]
    return str(config) if isinstance(config, Path) else config
