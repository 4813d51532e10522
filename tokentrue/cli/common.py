"""Options, how their values resolve to a model, a journal or a gateway, and output."""

import errno
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Argument, Option

from tokentrue.errors import ConfigError, FileFormatError, InputError, RenderError
from tokentrue.json_types import JsonValue
from tokentrue.plain_json import is_utf8

# Help texts need none of these: each function imports what it uses.
if TYPE_CHECKING:
    from rich.console import Console

    from tokentrue.client import Client
    from tokentrue.renderers import Renderer
    from tokentrue.sessions.journal import Journal
    from tokentrue.viewer import Report

T = TypeVar("T")
SUBJECT = "model: "  # what `tokentrue.hub` and `load_renderer` begin with
ADVICE = "give what `tokentrue serve --store` was given: sqlite:PATH or postgresql://…"
PIPED_WIDTH = 1000  # columns; a table takes what it needs
MAGIC = b"SQLite format 3\0"
STYLES = {  # of cells and verdicts
    **dict.fromkeys(("ok", "pass", "proven"), "green"),
    **dict.fromkeys(("fault", "fail", "wrong"), "bold red"),
    **dict.fromkeys(("warn", "cannot tell", "history"), "yellow"),
    **dict.fromkeys(("not applicable", "not run", "unsupported"), "dim"),
    "refused": "red",
}
STEP_PARTS = ("wait", "recompute", "measure", "update", "publish")  # `wait`: rollouts run and nothing is trained

AsJson = Annotated[bool, Option("--json", help="print JSON")]
ConfigFile = Annotated[Path | None, Option("--config", help="a TOML file; flags win over it")]
Settings = Annotated[list[str] | None, Option("--set", help="any setting: key.path=value; may be repeated")]
OutFolder = Annotated[Path | None, Option("-o", "--out", help="output directory; resumes an existing run")]
ReportPage = Annotated[Path | None, Option("-o", "--out", help="write the report as one HTML page")]
ModelName = Annotated[
    str | None, Option("--model", help="a model's directory or hub id (default: the small model that ships)")
]
Device = Annotated[str | None, Option("--device", help="cpu, cuda or cuda:N (default: cpu)")]
Dtype = Annotated[str | None, Option("--dtype", help="float32, bfloat16 or float16 (default: float32)")]
RayAddress = Annotated[
    str | None, Option("--ray", help="a Ray address, or `local`: engines, gateways and rollouts as actors")
]
RayNodes = Annotated[int | None, Option("--nodes", help="of --ray: nodes to place the actors on")]
SamplesFile = Annotated[Path, Argument(help="exported samples, in any of tokentrue's formats")]
JournalOrUrl = Annotated[
    str, Argument(help="a journal (sqlite:PATH, PATH or postgresql://…) or the base URL of a running gateway")
]
TrainerFile = Annotated[
    Path | None,
    Option("--trainer-logprobs", help='JSON lines {"sample_id": …, "logprobs": [per token, null where unknown]}'),
]


def require_utf8(option: str, text: str | None) -> None:
    if not is_utf8(text or ""):
        raise ConfigError(f"{option}: {text!r} is not UTF-8 text")


@contextmanager
def name_option(option: str) -> Generator[None]:
    try:
        yield
    except (InputError, RenderError) as error:
        if not str(error).startswith(SUBJECT):
            raise
        raise ConfigError(f"{option}: {str(error).removeprefix(SUBJECT)}") from error


def check_model_of(option: str, model: str | None, check: Callable[[str], object]) -> None:
    if model is not None:
        with name_option(option):
            check(model)


def renderer_from(option: str, model: str | None) -> "Renderer | None":
    if model is None:
        return None
    from tokentrue.renderers import load_renderer

    with name_option(option):
        return load_renderer(model)


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def connect(url: str) -> "Client":
    from tokentrue.client import Client

    return Client(url.rstrip("/").removesuffix("/v1"))


def open_recorded(source: str) -> "Journal":
    from tokentrue.sessions.journal import open_journal

    return open_journal(require_store(source), read_only=True)


def require_store(source: str) -> str:
    """The store that `source` names. Call it before this process opens it: closing a file drops the locks that SQLite
    holds on it."""
    from tokentrue.sessions.journal import is_postgres

    if is_postgres(source):
        return source
    path = Path(source.removeprefix("sqlite:"))
    if path.is_dir():
        held = ", ".join(map(str, sorted(path.glob("*.sqlite")))) or "none is in it"
        raise FileFormatError(f"{path} is a directory; name the journal in it: {held}")
    if not path.is_file():
        advice = f"write http://{source} for a gateway" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", source) else ADVICE
        raise FileFormatError(f"no journal at {path}; {advice}")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) not in (b"", MAGIC):
            raise FileFormatError(f"{path} is not a journal (no SQLite file); {ADVICE}")
    return f"sqlite:{path}"


