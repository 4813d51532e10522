"""Runs one command line until it ends or reaches a limit, and reads a reward from a score command."""

import asyncio
import json
import math
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tokentrue.errors import AgentError
from tokentrue.records import record

CANNOT_RUN = (125, 126, 127)  # the sandbox failed; not executable; not found
TAIL_BYTES = REWARD_BYTES = 65536


@record
class CommandResult:
    code: int | None
    tail: str = ""


class OutputReader(asyncio.Protocol):
    def __init__(self, file: BinaryIO, limit: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tail = b""
        self._file, self._left = file, limit

    def data_received(self, data: bytes) -> None:
        self._file.write(data[: self._left])
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        self._left = max(0, self._left - len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def run_command(
    build: Callable[[int], Sequence[str]],
    *,
    env: Mapping[str, str],
    output: BinaryIO,
    most_output: int,
    cwd: Path | None = None,
    timeout_s: float | None = None,
    is_bwrap: bool = False,
) -> CommandResult:
    """`build` makes the command line from the file descriptor on which bubblewrap reports its process 1."""
    pipe_read, pipe_write = os.pipe()
    reader, code = OutputReader(output, most_output), None
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: reader, os.fdopen(pipe_read, "rb", 0))
    starting = asyncio.ensure_future(start(build, pipe_write, cwd, env, is_bwrap=is_bwrap))
    try:
        process, _ = await asyncio.shield(starting)
        with suppress(TimeoutError):
            code = await asyncio.wait_for(process.wait(), timeout_s)
    finally:
        # shielded: a cancelled rollout also returns only when its processes are dead
        await asyncio.shield(asyncio.ensure_future(stop(starting)))
        await asyncio.wait([reader.ended], timeout=1)  # without a sandbox a process may have escaped with the pipe
        transport.close()
    tail = reader.tail.decode(errors="replace")
    if code is not None and code < 0:
        code = 128 - code  # ended by a signal: as a shell reports it
    if is_bwrap and code == 1 and tail.startswith("bwrap: "):
        code = 125
    return CommandResult(code=code, tail=tail)


async def start(
    build: Callable[[int], Sequence[str]], output: int, cwd: Path | None, env: Mapping[str, str], *, is_bwrap: bool
) -> tuple[asyncio.subprocess.Process, int | None]:
    info_read, info_write = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *build(info_write), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd, env=dict(env),
            start_new_session=True, pass_fds=(info_write,) if is_bwrap else (),
        )  # fmt: skip
    except BaseException:
        os.close(info_read)
        raise
    finally:
        os.close(info_write)
        os.close(output)
    return process, await asyncio.to_thread(open_first_process, info_read)


async def stop(starting: asyncio.Future[tuple[asyncio.subprocess.Process, int | None]]) -> None:
    await asyncio.wait([starting])
    if starting.exception() is not None:
        return
    process, first = starting.result()
    if first is not None:
        await end_namespace(first)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def open_first_process(info: int) -> int | None:
    with os.fdopen(info, "rb", 0) as file:
        report = b""
        while b"}" not in report and (piece := file.read(4096)):  # it would die of a pipe that is closed early
            report += piece
    found = re.search(rb'"child-pid": (\d+)', report)
    with suppress(ProcessLookupError):
        return os.pidfd_open(int(found[1])) if found else None
    return None


async def end_namespace(first: int) -> None:
    """The kernel kills all others with process 1, and reports its end after theirs."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(first, signal.SIGKILL)
    loop.add_reader(first, lambda: gone.done() or gone.set_result(None))
    try:
        await gone
    finally:
        loop.remove_reader(first)
        os.close(first)


def reward_from_command(result: CommandResult, command: str) -> float:
    """Exit code 0: the number on the last line, or 1 if there is none. Others: 0. Raises if the command could not run,
    was killed, or printed nan or inf."""
    if result.code is None:
        raise AgentError(f"score: {command!r} took longer than its time limit")
    if result.code in CANNOT_RUN or result.code > 128:
        raise AgentError(f"score: {command!r} ended with exit code {result.code}: {result.tail.strip()[-200:]}")
    if result.code != 0:
        return 0.0
    last = (result.tail.strip().splitlines() or [""])[-1]
    try:
        number = float(last)
    except ValueError:
        return 1.0
    if not math.isfinite(number):
        raise AgentError(f"score: {command!r} printed {last.strip()}, which is no score; let it print a finite number")
    return number


def reward_from_harbor(folder: Path, result: CommandResult, command: str) -> float:
    if result.code is None:
        raise AgentError(f"score: {command!r} took longer than its time limit")
    for name, parse in (("reward.txt", float), ("reward.json", parse_reward_json)):
        with suppress(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
            if math.isfinite(number := parse(read_reward_file(folder, name))):
                return number
    said = result.tail.strip()[-200:]
    raise AgentError(
        f"score: tests/test.sh wrote no number to /logs/verifier/reward.txt (exit code {result.code}): {said}"
    )


def read_reward_file(folder: Path, name: str) -> str:
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


def parse_reward_json(text: str) -> float:
    values = json.loads(text)
    return float(values["reward"] if "reward" in values else sum(values.values()) / len(values))
