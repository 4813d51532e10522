"""Plays one rollout of an agent whose program the test writes: `Arena.play` returns its outcome and transcript.

Beside the rollout lies what an agent must not reach: a file with a secret, the admin key in the environment of this
process, a server on another port, an abstract Unix socket, the directories of another rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokentrue.environments import Outcome
from tokentrue.environments.agents import CommandLineAgent

ADMIN_KEY = "the-admin-key-0451"
SECRET = "the-secret-0452"
SESSION_KEY = "tt-s1-key"


class Arena:
    """`victim` is a folder of the host with a secret in it; `contacts` are the ports that somebody connected to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contacts: list[int] = []
        self._servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.gateway, self.other = (server.getsockname()[1] for server in self._servers)
        self.abstract = f"tokentrue-{os.getpid()}-{self.other}"
        hidden = socket.socket(socket.AF_UNIX)
        hidden.bind("\0" + self.abstract)
        hidden.listen()
        self._servers.append(hidden)
        for server in self._servers:
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        self.victim = folder / "victim"
        self.victim.mkdir()
        (self.victim / "secret.txt").write_text(SECRET)
        (folder / "repo").mkdir()
        (folder / "repo" / "sum.txt").write_text("x = 2 + 2\n")
        self.write_task()

    def write_task(self, **fields: Any) -> None:
        line = {"id": "sum", "prompt": "add", "dir": "repo", **fields}
        (self.folder / "tasks.jsonl").write_text(json.dumps(line) + "\n")

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                caller, _ = server.accept()
            except OSError:
                return
            name = server.getsockname()
            self.contacts.append(name[1] if isinstance(name, tuple) else -1)
            with caller:
                caller.recv(1000)
                caller.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")

    def close(self) -> None:
        for server in self._servers:
            server.shutdown(socket.SHUT_RDWR)
            server.close()

    def make(self, program: str, score: str = "true", **options: Any) -> CommandLineAgent:
        """`program` is Python; `ARENA` in it is this arena's paths and ports."""
        known = {
            "folder": str(self.folder),
            "victim": str(self.victim),
            "gateway": self.gateway,
            "other": self.other,
            "abstract": self.abstract,
            "pid": os.getpid(),
        }
        (self.folder / "agent").mkdir(exist_ok=True)
        path = self.folder / "agent" / "agent.py"
        path.write_text(f"ARENA = {known!r}\n{program}")
        settings: dict[str, Any] = {
            "agent": f"{sys.executable} -u {path} {{task}}",
            "tasks": str(self.folder / "tasks.jsonl"),
            "directory": str(self.folder / "rollouts"),
            "transcripts": str(self.folder / "transcripts"),
        }
        return CommandLineAgent(score=score, **{**settings, **options})

    def play(self, program: str, score: str = "true", **options: Any) -> tuple[Outcome, str]:
        agent = self.make(program, score, **options)
        client = SimpleNamespace(base_url=f"http://127.0.0.1:{self.gateway}/sessions/s1/v1/", api_key=SESSION_KEY)
        (task,) = agent.tasks(1)
        outcome = asyncio.run(agent.run(client, task))
        return outcome, self.transcript

    @property
    def transcript(self) -> str:
        return (self.folder / "transcripts" / "s1.log").read_bytes().decode(errors="replace")

    def check_intact(self) -> None:
        """What every attack must leave as it was."""
        assert {path.name: path.read_text() for path in self.victim.iterdir()} == {"secret.txt": SECRET}
        assert (self.folder / "repo" / "sum.txt").read_text() == "x = 2 + 2\n"
        assert list((self.folder / "rollouts").iterdir()) == [], "the rollout's directory is removed"
        assert self.other not in self.contacts and -1 not in self.contacts
        found = SECRET in self.transcript or ADMIN_KEY in self.transcript
        assert not found, self.transcript


@contextmanager
def open_arena(folder: Path) -> Iterator[Arena]:
    arena = Arena(folder)
    try:
        yield arena
    finally:
        arena.close()


def processes_named(mark: str) -> list[str]:
    """Command lines of this machine's processes that hold `mark`."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found
