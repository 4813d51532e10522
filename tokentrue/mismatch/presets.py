"""Published corrections by name, from presets.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from tokentrue.mismatch.correction import Correction

_TABLES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS: Mapping[str, Correction] = MappingProxyType(msgspec.convert(_TABLES, dict[str, Correction]))
