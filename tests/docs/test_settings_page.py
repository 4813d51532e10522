"""docs/settings.md has every key of the three commands with its default, every option of the engines, and every flag is
on some page."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import typer

from tests.docs.fences import PAGES, ROOT
from tokentrue.app.configuration import as_mapping, literal
from tokentrue.app.rollouts import RolloutRun
from tokentrue.app.training import TrainRun
from tokentrue.app.wiring import ServeConfig
from tokentrue.cli.main import COMMANDS, load_command
from tokentrue.mismatch import LOSSES, Correction, LossConfig
from tokentrue.providers import registry

PAGE = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
NOT_SET = "*not set*"
ENGINES = registry.ENGINES
WIRED = {"self", "url", "script", "encode", "stop_id", "decode", "limits"}  # parameters of providers that no file sets


KEYS = "| key | default | meaning |"
OPTIONS = "| `engine.options.` | engines | default | meaning |"


def rows(header: str) -> Iterator[list[str]]:
    """The rows of all tables with this header, as cells."""
    current = ""
    for before, line in pairwise(["", *PAGE.splitlines()]):
        if line.startswith("|") and not before.startswith("|"):
            current = line
        elif line.startswith("| ") and current == header:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def value_of(cell: str) -> Any:
    return None if cell == NOT_SET else literal(cell.strip("`"))


def keys_of(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", as_mapping(value)


def test_every_key_is_there_with_its_default() -> None:
    known = {
        (key, repr(value)) for config in (ServeConfig(), RolloutRun(), TrainRun()) for key, value in keys_of(config)
    }
    written = {(key.strip("`"), repr(value_of(default))) for key, default, _ in rows(KEYS)}
    assert written == known, f"not on the page: {sorted(known - written)}; only on the page: {sorted(written - known)}"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_of_an_engine_is_there(engine: str) -> None:
    module, _, name = registry.ENGINES[engine].address.partition(":")
    kinds = [
        kind for kind in getattr(import_module(module), name).__mro__[:-1] if not getattr(kind, "_is_protocol", False)
    ]
    parameters = {key: each for kind in kinds for key, each in inspect.signature(kind.__init__).parameters.items()}
    known = {
        key: None if each.default is inspect.Parameter.empty else each.default
        for key, each in parameters.items()
        if key not in WIRED and each.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    }
    written = {
        key.strip("`"): value_of(default) for key, engines, default, _ in rows(OPTIONS) if engine in engines.split(", ")
    }
    assert written == known


@pytest.mark.parametrize(
    ("key", "kind", "names"), [("loss.options", LossConfig, set()), ("loss.correction", Correction, {"preset"})]
)
def test_every_field_of_a_loss_is_there(key: str, kind: type[Any], names: set[str]) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"- `{key}`: "))
    fields = {field.name for field in dataclasses.fields(kind)} - {"correction"}
    assert set(re.findall(r"`(\w+)`", line.partition(": ")[2])) == fields | names


def test_every_loss_is_there() -> None:
    row = next(cells for cells in rows(KEYS) if cells[0] == "`loss.name`")
    assert re.findall(r"`(\w+)`", row[2]) == list(LOSSES)


def test_every_flag_is_on_some_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in COMMANDS:
        app = typer.Typer(add_completion=False)
        app.command(name)(load_command(name))
        flags = [
            flag for parameter in typer.main.get_command(app).params for flag in parameter.opts if flag.startswith("--")
        ]
        missing = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", text)]
        assert not missing, f"tokentrue {name}: {missing} on no page"
