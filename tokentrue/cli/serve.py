"""tokentrue serve: the gateway, until a signal ends it."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tokentrue.cli.common import ConfigFile, Device, Dtype, ModelName, Settings, show_status
from tokentrue.errors import ConfigError
from tokentrue.providers.registry import ENGINES, IN_PROCESS, REMOTE, list_names

if TYPE_CHECKING:
    from tokentrue.app.wiring import ServeConfig

ADMIN_KEY = "TOKENTRUE_ADMIN_KEY"


def command(
    config: ConfigFile = None,
    model: ModelName = None,
    engine: Annotated[str | None, Option(help=f"{list_names(tuple(ENGINES))} (default: exact)")] = None,
    url: Annotated[list[str] | None, Option(help="an engine's address; repeat it for replicas")] = None,
    device: Device = None,
    dtype: Dtype = None,
    script: Annotated[str | None, Option(help="JSON lines for the scripted engine")] = None,
    host: Annotated[str | None, Option(help="address to bind (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, Option(help="port to bind; 0 takes a free one (default: 8000)")] = None,
    store: Annotated[
        str | None, Option(help="sqlite:PATH, postgresql://… or memory (default: sqlite:tokentrue.sqlite)")
    ] = None,
    durability: Annotated[
        str | None, Option(help="normal (default): survives a kill of the process; full: power loss, too")
    ] = None,
    history: Annotated[
        str | None, Option(help="keep (default), or template: fork where the template rewrites history")
    ] = None,
    workers: Annotated[int | None, Option(help="processes; sessions are spread over them (default: 1)")] = None,
    adapter: Annotated[
        list[str] | None, Option(help="NAME=DIR: a LoRA adapter of the exact engine; repeat it for several")
    ] = None,
    pipeline: Annotated[
        int | None, Option(help="processes of the exact engine, each with some of the layers (default: 1)")
    ] = None,
    tensor: Annotated[
        int | None, Option(help="processes of the exact engine, each with a part of every layer (default: 1)")
    ] = None,
    sets: Settings = None,
) -> int:
    """Serve OpenAI Chat Completions and Responses, Anthropic Messages and Google generateContent, and record every
    token."""
    from tokentrue.app.configuration import Checks, read
    from tokentrue.app.libraries import without_torch
    from tokentrue.app.wiring import ServeConfig, check_gateway, identify_model
    from tokentrue.gateway.auth import new_admin_key
    from tokentrue.gateway.serving.server import listen

    adapters: dict[str, str] = {}
    for given in adapter or ():
        name, _, folder = given.partition("=")
        if not (name and folder):
            raise ConfigError(f"--adapter {given!r}: write NAME=DIR")
        adapters[name] = folder
    flags = {
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
        "engine.options.tensor": tensor,
        "engine.options.adapters": adapters or None,
    }
    settings = read(ServeConfig, config, sets or (), flags)
    chosen, server = settings.engine.name, settings.server
    given_key = os.environ.get(ADMIN_KEY)
    admin_key = given_key or new_admin_key()
    checks = Checks()
    if server.workers > 1:
        remote = f"--workers needs a remote engine ({list_names(REMOTE)}), not {chosen!r}"
        checks.require(chosen in REMOTE, remote)
        checks.require(server.store != "memory", "--workers needs --store sqlite:PATH: workers share the journal")
    check_gateway(checks, settings.model, settings.engine, server.store, reach=False)  # `identify_model` asks engines
    checks(lambda: listen(server.host, server.port, admin_key=admin_key).close())
    checks.finish()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would be missing in the child; we encode one by one
    with without_torch(chosen):
        settings = asyncio.run(identify_model(settings))
    return serve(settings, admin_key, is_new_key=given_key is None)


def serve(settings: "ServeConfig", admin_key: str, *, is_new_key: bool) -> int:
    from tokentrue.app.libraries import without_torch
    from tokentrue.app.wiring import gateway_for
    from tokentrue.gateway.serving.forwarding import Peers
    from tokentrue.gateway.serving.processes import Dispatcher, RenderDeadline, Supervisor, share_admin_state
    from tokentrue.gateway.serving.server import find_url, listen, listen_to_workers, log_to_stderr, serve_until_signal
    from tokentrue.sessions import StoreLock

    state = share_admin_state()  # in memory that the processes share: admin settings survive a restart
    engine, server = settings.engine.name, settings.server
    with (
        listen(server.host, server.port, admin_key=admin_key) as public,
        tempfile.TemporaryDirectory(prefix="tokentrue-") as folder,
    ):
        bound = find_url(server.host, public)
        settings = replace(settings, server=replace(server, address=server.address.rstrip("/") or bound))
        dispatcher = Dispatcher(public, server.workers) if server.workers > 1 else None
        lock = StoreLock(server.store) if server.store.startswith("sqlite:") else None
        paths = [str(Path(folder) / f"worker-{each}.sock") for each in range(server.workers)]
        what = f"loading {settings.model.shown}, engine {engine}"

        def serve_worker(number: int, say_up: Callable[[], None]) -> None:
            if lock is not None:
                lock.release()  # this process's copy: the parent alone holds it
            if dispatcher is not None:
                public.close()  # the parent alone accepts: the port is free when it ends
            log_to_stderr(enabled=server.log == "json")
            with without_torch(engine), show_status(what) if server.workers == 1 else nullcontext():
                gateway = gateway_for(
                    settings,
                    admin_key=admin_key,
                    number=number,
                    peers=Peers(me=number, sockets=paths),
                    admin_state=state,
                    render_deadline=RenderDeadline(settings.limits.render_s),
                    lock=False,
                )
            listener = public if dispatcher is None else listen_to_workers(paths[number])
            # After it listens: later changes arrive at its socket. An engine in this process has restarted with
            # the weights of its directory.
            gateway.services.restore_admin_state(has_weights=engine not in IN_PROCESS)
            receiver = None if dispatcher is None else dispatcher.receivers[number]
            serve_until_signal(gateway, listener, receiver=receiver, ready=say_up)

        try:
            base = server.base_url.rstrip("/") or bound
            supervisor = Supervisor(serve_worker, server.workers, public, dispatcher)
            return supervisor.run(lambda: greet(settings, base, admin_key if is_new_key else None))
        finally:
            if lock is not None:
                lock.release()


def greet(settings: "ServeConfig", base: str, new_key: str | None) -> None:
    """`new_key`, an admin key created by this start, is shown only here."""
    from tokentrue.sessions.journal.database import describe_store

    store = describe_store(settings.server.store)
    print(f"tokentrue gateway on {base}   model {settings.model.shown}, engine {settings.engine.name}, store {store}")
    if settings.model.path is None:
        about = "the small calculator model that ships with the package; --model DIR_OR_ID serves your own"
        print(f"  toy model        {about}")
    if new_key is not None:
        print(f"  admin key        {new_key}      (made for this run; set {ADMIN_KEY} to choose one)")
    print("  in another shell")
    print(f"export TOKENTRUE_URL={base}")
    print(f"export {ADMIN_KEY}={new_key}" if new_key else f"export {ADMIN_KEY}=…      (as in this shell)")
    print(f'  new session      curl -X POST {base}/sessions -H "Authorization: Bearer ${ADMIN_KEY}"')
    print("  OpenAI client    OpenAI(base_url=session['base_url'], api_key=session['api_key'])")
    print("  Anthropic client Anthropic(base_url=session['anthropic_base_url'], api_key=session['api_key'])")
    google = "api_key=session['api_key'], http_options={'base_url': session['google_base_url']}"
    print(f"  Google client    genai.Client({google})")
    print(f"  fixed base URL   {base}/v1 with the session's api_key")
    print(f"  viewer           {base}/view      (any user name, the admin key as password)")
    print(f"  samples          tokentrue samples {base} -o samples.jsonl", flush=True)
