"""The parent process of one agent: runs a command and ends all of its descendants, also those that left its process
group.

Run as a program, with the standard library alone: `supervise.py COMMAND…`. It adopts orphans (a Linux subreaper), so
that every descendant stays below it. When its standard input closes, its starter wants it to stop, or has died: it
kills everything. Its exit code is the command's, 128 + N for a signal N.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
STOPPED = 137


def pass_over(*_: object) -> None:
    """A signal that ends the command, and not this process."""


def main() -> int:
    command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, pass_over)  # a handler, which the command does not inherit
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    is_stopped = wait(child)
    kill_descendants(child.pid)
    if is_stopped:
        return STOPPED
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def wait(child: "subprocess.Popen[bytes]") -> bool:
    """Returns when the command has ended by itself, or True when standard input closed."""
    while child.poll() is None:
        if select.select([0], [], [], 0.05)[0]:
            return True
    return False


def kill_descendants(command: int) -> None:
    """Until none is left: a process that is being killed may still have started another."""
    if not os.path.isdir("/proc/self"):  # not Linux: the process group is all that is known
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command, signal.SIGKILL)
        return
    while alive := descendants(os.getpid()):
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        reap()
        time.sleep(0.01)


def descendants(me: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    state, parent = stat.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [me]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def reap() -> None:
    """Collects processes that have ended."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        try:
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main())
