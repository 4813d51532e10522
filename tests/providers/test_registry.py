"""One table of engines; what names them elsewhere follows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokentrue.providers import registry

ENGINES_PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_has_a_row_for_every_engine() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", ENGINES_PAGE.read_text(), re.M)
    assert sorted(rows) == sorted(registry.ENGINES)


@pytest.mark.parametrize("command", ["serve", "doctor", "train", "rollout"])
def test_help_names_the_engines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tokentrue.cli.main import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in registry.REMOTE + registry.IN_PROCESS)
