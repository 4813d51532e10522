"""The only module that chooses implementations. A gateway for a remote engine starts without torch."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec

from tokentrue.app.configuration import Checks
from tokentrue.app.libraries import require_device, require_device_name, require_dtype
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError, EngineError, EngineUnreachable
from tokentrue.gateway.config import GatewayConfig, GatewayLimits, ServingConfig
from tokentrue.hub import check_model, find_directory
from tokentrue.ids import TokenIds
from tokentrue.images import ImageSettings
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import Tokenizing
from tokentrue.providers.registry import ENGINES, IN_PROCESS, REMOTE, check_options, find_address, list_names
from tokentrue.records import record
from tokentrue.sessions.requests import SessionLimits as SessionLimits
from tokentrue.tracing import start_tracing
from tokentrue.types import AtLeastOne

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tokentrue.gateway.app import Gateway
    from tokentrue.gateway.serving.forwarding import Peers
    from tokentrue.gateway.serving.processes import AdminState
    from tokentrue.protocols import EngineControl, Provider
    from tokentrue.renderers.renderer import Renderer
    from tokentrue.sessions.journal import Journal

ADMIN_KEY = "TOKENTRUE_ADMIN_KEY"
ENGINE_KEY = "TOKENTRUE_ENGINE_KEY"
DEFAULT_STORE = "sqlite:tokentrue.sqlite"
PROBE = "Hello, wörld! 12345 + 678 = ?\n\n\tdef f(x): return x**2  # 你好 🙂"


@record
class ModelConfig:
    """`path`: a directory, a hub id, or the output of a training run (its newest checkpoint); `name` is what clients
    see."""

    path: str | None = None
    name: str | None = None
    chat_template: str | None = None
    template_kwargs: JsonMapping = field(default_factory=JsonObject)
    history: Literal["keep", "template"] = "keep"
    injection: Literal["safe", "engine"] = "safe"
    encode_cache_bytes: int = 64 << 20  # ids of texts that were encoded before; 0 disables the cache
    extend_plans: int = 4096  # request shapes whose suffix is planned once; 0 plans each request

    def __post_init__(self) -> None:
        newest = Path(self.path or "") / "checkpoints" / "latest"
        if self.path is not None and (newest / "config.json").is_file():
            object.__setattr__(self, "name", self.name or Path(self.path).resolve().name)
            object.__setattr__(self, "path", str(newest))

    @property
    def shown(self) -> str:
        return self.name or (Path(self.path).name if self.path else SMALL_MODEL.name)


@record
class EngineConfig:
    name: str = "exact"
    urls: tuple[str, ...] = ()
    script: str | None = None
    options: JsonMapping = field(default_factory=JsonObject)


@record
class ServerConfig(ServingConfig):
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    workers: AtLeastOne = 1
    store: str = DEFAULT_STORE
    durability: Literal["normal", "full"] = "normal"  # full: acknowledged turns survive a loss of power
    address: str = ""  # where other gateways on the same PostgreSQL reach this one; default: the bound address
    lease_s: float = 15.0  # PostgreSQL: a gateway that is silent for longer loses its sessions to the others
    log: Literal["json", "off"] = "json"
    trace_url: str = ""  # an OTLP/HTTP collector, http://host:4318; empty: no traces


@record
class ServeConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    images: ImageSettings = field(default_factory=ImageSettings)


def renderer_for(
    config: ModelConfig, render_deadline: AbstractContextManager[object] | None = None
) -> Callable[[str], Renderer]:
    @cache
    def load(history: Literal["keep", "template"]) -> Renderer:
        from tokentrue.renderers import load_renderer

        return load_renderer(
            config.path or str(SMALL_MODEL),
            config.chat_template,
            dict(config.template_kwargs) or None,
            history=history,
            render_deadline=render_deadline,
            injection=config.injection,
            encode_cache_bytes=config.encode_cache_bytes,
            extend_plans=config.extend_plans,
        )

    return load  # pyright: ignore[reportReturnType]


def provider_for(config: EngineConfig, model: ModelConfig, renderer: Callable[[str], Renderer]) -> EngineControl:
    from tokentrue.providers import load
    from tokentrue.providers.pool import Pool

    check_engine_settings(config)
    options: JsonObject = dict(config.options)
    if is_remote(config):
        return Pool([connect_engine(config, url) for url in config.urls])
    if config.name in IN_PROCESS:
        require_device(str(options.get("device", "cpu")))
    if config.name == "scripted":
        made = renderer(model.history)
        options |= {"script": config.script, "encode": made.encode_sampled, "stop_id": made.stop_token_ids[0]}
    else:
        options.setdefault("model", model.path or str(SMALL_MODEL))
        options.setdefault("decode", renderer(model.history).decode)  # for stop strings
    return Pool([load(config.name, **options)])


def check_engine_settings(config: EngineConfig) -> None:
    find_address(config.name)
    checks, options = Checks(), config.options
    here = sorted({"device", "dtype"} & options.keys())
    if config.name in IN_PROCESS:
        checks(require_device_name, str(options.get("device", "cpu")))
        checks(require_dtype, str(options.get("dtype", "float32")))
    elif here and config.name in ENGINES:
        names = list_names(IN_PROCESS, "and")
        checks.require(False, f"engine {config.name!r} loads no model in this process: --{here[0]} is for {names}")
        options = {name: value for name, value in options.items() if name not in here}
    checks(check_options, config.name, options)
    for name, folder in cast("Mapping[str, str]", options.get("adapters") or {}).items():
        checks.require(Path(folder).is_dir(), f"--adapter {name}: there is no directory {str(folder)!r}")
    if is_remote(config):
        elsewhere = """`train` and `rollout`: --set 'engine.urls=["http://…"]'"""
        checks.require(bool(config.urls), f"engine {config.name!r} needs --url, one for each replica ({elsewhere})")
    else:
        checks.require(not config.urls, f"engine {config.name!r} runs in this process and takes no --url")
    if config.name == "scripted":
        script = config.script
        checks.require(script is not None, "engine 'scripted' needs --script FILE.jsonl")
        checks.require(script is None or Path(script).exists(), f"--script: there is no file {script!r}")
    checks.finish()


def check_gateway(
    checks: Checks, model: ModelConfig, engine: EngineConfig, store: str | None, *, reach: bool = True
) -> None:
    """Checks what a gateway starts with, before loading it. `reach=False` if it runs on another machine."""
    from tokentrue.sessions.journal import check_store

    path = model.path or SMALL_MODEL
    checks(check_model, path)
    checks(check_engine, engine, path, reach)
    if store is not None:
        checks(check_store, store)


def check_engine(engine: EngineConfig, model: str | Path, reach: bool = True) -> None:
    check_engine_settings(engine)
    if is_remote(engine) and reach:
        asyncio.run(ask_engines(engine))
    elif engine.name == "exact":
        check_parts(engine.options, model)


def check_parts(options: JsonMapping, model: str | Path) -> None:
    checks, layers = Checks(), None
    for name in ("pipeline", "tensor"):
        parts = options.get(name, 1)
        checks.require(isinstance(parts, int) and parts > 0, f"{name}: must be a whole number >= 1, got {parts!r}")
    checks.finish()
    with suppress(OSError, ValueError, ConfigError):  # a wrong model is reported by `check_model`
        if folder := find_directory(model):
            layers = json.loads((folder / "config.json").read_text()).get("num_hidden_layers")
    stages, ranks = options.get("pipeline", 1), options.get("tensor", 1)
    checks.require(stages <= (layers or stages), f"pipeline={stages}: choose 1 to {layers}, one for each layer")
    checks.require(ranks in (1, 2, 4, 8), f"tensor={ranks}: choose 1, 2, 4 or 8")
    checks.finish()


def is_remote(engine: EngineConfig) -> bool:
    return engine.name in REMOTE or (engine.name not in ENGINES and bool(engine.urls))


def connect_engine(config: EngineConfig, url: str) -> Provider:
    from tokentrue.providers import load

    return load(config.name, url=url, **{"api_key": os.environ.get(ENGINE_KEY), **config.options})


def check_journal(journal: Journal, renderer: Renderer, store: str) -> None:
    """Refuses the default journal if its last session used another model; only warns for a chosen one."""
    last = next(iter(journal.sessions(limit=1)), None)
    if last is None or last.tokenizer == renderer.tokenizer_hash:
        return
    said = f"{store} holds sessions of another model: the last one, {last.id}, was recorded with another tokenizer"
    if store == DEFAULT_STORE:
        raise ConfigError(
            f"{said}; give this model a journal of its own (--store sqlite:PATH), or serve the recorded model (--model)"
        )
    logging.getLogger("tokentrue").warning("%s; these sessions can be read, not continued", said)


def view_for(config: ServeConfig, journal: Journal, renderer: Callable[[str], Renderer]) -> Callable[[], ASGIApp]:
    def load() -> ASGIApp:
        from tokentrue.viewer import StoreSource, ViewerData, create_app

        source = StoreSource(journal, name=config.model.shown, kind="gateway")
        return create_app(ViewerData(source, renderer=renderer(config.model.history)))

    return load


def gateway_for(
    config: ServeConfig,
    *,
    admin_key: str,
    number: int = 0,
    peers: Peers | None = None,
    admin_state: AdminState | None = None,
    render_deadline: AbstractContextManager[object] | None = None,
    lock: bool = True,
) -> Gateway:
    """Templates render within `render_deadline`. `admin_state` outlives this process. `lock=False` if the parent
    process holds the store's lock."""
    from tokentrue.gateway.app import Gateway
    from tokentrue.sessions.journal import open_journal

    if config.server.trace_url:
        start_tracing(config.server.trace_url)
    renderer = renderer_for(config.model, render_deadline)
    loaded = renderer(config.model.history)  # a refused template is a start-up error, not a request's
    for warning in loaded.proof.warnings:
        logging.getLogger("tokentrue").warning("%s: %s", config.model.shown, warning)
    server = config.server
    shared: JsonObject = {each.name: getattr(server, each.name) for each in fields(ServingConfig)}
    shared["base_url"] = server.base_url.rstrip("/")
    settings = GatewayConfig(
        **shared,
        model=config.model.shown,
        admin_key=admin_key,
        limits=config.limits,
        session_limits=config.session_limits,
        images=config.images,
        history=config.model.history,
    )
    journal = open_journal(
        server.store,
        durability=server.durability,
        lock=lock,
        name=f"{socket.gethostname()} {server.address} {number}" if server.address else "",
        address=server.address,
        lease_s=server.lease_s,
    )
    try:
        check_journal(journal, loaded, server.store)
        return Gateway(
            config=settings,
            renderer_for=renderer,
            provider=provider_for(config.engine, config.model, renderer),
            journal=journal,
            peers=peers,
            admin_state=admin_state,
            view=view_for(config, journal, renderer),
        )
    except BaseException:
        journal.close()
        raise


