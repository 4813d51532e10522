"""The directories of one rollout.

    tokentrue-rollout-…/                 this process's own; an agent never sees it
        agent/home work tmp logs         written by the agent, mounted in its sandbox
        score/home work tmp logs verifier   written by the score command, made after the agent has ended
        gateway/  agent.log  score.log   written by this process
        lock                             held by this process: a later run removes what a killed one left

Nothing is opened by name below `agent` and `score` once a command has run there, except by
`process.read_reward_file`."""

import asyncio
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tokentrue.errors import ConfigError
from tokentrue.records import record

PREFIX = "tokentrue-rollout-"


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
async def open_workspace(source: Path | None, *, ref: str | None, under: Path) -> AsyncGenerator[Workspace]:
    # In threads: copying a repository must not block other rollouts.
    under.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=under))
    lock = (directory / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    filling = asyncio.ensure_future(asyncio.to_thread(fill_workspace, directory, source, ref))
    try:
        yield await asyncio.shield(filling)
    finally:

        async def remove() -> None:
            await asyncio.wait([filling])
            await asyncio.to_thread(remove_tree, directory)
            lock.close()

        await asyncio.shield(asyncio.ensure_future(remove()))


def fill_workspace(directory: Path, source: Path | None, ref: str | None) -> Workspace:
    agent, objects = directory / "agent", None
    make_folders(agent, with_work=source is None)
    if source is not None and ref is not None:
        objects = check_out(source, ref, agent / "work")
    elif source is not None:
        shutil.copytree(source, agent / "work", symlinks=True)
    return Workspace(directory=directory, objects=objects)


def log_beside(folder: Path) -> Path:
    return folder.with_suffix(".log")


def make_folders(folder: Path, *, with_work: bool = True) -> None:
    for name in ("home", "tmp", "logs", "verifier", *(["work"] if with_work else [])):
        (folder / name).mkdir(parents=True)


def check_out(source: Path, ref: str, work: Path) -> Path:
    # A git worktree would let the agent write hooks and settings that the user's git obeys.
    commit = git(source, "rev-parse", "--verify", f"{ref}^{{commit}}")
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
    # and removed its own permissions.
    for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):
        subprocess.run([*command, str(directory)], capture_output=True, stdin=subprocess.DEVNULL)


def find_abandoned(under: Path) -> list[Path]:
    """The directories of killed processes: the kernel has released their locks."""
    found: list[Path] = []
    for directory in under.glob(f"{PREFIX}*"):
        if not directory.is_symlink() and directory.lstat().st_uid == os.geteuid():
            with suppress(OSError), (directory / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(directory)
    return found
