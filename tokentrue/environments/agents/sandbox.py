"""The command line that confines an agent: bubblewrap's and prlimit's, on which confinement relies entirely. Inside,
`/rollout/work` is the working directory, `/rollout/home` the home and `/tmp` is private; nothing else is writable. From
the host an agent sees `SYSTEM`, this Python, the programs on the PATH and what the user names, all read-only; no
process, no socket, and of the network only the bridge: a loopback port that leads to the gateway."""

import asyncio
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tokentrue.errors import ConfigError
from tokentrue.records import record
from tokentrue.types import AtLeastOne, check_fields

SandboxKind = Literal["bwrap", "none"]
Network = Literal["gateway", "host"]
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", "nix")
RESOLVER = Path("/run/systemd/resolve")  # /etc/resolv.conf may point there
PARTS_OF_A_PREFIX = ("bin", "lib", "lib64", "libexec", "include", "versions", "shims", "pyvenv.cfg")
NOBODY = 65534  # if we are root, agents are not: a root user without capabilities still owns root's files
NAMESPACES = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session"),
)
NO_NEW_NAMESPACES = ("--unshare-user", "--disable-userns")  # a nested one could mount file systems without a limit
DROP_ROOT = (
    *("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"),
    *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"),
    *("bwrap", *NO_NEW_NAMESPACES, "--die-with-parent", "--dev-bind", "/", "/", "--"),
)
MIB = 1024 * 1024
SHARED_MEMORY_BYTES = 64 * MIB
PORT = 47321  # of the bridge, on the agent's loopback
BRIDGE = Path("/run/gateway")  # where the folder of its Unix socket is mounted
SOCKET = "socket"
CONNECTIONS = 128  # concurrent connections of one agent; each takes two file descriptors of this process
# Runs in the sandbox before the agent: listens on its loopback interface, passes the listening socket to this process
# through a Unix socket and execs the agent. Connections are thus accepted outside: no helper runs inside that the agent
# could stop or replace.
ENTER = f"""
import os, socket, sys
server = socket.create_server(("127.0.0.1", {PORT}))
with socket.socket(socket.AF_UNIX) as host:
    host.connect("{BRIDGE / SOCKET}")
    socket.send_fds(host, [b"s"], [server.fileno()])
    host.recv(1)
server.close()
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(print(f"cannot start {{sys.argv[1]}}: {{error.strerror}}", file=sys.stderr) or 127)
"""


@record
class SandboxLimits:
    """`memory_mib` is per process; of what a command prints, `output_mib` are kept."""

    memory_mib: AtLeastOne = 8192
    processes: AtLeastOne = 1024
    file_mib: AtLeastOne = 4096
    output_mib: AtLeastOne = 64

    def __post_init__(self) -> None:
        check_fields(self, "agent")


def check_sandbox(wanted: SandboxKind) -> None:
    if wanted == "bwrap" and (failure := try_bwrap()) is not None:
        raise ConfigError(
            f"sandbox: bwrap does not work here ({failure}); install bubblewrap 0.8 or newer (apt-get install "
            "bubblewrap); --sandbox none runs agents unconfined"
        )


