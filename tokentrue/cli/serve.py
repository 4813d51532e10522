"""tokentrue serve: the gateway, until a signal ends it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tokentrue.app.configuration import read
from tokentrue.app.identity import identify_model
from tokentrue.app.torchless import torch_kept_out
from tokentrue.app.wiring import ADMIN_KEY, REMOTE, ServeConfig, gateway_for
from tokentrue.errors import ConfigError, TokenTrueError


def command(
    config: Annotated[Path | None, typer.Option("--config", help="a TOML file; flags win over it")] = None,
    model: Annotated[
        str | None, typer.Option(help="model directory or hub id (default: the small model that ships with the package)")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="exact, hf, sglang, vllm or scripted")] = None,
    url: Annotated[list[str] | None, typer.Option(help="an engine's address; repeat it for replicas")] = None,
    script: Annotated[str | None, typer.Option(help="JSON lines for the scripted engine")] = None,
    host: Annotated[str | None, typer.Option(help="address to bind")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind; 0 takes a free one")] = None,
    store: Annotated[str | None, typer.Option(help="sqlite:PATH or memory")] = None,
    history: Annotated[str | None, typer.Option(help="keep, or template (fork where the template rewrites history)")] = None,
    workers: Annotated[int | None, typer.Option(help="processes; sessions are spread over them")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="any setting: key.path=value")] = None,
) -> int:
    """Serve OpenAI Chat Completions, OpenAI Responses and Anthropic Messages, and record every token."""
    flags: dict[str, Any] = {
        "model.path": model,
        "engine.name": engine,
        "engine.urls": url or None,
        "engine.script": script,
        "server.host": host,
        "server.port": port,
        "server.store": store,
        "model.history": history,
        "server.workers": workers,
    }
    settings = read(ServeConfig, config, sets or (), flags)
    check(settings)
    with torch_kept_out(settings.engine.name):
        settings = identify_model(settings)
    from tokentrue.gateway.server import listen, log_to_stderr, run_worker, supervise

    with listen(settings.server.host, settings.server.port, admin_key=bool(os.environ.get(ADMIN_KEY))) as public:
        port_bound = public.getsockname()[1]
        base = settings.server.base_url.rstrip("/") or f"http://{shown_host(settings.server.host)}:{port_bound}"
        if settings.server.workers > 1:
            return supervise(start_worker, settings, public, settings.server.workers, ready=lambda: greet(settings, base))
        log_to_stderr(enabled=settings.server.log == "json")
        with torch_kept_out(settings.engine.name):
            gateway = gateway_for(settings)
        run_worker(gateway, public, ready=lambda: greet(settings, base))
    return 0


def check(settings: ServeConfig) -> None:
    """What can be known wrong before anything is started."""
    if settings.server.workers > 1:
        if settings.engine.name not in REMOTE:
            raise ConfigError(f"--workers needs an engine of its own process (sglang or vllm), not {settings.engine.name!r}")
        if settings.server.store == "memory":
            raise ConfigError("--workers needs --store sqlite:PATH: workers share the journal")


def start_worker(settings: ServeConfig, public: socket.socket, me: int, workers: int, folder: str, up: Any) -> None:
    """The main function of a worker process."""
    from tokentrue.gateway.peers import Peers, socket_path
    from tokentrue.gateway.server import log_to_stderr, run_worker

    log_to_stderr(enabled=settings.server.log == "json")
    try:
        peers = Peers(me=me, workers=workers, folder=folder, body_limit=settings.limits.body_bytes)
        with torch_kept_out(settings.engine.name):
            gateway = gateway_for(settings, peers=peers)
    except TokenTrueError as error:
        print(f"tokentrue serve: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run_worker(gateway, public, peer_socket=str(socket_path(folder, me)), ready=up.release)


def shown_host(host: str) -> str:
    if host in {"0.0.0.0", "::"}:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def greet(settings: ServeConfig, base: str) -> None:
    admin = "Authorization: Bearer $TOKENTRUE_ADMIN_KEY" if os.environ.get(ADMIN_KEY) else "no admin key is set: loopback only"
    print(f"tokentrue gateway on {base}   model {settings.model.shown}, engine {settings.engine.name}, store {settings.server.store}")
    print(f"  new session      curl -X POST {base}/sessions      ({admin})")
    print("  OpenAI client    OpenAI(base_url=session['base_url'], api_key=session['api_key'])")
    print("  Anthropic client Anthropic(base_url=session['anthropic_base_url'], api_key=session['api_key'])")
    print(f"  fixed base URL   {base}/v1 with the session's api_key", flush=True)
