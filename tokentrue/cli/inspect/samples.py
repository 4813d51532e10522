"""tokentrue samples STORE_OR_URL -o OUT: exports training samples from a journal or from a running gateway."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tokentrue.cli.options import AsJson, JournalOrUrl, connect, is_url, open_recorded, require_utf8
from tokentrue.cli.output import count_items, pluralise
from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.json_types import JsonObject
from tokentrue.samples.formats import FORMATS
from tokentrue.types import Coverage

if TYPE_CHECKING:
    from tokentrue.client import Client
    from tokentrue.types import Sample

T = TypeVar("T")


def command(
    source: JournalOrUrl,
    out: Annotated[Path, typer.Option("-o", "--out", help="the file to write")],
    session: Annotated[list[str] | None, typer.Option("--session", help="only this session (may repeat)")] = None,
    group: Annotated[str | None, typer.Option("--group", help="only sessions of this group")] = None,
    format: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "jsonl",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="cut samples at the last turn that fits")
    ] = None,
    abandoned: Annotated[bool, typer.Option("--abandoned", help="also export what was retried or given up")] = False,
    as_json: AsJson = False,
) -> int:
    """Export training samples."""
    from tokentrue.samples import write_samples
    from tokentrue.samples.files import find_format

    find_format(format)
    for name in session or ():
        require_utf8("--session", name)
    require_utf8("--group", group or "")
    total = Totals()
    if not is_url(source):
        samples = _from_journal(source, session, group, total, max_tokens=max_tokens, abandoned=abandoned)
    elif max_tokens is not None or abandoned:
        raise ConfigError("--max-tokens and --abandoned need the journal itself, not a URL")
    else:
        samples = _from_url(source, session, group, total)
    count = write_samples(count_items(_at_least_one(samples, total, group), "sample"), out, format=format)
    _report(total, count, out, as_json=as_json)
    return 0


class Totals:
    def __init__(self) -> None:
        self.sessions = self.sampled = self.trained = 0
        self.reasons: Counter[str] = Counter()

    def add(self, coverage: Coverage) -> None:
        self.sessions += 1
        self.sampled += coverage.sampled
        self.trained += coverage.trained
        self.reasons.update(coverage.untrained_by_reason)


def _at_least_one(samples: Iterator[Sample], total: Totals, group: str | None) -> Iterator[Sample]:
    """A group without sessions is an error, not an empty file."""
    yield from samples
    if group is not None and not total.sessions:
        raise SessionNotFound(f"no session of group {group!r}; `tokentrue sessions` lists them")


def _from_journal(
    source: str, names: list[str] | None, group: str | None, total: Totals, *, max_tokens: int | None, abandoned: bool
) -> Iterator[Sample]:
    from tokentrue.samples import assemble
    from tokentrue.sessions.journal.journal import load_tree

    journal = open_recorded(source)
    try:
        chosen = names or [record.id for record in journal.all_sessions(group=group)]
        for record, tree in _load_each(lambda name: load_tree(journal, name), chosen, must_exist=bool(names)):
            made = assemble(tree, record, max_tokens=max_tokens, include_abandoned=abandoned)
            total.add(made.coverage)
            yield from made.samples
    finally:
        journal.close()


def _from_url(url: str, names: list[str] | None, group: str | None, total: Totals) -> Iterator[Sample]:
    with connect(url) as client:
        for made in _load_each(client.session_samples, names or session_names(client, group), must_exist=bool(names)):
            total.add(made.coverage)
            yield from made.samples


def _load_each(load: Callable[[str], T], names: Iterable[str], *, must_exist: bool) -> Iterator[T]:
    """A session that was listed, not requested by name, may have been purged since."""
    for name in names:
        try:
            yield load(name)
        except SessionNotFound:
            if must_exist:
                raise


def session_names(client: Client, group: str | None) -> Iterator[str]:
    last: JsonObject | None = None
    while page := client.sessions(after=last, group=group):
        yield from (item["session_id"] for item in page)
        last = page[-1]


def _report(total: Totals, count: int, out: Path, *, as_json: bool) -> None:
    ratio = Coverage(sampled=total.sampled, trained=total.trained).ratio
    if as_json:
        counts = {"samples": count, "sessions": total.sessions, "sampled": total.sampled, "trained": total.trained}
        print(json.dumps({"out": str(out), **counts, "coverage": ratio, "untrained": total.reasons}, indent=1))
        return
    written = f"{pluralise(count, 'sample')} of {pluralise(total.sessions, 'session')} in {out}"
    if not total.sessions:
        print(f"{written}: the journal has no session yet")
        return
    print(f"{written}; coverage {ratio:.2%} of {pluralise(total.sampled, 'sampled token')}")
    if total.reasons:
        print("not trained: " + ", ".join(f"{tokens} {why}" for why, tokens in sorted(total.reasons.items())))
