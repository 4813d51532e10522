"""The table of engines. Loading an engine imports only its adapter; commands, help texts and docs derive their lists
from here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tokentrue.errors import ConfigError
from tokentrue.protocols import Provider, find_plugins
from tokentrue.records import record


@record
class EngineKind:
    """`remote`: a server, reached by `--url`, which may have replicas. `needs_torch`: the model is loaded into this
    process."""

    address: str
    remote: bool = False
    needs_torch: bool = False


ENGINES: Mapping[str, EngineKind] = {
    "exact": EngineKind(address="tokentrue.providers.exact:ExactProvider", needs_torch=True),
    "hf": EngineKind(address="tokentrue.providers.hf:HFProvider", needs_torch=True),
    "sglang": EngineKind(address="tokentrue.providers.sglang:SGLangProvider", remote=True),
    "vllm": EngineKind(address="tokentrue.providers.vllm:VLLMProvider", remote=True),
    "scripted": EngineKind(address="tokentrue.providers.scripted:ScriptedProvider"),
}
REMOTE = tuple(name for name, kind in ENGINES.items() if kind.remote)
IN_PROCESS = tuple(name for name, kind in ENGINES.items() if kind.needs_torch)


def list_names(names: tuple[str, ...], last: str = "or") -> str:
    """`exact, hf or vllm`."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def find_address(name: str) -> str:
    if name in ENGINES:
        return ENGINES[name].address
    plugins = find_plugins("providers")
    if name not in plugins:
        raise ConfigError(f"no engine {name!r}; choose one of {', '.join([*ENGINES, *plugins])}")
    return plugins[name].value


def load(name: str, **settings: Any) -> Provider:
    """The provider `name`, built with its settings (`url=` for servers, `model=` for embedded engines, `script=`).
    Other packages add theirs as entry points."""
    module, _, attribute = find_address(name).partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "torch":
            raise ConfigError(f"engine {name!r} needs torch: pip install 'tokentrue[engine]'") from error
        raise
    try:
        return kind(**settings)
    except TypeError as error:  # a setting that it does not have, or of another type
        raise ConfigError(f"engine {name!r}: {str(error).rpartition('__init__() ')[2]}") from error
