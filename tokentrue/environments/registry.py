"""Environments by name: the three of the house, or `package.module:Class` for anybody's own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tokentrue.environments.base import Environment
from tokentrue.errors import ConfigError

ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "tokentrue.environments.calculator:Calculator",
    "shop": "tokentrue.environments.shop:Shop",
    "ledger": "tokentrue.environments.ledger:Ledger",
}


def load_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    address = ENVIRONMENTS.get(name, name)
    module_name, _, attribute = address.partition(":")
    if not attribute:
        raise ConfigError(f"environment: no {name!r}; one of {', '.join(ENVIRONMENTS)}, or package.module:Class")
    try:
        made = getattr(import_module(module_name), attribute)(**(options or {}))
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"environment: {address} cannot be made: {error}") from error
    missing = [part for part in ("name", "tasks", "run") if not hasattr(made, part)]
    if missing:
        raise ConfigError(f"environment: {address} has no {', '.join(missing)}; see tokentrue.environments.Environment")
    return made
