"""Options shared by the commands, and how their values resolve to a model, a journal or a gateway."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from tokentrue.errors import ConfigError, FileFormatError, InputError, RenderError
from tokentrue.plain_json import is_utf8

if TYPE_CHECKING:
    from tokentrue.client import Client
    from tokentrue.renderers import Renderer
    from tokentrue.sessions import Journal

SUBJECT = "model: "  # what `tokentrue.hub` and `load_renderer` begin with
ADVICE = "give what `tokentrue serve --store` was given: sqlite:PATH or postgresql://…"
MAGIC = b"SQLite format 3\0"

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="print JSON")]
ConfigFile: TypeAlias = Annotated[Path | None, typer.Option("--config", help="a TOML file; flags win over it")]
Settings: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="any setting: key.path=value; may be repeated")
]
OutFolder: TypeAlias = Annotated[Path | None, typer.Option("--out", help="output directory; resumes an existing run")]
ReportPage: TypeAlias = Annotated[Path | None, typer.Option("-o", "--output", help="write the report as one HTML page")]
ModelName: TypeAlias = Annotated[
    str | None,
    typer.Option("--model", help="a model's directory or hub id (default: the small model that ships)"),
]
Device: TypeAlias = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N (default: cpu)")]
Dtype: TypeAlias = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16 (default: float32)")
]
RayAddress: TypeAlias = Annotated[
    str | None, typer.Option("--ray", help="a Ray address, or `local`: engines, gateways and rollouts as actors")
]
RayNodes: TypeAlias = Annotated[int | None, typer.Option("--nodes", help="of --ray: nodes to place the actors on")]
SamplesFile: TypeAlias = Annotated[Path, typer.Argument(help="exported samples, in any of tokentrue's formats")]
JournalOrUrl: TypeAlias = Annotated[
    str, typer.Argument(help="a journal (sqlite:PATH, PATH or postgresql://…) or the base URL of a running gateway")
]
TrainerFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--trainer-logprobs", help='JSON lines {"sample_id": …, "logprobs": [per token, null where unknown]}'),
]


def require_utf8(option: str, text: str) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates."""
    if not is_utf8(text):
        raise ConfigError(f"{option}: {text!r} is not UTF-8 text")


@contextmanager
def name_option(option: str) -> Generator[None, None, None]:
    """Adds the option's name to errors about its model."""
    try:
        yield
    except (InputError, RenderError) as error:
        if not str(error).startswith(SUBJECT):
            raise
        raise ConfigError(f"{option}: {str(error).removeprefix(SUBJECT)}") from error


def renderer_from(option: str, model: str | None) -> Renderer | None:
    if model is None:
        return None
    from tokentrue.renderers import load_renderer

    with name_option(option):
        return load_renderer(model)


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def connect(url: str) -> Client:
    """Reads the admin key from TOKENTRUE_ADMIN_KEY."""
    from tokentrue.client import Client

    return Client(url.rstrip("/").removesuffix("/v1"))


def open_recorded(source: str) -> Journal:
    from tokentrue.sessions.journal import open_journal

    return open_journal(require_store(source), read_only=True)


def require_store(source: str) -> str:
    """Returns the store that `source` names; raises FileFormatError if a path has no journal. Call it before this
    process opens the store: closing a file drops the locks that SQLite holds on it.
    """
    from tokentrue.sessions.journal import is_postgres

    if is_postgres(source):
        return source
    path = Path(source.removeprefix("sqlite:"))
    if not path.is_file():
        raise FileFormatError(f"no journal at {path}; {ADVICE}")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start and start != MAGIC:
        raise FileFormatError(f"{path} is not a journal (no SQLite file); {ADVICE}")
    return f"sqlite:{path}"
