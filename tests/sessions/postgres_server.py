"""A PostgreSQL server of the tests' own: Debian's package, a fresh cluster in a temporary folder, no network but
loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg


def find_programs() -> Path | None:
    """The folder of initdb and postgres; None where the server is not installed."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    on_path = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    return next((folder for folder in [*versions, *on_path] if (folder / "initdb").exists()), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, folder: Path, *, fsync: bool = False, host: str = "127.0.0.1") -> None:
        programs = find_programs()
        assert programs is not None
        self.folder, self.port, self.host = folder, free_port(), host
        self._programs, self._fsync = programs, fsync
        self._user = None if os.geteuid() else next(user for user in ("postgres", "nobody") if _exists(user))
        if self._user is not None:
            shutil.chown(folder, self._user)
        initdb = [
            programs / "initdb",
            "-D",
            folder / "data",
            "-U",
            "tokentrue",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        subprocess.run(initdb, check=True, capture_output=True, user=self._user, cwd=folder)
        if host != "127.0.0.1":
            with (folder / "data" / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {host}/24 trust\n")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://tokentrue@{self.host}:{self.port}/postgres"

    def start(self) -> None:
        options = ["-c", f"listen_addresses={self.host}", "-c", f"port={self.port}", "-c", "unix_socket_directories="]
        options += ["-c", f"fsync={'on' if self._fsync else 'off'}", "-c", "max_connections=100"]
        with (self.folder / "log").open("ab") as log:
            command = [self._programs / "postgres", "-D", self.folder / "data", *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, user=self._user, cwd=self.folder)
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()[
                    -2000:
                ]
                time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: connections are cut, the server ends in order. SIGQUIT: it ends at once, and recovers when it
        starts."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def new_database(self, name: str, *, connect_timeout: int = 60) -> str:
        """Its URL. A busy test machine is given a minute to accept a connection."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')  # pyright: ignore
        return f"{self.url.removesuffix('postgres')}{name}?connect_timeout={connect_timeout}"


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


@contextmanager
def run_server(*, fsync: bool = False, host: str = "127.0.0.1") -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="tokentrue-postgres-"))
    server: Server | None = None
    try:
        server = Server(folder, fsync=fsync, host=host)
        yield server
    finally:
        if server is not None:
            server.stop(signal.SIGQUIT)
        shutil.rmtree(folder, ignore_errors=True)