@cache
def try_bwrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "not installed"
    line = bwrap_command(["true"], mounts=(), cwd=Path("/"), network="gateway", limits=SandboxLimits())
    try:
        done = subprocess.run(line, capture_output=True, timeout=20, stdin=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else None


def bwrap_command(
    command: Sequence[str],
    *,
    mounts: Iterable[tuple[Path, Path, bool]],
    cwd: Path,
    network: Network,
    limits: SandboxLimits,
    info_fd: int | None = None,
) -> list[str]:
    """`mounts` are (host path, path inside, writable). bubblewrap reports its process 1 on `info_fd`."""
    is_root = os.geteuid() == 0
    line = ["bwrap", *NAMESPACES, *(() if is_root else NO_NEW_NAMESPACES), "--cap-drop", "ALL"]
    if is_root:
        line += [word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}")]
    if network != "host":
        line.append("--unshare-net")
    if info_fd is not None:
        line += ["--info-fd", str(info_fd)]
    for entry in map(Path("/").joinpath, SYSTEM):
        if entry.is_symlink():
            line += ["--symlink", os.readlink(entry), str(entry)]
        elif entry.is_dir():
            line += ["--ro-bind", str(entry), str(entry)]
    line += ["--proc", "/proc", "--dev", "/dev", "--dir", "/run", "--dir", "/tmp"]
    line += ["--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    line += ["--perms", "1777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    if network == "host":
        line += ["--ro-bind-try", str(RESOLVER), str(RESOLVER)]
    for path, inside, is_writable in sorted(mounts, key=lambda mount: len(mount[1].parts)):  # a folder before its parts
        for parent in reversed(inside.parents[:-1]):  # bubblewrap creates missing parents that only it can enter
            line += ["--dir", str(parent)]
        line += ["--bind" if is_writable else "--ro-bind", str(path), str(inside)]
    line += ["--remount-ro", "/", "--chdir", str(cwd), "--", *(DROP_ROOT if is_root else ())]
    # Set inside the sandbox: the kernel then counts its processes, not the user's. RLIMIT_DATA, not RLIMIT_AS, because
    # JavaScript engines reserve far more addresses than they use.
    memory, file = limits.memory_mib * MIB, limits.file_mib * MIB
    line += ["prlimit", f"--data={memory}", f"--nproc={limits.processes}", f"--fsize={file}", "--core=0", "--"]
    return [*line, *command]


def visible_programs(program: str) -> dict[Path, Path]:
    folders = [Path(sys.prefix) / "bin", Path(sys.base_prefix) / "bin"]
    folders += [Path(program).parent, Path(program).resolve().parent]
    folders += [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry.startswith("/")]
    return paths_shown(str(part) for folder in folders if not is_whole_home(folder) for part in parts_beside(folder))


def paths_shown(names: Iterable[str]) -> dict[Path, Path]:
    found = dict.fromkeys(Path(name).expanduser().absolute() for name in names)
    return {path: path for path in found if path.exists() and path.parts[1:2] not in [(name,) for name in SYSTEM]}


def folders_named_in(command: str) -> list[str]:
    """The folders of files that a command line names by absolute path; in a home directory or /tmp only the file."""
    try:
        words = shlex.split(command)
    except ValueError:  # the shell reports it
        return []
    files = [Path(word) for word in words if word.startswith("/") and Path(word).is_file()]
    folders = [path.parent.resolve() for path in files]  # a home directory may be named through a link
    shown = zip(files, folders, strict=True)
    return [str(folder / path.name if is_whole_home(folder) else folder) for path, folder in shown]


def is_whole_home(folder: Path) -> bool:
    homes = (Path("/"), Path("/home"), Path("/root"), Path("/tmp"), Path.home().resolve())
    return folder in homes or folder.parent == Path("/home")


def parts_beside(folder: Path) -> list[Path]:
    """A directory of programs and, if it is the `bin` of a prefix, the libraries beside it; for npm its
    node_modules."""
    tops = [parent for parent in (folder, *folder.parents) if parent.name == "node_modules"]
    if tops:
        return [tops[-1]]
    if folder.name not in ("bin", "shims"):
        return [folder]
    return [path for name in PARTS_OF_A_PREFIX if (path := folder.parent / name).exists()]


@asynccontextmanager
async def open_bridge(folder: Path, url: str) -> AsyncGenerator[None]:
    """`folder` is mounted at `BRIDGE` in the sandbox."""
    target = urlsplit(url)
    is_tls = target.scheme == "https"
    slots = asyncio.Semaphore(CONNECTIONS)
    folder.mkdir()
    folder.chmod(0o755)
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{handle}/{SOCKET}")  # the folder's path may be too long for a socket
        os.close(handle)
        (folder / SOCKET).chmod(0o777)
        listener.listen(1)
        listener.setblocking(False)

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                if not slots.locked():
                    async with slots:
                        port = target.port or (443 if is_tls else 80)
                        theirs = await asyncio.open_connection(target.hostname, port, ssl=is_tls or None)
                        await exchange((reader, writer), theirs)
            writer.close()

        async def adopt() -> None:
            """The first caller is `ENTER`: the agent does not start before it has its answer."""
            loop = asyncio.get_running_loop()
            caller, _ = await loop.sock_accept(listener)
            with caller:
                caller.settimeout(10)
                _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, caller, 1, 1)
                server = await asyncio.start_server(forward, sock=socket.socket(fileno=fds[0]))
                caller.send(b"r")
            listener.close()
            try:
                await asyncio.Event().wait()
            finally:
                server.close()

        serving = asyncio.create_task(adopt())
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait([serving])


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def exchange(ours: Connection, theirs: Connection) -> None:
    try:
        await asyncio.gather(copy(ours[0], theirs[1]), copy(theirs[0], ours[1]))
    finally:
        theirs[1].close()


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(65536):
        sink.write(piece)
        await sink.drain()
    if sink.can_write_eof():  # TLS cannot
        sink.write_eof()
    else:
        sink.close()
