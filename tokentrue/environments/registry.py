"""Environments by name: small ones, any command-line agent, or `package.module:Class` for anybody's own."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module

from tokentrue.environments.base import Environment
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping

ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "tokentrue.environments.calculator:Calculator",
    "shop": "tokentrue.environments.shop:Shop",
    "ledger": "tokentrue.environments.ledger:Ledger",
    "questions": "tokentrue.environments.questions:Questions",
    "agent": "tokentrue.environments.agents:CommandLineAgent",
    "verifiers": "tokentrue.integrations.verifiers:VerifiersEnvironment",
}


LOG = logging.getLogger(
    "tokentrue.rollouts"
)  # tracebacks of user code; `tokentrue rollout` and `train` write them to rollouts.log
LOG.addHandler(logging.NullHandler())


def describe(error: Exception) -> str:
    """The error with the line of user code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"


def load_environment(name: str, options: JsonMapping | None = None) -> Environment:
    address = ENVIRONMENTS.get(name, name)
    module_name, _, attribute = address.partition(":")
    if not attribute:
        raise ConfigError(f"environment: no {name!r}; one of {', '.join(ENVIRONMENTS)}, or package.module:Class")
    if name not in ENVIRONMENTS and os.getcwd() not in sys.path:
        sys.path.insert(
            0, os.getcwd()
        )  # `tokentrue` is a script of its own folder: a module beside the user's files is not on its path
    try:
        made = getattr(import_module(module_name), attribute)(**(options or {}))
    except ConfigError:  # an environment that names what is wrong with its options
        raise
    except Exception as error:  # the module is the user's: it may raise anything
        LOG.error("environment %s cannot be loaded", address, exc_info=True)
        raise ConfigError(f"environment: {address} cannot be loaded: {describe(error)}") from error
    missing = [part for part in ("name", "tasks", "run") if not hasattr(made, part)]
    if missing:
        raise ConfigError(f"environment: {address} has no {', '.join(missing)}; see tokentrue.environments.Environment")
    return made
