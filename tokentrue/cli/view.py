"""tokentrue view: the viewer in a browser, over a gateway, a store or a samples file; or as one file."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tokentrue.cli.common import TrainerFile, is_url, open_recorded, pluralise, renderer_from, require_file
from tokentrue.errors import ConfigError

if TYPE_CHECKING:
    from tokentrue.viewer import GatewayData, ViewerData
    from tokentrue.viewer.records import RecordSource

HOST = "127.0.0.1"


def command(
    source: Annotated[
        str, Argument(help="a samples file, a store (sqlite:PATH or postgresql://…), or the URL of a running gateway")
    ],
    port: Annotated[int, Option(help="port to listen on; 0 picks a free one")] = 8010,
    model: Annotated[
        str | None, Option(help="a model's directory or hub id: shows tokens as text and what would have broken")
    ] = None,
    trainer_logprobs: TrainerFile = None,
    export: Annotated[
        Path | None, Option("--export", "-o", "--out", help="write one HTML file instead of serving")
    ] = None,
) -> int:
    """The viewer: sessions, token trees, mismatch plots. Read-only."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {port}")
    require_file("--export", export)
    from tokentrue.samples.trainer_logprobs import read_trainer_logprobs
    from tokentrue.viewer import GatewayData, ViewerData, write_export

    if is_url(source):
        if model is not None or trainer_logprobs is not None:
            raise ConfigError(
                "--model and --trainer-logprobs: a gateway shows its own model; they are for a store or a file"
            )
        opened = data = GatewayData(source, key=None)
    else:
        trainer = None if trainer_logprobs is None else read_trainer_logprobs(trainer_logprobs)
        opened = open_source(source)
        data = ViewerData(opened, renderer=renderer_from("--model", model), trainer=trainer)
    with closing(opened):
        if export is None:
            serve(data, opened.name, port)
        else:
            count, total = write_export(data, export), data.ask("index", limit="1")["total"]
            size = export.stat().st_size / 1e6
            print(f"{export}: {count} of {pluralise(total, 'session')}, {size:.1f} MB")
    return 0


def open_source(source: str) -> "RecordSource":
    from tokentrue.sessions.journal import is_postgres
    from tokentrue.viewer import FileSource, StoreSource

    if is_postgres(source) or source.startswith("sqlite:") or source.endswith(".sqlite"):
        journal = open_recorded(source)
        return StoreSource(journal, name=Path(journal.target.removeprefix("sqlite:")).name)
    return FileSource(source)


def serve(data: "ViewerData | GatewayData", name: str, port: int) -> None:
    import secrets
    import socket

    import uvicorn
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Mount, Router

    from tokentrue.viewer import GatewayData, create_app

    # A gateway shows its conversations to holders of the admin key alone: others on this machine must guess the path.
    path = f"{secrets.token_urlsafe(24)}/" if isinstance(data, GatewayData) else ""
    page = Router(routes=[Mount(f"/{path}".rstrip("/"), create_app(data))])
    # A page from elsewhere must not read it by DNS rebinding.
    app = TrustedHostMiddleware(page, allowed_hosts=[HOST, "localhost"])
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {HOST}:{port}: {error.strerror}; choose another --port") from error
    url = f"http://{HOST}:{listener.getsockname()[1]}/{path}"
    print(f"viewer: {url}   ({name}; Ctrl-C stops it)", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
