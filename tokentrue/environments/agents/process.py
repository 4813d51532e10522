"""Runs one command line until it ends or reaches a limit, and reads a reward from a score command's result. When
`run_command` returns or raises, no process of its sandbox is alive."""

from __future__ import annotations

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
from typing import BinaryIO, Literal, TypeAlias

from tokentrue.environments.agents.sandbox import MIB, SandboxLimits
from tokentrue.errors import AgentError
from tokentrue.records import record

Container: TypeAlias = tuple[Literal["docker", "podman"], str]  # engine and name
CANNOT_RUN = (125, 126, 127)  # the sandbox failed; not executable; not found
GRACE_S = 5  # between the signal that asks a command to end and the one that kills it
TAIL_BYTES = REWARD_BYTES = 65536
# Of the file system: an open file without a name is in no folder.
LEAST_FREE_BYTES, LEAST_FREE_FILES = 256 * MIB, 10_000
UNREADABLE_CHECKS = 5
SIGNS = {  # what programs print when the kernel refuses something
    "memory_mib": ("MemoryError", "Cannot allocate memory", "out of memory"),
    "processes": ("Resource temporarily unavailable", "can't start new thread", "Cannot fork"),
    "file_mib": ("File too large", "File size limit exceeded"),
}


@record
class CommandResult:
    """`code` is None if a limit ended the command; `limit` says which."""

    code: int | None
    tail: str = ""
    limit: str | None = None


class OutputReader(asyncio.Protocol):
    """Writes a command's output to a file; sets `overflow` when it exceeds the limit."""

    def __init__(self, file: BinaryIO, limit_mib: int) -> None:
        loop = asyncio.get_running_loop()
        self.overflow: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.tail = b""
        self._file, self._limit_mib, self._left = file, limit_mib, limit_mib * MIB

    def data_received(self, data: bytes) -> None:
        self._file.write(data[: self._left])
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        self._left = max(0, self._left - len(data))
        if not self._left and not self.overflow.done():
            self.overflow.set_result(f"printed more than output_mib = {self._limit_mib}")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def run_command(
    build: Callable[[int], Sequence[str]],
    *,
    env: Mapping[str, str],
    output: BinaryIO,
    limits: SandboxLimits,
    folder: Path,
    cwd: Path | None = None,
    timeout_s: float | None = None,
    is_bwrap: bool = False,
    container: Container | None = None,
) -> CommandResult:
    """`build` makes the command line from the file descriptor on which bubblewrap reports its process 1. The command
    can write only to `folder`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    pipe_read, pipe_write = os.pipe()
    reader = OutputReader(output, limits.output_mib)
    transport, _ = await loop.connect_read_pipe(lambda: reader, os.fdopen(pipe_read, "rb", 0))
    starting = asyncio.ensure_future(start(build, pipe_write, cwd, env, is_bwrap=is_bwrap))
    waiting: list[asyncio.Future[str] | asyncio.Task[str] | asyncio.Task[int]] = []
    try:
        process, _ = await asyncio.shield(starting)
        ended = asyncio.create_task(process.wait())
        waiting = [ended, asyncio.create_task(watch_disk(folder, limits)), reader.overflow]
        done, _ = await asyncio.wait(
            waiting, timeout=timeout_s and timeout_s + 2 * GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        code = ended.result() if ended in done else None
        code = 128 - code if code is not None and code < 0 else code  # ended by a signal: as a shell reports it
        reached = [task.result() for task in done if task is not ended]
    finally:
        for task in waiting:
            task.cancel()
        # shielded: a cancelled rollout also returns only when its processes are dead
        await asyncio.shield(asyncio.ensure_future(stop(starting, container)))
        await asyncio.wait([reader.ended], timeout=1)  # without a sandbox a process may have escaped with the pipe
        transport.close()
    seconds = loop.time() - began
    tail = reader.tail.decode(errors="replace")
    if is_bwrap and code == 1 and tail.startswith("bwrap: "):  # container engines report their own failures so
        code = 125
    if reached:
        limit, code = str(reached[0]), None
    elif timeout_s is not None and seconds >= timeout_s:
        limit, code = f"took longer than its time limit ({timeout_s:g} s)", None
    else:
        limit = explain_failure(code or 0, tail, limits)
    return CommandResult(code=code, tail=tail, limit=limit)


async def start(
    build: Callable[[int], Sequence[str]], output: int, cwd: Path | None, env: Mapping[str, str], *, is_bwrap: bool
) -> tuple[asyncio.subprocess.Process, int | None]:
    """The process, and a handle of the sandbox's process 1 if bubblewrap reports one."""
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


