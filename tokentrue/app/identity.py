"""Checks at start, for each replica, that a remote engine serves the model whose tokenizer we use: compares the
engine's tokenisation of a probe text, if it offers one. Without `--model` the engine's model must be a local
directory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tokentrue.app.wiring import EngineConfig, ModelConfig, ServeConfig, connect_engine, renderer_for
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError, EngineError, EngineUnreachable
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Provider, Renderer, Tokenizing
from tokentrue.providers.registry import REMOTE

PROBE = "Hello, wörld! 12345 + 678 = ?\n\n\tdef f(x): return x**2  # 你好 🙂"


def identify_model(config: ServeConfig) -> ServeConfig:
    """Raises ConfigError if an engine is unreachable or serves another model."""
    if config.engine.name not in REMOTE:
        return config
    if not config.engine.urls:
        raise ConfigError(f"engine {config.engine.name!r} needs --url (one for each replica)")
    facts = [asyncio.run(_ask(config.engine, url, None)) for url in config.engine.urls]
    model = config.model if config.model.path is not None else _config_from_engine(config.model, config.engine, facts)
    settled = replace(config, model=model)
    renderer = renderer_for(model)(model.history)
    for url in config.engine.urls:
        asyncio.run(_ask(config.engine, url, renderer))
    return settled


async def _ask(engine: EngineConfig, url: str, renderer: Renderer | None) -> JsonMapping:
    """Health facts of one replica; with a renderer, also compares its tokenisation."""
    provider = connect_engine(engine, url)
    try:
        facts = await provider.health()
        if renderer is not None:
            await _compare_tokens(provider, renderer, url)
        return facts
    except EngineUnreachable as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        raise ConfigError(f"the engine at {url} cannot be used: {error}") from error
    finally:
        await provider.close()


async def _compare_tokens(provider: Provider, renderer: Renderer, url: str) -> None:
    if not isinstance(provider, Tokenizing):
        return
    theirs = await provider.tokenize(PROBE)
    if theirs is None:  # the server has no such route
        return
    ours = TokenIds(renderer.encode_sampled(PROBE))
    if theirs != ours:
        raise ConfigError(
            f"the engine at {url} has another tokenizer than --model: a probe text gives {len(theirs)} ids there ({theirs!r}) and "
            f"{len(ours)} here ({ours!r}); give --model the directory or id of the model that the engine serves"
        )


def _config_from_engine(model: ModelConfig, engine: EngineConfig, facts: list[JsonMapping]) -> ModelConfig:
    # Without --model: the directory that the engine reports, or the shipped model by its name.
    names = {str(fact.get("path") or fact.get("model")) for fact in facts}
    if len(names) > 1:
        raise ConfigError(f"the replicas serve different models: {', '.join(sorted(names))}")
    (name,) = names
    if Path(name).is_dir():
        return replace(model, path=name)
    if name == SMALL_MODEL.name:
        return replace(model, path=str(SMALL_MODEL))
    raise ConfigError(
        f"the {engine.name} engine serves {name!r}, which is no directory here: give --model its directory or hub id"
    )
