"""Adapters to trainer frameworks, one file each; none imports torch or its framework before it is called."""

from importlib import import_module
from types import ModuleType

ADAPTERS = ("areal", "openrlhf", "prime_rl", "skyrl", "slime", "tinker", "trl", "verifiers", "verl")


def __getattr__(name: str) -> ModuleType:
    if name in ADAPTERS:
        return import_module(f"tokentrue.integrations.{name}")
    raise AttributeError(f"no integration {name!r}; there are {', '.join(ADAPTERS)}")
