"""tokentrue verify MODEL: proves or refutes, in token ids, that a model's chat template can be extended."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from tokentrue.cli.common import AsJson, print_json, print_table, print_verdict, show_status
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonObject

if TYPE_CHECKING:
    from tokentrue.renderers import Verification

MEANINGS = {
    "proven": "the new message's tokens follow the recorded ones, for every conversation of this shape",
    "history": "they do, too: the tokens depend on earlier turns",
    "refused": "such a message cannot be appended; the conversation is rendered whole, as a new root",
    "wrong": "the appended tokens are not those of the template",
    "unsupported": "the template does not take such a message",
}


def command(
    model: Annotated[str, Argument(help="a model's directory, or a hub id")],
    template: Annotated[Path | None, Option(help="a chat template to use instead of the model's own")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="k=v: a variable of the template; v is JSON or text")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Exit 0: users' and tools' messages can follow the model's turn, proven. 1: they cannot, and the table says
    why."""
    from tokentrue.app.configuration import Checks
    from tokentrue.hub import check_model

    checks = Checks()
    checks(check_model, model)
    text = None if template is None else checks(read_template, template)
    kwargs: JsonObject = {}
    for item in settings or ():
        name, equals, value = item.partition("=")
        checks.require(bool(equals) and name.isidentifier(), f"--set: expected k=v, got {item!r}")
        try:
            kwargs[name] = json.loads(value)
        except ValueError:
            kwargs[name] = value
    checks.finish()
    with show_status("proving", quiet=not sys.stderr.isatty()):
        from tokentrue.renderers import verify

        found = verify(model, chat_template=text, template_kwargs=kwargs or None)
    if as_json:
        print_json(found.to_json())
    else:
        print_proof(found)
    return 0 if found.ok else 1


def read_template(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"--template: no file {str(path)!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--template: {path} is not text: {error}") from error


def print_proof(found: "Verification") -> None:
    columns = ("role appended", "result", "between stop and content", "rewrites history", "not proven")
    roles = [
        (
            role,
            result,
            repr(found.boundary[role]) if role in found.boundary else "-",
            "yes" if found.rewrites.get(role) else "no",
            found.why.get(role, ""),
        )
        for role, result in found.roles.items()
    ]
    print_table(f"{found.model} (family: {found.family})", columns, roles)
    cases: list[tuple[str, str, str, str]] = []
    for case in found.cases:
        why = f"{case.why}: {case.detail}" if case.detail else case.why
        cases.append((case.role, case.shape, case.outcome, why))
    print_table("shapes", ("role appended", "conversation ends with", "result", "why"), cases)
    used = {case.outcome for case in found.cases} | set(found.roles.values())
    print(*(f"{result}: {meaning}" for result, meaning in MEANINGS.items() if result in used), sep="\n")
    print_table("parse inverts render", ("turn", "result"), found.parse.items())
    if found.images:
        print_table("images", ("role", "result"), found.images.items())
    stops = "  ".join(f"{kind}: {' '.join(texts) or '-'}" for kind, texts in found.stops.items())
    hashes = (f"template {found.template_hash}", f"tokenizer {found.tokenizer_hash}")
    print(f"stop tokens  {stops}", *hashes, *found.warnings, sep="\n")
    print_verdict("ok" if found.ok else "not ok", ok=found.ok)
