"""A gateway under test: how it is installed, started and asked for its rows. An adapter is one subclass of `Target`."""

import asyncio
import inspect
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import httpx

from tokentrue.conformance.oracle import Row
from tokentrue.errors import ConfigError
from tokentrue.records import record

START_S, STOP_S = 120.0, 20.0
TOKENTRUE = "tokentrue"


@record
class Session:
    """`urls`: one complete URL per dialect that the gateway serves (chat, responses, anthropic, google; google's ends
    before `/models/…`). `headers` go with every request of the agent."""

    id: str
    urls: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


class Target:
    """Write `command`, `open` and `rows`; the rest has defaults."""

    name: ClassVar[str]
    requires: ClassVar[Sequence[str]] = ()
    """Packages with versions, installed into an environment of this target."""
    engine: ClassVar[str] = "chat"
    """How it asks the engine: chat (the engine renders), completions, generate or sglang."""
    ready: ClassVar[str] = "/health"
    """A path that answers, with any status, as soon as the gateway is up."""
    not_promised: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Levels ("6"), cases ("5.kill") or rules ("1.2") that the gateway makes no promise about, with the reason."""

    settle_s: ClassVar[float] = 3.0
    """How long the record of an answered turn may take to be written."""

    python = sys.executable
    url = ""

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        """Starts the gateway on `port` before the engine at `engine`; `model` has the tokenizer and chat template."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        return {}

    def open(self) -> Session:
        """A new session."""
        raise NotImplementedError

    def rows(self, session: Session) -> Sequence[Row]:
        """What the gateway would train on."""
        raise NotImplementedError

    def reasons(self, session: Session) -> Mapping[str, int]:
        """Sampled tokens that the gateway says it does not train, by its reason."""
        return {}

    def export(self, session: Session, folder: Path) -> Path | None:
        """A file that an outsider can check; None if there is no such thing (level 8)."""
        return None

    def audit(self, path: Path) -> bool:
        """Whether the exported file passes the gateway's own check."""
        raise NotImplementedError

    # What adapters call.
    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        return self._call("GET", path, None, headers)

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        return self._call("POST", path, {} if body is None else body, headers)

    def _call(self, method: str, path: str, body: Any, headers: Mapping[str, str] | None) -> Any:
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=60, follow_redirects=True)
        answer.raise_for_status()
        return answer.json() if answer.content else None


class TargetProcess:
    """The gateway as a child process; `kill` and `start` again find the same folder and port."""

    def __init__(self, target: Target, engine: str, folder: Path, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        self.target, self._log = target, folder / "gateway.log"
        target.url = f"http://127.0.0.1:{port}"
        self.command = [str(part) for part in target.command(engine, port, folder, model)]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        env = {**os.environ, **self.target.environment()}
        if self.target.requires:  # another environment must not see ours
            env.pop("PYTHONPATH", None)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        loop = asyncio.get_running_loop()
        end = loop.time() + START_S
        while not await asyncio.to_thread(self._answers):
            if self._process.poll() is not None or loop.time() > end:
                told = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["it wrote nothing"]
                raise ConfigError(f"{self.target.name} did not start: {told[0]} (command: {' '.join(self.command)})")
            await asyncio.sleep(0.1)

    def _answers(self) -> bool:
        try:
            httpx.get(self.target.url + self.target.ready, timeout=5)
        except httpx.TransportError:
            return False
        return True

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        for send in (how, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, send)
            try:
                await asyncio.to_thread(self._process.wait, STOP_S)
                break
            except subprocess.TimeoutExpired:
                continue


def load_target(name: str, python: str | None = None) -> Target:
    """`tokentrue`, or a Python file with one subclass of `Target`."""
    path = Path(__file__).with_name("own.py") if name == TOKENTRUE else Path(name)
    if not (path.is_file() and path.suffix == ".py"):
        hint = "; a URL does not say how sessions are opened and rows are read" if "://" in name else ""
        raise ConfigError(f"no target {name!r}: give {TOKENTRUE!r}, or a Python file with a subclass of Target{hint}")
    module = f"conformance_target_{path.stem}"
    try:
        values = runpy.run_path(str(path), run_name=module).values()
    except Exception as error:
        raise ConfigError(f"{path}: cannot be imported: {error!r}") from error
    classes = [value for value in values if inspect.isclass(value)]
    found = [each for each in classes if issubclass(each, Target) and each.__module__ == module]
    if len(found) != 1:
        raise ConfigError(f"{path}: {len(found)} subclasses of Target; one is needed")
    target: Target = found[0]()
    target.python = python or (make_environment(target) if target.requires else sys.executable)
    return target


def make_environment(target: Target) -> str:
    """The Python of a virtual environment with what the target requires, made once in the user's cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "tokentrue" / "conformance" / "_".join(target.requires).replace("/", "_").replace(" ", "")[:120]
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(f"installing {' '.join(target.requires)} into {folder}", file=sys.stderr, flush=True)
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", *target.requires],
        ):
            ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if ran.returncode:
                last = (ran.stdout.strip().splitlines() or ["no message"])[-1]
                raise ConfigError(f"{' '.join(target.requires)}: cannot be installed: {last}; or give --python")
        done.touch()
    return str(python)
