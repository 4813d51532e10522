"""tokentrue samples STORE_OR_URL -o OUT: exports training samples."""

from collections import Counter
from collections.abc import Iterator
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
    pluralise,
    print_json,
    require_file,
    require_utf8,
    show_coverage,
)
from tokentrue.cli.sessions import JournalSource, session_ids
from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.types import Coverage

if TYPE_CHECKING:
    from tokentrue.client import Client
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
    from tokentrue.samples import write_samples
    from tokentrue.samples.files import is_stream
    from tokentrue.samples.images import ImageFolder

    format = choose_format(out, format)
    require_file("-o", out)
    for name in session or ():
        require_utf8("--session", name)
    require_utf8("--group", group)
    if session and group is not None:
        raise ConfigError("--session and --group: give one of them; a session's group is in its samples")
    if is_url(source) and (max_tokens is not None or abandoned):
        raise ConfigError("--max-tokens and --abandoned need the journal itself, not a URL")
    counts: Counter[str] = Counter(sessions=0, sampled=0, trained=0)
    reasons: Counter[str] = Counter()

    def collect(opened: "Client | JournalSource") -> "Iterator[Sample]":
        folder = ImageFolder(out)
        for name in session or session_ids(opened, group):
            try:
                if isinstance(opened, JournalSource):
                    made = opened.assemble(name, max_tokens=max_tokens, include_abandoned=abandoned)
                else:
                    made = opened.session_samples(name)
            except SessionNotFound:
                if session:
                    raise
                continue  # it was listed, and has been purged since
            counts.update(sessions=1, sampled=made.coverage.sampled, trained=made.coverage.trained)
            reasons.update(made.coverage.untrained_by_reason)
            for sample in made.samples:
                if sample.images and is_stream(out):
                    raise ConfigError(
                        f"sample {sample.sample_id} has images, whose files are beside a file: give -o FILE"
                    )
                folder.write(sample, opened.session_image)
                yield sample
        if group is not None and not counts["sessions"]:  # an error, not an empty file
            raise SessionNotFound(f"no session of group {group!r}; `tokentrue sessions` lists them")

    with closing(connect(source) if is_url(source) else JournalSource(source)) as opened:
        count = write_samples(count_items(collect(opened), "sample"), out, format=format)
    ratio = Coverage(sampled=counts["sampled"], trained=counts["trained"]).ratio
    if as_json:
        print_json({"out": str(out), "samples": count, **counts, "coverage": ratio, "untrained": reasons})
        return 0
    share = show_coverage(ratio, counts["sampled"]) if counts["sessions"] else "the journal has no session yet"
    end = f"{'; ' if counts['sessions'] else ': '}{share}"
    print(f"{pluralise(count, 'sample')} of {pluralise(counts['sessions'], 'session')} in {out}{end}")
    if reasons:
        hint = " (the same request again: use a session for each rollout, or n)" if "retried" in reasons else ""
        print("not trained: " + ", ".join(f"{tokens} {why}" for why, tokens in sorted(reasons.items())) + hint)
    return 0


def choose_format(out: Path, format: str | None) -> str:
    from tokentrue.samples.files import MEDIA_TYPES, find_format

    named = ".jsonl" if out.suffix in ("", ".json") else out.suffix
    if format is None:
        if named not in MEDIA_TYPES:
            raise ConfigError(f"-o {out}: no format writes {named} files; name it .jsonl, or choose --format {NAMES}")
        return named.removeprefix(".")
    wanted = find_format(format).suffix
    if out.suffix and named in MEDIA_TYPES and named != wanted:
        raise ConfigError(f"-o {out}: format {format} writes a {wanted} file; name it {out.with_suffix(wanted).name}")
    return format
