"""The directories of one rollout, and their end.

Each rollout has one directory with `home`, `work`, `root` (of a namespace) and `logs` in it. Its name holds the process
that made it: a janitor process takes it away where that process is killed, and a later run where the machine was.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from tokentrue.errors import ConfigError

WorkspaceKind: TypeAlias = Literal["copy", "worktree"]
PREFIX = "tokentrue-rollout-"
JANITOR = Path(__file__).with_name("janitor.py")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """`shared` are directories outside that the agent must be able to write: the repository of a git worktree."""

    directory: Path
    shared: tuple[Path, ...] = ()

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def work(self) -> Path:
        return self.directory / "work"

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"


@asynccontextmanager
async def open_workspace(
    source: Path | None, *, kind: WorkspaceKind, ref: str | None, under: Path
) -> AsyncGenerator[Workspace]:
    """`make_workspace` in a thread: copying a repository must not hold up other rollouts."""
    manager = make_workspace(source, kind=kind, ref=ref, under=under)
    entering = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        yield await asyncio.shield(entering)
    finally:
        await asyncio.shield(asyncio.ensure_future(_leave(manager, entering)))


async def _leave(manager: AbstractContextManager[Workspace], entering: asyncio.Future[Workspace]) -> None:
    await asyncio.wait([entering])
    if entering.exception() is None:
        await asyncio.to_thread(manager.__exit__, None, None, None)


@contextmanager
def make_workspace(source: Path | None, *, kind: WorkspaceKind, ref: str | None, under: Path) -> Generator[Workspace]:
    """A fresh directory with a copy of `source`, or a git worktree of it at `ref`. It is gone when the block ends."""
    under.mkdir(parents=True, exist_ok=True)
    start_janitor(under, os.getpid())
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own_name()}-{next(_numbers)}-", dir=under))
    is_worktree = kind == "worktree" and source is not None
    try:
        for name in ("home", "root", "logs"):
            (directory / name).mkdir()
        shared: tuple[Path, ...] = ()
        if is_worktree:
            assert source is not None
            git(source, "worktree", "add", "--detach", str(directory / "work"), *([ref] if ref else []))
            shared = (Path(git(source, "rev-parse", "--path-format=absolute", "--git-common-dir")),)
        elif source is not None:
            shutil.copytree(source, directory / "work", symlinks=True)
        else:
            (directory / "work").mkdir()
        yield Workspace(directory=directory, shared=shared)
    finally:
        remove_tree(directory)
        if is_worktree:
            assert source is not None
            git(source, "worktree", "prune")


@cache
def start_janitor(under: Path, process: int) -> int:
    """One janitor for all directories that this process makes in `under`; returns the end of the pipe that it
    watches."""
    read, write = os.pipe()
    command = [sys.executable, "-I", str(JANITOR), str(under), f"{PREFIX}{own_name()}-"]
    os.posix_spawn(sys.executable, command, {}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)], setpgroup=0)
    os.close(read)
    return write


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise ConfigError(f"workspace: git {arguments[0]} failed in {repository}: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


def remove_tree(directory: Path) -> None:
    """Also where an agent took away its own permissions."""
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        for folder, _, _ in os.walk(directory):
            os.chmod(folder, 0o700)
        shutil.rmtree(directory, ignore_errors=True)


def own_name() -> str:
    return f"{os.getpid()}.{started_at(os.getpid())}"


def started_at(process: int) -> str:
    """When a process started, in the kernel's own count: its id may be used again. Empty where it is not running, or
    not on Linux."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def remove_abandoned(under: Path) -> int:
    """Removes the directories of processes that are gone; returns how many there were."""
    removed = 0
    for directory in under.glob(f"{PREFIX}*"):
        process, _, started = directory.name.removeprefix(PREFIX).split("-")[0].partition(".")
        if process.isdigit() and started and started_at(int(process)) != started:
            remove_tree(directory)
            removed += 1
    return removed
