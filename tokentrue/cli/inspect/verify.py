"""tokentrue verify MODEL: proves or refutes, by comparing token ids, that a model's chat template can be extended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentrue.cli.options import AsJson
from tokentrue.cli.output import print_table
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonValue

if TYPE_CHECKING:
    from tokentrue.renderers import Verification

_COLOURS = {"proven": "green", "history": "yellow", "refused": "red", "wrong": "bold red", "unsupported": "dim"}


def command(
    model: Annotated[str, typer.Argument(help="a model's directory, or a hub id")],
    template: Annotated[
        Path | None, typer.Option("--template", help="a chat template to use instead of the model's own")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="k=v: a variable of the template; v is JSON or text")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Exit 0: users' and tools' messages can follow the model's turn, proven. 1: they cannot, and the table says
    why."""
    from rich.console import Console

    if template is not None and not template.is_file():
        raise ConfigError(f"--template: no file {str(template)!r}")
    kwargs = dict(_setting(item) for item in settings or ())
    with Console(stderr=True).status("proving"):
        from tokentrue.renderers import verify

        found = verify(model, chat_template=_read_template(template), template_kwargs=kwargs or None)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))
    else:
        _show(found)
    return 0 if found.ok else 1


def _read_template(template: Path | None) -> str | None:
    try:
        return None if template is None else template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--template: {template} is not text: {error}") from error


def _setting(item: str) -> tuple[str, JsonValue]:
    name, equals, value = item.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--set: expected k=v, got {item!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _show(found: Verification) -> None:
    from rich.console import Console
    from rich.text import Text

    print_table(
        f"{found.model} (family: {found.family})",
        ("role appended", "result", "between stop and content", "rewrites history", "not proven"),
        (
            (
                role,
                (result, _COLOURS[result]),
                repr(found.boundary[role]) if role in found.boundary else "-",
                "yes" if found.rewrites.get(role) else "no",
                found.why.get(role, ""),
            )
            for role, result in found.roles.items()
        ),
    )
    cases = [
        (
            case.role,
            case.shape,
            (case.outcome, _COLOURS[case.outcome]),
            f"{case.why}: {case.detail}" if case.detail else case.why,
        )
        for case in found.cases
    ]
    print_table("shapes", ("role appended", "conversation ends with", "result", "why"), cases)
    print_table("parse inverts render", ("turn", "result"), found.parse.items())
    stops = "  ".join(f"{kind}: {' '.join(texts) or '-'}" for kind, texts in found.stops.items())
    hashes = (f"template {found.template_hash}", f"tokenizer {found.tokenizer_hash}")
    console = Console()
    for line in (f"stop tokens  {stops}", *hashes, *found.warnings):
        console.print(Text(line))
    console.print(Text("ok" if found.ok else "not ok", style="green" if found.ok else "red"))
