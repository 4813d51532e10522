"""What an agent can reach besides the network: a `namespace` of its own, or no more than a `process` of its own.

In a namespace (user, mount and process namespaces through util-linux's `unshare`, no privileges needed) the file system is read-only but
for the rollout's own directory and a private /tmp, no other process can be seen, and directories may have other names (/app, /tests).
As a process, an agent has a home and a working directory of its own, and can reach whatever its user can.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from tokentrue.errors import ConfigError

SandboxKind: TypeAlias = Literal["auto", "namespace", "process"]
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
# $1: the new root. Then pairs of a directory and its name inside, `--`, the directory to start in, and the command.
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
while [ "$1" != "--" ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done
shift; cd=$1; shift
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$cd" "$@"
"""


@cache
def has_namespaces() -> bool:
    if shutil.which(UNSHARE[0]) is None:
        return False
    probe = "mount -t tmpfs tmpfs /tmp && mount --rbind /usr /mnt"
    try:
        return subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, timeout=20, stdin=subprocess.DEVNULL).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def choose_sandbox(wanted: SandboxKind) -> Literal["namespace", "process"]:
    if wanted == "process":
        return "process"
    if has_namespaces():
        return "namespace"
    if wanted == "namespace":
        raise ConfigError("sandbox: this machine grants no user namespaces (unshare --user --mount --pid); use sandbox='process'")
    return "process"


def enter_namespace(command: Sequence[str], *, root: Path, shown: Mapping[Path, Path], cwd: Path) -> list[str]:
    """The command line that runs `command` in `cwd` of a new root; `shown` maps writable directories to their names inside."""
    pairs = [str(part) for pair in shown.items() for part in pair]
    return [*UNSHARE, "sh", "-c", ENTER, "enter", str(root), *pairs, "--", str(cwd), *command]
