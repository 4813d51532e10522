"""Runs the commands of a console block as its reader would: in one directory, with the environment that earlier
commands of the block left.

* A server (`tokentrue serve`, `tokentrue view` without `--export`) takes a free port and runs until the next server of
  the block or the block's end; it must print its address and answer there. Later commands reach it under the address
  that the page gives.
* `tokentrue diagnose` and `tokentrue doctor` may find a fault in what the reader has: exit code 1 is an answer. Not with
  `--policy-version`: the page then compares samples with the weights that sampled them.
* `make TARGET` is `make -n TARGET`: what a target runs has tests of its own.
* `pip`, `docker` and `python -m pytest` are checked by dry.py: nothing is installed, no daemon runs where the tests do,
  and the tests that a page names are run by `make test` or `make test-slow`.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.docs import dry
from tests.docs.fences import ROOT
from tests.docs.reader import Record, environment

LISTEN_S = 30.0
FINDERS = (["tokentrue", "diagnose"], ["tokentrue", "doctor"])
ADDRESS = re.compile(r"(http://[\w.\[\]:]+:\d+)(/[\w-]+)?")


class Shell:
    """Use as a context manager: the servers of the block end with it."""

    def __init__(self, folder: Path, record: Record, *, timeout_s: float = 600.0) -> None:
        self._folder, self._record, self._timeout_s = folder, record, timeout_s
        self._env = environment(folder, record)
        self._server: subprocess.Popen[str] | None = None
        self._gateway: str | None = None  # the address of the block's own `tokentrue serve`

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_server()

    def check(self, command: str) -> None:
        """Parses the command, or, where it only prepares others, runs it."""
        if command.startswith("make "):
            self.run(command)
        else:
            dry.check(command, cwd=self._folder, env=self._env)

    def run(self, command: str) -> None:
        words = shlex.split(command, comments=True)
        command = self._record.at_real_addresses(
            command.replace("http://127.0.0.1:8000", self._gateway or self._record.url)
        )
        if words[0] in ("docker", "pip") or words[:3] == ["python", "-m", "pytest"]:
            dry.check(command, cwd=self._folder, env=self._env)
        elif words[0] == "make":
            self._bash(f"make -n {shlex.join(words[1:])}", cwd=ROOT)
        elif words[:2] == ["tokentrue", "serve"] and "--help" not in words:
            self._gateway = self._start(f"{command.partition('  #')[0]} --port 0", "/ready")
        elif words[:2] == ["tokentrue", "view"] and "--export" not in words:
            self._start(f"{command.partition('  #')[0]} --port 0", "/")
        else:
            self._bash(command, cwd=self._folder, may_find=words[:2] in FINDERS and "--policy-version" not in words)

    def _bash(self, command: str, *, cwd: Path, may_find: bool = False) -> None:
        """Its environment is that of the next command."""
        after = self._folder / ".environment"
        accepted = " || [ $? -eq 1 ]" if may_find else ""
        script = f"set -e\n{command.partition('  #')[0]}{accepted}\nenv -0 > {shlex.quote(str(after))}\n"
        done = self._call(["bash", "-c", script], cwd=cwd)
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-700:]}\n{done.stderr[-2000:]}"
        pairs = (pair.partition("=") for pair in after.read_text().split("\0") if pair)
        self._env = {name: value for name, _, value in pairs}

    def _call(self, words: list[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=cwd, env=self._env, capture_output=True, text=True, timeout=self._timeout_s)

    def _start(self, command: str, path: str) -> str:
        self._end_server()
        log = self._folder / "server.log"
        with log.open("w") as err:
            words = ["bash", "-c", f"exec {command}"]
            self._server = subprocess.Popen(
                words, cwd=self._folder, env=self._env, stdout=subprocess.PIPE, stderr=err, text=True
            )
        assert self._server.stdout is not None
        for line in self._server.stdout:
            if found := ADDRESS.search(line):
                wait_for_answer(found[1] + (found[2] or "") + path)
                return found[1]
        raise AssertionError(f"$ {command}\n{log.read_text()[-2000:]}")

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            server.wait(40)
            if server.stdout is not None:
                server.stdout.close()


def wait_for_answer(url: str) -> None:
    """Returns when the server answers 200; it prints its address a moment before it listens there."""
    end = time.monotonic() + LISTEN_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert answer.status == 200
                return
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > end:
                raise
            time.sleep(0.1)


def run_python(code: str, folder: Path, record: Record) -> str:
    """What the program printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(folder, record),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
