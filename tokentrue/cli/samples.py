"""tokentrue samples STORE_OR_URL -o OUT: exports training samples from a journal or from a running gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from tokentrue.cli.common import (
    AsJson,
    JournalOrUrl,
    connect,
    count_items,
    is_url,
    open_recorded,
    pluralise,
    print_json,
    require_utf8,
    show_coverage,
)
from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.json_types import JsonObject
from tokentrue.types import Coverage

if TYPE_CHECKING:
    from tokentrue.client import Client, SessionSamples
    from tokentrue.samples import Assembly
    from tokentrue.samples.images import ImageFolder
    from tokentrue.types import Sample

NAMES = "jsonl, parquet, safetensors, verl, trl, slime, prime-rl, tinker"


def command(
    source: JournalOrUrl,
    out: Annotated[Path, Option("-o", "--out", help="the file to write")],
    session: Annotated[list[str] | None, Option(help="only this session (may repeat)")] = None,
    group: Annotated[str | None, Option(help="only sessions of this group")] = None,
    format: Annotated[str | None, Option(help=f"{NAMES} (default: by the file's name, else jsonl)")] = None,
    max_tokens: Annotated[int | None, Option(help="cut samples at the last turn that fits")] = None,
    abandoned: Annotated[bool, Option("--abandoned", help="also export what was retried or given up")] = False,
    as_json: AsJson = False,
) -> int:
    """Export training samples."""
    from tokentrue.samples import assemble, write_samples
    from tokentrue.samples.images import ImageFolder
    from tokentrue.sessions.journal.journal import load_tree

    format = format or {".parquet": "parquet", ".safetensors": "safetensors"}.get(out.suffix, "jsonl")
    require_suffix(out, format)
    for name in session or ():
        require_utf8("--session", name)
    require_utf8("--group", group)
    if is_url(source) and (max_tokens is not None or abandoned):
        raise ConfigError("--max-tokens and --abandoned need the journal itself, not a URL")
    counts: Counter[str] = Counter(sessions=0, sampled=0, trained=0)
    reasons: Counter[str] = Counter()

    folder = ImageFolder(out)

    def collect(
        load: Callable[[str], Assembly | SessionSamples],
        listed: Iterable[str],
        read_image: Callable[[str, str], bytes],
    ) -> Iterator[Sample]:
        for name in session or listed:
            try:
                made = load(name)
            except SessionNotFound:
                if session:
                    raise
                continue  # it was listed, and has been purged since
            counts.update(sessions=1, sampled=made.coverage.sampled, trained=made.coverage.trained)
            reasons.update(made.coverage.untrained_by_reason)
            yield from keep_images(made.samples, out, folder, read_image)
        if group is not None and not counts["sessions"]:  # an error, not an empty file
            raise SessionNotFound(f"no session of group {group!r}; `tokentrue sessions` lists them")

    def read_all() -> Iterator[Sample]:
        if is_url(source):
            with connect(source) as client:
                yield from collect(client.session_samples, session_names(client, group), client.session_image)
            return
        with closing(open_recorded(source)) as journal:

            def load(name: str) -> Assembly:
                record, tree = load_tree(journal, name)
                return assemble(tree, record, max_tokens=max_tokens, include_abandoned=abandoned)

            names = (record.id for record in journal.all_sessions(group=group))
            yield from collect(load, names, lambda name, sha256: journal.read_image(name, sha256)[0])

    count = write_samples(count_items(read_all(), "sample"), out, format=format)
    ratio = Coverage(sampled=counts["sampled"], trained=counts["trained"]).ratio
    if as_json:
        print_json({"out": str(out), "samples": count, **counts, "coverage": ratio, "untrained": reasons})
        return 0
    written = f"{pluralise(count, 'sample')} of {pluralise(counts['sessions'], 'session')} in {out}"
    if not counts["sessions"]:
        print(f"{written}: the journal has no session yet")
        return 0
    print(f"{written}; {show_coverage(ratio, counts['sampled'])}")
    if reasons:
        hint = " (the same request again: use a session for each rollout, or n)" if "retried" in reasons else ""
        print("not trained: " + ", ".join(f"{tokens} {why}" for why, tokens in sorted(reasons.items())) + hint)
    return 0


def require_suffix(out: Path, format: str) -> None:
    """Refuses a name that says another kind of file."""
    from tokentrue.samples.files import MEDIA_TYPES, find_format

    wanted, named = find_format(format).suffix, ".jsonl" if out.suffix == ".json" else out.suffix
    if named in MEDIA_TYPES and named != wanted:
        raise ConfigError(f"-o {out}: format {format} writes a {wanted} file; name it {out.with_suffix(wanted).name}")


def session_names(client: Client, group: str | None) -> Iterator[str]:
    last: JsonObject | None = None
    while page := client.sessions(after=last, group=group):
        yield from (item["session_id"] for item in page)
        last = page[-1]


def keep_images(
    samples: Iterable[Sample], out: Path, folder: ImageFolder, read: Callable[[str, str], bytes]
) -> Iterator[Sample]:
    from tokentrue.samples.files import is_stream

    for sample in samples:
        if sample.images and is_stream(out):
            raise ConfigError(f"sample {sample.sample_id} has images, whose files are beside a file: give -o FILE")
        folder.write(sample, read)
        yield sample
