"""Runs one command under `supervise.py`, with a time limit; whatever happens here, no descendant of the command
outlives the call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SUPERVISOR = Path(__file__).with_name("supervise.py")
CANNOT_RUN = (126, 127)  # a shell's exit codes for a command that is not executable, or not there


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """`code` is None where the time ran out."""

    code: int | None
    seconds: float


async def run_supervised(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: Path, timeout_s: float | None = None
) -> CommandResult:
    """Output and errors go to `output`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with output.open("ab") as out:
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(
            sys.executable, "-I", str(SUPERVISOR), *command,
            stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out, cwd=cwd, env=dict(env), start_new_session=True,
        ))  # fmt: skip
        try:
            process = await asyncio.shield(starting)
        except (
            asyncio.CancelledError
        ):  # while it starts asyncio would kill the supervisor, and the command would outlive it
            await asyncio.shield(asyncio.ensure_future(stop_when_started(starting)))
            raise
    try:
        code: int | None = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        code = None
    finally:
        await asyncio.shield(stop(process))
    return CommandResult(code=code, seconds=loop.time() - began)


async def stop_when_started(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    await stop(await starting)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Asks the supervisor to end everything, and waits until it has."""
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()