async def stop(
    starting: asyncio.Future[tuple[asyncio.subprocess.Process, int | None]], container: Container | None
) -> None:
    await asyncio.wait([starting])
    if starting.exception() is not None:
        return
    process, first = starting.result()
    if container is not None:
        await asyncio.to_thread(remove_container, *container)
    elif first is not None:
        await end_namespace(first)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def open_first_process(info: int) -> int | None:
    """None if it has ended already, or bubblewrap failed."""
    with os.fdopen(info, "rb", 0) as file:
        report = b""
        while b"}" not in report and (piece := file.read(4096)):  # it would die of a pipe that is closed early
            report += piece
    found = re.search(rb'"child-pid": (\d+)', report)
    with suppress(ProcessLookupError):
        return os.pidfd_open(int(found[1])) if found else None
    return None


async def end_namespace(first: int) -> None:
    """Kills process 1 of a process namespace: the kernel kills all others with it, and reports its end after theirs."""
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


def remove_container(engine: str, name: str) -> None:
    # Ending the engine's command does not end the container.
    subprocess.run([engine, "rm", "--force", name], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)


async def watch_disk(folder: Path, limits: SandboxLimits) -> str:
    """Returns when `folder` exceeds its limit."""
    # Only a quota could refuse the write itself, and that needs root.
    loop = asyncio.get_running_loop()
    unreadable = 0
    while True:
        began = loop.time()
        measured = await asyncio.to_thread(
            subprocess.run, ["du", "-skx", str(folder)], capture_output=True, env={**os.environ, "LC_ALL": "C"}
        )
        used = measured.stdout.split()
        if used and int(used[0]) > limits.disk_mib * 1024:
            return f"wrote more than disk_mib = {limits.disk_mib}"
        unreadable = unreadable + 1 if b"Permission denied" in measured.stderr else 0
        if unreadable >= UNREADABLE_CHECKS:
            return "keeps a folder that cannot be read, so that disk_mib cannot be checked"
        space = os.statvfs(folder)
        is_full = space.f_bavail * space.f_frsize < LEAST_FREE_BYTES
        if is_full or (space.f_files and space.f_favail < LEAST_FREE_FILES):
            return f"was ended because the disk that holds {folder} is nearly full"
        await asyncio.sleep(max(1.0, 10 * (loop.time() - began)))


def explain_failure(code: int, tail: str, limits: SandboxLimits) -> str | None:
    if code == 128 + signal.SIGXFSZ:
        return f"met file_mib = {limits.file_mib}"
    if code == 128 + signal.SIGKILL:
        return f"was killed, perhaps for want of memory (memory_mib = {limits.memory_mib})"
    if code:
        for name, signs in SIGNS.items():
            if any(sign in tail for sign in signs):
                return f"met {name} = {getattr(limits, name)}"
    return None


def reward_from_command(result: CommandResult, command: str) -> float:
    """Exit code 0: the number on the last line, or 1 if there is none. Other exit codes: 0. Raises if the command
    could not run or was killed."""
    if result.code is None:
        raise AgentError(f"score: {command!r} {result.limit}")
    if result.code in CANNOT_RUN or result.code > 128:
        raise AgentError(f"score: {command!r} ended with exit code {result.code}: {result.tail.strip()[-200:]}")
    if result.code != 0:
        return 0.0
    lines = result.tail.strip().splitlines()
    number = as_number(lines[-1]) if lines else None
    return 1.0 if number is None else number


def reward_from_harbor(folder: Path, result: CommandResult, command: str) -> float:
    """The verifier's reward.txt or reward.json; raises if it wrote neither."""
    if result.code is None:
        raise AgentError(f"score: {command!r} {result.limit}")
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
