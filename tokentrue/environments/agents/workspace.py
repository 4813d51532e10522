"""The directories of one rollout.

    tokentrue-rollout-PID.START-N-…/     this process's own; an agent never sees it
        agent/home work tmp logs         written by the agent, mounted in its sandbox
        score/home work tmp logs verifier   written by the score command, made after the agent has ended
        gateway/  agent.log  score.log   written by this process

Nothing is opened by name below `agent` and `score` once a command has run there, except by
`process.read_reward_file`. The name holds the process that made the directory: a later run removes what a killed one
left.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from tokentrue.errors import ConfigError
from tokentrue.records import record

WorkspaceKind: TypeAlias = Literal["copy", "worktree"]
PREFIX = "tokentrue-rollout-"
_numbers = itertools.count()


@record
class Workspace:
    """`agent` and `score` are each writable by one command. `objects` is the object store that a checkout borrows
    from, read-only."""

    directory: Path
    objects: Path | None = None

    @property
    def agent(self) -> Path:
        return self.directory / "agent"

    @property
    def score(self) -> Path:
        return self.directory / "score"


@asynccontextmanager
async def open_workspace(
    source: Path | None, *, kind: WorkspaceKind, ref: str | None, under: Path
) -> AsyncGenerator[Workspace]:
    """A fresh directory with a copy of `source`, or a git checkout of it at `ref`; removed when the block ends."""
    # In threads: copying a repository must not block other rollouts.
    under.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own_name()}-{next(_numbers)}-", dir=under))
    filling = asyncio.ensure_future(asyncio.to_thread(fill_workspace, directory, source, kind, ref))
    try:
        yield await asyncio.shield(filling)
    finally:

        async def remove() -> None:
            await asyncio.wait([filling])
            await asyncio.to_thread(remove_tree, directory)

        await asyncio.shield(asyncio.ensure_future(remove()))


def fill_workspace(directory: Path, source: Path | None, kind: WorkspaceKind, ref: str | None) -> Workspace:
    workspace = Workspace(directory=directory)
    make_folders(workspace.agent, with_work=source is None)
    if source is not None and kind == "worktree":
        return Workspace(directory=directory, objects=check_out(source, ref, workspace.agent / "work"))
    if source is not None:
        shutil.copytree(source, workspace.agent / "work", symlinks=True)
    return workspace


def log_beside(folder: Path) -> Path:
    """Outside the folders that a command can write."""
    return folder.with_suffix(".log")


def make_folders(folder: Path, *, with_work: bool = True) -> None:
    for name in ("home", "tmp", "logs", "verifier", *(["work"] if with_work else [])):
        (folder / name).mkdir(parents=True)


def check_out(source: Path, ref: str | None, work: Path) -> Path:
    """Clones `source` at `ref`, borrowing its objects; returns their directory."""
    # A git worktree would let the agent write hooks and settings that the user's git obeys.
    commit = git(source, "rev-parse", "--verify", f"{ref or 'HEAD'}^{{commit}}")
    common = Path(git(source, "rev-parse", "--path-format=absolute", "--git-common-dir"))
    git(source, "clone", "--quiet", "--shared", "--no-checkout", str(common), str(work))
    git(work, "checkout", "--quiet", "--detach", commit)
    return common / "objects"


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise ConfigError(f"workspace: git {arguments[0]} failed in {repository}: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


def give_to(folder: Path, owner: int) -> None:
    command = ["chown", "-R", "-P", "-h", f"{owner}:{owner}", str(folder)]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def remove_tree(directory: Path) -> None:
    # With the system's programs, which follow no links: an agent may have nested folders deeper than Python recurses,
    # and may have removed its own permissions.
    for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):
        subprocess.run([*command, str(directory)], capture_output=True, stdin=subprocess.DEVNULL)


def own_name() -> str:
    return f"{os.getpid()}.{started_at(os.getpid())}"


def started_at(process: int) -> str:
    """The start time in kernel ticks, because process ids are reused. Empty if the process is not running, or not on
    Linux."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def find_abandoned(under: Path) -> list[Path]:
    found: list[Path] = []
    for directory in under.glob(f"{PREFIX}*"):
        process, _, started = directory.name.removeprefix(PREFIX).split("-")[0].partition(".")
        is_ours = directory.lstat().st_uid == os.geteuid() and not directory.is_symlink()
        if is_ours and process.isdigit() and started and started_at(int(process)) != started:
            found.append(directory)
    return found
