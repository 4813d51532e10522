"""constraints-lowest.txt is what `make test-lowest` installs: the lower bounds in pyproject.toml, no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_file_has_the_lower_bounds_of_pyproject() -> None:
    made = subprocess.check_output([sys.executable, "scripts/lowest_versions.py"], cwd=ROOT, text=True)
    assert made == (ROOT / "constraints-lowest.txt").read_text(), (
        "run python scripts/lowest_versions.py > constraints-lowest.txt"
    )
    assert "starlette==" in made and "torch" not in made
