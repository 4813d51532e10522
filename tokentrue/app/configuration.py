"""Reads TOML and `--set a.b=c` into frozen dataclasses; errors are one line that names the key."""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

from tokentrue.errors import ConfigError, ConfigErrors, InputError, TokenTrueError, did_you_mean
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import complaint

T = TypeVar("T")
NONE = "none"


class Checks:
    """Checks that load nothing, run one by one; `finish` reports all that failed."""

    def __init__(self) -> None:
        self._failed: list[Exception] = []

    def __call__(self, check: Callable[..., T], *given: Any) -> T | None:
        try:
            return check(*given)
        except ConfigErrors as error:
            self._failed += error.errors
        except (TokenTrueError, OSError, ModuleNotFoundError) as error:
            self._failed.append(error)
        return None

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._failed.append(ConfigError(otherwise))

    def finish(self) -> None:
        if len(self._failed) == 1:
            raise self._failed[0]
        if self._failed:
            raise ConfigErrors(self._failed)


def read(
    type_: type[T],
    path: Path | None = None,
    sets: Sequence[str] = (),
    overrides: JsonMapping | None = None,
    defaults: JsonMapping | None = None,
) -> T:
    """Later sources override earlier ones: the dataclasses' defaults, `defaults` and then the file, `overrides` (flags;
    None means not given), `--set`. Keys are dotted."""
    values: JsonObject = {}
    for dotted, value in (defaults or {}).items():
        set_dotted(values, dotted, value)
    written: JsonObject = {}
    if path is not None:
        try:
            written = tomllib.loads(path.read_text(encoding="utf-8"))
            merge(values, deepcopy(written))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for dotted, value in (overrides or {}).items():
        if value is not None:
            set_dotted(values, dotted, value)
    for text in sets:
        dotted, equals, value = text.partition("=")
        if not equals or not dotted.strip():
            raise ConfigError(f"--set {text!r}: write key.path=value")
        set_dotted(values, dotted.strip(), literal(value.strip()))
    checks = Checks()
    made = checks(build, type_, values)
    try:
        checks.finish()
    except ConfigError as error:
        wrong = error.errors if isinstance(error, ConfigErrors) else [error]
        named = [name_file(each, path, written, values) for each in wrong]
        raise ConfigErrors(named) if len(named) > 1 else named[0] from error
    return cast("T", made)


def name_file(error: Exception, path: Path | None, written: JsonObject, values: JsonObject) -> Exception:
    """`error` with the name of the file, if its key has the value that the file gives it."""
    key = str(error).partition(":")[0]
    given = find_dotted(written, key)
    return error if given is None or given != find_dotted(values, key) else ConfigError(f"{path}: {error}")


def merge(values: JsonObject, over: JsonMapping) -> None:
    for name, value in over.items():
        known = values.get(name)
        if isinstance(known, dict) and isinstance(value, Mapping):
            merge(cast("JsonObject", known), cast("JsonMapping", value))
        else:
            values[name] = value


def literal(text: str) -> Any:
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


def find_dotted(values: JsonMapping, dotted: str) -> Any:
    found: Any = values
    for name in dotted.partition("[")[0].split("."):
        found = cast("JsonMapping", found).get(name) if isinstance(found, Mapping) else None
    return found


def build(type_: type[T], values: JsonMapping, *, path: str = "", base: T | None = None) -> T:
    """`base` supplies missing values, table by table."""
    hints = get_type_hints(type_, include_extras=True)
    known = {field.name: field for field in dataclasses.fields(cast("Any", type_)) if field.init}
    made: JsonObject = {}
    checks = Checks()
    for name, value in values.items():
        at = f"{path}.{name}" if path else name
        if name in known:
            made[name] = checks(_value, hints[name], value, at, getattr(base, name, None))
        else:
            listed = f"known here: {', '.join(sorted(known))}{did_you_mean(name, known)}"
            checks.require(False, f"{at}: unknown key; {listed}")
    for name, field in known.items():
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if base is None and is_needed and name not in values:
            checks.require(False, f"{path}.{name}: is needed" if path else f"{name}: is needed")
    checks.finish()
    try:
        return type_(**made) if base is None else cast("T", dataclasses.replace(cast("Any", base), **made))
    except InputError as error:
        raise ConfigError(f"{path + ': ' if path else ''}{error}") from error


def _value(hint: Any, value: Any, path: str, base: Any = None) -> Any:
    if dataclasses.is_dataclass(value):
        return value
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if type(None) in get_args(hint) else [hint]
    # TOML has no None: the word NONE means it, unless the field may be text.
    if len(kinds) < len(get_args(hint)) and (value is None or (value == NONE and str not in kinds)):
        return None
    record = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
    if record is not None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: must be a table")
        return build(cast("type[Any]", record), cast("JsonMapping", value), path=path, base=base)
    item = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple), None)
    if dataclasses.is_dataclass(item) and isinstance(value, list | tuple):
        rows = cast("Sequence[Any]", value)
        return tuple(_value(item, row, f"{path}[{index}]") for index, row in enumerate(rows))
    try:
        return msgspec.convert(value, hint, dec_hook=_as_path)
    except msgspec.ValidationError as error:
        what = complaint(error, path, hint)
        raise ConfigError(f"{what}, got {value!r}" if "not " not in str(what) else str(what)) from None


def _as_path(type_: type[Any], value: Any) -> Any:
    if issubclass(type_, Path) and isinstance(value, str | Path):
        return Path(value)
    raise ValueError(f"Expected `{type_.__name__}`, got `{type(value).__name__}`")


def as_mapping(config: Any) -> Any:
    if dataclasses.is_dataclass(config):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        pairs = cast("Mapping[Any, Any]", config).items()
        return {str(name): as_mapping(value) for name, value in pairs if value is not None}
    if isinstance(config, list | tuple):
        return [as_mapping(value) for value in cast("Sequence[Any]", config)]
    return str(config) if isinstance(config, Path) else config
