"""A reward from a command: the last number it prints, or whether it succeeded."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

from tokentrue.environments.agents.process import CANNOT_RUN, CommandResult
from tokentrue.errors import AgentError

REWARD_BYTES = 65536


def reward_from_command(result: CommandResult, command: str) -> float:
    """Exit code 0: the number on the last line, or 1 if there is none. Other exit codes: 0. Raises if the command
    could not run or was killed."""
    require_end(result, command)
    if result.code in CANNOT_RUN or (result.code or 0) > 128:
        raise AgentError(f"score: {command!r} ended with exit code {result.code}: {result.tail.strip()[-200:]}")
    if result.code != 0:
        return 0.0
    lines = result.tail.strip().splitlines()
    number = as_number(lines[-1]) if lines else None
    return 1.0 if number is None else number


def reward_from_harbor(folder: Path, result: CommandResult, command: str) -> float:
    """The verifier's reward.txt or reward.json; raises if it wrote neither."""
    require_end(result, command)
    number = as_number(read_reward_file(folder, "reward.txt"))
    if number is not None:
        return number
    try:
        values = json.loads(read_reward_file(folder, "reward.json"))
        number = float(values["reward"] if "reward" in values else sum(values.values()) / len(values))
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError):
        number = math.nan
    if math.isfinite(number):
        return number
    said = result.tail.strip()[-200:]
    raise AgentError(
        f"score: tests/test.sh wrote no number to /logs/verifier/reward.txt (exit code {result.code}): {said}"
    )


def require_end(result: CommandResult, command: str) -> None:
    if result.code is None:
        raise AgentError(f"score: {command!r} {result.limit}")


def read_reward_file(folder: Path, name: str) -> str:
    """The text of a small regular file; empty if it is not one."""
    # The tests run the agent's code, which may put a link or a FIFO there.
    try:
        within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=within)
        finally:
            os.close(within)
    except OSError:
        return ""
    try:
        is_regular = stat.S_ISREG(os.fstat(file).st_mode)
        return os.read(file, REWARD_BYTES).decode(errors="replace") if is_regular else ""
    finally:
        os.close(file)


def as_number(text: str) -> float | None:
    try:
        value = float(text.strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None
