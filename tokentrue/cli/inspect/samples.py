"""tokentrue samples STORE_OR_URL -o OUT: exports training samples from a journal or from a running gateway."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tokentrue.cli.inspect.journal import open_recorded
from tokentrue.cli.options import require_utf8
from tokentrue.cli.words import count_of
from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from tokentrue.client import Client
    from tokentrue.types import Coverage

T = TypeVar("T")


def command(
    source: Annotated[
        str, typer.Argument(help="a journal (sqlite:PATH, PATH or postgresql://…) or the base URL of a running gateway")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="the file to write")],
    session: Annotated[list[str] | None, typer.Option("--session", help="only this session (may repeat)")] = None,
    group: Annotated[str | None, typer.Option("--group", help="only sessions of this group")] = None,
    format: Annotated[
        str, typer.Option("--format", help="jsonl, parquet, safetensors, verl, trl, slime, prime-rl or tinker")
    ] = "jsonl",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="cut samples at the last turn that fits")
    ] = None,
    abandoned: Annotated[bool, typer.Option("--abandoned", help="also export what was retried or given up")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> int:
    """Export training samples."""
    from tokentrue.samples import write_samples
    from tokentrue.samples.exporters import EXPORTERS

    if format not in EXPORTERS:
        raise ConfigError(f"no format {format!r}; choose one of {', '.join(EXPORTERS)}")
    for name in session or ():
        require_utf8("--session", name)
    require_utf8("--group", group or "")
    total = Totals()
    samples = _from_url(source, session, group, total) if source.startswith(("http://", "https://")) else None
    if samples is None:
        samples = _from_journal(source, session, group, total, max_tokens=max_tokens, abandoned=abandoned)
    elif max_tokens is not None or abandoned:
        raise ConfigError("--max-tokens and --abandoned need the journal itself, not a URL")
    count = write_samples(_count_with_bar(_at_least_one(samples, total, group)), out, format=format)
    _report(total, count, out, as_json=as_json)
    return 0


class Totals:
    """Coverage over everything exported."""

    def __init__(self) -> None:
        self.sessions = self.sampled = self.trained = 0
        self.reasons: Counter[str] = Counter()

    def add(self, coverage: Coverage) -> None:
        self.sessions += 1
        self.sampled += coverage.sampled
        self.trained += coverage.trained
        self.reasons.update(coverage.untrained_by_reason)


def _at_least_one(samples: Iterator[Any], total: Totals, group: str | None) -> Iterator[Any]:
    """The samples; a group that no session belongs to is an error, not an empty file."""
    yield from samples
    if group is not None and not total.sessions:
        raise SessionNotFound(f"no session of group {group!r}; `tokentrue sessions` lists them")


def _count_with_bar(samples: Iterator[Any]) -> Iterator[Any]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("exporting")
        for number, sample in enumerate(samples, start=1):
            progress.update(task, description=count_of(number, "sample"))
            yield sample


def _from_journal(
    source: str, names: list[str] | None, group: str | None, total: Totals, *, max_tokens: int | None, abandoned: bool
) -> Iterator[Any]:
    from tokentrue.samples import assemble
    from tokentrue.sessions.store import load_tree

    journal = open_recorded(source)
    try:
        chosen = names or [record.id for record in journal.all_sessions(group=group)]
        for record, tree in _load_each(lambda name: load_tree(journal, name), chosen, must_exist=bool(names)):
            made = assemble(tree, record, max_tokens=max_tokens, include_abandoned=abandoned)
            total.add(made.coverage)
            yield from made.samples
    finally:
        journal.close()


def _from_url(url: str, names: list[str] | None, group: str | None, total: Totals) -> Iterator[Any]:
    from tokentrue.client import Client

    with Client(url.rstrip("/").removesuffix("/v1")) as client:
        for made in _load_each(client.session_samples, names or _session_names(client, group), must_exist=bool(names)):
            total.add(made.coverage)
            yield from made.samples


def _load_each(load: Callable[[str], T], names: Iterable[str], *, must_exist: bool) -> Iterator[T]:
    """The sessions of these names. One that was listed, and not asked for, may have been purged since: it is left
    out."""
    for name in names:
        try:
            yield load(name)
        except SessionNotFound:
            if must_exist:
                raise


def _session_names(client: Client, group: str | None) -> Iterator[str]:
    last: JsonObject | None = None
    while page := client.sessions(after=last, group=group):
        yield from (item["session_id"] for item in page)
        last = page[-1]


def _report(total: Totals, count: int, out: Path, *, as_json: bool) -> None:
    ratio = total.trained / total.sampled if total.sampled else 1.0
    if as_json:
        import json

        counts = {"samples": count, "sessions": total.sessions, "sampled": total.sampled, "trained": total.trained}
        print(json.dumps({"out": str(out), **counts, "coverage": ratio, "untrained": total.reasons}, indent=1))
        return
    left_out = ", ".join(f"{tokens} {why}" for why, tokens in sorted(total.reasons.items()))
    written = f"{count_of(count, 'sample')} of {count_of(total.sessions, 'session')} in {out}"
    if not total.sessions:
        print(f"{written}: the journal has no session yet")
        return
    print(f"{written}; coverage {ratio:.2%} of {count_of(total.sampled, 'sampled token')}")
    if left_out:
        print(f"not trained: {left_out}")
