"""Checks at start, for each replica, that a remote engine serves the model whose tokenizer we use: compares the
engine's tokenisation of a probe text, if it offers one. Without `--model` the engine's model must be a local
directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tokentrue.app.wiring import EngineConfig, ServeConfig, connect_engine, renderer_for
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError, EngineError, EngineUnreachable
from tokentrue.ids import TokenIds
from tokentrue.protocols import Provider, Tokenizing
from tokentrue.providers.registry import REMOTE

PROBE = "Hello, wörld! 12345 + 678 = ?\n\n\tdef f(x): return x**2  # 你好 🙂"


def identify_model(config: ServeConfig) -> ServeConfig:
    """Raises ConfigError if an engine is unreachable or serves another model."""
    if config.engine.name not in REMOTE:
        return config
    if not config.engine.urls:
        raise ConfigError(f"engine {config.engine.name!r} needs --url (one for each replica)")
    return asyncio.run(_identify(config, config.engine))


async def _identify(config: ServeConfig, engine: EngineConfig) -> ServeConfig:
    names: set[str] = set()
    for url in engine.urls:
        async with _connected(engine, url) as provider:
            facts = await provider.health()
            names.add(str(facts.get("path") or facts.get("model")))
    model = config.model
    if model.path is None:
        model = replace(model, path=_find_directory(engine, names))
    renderer = renderer_for(model)(model.history)
    ours = TokenIds(renderer.encode_sampled(PROBE))
    for url in engine.urls:
        async with _connected(engine, url) as provider:
            theirs = await provider.tokenize(PROBE) if isinstance(provider, Tokenizing) else None
        if theirs is not None and theirs != ours:  # a server may have no such route
            raise ConfigError(
                f"the engine at {url} has another tokenizer than --model: a probe text gives {len(theirs)} ids there "
                f"({theirs!r}) and {len(ours)} here ({ours!r}); give --model the directory or id of the model that the "
                "engine serves"
            )
    return replace(config, model=model)


@asynccontextmanager
async def _connected(engine: EngineConfig, url: str) -> AsyncGenerator[Provider, None]:
    provider = connect_engine(engine, url)
    try:
        yield provider
    except EngineUnreachable as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        raise ConfigError(f"the engine at {url} cannot be used: {error}") from error
    finally:
        await provider.close()


def _find_directory(engine: EngineConfig, names: set[str]) -> str:
    """The directory that all replicas report, or the shipped model by its name."""
    if len(names) > 1:
        raise ConfigError(f"the replicas serve different models: {', '.join(sorted(names))}")
    (name,) = names
    if Path(name).is_dir():
        return name
    if name == SMALL_MODEL.name:
        return str(SMALL_MODEL)
    raise ConfigError(
        f"the {engine.name} engine serves {name!r}, which is no directory here: give --model its directory or hub id"
    )
