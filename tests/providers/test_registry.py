"""One table of engines; what names them elsewhere follows it."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tokentrue.errors import ConfigError
from tokentrue.providers import load, registry
from tokentrue.providers.scripted import ScriptedProvider

ENGINES_PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_has_a_row_for_every_engine() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", ENGINES_PAGE.read_text(), re.M)
    assert sorted(rows) == sorted(registry.SERVED)


@pytest.mark.parametrize("command", ["serve", "doctor", "train", "rollout"])
def test_help_names_the_engines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tokentrue.cli.main import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in registry.REMOTE + registry.IN_PROCESS)


def test_an_engine_that_another_package_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> list[Any]:
        place = "tokentrue.providers.scripted:ScriptedProvider"
        return [EntryPoint(name="theirs", value=place, group=group)] if group == "tokentrue.providers" else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert isinstance(load("theirs", script=[]), ScriptedProvider)
    with pytest.raises(ConfigError, match=r"scripted, verified, theirs$"):
        load("ours")
