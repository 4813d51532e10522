"""What an agent can reach besides the network.

- `bwrap` (bubblewrap): it writes nothing but the rollout's own directory and a private /tmp. The user's home directory
  and /run are out of sight, but for the programs in it; no other process can be seen.
- `namespace` (util-linux's `unshare`): the same, except that the home directory can be read.
- `docker`: a container of an image that holds the agent; of this machine it sees the rollout's directory.
- `none`: a home and a working directory of its own; it can reach whatever its user can.

`auto` takes the first of bwrap, namespace and none that works here. None of them needs privileges, and all share the
host's network, so that the gateway is reached on loopback. In a sandbox, directories may have other names (/app,
/tests).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from tokentrue.errors import ConfigError

SandboxKind: TypeAlias = Literal["auto", "bwrap", "namespace", "docker", "none"]
ChosenSandbox: TypeAlias = Literal["bwrap", "namespace", "docker", "none"]
DESCRIPTIONS: Mapping[ChosenSandbox, str] = {
    "bwrap": "in bubblewrap (writes only its own directory, does not see the home directory; network shared)",
    "namespace": "in a namespace of its own (files read-only but its own; network shared)",
    "docker": "in a container (network of the host)",
    "none": "as a plain process, without a sandbox",
}
BWRAP = (
    "bwrap",
    "--unshare-user",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-uts",
    "--die-with-parent",
    "--cap-drop",
    "ALL",
)
NOT_BOUND = ("proc", "dev", "tmp", "run", "app", "tests", "logs")  # of the root directory
RESOLVER = Path("/run/systemd/resolve")  # /etc/resolv.conf may point there
PARTS_OF_A_PREFIX = ("bin", "lib", "lib64", "libexec", "include", "versions", "shims", "pyvenv.cfg")
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
# $1: the new root. Then paths of /tmp to read, `--`, pairs of a directory and its name inside, `--`, where to start,
# and the command.
ENTER = """set -e
root=$1; shift
mount -t tmpfs tmpfs "$root"
for entry in /*; do
  case "$entry" in /proc|/dev|/sys|/tmp|/app|/tests|/logs) continue;; esac
  if [ -L "$entry" ]; then cp -P "$entry" "$root$entry"
  elif [ -d "$entry" ]; then
    mkdir "$root$entry"; mount --rbind "$entry" "$root$entry"; mount -o remount,ro,bind "$root$entry" 2>/dev/null || true
  fi
done
mkdir "$root/proc" "$root/dev" "$root/sys" "$root/tmp"
mount -t proc proc "$root/proc" 2>/dev/null || mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"; mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/tmp"
while [ "$1" != "--" ]; do
  if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; touch "$root$1"; fi
  mount --bind "$1" "$root$1"; mount -o remount,ro,bind "$root$1" 2>/dev/null || true; shift
done
shift
while [ "$1" != "--" ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done
shift; cd=$1; shift
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$cd" "$@"
"""


def choose_sandbox(wanted: SandboxKind, *, image: str | None = None) -> ChosenSandbox:
    """The sandbox to use; an error that says what is missing where the wanted one does not work here."""
    if wanted == "docker":
        if image is None or shutil.which("docker") is None:
            raise ConfigError(
                "sandbox: docker needs the docker command and an image that holds the agent: rollout.options.image=NAME"
            )
        return "docker"
    if wanted in ("auto", "bwrap") and has_bwrap():
        return "bwrap"
    if wanted in ("auto", "namespace") and has_namespaces():
        return "namespace"
    if wanted in ("auto", "none"):
        return "none"
    cure = (
        "install bubblewrap"
        if wanted == "bwrap" and shutil.which(BWRAP[0]) is None
        else "user namespaces are not granted here"
    )
    raise ConfigError(f"sandbox: {wanted} does not work on this machine: {cure}; or use sandbox='none'")


@cache
def has_bwrap() -> bool:
    return works(enter_bwrap(["true"], shown={}, readable=(), cwd=Path("/")))


@cache
def has_namespaces() -> bool:
    return works([*UNSHARE, "sh", "-c", "mount -t tmpfs tmpfs /tmp && mount --rbind /usr /mnt"])


def works(command: Sequence[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    try:
        return subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def enter_bwrap(
    command: Sequence[str], *, shown: Mapping[Path, Path], readable: Iterable[Path], cwd: Path
) -> list[str]:
    """The command line that runs `command` in `cwd`; `shown` maps writable directories to their names inside,
    `readable` are paths of the home directory or of /tmp that stay in sight."""
    line = [*BWRAP, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/run"]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            line += ["--symlink", os.readlink(entry), str(entry)]
        elif entry.is_dir() and entry.name not in NOT_BOUND:
            line += ["--ro-bind", str(entry), str(entry)]
    for home in home_directories():
        line += ["--tmpfs", str(home)]
    for path in (*readable, RESOLVER):
        line += ["--ro-bind-try", str(path), str(path)]
    for path, name in shown.items():
        line += ["--bind", str(path), str(name)]
    hidden = [part for home in (*home_directories(), Path("/")) for part in ("--remount-ro", str(home))]
    return [*line, *hidden, "--chdir", str(cwd), "--", *command]


def home_directories() -> list[Path]:
    """Where the files of users are: /home, /root, and this user's own home where that is elsewhere."""
    usual = [path for path in (Path("/home"), Path("/root")) if path.is_dir() and not path.is_symlink()]
    own = Path.home().resolve()
    return (
        usual
        if own == Path("/") or any(own.is_relative_to(path) for path in usual) or not own.is_dir()
        else [*usual, own]
    )


def programs_in_home(program: str, readable: Iterable[str] = ()) -> list[Path]:
    """What of the home directories and of /tmp must stay in sight for programs to run: this Python, the PATH, the
    agent, and what the user names."""
    folders = [
        Path(sys.prefix) / "bin",
        Path(sys.base_prefix) / "bin",
        Path(program).parent,
        Path(program).resolve().parent,
    ]
    folders += [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    found = [path for folder in folders for path in parts_beside(folder)]
    found += [Path(name).expanduser().resolve() for name in readable]
    hidden = (*home_directories(), Path("/tmp"))
    return [path for path in dict.fromkeys(found) if any(path.is_relative_to(folder) for folder in hidden)]


def folders_named_in(command: str) -> list[str]:
    """The folders of the files that a command line names by absolute path; of a home directory or of /tmp the file
    alone."""
    try:
        words = shlex.split(command)
    except ValueError:  # the shell says so
        return []
    files = [Path(word) for word in words if word.startswith("/") and Path(word).is_file()]
    folders = [path.parent.resolve() for path in files]  # a home directory may be named through a link
    return [
        str(folder / path.name if is_whole_home(folder) else folder)
        for path, folder in zip(files, folders, strict=True)
    ]


def is_whole_home(folder: Path) -> bool:
    return folder in (*home_directories(), Path.home().resolve(), Path("/tmp")) or folder.parent == Path("/home")


def parts_beside(folder: Path) -> list[Path]:
    """A directory of programs and, if it is the `bin` of a prefix, the libraries beside it; of an npm package its
    node_modules."""
    tops = [parent for parent in (folder, *folder.parents) if parent.name == "node_modules"]
    if tops:
        return [tops[-1]]
    if folder.name not in ("bin", "shims"):
        return [folder]
    return [path for name in PARTS_OF_A_PREFIX if (path := folder.parent / name).exists()]


def enter_namespace(
    command: Sequence[str], *, root: Path, shown: Mapping[Path, Path], readable: Iterable[Path], cwd: Path
) -> list[str]:
    """The command line that runs `command` in `cwd` of a new root; `shown` maps writable directories to their names
    inside, `readable` are paths that stay in sight, of which /tmp alone would hide any."""
    hidden = [str(path) for path in readable if path.is_relative_to("/tmp") and path.exists()]
    pairs = [str(part) for pair in shown.items() for part in pair]
    return [*UNSHARE, "sh", "-c", ENTER, "enter", str(root), *hidden, "--", *pairs, "--", str(cwd), *command]


def enter_docker(
    command: Sequence[str], *, image: str, name: str, shown: Mapping[Path, Path], variables: Iterable[str], cwd: Path
) -> list[str]:
    """The command line that runs `command` in a container called `name`. Values of `variables` are taken from docker's
    own environment:
    no key stands on a command line."""
    line = [
        "docker",
        "run",
        "--rm",
        "--init",
        "--name",
        name,
        "--network",
        "host",
        "--user",
        f"{os.getuid()}:{os.getgid()}",
    ]
    line += ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    for path, inside in shown.items():
        line += ["--volume", f"{path}:{inside}"]
    for variable in sorted(variables):
        line += ["--env", variable]
    return [*line, "--workdir", str(cwd), image, *command]


def remove_container(name: str) -> None:
    """The container of a rollout that ended, timed out or was cancelled: killing docker's command does not end it."""
    subprocess.run(["docker", "rm", "--force", name], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
