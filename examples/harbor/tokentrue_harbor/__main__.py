"""tokentrue-harbor export STORE SESSION [-o FILE]
tokentrue-harbor check STORE SESSION TRAJECTORY.json

`check` exits with 1 where the harness's account and the record disagree, and lists where; with 2 if it was called
wrongly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tokentrue.cli.common import open_recorded
from tokentrue.errors import FileFormatError, TokenTrueError
from tokentrue.sessions.journal.journal import load_tree
from tokentrue_harbor.atif import compare_trajectories, trajectory_from_tree


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tokentrue-harbor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("export", "check"):
        command = commands.add_parser(name)
        command.add_argument("store", help="sqlite:PATH or postgresql://…, the journal of a gateway")
        command.add_argument("session")
    commands.choices["export"].add_argument(
        "-o", "--out", type=Path, help="the file to write; default: standard output"
    )
    commands.choices["check"].add_argument("trajectory", type=Path, help="Harbor's agent/trajectory.json")
    commands.choices["check"].add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        with closing(open_recorded(given.store)) as journal:
            _, tree = load_tree(journal, given.session)
        recorded = trajectory_from_tree(tree, given.session)
        if given.command == "export":
            text = json.dumps(recorded, indent=1, ensure_ascii=False) + "\n"
            given.out.write_text(text) if given.out else sys.stdout.write(text)
            return 0
        found = compare_trajectories(recorded, read_trajectory(given.trajectory))
    except (TokenTrueError, OSError) as error:
        print(f"tokentrue-harbor: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({"ok": not found, "findings": found}, ensure_ascii=False))
    else:
        turns = sum(step["source"] == "agent" for step in recorded["steps"])
        print(
            *found,
            f"FAIL: {len(found)} disagreements" if found else f"OK: {turns} turns as the harness tells them",
            sep="\n",
        )
    return 1 if found else 0


def read_trajectory(path: Path) -> dict:
    try:
        told = json.loads(path.read_text())
        compare_trajectories({"steps": []}, told)  # every step has what is read of it
    except (ValueError, KeyError, TypeError, AttributeError, TokenTrueError) as error:
        raise FileFormatError(f"{path}: not an ATIF trajectory: {type(error).__name__}: {error}") from error
    return told


if __name__ == "__main__":
    sys.exit(main())