def pluralise(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_share(share: float) -> str:
    """`99.99%`: rounded down, as in the viewer, so that only all is 100.00%."""
    return f"{math.floor(share * 10_000 + 1e-9) / 100:.2f}%"


def show_coverage(share: float, sampled: int) -> str:
    return f"coverage {show_share(share)} of {pluralise(sampled, 'sampled token')}" if sampled else "no sampled tokens"


def console(*, stderr: bool = False) -> "Console":
    """Without escapes under NO_COLOR; wide enough for whole tables where the output is no terminal."""
    from rich.console import Console

    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        width=PIPED_WIDTH if piped and "COLUMNS" not in os.environ else None,
    )


def print_json(value: JsonValue) -> None:
    print(json.dumps(value, indent=1))


def print_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str | float]], *, whole: int = 0
) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", min_width=whole if number == 0 else None)
    for row in rows:
        cells = [f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row]
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in cells))
    console().print(table)


def print_verdict(text: str, *, ok: bool) -> None:
    console().print(text, style="green" if ok else "red", markup=False, highlight=False)


def output_report(report: "Report", out: Path | None, answer: JsonValue, *, as_json: bool, tables: int) -> None:
    if out is not None:
        from tokentrue.viewer import write_report

        write_report(out, report)
    if as_json:
        print_json(answer)
    else:
        print_report(report, out, tables=tables)


def print_report(report: "Report", out: Path | None, *, tables: int) -> None:
    for table in report.tables[:tables]:
        print_table(table.title, table.columns, table.rows)
    print_verdict(report.verdict, ok=report.ok)
    if out is not None:
        print(f"report: {out}")


def require_file(option: str, path: Path | None) -> None:
    """Raises if no file can be written there, before anything is computed for it."""
    if path is not None and (path.is_dir() or not path.name):
        raise ConfigError(f"{option} {path}: is a directory; name a file in it")
    if path is not None and not os.access(path.parent, os.W_OK):
        why = "is not writable" if path.parent.is_dir() else "does not exist"
        raise ConfigError(f"{option} {path}: directory {path.parent} {why}")


def require_folder(folder: Path) -> None:
    """Raises what creating `folder` would raise, and creates nothing."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        kind = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
        raise OSError(kind, os.strerror(kind), str(folder))


@contextmanager
def progress_bar(
    title: str, total: int, *, quiet: bool = False, every_s: float = 0.0
) -> Generator[Callable[[str], None]]:
    """Call the yielded function once per finished piece, with a word about it. A bar with the time left on a terminal;
    elsewhere a line per piece, or one every `every_s` seconds."""
    if quiet:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("  {task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn())
    is_terminal = sys.stdout.isatty()
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console(), disable=not is_terminal)
    began = said = time.monotonic()
    done = 0
    with bar:
        task = bar.add_task(title, total=total, note="")

        def advance(note: str) -> None:
            nonlocal done, said
            done += 1
            left = time_left(began, done, total)
            bar.update(task, completed=done, note=f"{left}  {note}")
            if not is_terminal and (time.monotonic() - said >= every_s or done >= total):
                said = time.monotonic()
                print(f"  {title} {done}/{total}  {note}".rstrip() + f"  {left}".rstrip(), flush=True)

        yield advance


def time_left(began: float, done: int, total: int) -> str:
    """If the others take as long as these. Not for the first, which waited for the engine, nor before a twentieth."""
    seconds = round((time.monotonic() - began) / done * (total - done))
    return f"{timedelta(seconds=seconds)} left" if max(2, total / 20) <= done < total else ""


def count_items(items: Iterable[T], noun: str, *, quiet: bool = False) -> Iterator[T]:
    with show_status("reading", quiet=quiet or not sys.stderr.isatty()) as update:
        for number, item in enumerate(items, start=1):
            update(pluralise(number, noun))
            yield item


@contextmanager
def show_status(text: str, *, quiet: bool = False) -> Generator[Callable[[str], None]]:
    """A spinner whose text the yielded function changes on a terminal's stderr, one line elsewhere."""
    if quiet:
        yield lambda _: None
        return
    shown = console(stderr=True)
    if not shown.is_terminal:
        print(f"  {text}", file=sys.stderr, flush=True)
        yield lambda _: None
        return
    with shown.status(text) as status:
        yield status.update


@contextmanager
def rollout_log(out: Path) -> Generator[Path]:
    path = out / "rollouts.log"
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("tokentrue.rollouts")
    logger.addHandler(handler)
    try:
        yield path
    finally:
        logger.removeHandler(handler)
        handler.close()


def describe_costs(steps: Sequence[Mapping[str, float]]) -> str:
    spent = {name: sum(step.get(name, 0.0) for step in steps) for name in (*STEP_PARTS, "step")}
    parts = ", ".join(f"{name} {spent[name] / (spent['step'] or 1.0):.1%}" for name in STEP_PARTS)
    return f"{parts}; publishing the weights took {1000 * spent['publish'] / max(1, len(steps)):.1f} ms"
