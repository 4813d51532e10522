"""tokentrue serve: runs the gateway until a signal ends it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentrue.app.configuration import read
from tokentrue.app.identity import identify_model
from tokentrue.app.libraries import without_torch
from tokentrue.app.wiring import ADMIN_KEY, ServeConfig, gateway_for
from tokentrue.cli.options import ConfigFile, Device, Dtype, ModelName, Settings
from tokentrue.cli.output import loading
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonObject
from tokentrue.providers.registry import IN_PROCESS, REMOTE, SERVED, list_names

if TYPE_CHECKING:
    from tokentrue.gateway.serving.processes import AdminState


def command(
    config: ConfigFile = None,
    model: ModelName = None,
    engine: Annotated[str | None, typer.Option(help=f"{list_names(SERVED)} (default: exact)")] = None,
    url: Annotated[list[str] | None, typer.Option(help="an engine's address; repeat it for replicas")] = None,
    device: Device = None,
    dtype: Dtype = None,
    script: Annotated[str | None, typer.Option(help="JSON lines for the scripted engine")] = None,
    host: Annotated[str | None, typer.Option(help="address to bind (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind; 0 takes a free one (default: 8000)")] = None,
    store: Annotated[
        str | None, typer.Option(help="sqlite:PATH, postgresql://… or memory (default: sqlite:tokentrue.sqlite)")
    ] = None,
    durability: Annotated[
        str | None, typer.Option(help="normal (default): survives a kill of the process; full: power loss, too")
    ] = None,
    history: Annotated[
        str | None, typer.Option(help="keep (default), or template: fork where the template rewrites history")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="processes; sessions are spread over them (default: 1)")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=DIR: a LoRA adapter of the exact engine; repeat it for several")
    ] = None,
    pipeline: Annotated[
        int | None, typer.Option(help="processes of the exact engine, each with some of the layers (default: 1)")
    ] = None,
    sets: Settings = None,
) -> int:
    """Serve OpenAI Chat Completions and Responses, Anthropic Messages and Google generateContent, and record every
    token."""
    flags: JsonObject = {
        "model.path": model,
        "engine.name": engine,
        "engine.urls": url or None,
        "engine.options.device": device,
        "engine.options.dtype": dtype,
        "engine.script": script,
        "server.host": host,
        "server.port": port,
        "server.store": store,
        "server.durability": durability,
        "model.history": history,
        "server.workers": workers,
        "engine.options.pipeline": pipeline,
        "engine.options.adapters": adapters_from(adapter) if adapter else None,
    }
    settings = read(ServeConfig, config, sets or (), flags)
    check(settings)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would be missing in the child; we encode one by one
    with without_torch(settings.engine.name):
        settings = identify_model(settings)
    from tokentrue.gateway.auth import new_admin_key
    from tokentrue.gateway.serving.dispatch import Dispatcher
    from tokentrue.gateway.serving.processes import AdminState, Supervisor
    from tokentrue.gateway.serving.server import find_url, listen
    from tokentrue.sessions import StoreLock

    given_key = os.environ.get(ADMIN_KEY)
    admin_key = given_key or new_admin_key()
    state = AdminState()  # in memory that the processes share: admin settings survive a restart
    with (
        listen(settings.server.host, settings.server.port, admin_key=admin_key) as public,
        tempfile.TemporaryDirectory(prefix="tokentrue-") as folder,
    ):
        bound = find_url(settings.server.host, public)
        base = settings.server.base_url.rstrip("/") or bound
        settings = replace(
            settings, server=replace(settings.server, address=settings.server.address.rstrip("/") or bound)
        )
        workers = settings.server.workers
        dispatcher = Dispatcher(public, workers) if workers > 1 else None
        lock = StoreLock(settings.server.store) if settings.server.store.startswith("sqlite:") else None

        def serve(number: int, say_up: Callable[[], None]) -> None:
            if lock is not None:
                lock.release()  # this process's copy: the parent alone holds it
            receiver = dispatcher.receivers[number] if dispatcher else None
            serve_worker(settings, number, public, receiver, folder, admin_key, state, say_up)

        try:
            supervisor = Supervisor(serve, workers, public, dispatcher)
            return supervisor.run(lambda: greet(settings, base, None if given_key else admin_key))
        finally:
            if lock is not None:
                lock.release()


def serve_worker(
    settings: ServeConfig,
    number: int,
    public: socket.socket,
    receiver: socket.socket | None,
    folder: str,
    admin_key: str,
    state: AdminState,
    say_up: Callable[[], None],
) -> None:
    """One gateway process, alone or one of several workers, until a signal ends it."""
    from tokentrue.gateway.serving.forwarding import Peers
    from tokentrue.gateway.serving.processes import RenderDeadline
    from tokentrue.gateway.serving.server import listen_to_workers, log_to_stderr, serve_until_signal

    log_to_stderr(enabled=settings.server.log == "json")
    hide_library_bars(settings.engine.name)
    workers = settings.server.workers
    paths = [str(Path(folder) / f"worker-{each}.sock") for each in range(workers)]
    what = f"{settings.model.shown}, engine {settings.engine.name}"
    with without_torch(settings.engine.name), loading(what) if workers == 1 else nullcontext():
        gateway = gateway_for(
            settings,
            admin_key=admin_key,
            number=number,
            peers=Peers(me=number, sockets=paths),
            admin_state=state,
            render_deadline=RenderDeadline(settings.limits.render_s),
            lock=False,
        )
    listener = public if workers == 1 else listen_to_workers(paths[number])
    # After it listens: later changes arrive at its socket. An engine in this process has restarted with
    # the weights of its directory.
    gateway.services.restore_admin_state(has_weights=settings.engine.name not in IN_PROCESS)
    serve_until_signal(gateway, listener, receiver=receiver, ready=say_up)


def adapters_from(flags: list[str]) -> dict[str, str]:
    """Parses --adapter NAME=DIR."""
    pairs = [flag.partition("=") for flag in flags]
    for name, equals, folder in pairs:
        if not (name and equals and folder):
            raise ConfigError(f"--adapter {name + equals + folder!r}: write NAME=DIR")
    return {name: folder for name, _, folder in pairs}


def hide_library_bars(engine: str) -> None:
    """transformers draws a bar per loaded model; ours shows what is loading."""
    if engine in IN_PROCESS:
        from transformers.utils import logging

        logging.disable_progress_bar()


def check(settings: ServeConfig) -> None:
    if settings.server.workers > 1:
        if settings.engine.name not in REMOTE:
            raise ConfigError(f"--workers needs a remote engine ({list_names(REMOTE)}), not {settings.engine.name!r}")
        if settings.server.store == "memory":
            raise ConfigError("--workers needs --store sqlite:PATH: workers share the journal")


def greet(settings: ServeConfig, base: str, new_key: str | None) -> None:
    """`new_key`, an admin key created by this start, is shown only here."""
    from tokentrue.sessions.journal.database import describe_store

    store = describe_store(settings.server.store)
    print(f"tokentrue gateway on {base}   model {settings.model.shown}, engine {settings.engine.name}, store {store}")
    if settings.model.path is None:
        print(
            "  toy model        the small calculator model that ships with the package; --model DIR_OR_ID serves your own"
        )
    if new_key is not None:
        print(f"  admin key        {new_key}      (made for this run; set {ADMIN_KEY} to choose one)")
    print(f'  new session      curl -X POST {base}/sessions -H "Authorization: Bearer {new_key or "$" + ADMIN_KEY}"')
    print("  OpenAI client    OpenAI(base_url=session['base_url'], api_key=session['api_key'])")
    print("  Anthropic client Anthropic(base_url=session['anthropic_base_url'], api_key=session['api_key'])")
    print(
        "  Google client    genai.Client(api_key=session['api_key'], http_options={'base_url': session['google_base_url']})"
    )
    print(f"  fixed base URL   {base}/v1 with the session's api_key", flush=True)
