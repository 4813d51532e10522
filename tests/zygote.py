"""Starts commands of the package as forks of one process that has imported what a gateway needs and has loaded the
tokenizer: of the four to six CPU seconds that a gateway takes to start, nearly all are imports and the tokenizer.

`start` is `subprocess.Popen` for `python -m MODULE ARGUMENTS`, without torch. The process that forks is started at the
first call in each process of the tests and ends with it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 1 << 20
OPTIONS = {"trust_remote_code": False}  # with which the package loads a tokenizer
LOCK = threading.Lock()
PRELOADED = (
    "tokentrue.cli.serve", "tokentrue.app.configuration", "tokentrue.app.wiring", "tokentrue.gateway.app",
    "tokentrue.gateway.serving.server", "tokentrue.gateway.serving.processes", "tokentrue.renderers.load",
    "tokentrue.providers.building", "tokentrue.providers.pool", "uvicorn", "uvloop",
)  # fmt: skip


class Started:
    """A started command, as `subprocess.Popen` shows it."""

    def __init__(self, pid: int, stdout: TextIO) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _call({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout if timeout is not None else 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, sent: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sent)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it still prints, to its end."""
        with self.stdout:
            said = self.stdout.read()
        self.wait(timeout)
        return said, None


def start(module: str, arguments: Sequence[str], *, env: Mapping[str, str], log: Path | None = None) -> Started:
    """Standard output can be read, errors go to the end of `log`."""
    reading, writing = os.pipe()
    errors = os.open(log or "/dev/stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT) if log else os.dup(2)
    try:
        pid = _call({"module": module, "arguments": list(arguments), "env": dict(env)}, writing, errors)
    finally:
        os.close(writing)
        os.close(errors)
    return Started(pid, os.fdopen(reading, encoding="utf-8"))


def _call(request: dict[str, Any], *files: int) -> Any:
    with LOCK:  # threads of a test stop servers, too
        connection = _connection()
        socket.send_fds(connection, [json.dumps(request).encode()], files)
        return json.loads(connection.recv(LARGEST))


@cache
def _connection() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
    with theirs:
        command = [sys.executable, "-m", "tests.zygote", str(theirs.fileno())]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait(20)

    atexit.register(end)
    return ours


def serve(connection: socket.socket) -> None:
    """Answers until the tests close their end. A child returns from here to run its command."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # as `tokentrue serve` does for an engine that runs elsewhere
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # "PyTorch was not found": as intended
    from transformers import AutoTokenizer

    del sys.modules["torch"]
    for name in PRELOADED:
        import_module(name)
    with suppress(ModuleNotFoundError):  # newer versions of typer import it when they read a command line
        import_module("typer._adapters")
    tokenizers: dict[str, Any] = {}
    load = AutoTokenizer.from_pretrained

    def find_or_load(directory: str, **options: Any) -> Any:
        is_loaded = directory in tokenizers and options == OPTIONS
        return tokenizers[directory] if is_loaded else load(directory, **options)

    AutoTokenizer.from_pretrained = find_or_load  # type: ignore[method-assign]
    while True:
        data, files, _, _ = socket.recv_fds(connection, LARGEST, 2)
        if not data:
            raise SystemExit(0)
        request = json.loads(data)
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            connection.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
            continue
        for each in request["arguments"]:  # no test changes a directory of the repository
            if each not in tokenizers and Path(each, "tokenizer.json").is_file() and ROOT in Path(each).parents:
                tokenizers[each] = load(each, **OPTIONS)
                gc.freeze()
        if child := os.fork():
            for file in files:
                os.close(file)
            connection.send(json.dumps(child).encode())
            continue
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)
            os.close(file)
        connection.close()
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = [request["module"], *request["arguments"]]
        run_module(request["module"], run_name="__main__", alter_sys=True)
        return


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
