"""The table of engines; commands, help texts and docs derive their lists from here."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from tokentrue.errors import ConfigError, did_you_mean
from tokentrue.protocols import Provider, find_plugins, load_plugin
from tokentrue.records import record


@record
class EngineKind:
    """`remote`: a server, reached by `--url`. `needs_torch`: the model is loaded here. `options` are checked before
    that."""

    address: str
    options: tuple[str, ...] = ()
    remote: bool = False
    needs_torch: bool = False


_LOADED = ("model", "device", "dtype", "version", "decode")
_SERVER = ("url", "timeout_s", "connect_s", "retries", "api_key", "weights_dir", "adapter")
ENGINES: Mapping[str, EngineKind] = {
    "exact": EngineKind(
        address="tokentrue.providers.exact:ExactProvider",
        options=(*_LOADED, "pipeline", "tensor", "leaves", "limits", "max_len", "kv_tokens", "adapters"),
        needs_torch=True,
    ),
    "hf": EngineKind(address="tokentrue.providers.hf:HFProvider", options=_LOADED, needs_torch=True),
    "sglang": EngineKind(
        address="tokentrue.providers.sglang:SGLangProvider",
        options=(*_SERVER, "sampling_mask", "routed_experts"),
        remote=True,
    ),
    "vllm": EngineKind(
        address="tokentrue.providers.vllm:VLLMProvider",
        options=(*_SERVER, "model", "version", "cache_salt"),
        remote=True,
    ),
    "scripted": EngineKind(
        address="tokentrue.providers.scripted:ScriptedProvider",
        options=("script", "encode", "stop_id", "version", "loop"),
    ),
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
        known = [*ENGINES, *plugins]
        raise ConfigError(f"no engine {name!r}; choose one of {', '.join(known)}{did_you_mean(name, known)}")
    return plugins[name].value


def check_options(name: str, settings: Iterable[str]) -> None:
    """For an engine of another package, `load` checks them."""
    known = ENGINES[name].options if name in ENGINES else ()
    for option in settings if known else ():
        if option not in known:
            listed = f"known: {', '.join(sorted(known))}{did_you_mean(option, known)}"
            raise ConfigError(f"engine {name!r} has no option {option!r}; {listed}")


def load(name: str, **settings: Any) -> Provider:
    """The provider `name`, built with its settings."""
    module, _, attribute = find_address(name).partition(":")
    check_options(name, settings)
    try:
        is_ours = name in ENGINES
        kind = getattr(import_module(module), attribute) if is_ours else load_plugin(find_plugins("providers")[name])
    except (ModuleNotFoundError, ConfigError) as error:
        causes = (error, error.__cause__)  # `load_plugin` raises from it
        missing = [each.name or "" for each in causes if isinstance(each, ModuleNotFoundError)]
        if any(name.partition(".")[0] == "torch" for name in missing):
            raise ConfigError(f"engine {name!r} needs torch: pip install 'tokentrue[engine]'") from error
        raise
    try:
        return kind(**settings)
    except TypeError as error:  # a setting that it does not have, or of another type
        raise ConfigError(f"engine {name!r}: {str(error).rpartition('__init__() ')[2]}") from error