async def identify_model(config: ServeConfig) -> ServeConfig:
    """Checks that every replica of a remote engine has our tokenizer, if it offers tokenisation. Without `--model` the
    engine's model must be a local directory."""
    if not is_remote(config.engine):
        return config
    names, tokenised = await ask_engines(config.engine)
    model = config.model
    if model.path is None:
        model = replace(model, path=_find_directory(config.engine, names))
    ours = TokenIds(renderer_for(model)(model.history).encode_sampled(PROBE))
    for url, theirs in tokenised.items():
        if theirs != ours:
            found = f"a probe text gives {len(theirs)} ids there ({theirs!r}) and {len(ours)} here ({ours!r})"
            cure = "give --model the directory or id of the model that the engine serves"
            raise ConfigError(f"the engine at {url} has another tokenizer than --model: {found}; {cure}")
    return replace(config, model=model)


async def ask_engines(engine: EngineConfig) -> tuple[set[str], dict[str, TokenIds]]:
    """The models that the replicas serve, and the ids of `PROBE` by URL, of servers that tokenise."""
    names: set[str] = set()
    tokenised: dict[str, TokenIds] = {}
    for url in engine.urls:
        provider = connect_engine(engine, url)
        try:
            facts = await provider.health()
            names.add(str(facts.get("path") or facts.get("model")))
            if isinstance(provider, Tokenizing) and (ids := await provider.tokenize(PROBE)) is not None:
                tokenised[url] = ids
        except EngineError as error:
            why = "" if isinstance(error, EngineUnreachable) else f"the engine at {url} cannot be used: "
            raise ConfigError(f"{why}{error}") from error
        finally:
            await provider.close()
    return names, tokenised


def _find_directory(engine: EngineConfig, names: set[str]) -> str:
    if len(names) > 1:
        raise ConfigError(f"the replicas serve different models: {', '.join(sorted(names))}")
    (name,) = names
    if Path(name).is_dir() or name == SMALL_MODEL.name:
        return name
    raise ConfigError(
        f"the {engine.name} engine serves {name!r}, which is no directory here: give --model its directory or hub id"
    )
