"""A table of addresses, not imports: naming an engine imports its adapter and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tokentrue.errors import ConfigError
from tokentrue.protocols import Provider

PROVIDERS: Mapping[str, str] = {
    "sglang": "tokentrue.providers.sglang:SGLangProvider",
    "vllm": "tokentrue.providers.vllm:VLLMProvider",
    "hf": "tokentrue.providers.hf:HFProvider",
    "exact": "tokentrue.providers.exact:ExactProvider",
    "verified": "tokentrue.providers.verified:VerifiedProvider",
    "scripted": "tokentrue.providers.scripted:ScriptedProvider",
}


def load(name: str, **settings: Any) -> Provider:
    """The provider called `name`, built with its own settings (`url=` for servers, `model=` for embedded engines,
    `script=`)."""
    if name not in PROVIDERS:
        raise ConfigError(f"no engine {name!r}; choose one of {', '.join(PROVIDERS)}")
    module, _, attribute = PROVIDERS[name].partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "torch":
            raise ConfigError(f"engine {name!r} needs torch: pip install 'tokentrue[engine]'") from error
        raise
    try:
        return kind(**settings)
    except TypeError as error:
        if "unexpected keyword argument" in str(error) or "required" in str(error):
            raise ConfigError(f"engine {name!r}: {error}") from error
        raise
