"""Prints the lowest version that pyproject.toml allows of every dependency without torch, as pip constraints.

`python scripts/lowest_versions.py > constraints-lowest.txt`; `make test-lowest` installs them and runs the tests that
need no torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

EXTRAS = ("gateway", "postgres", "otel", "parquet", "images")
TOOLS = (
    "hypothesis",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
)  # of the dev extra: what those tests run on
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def list_requirements() -> Iterator[str]:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    yield from project["dependencies"]
    for extra in EXTRAS:
        yield from project["optional-dependencies"][extra]
    yield from (line for line in project["optional-dependencies"]["dev"] if re.match(r"[\w-]+", line)[0] in TOOLS)


def lowest(requirement: str) -> str:
    """`starlette==0.45` for `starlette>=0.45,<2`."""
    found = re.match(r"([\w.-]+)(?:\[[^\]]*\])?>=([\w.]+)", requirement)
    if found is None:
        raise SystemExit(f"pyproject.toml: {requirement!r} has no lower bound")
    return f"{found[1]}=={found[2]}"


def main() -> None:
    print(
        "# Made by scripts/lowest_versions.py: the lower bounds in pyproject.toml. `make test-lowest` runs the tests with them."
    )
    print("\n".join(sorted(map(lowest, list_requirements()))))


if __name__ == "__main__":
    main()
