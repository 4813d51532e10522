"""A reward from a command: its last printed number, or whether it succeeded."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tokentrue.environments.agents.process import CANNOT_RUN, CommandResult
from tokentrue.errors import AgentError


def reward_from_command(result: CommandResult, printed: str, command: str) -> float:
    """Exit code 0: the number on the last line where there is one, else 1. Any other exit code: 0. A command that could
    not run, or was killed, is no score."""
    if result.code is None:
        raise AgentError(f"score: {command!r} took longer than its time limit ({result.seconds:.0f} s)")
    if result.code in CANNOT_RUN or result.code > 128:
        raise AgentError(f"score: {command!r} ended with exit code {result.code}: {printed.strip()[-200:]}")
    if result.code != 0:
        return 0.0
    lines = printed.strip().splitlines()
    number = as_number(lines[-1]) if lines else None
    return 1.0 if number is None else number


def reward_from_harbor(logs: Path, result: CommandResult, printed: str) -> float:
    """What the verifier wrote to reward.txt or reward.json; a verifier that wrote neither has failed."""
    text, table = logs / "reward.txt", logs / "reward.json"
    if text.exists():
        number = as_number(text.read_text(errors="replace"))
        if number is not None:
            return number
    if table.exists():
        try:
            values = json.loads(table.read_text())
            return float(values["reward"] if "reward" in values else sum(values.values()) / len(values))
        except (ValueError, TypeError, KeyError, ZeroDivisionError):
            pass
    said = printed.strip()[-200:]
    raise AgentError(
        f"score: tests/test.sh wrote no number to /logs/verifier/reward.txt (exit code {result.code}): {said}"
    )


def as_number(text: str) -> float | None:
    try:
        value = float(text.strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None
