"""A wheel, and environments that have nothing but what pip installs from it: no source tree, no variable of this run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("HOME", "LANG", "PATH", "TMPDIR")  # with pip's own and certificates, all that an environment sees


def list_tracked(*paths: str) -> list[str]:
    return subprocess.check_output(["git", "ls-files", *paths], cwd=ROOT, text=True).splitlines()


def build(folder: Path) -> Path:
    """Builds the sdist, and the wheel from the sdist, in a copy of the tracked files; returns the folder with both."""
    source = folder / "source"
    for name in list_tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--outdir", folder / "dist", source]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(source)
    return folder / "dist"


def run(
    command: Sequence[str | Path], *, cwd: Path, code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, env=clean(variables), capture_output=True, text=True, timeout=1700)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


def clean(variables: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key in KEPT or key.startswith(("PIP_", "SSL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def program(self, name: str) -> Path:
        return self.folder / "venv" / "bin" / name

    def pip(self, *arguments: str | Path) -> str:
        return run([self.program("python"), "-m", "pip", *arguments], cwd=self.work).stdout

    def tokentrue(self, *arguments: str | Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        return run([self.program("tokentrue"), *arguments], cwd=self.work, code=code, **variables)

    def python(self, code: str, **variables: str) -> Any:
        """Runs a program whose last line is JSON; returns that."""
        done = run([self.program("python"), "-c", code], cwd=self.work, **variables)
        return json.loads(done.stdout.splitlines()[-1])

    def packages(self) -> set[str]:
        return {each["name"].lower() for each in json.loads(self.pip("list", "--format", "json"))}

    @contextmanager
    def running(self, *arguments: str | Path, **variables: str) -> Iterator[str]:
        """A command that serves until it is ended; yields the first address that it prints."""
        command = [self.program("tokentrue"), *arguments]
        log = self.work / f"{arguments[0]}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=self.work, env=clean(variables), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            assert process.stdout is not None
            url = next((found[0] for line in process.stdout if (found := re.search(r"http://\S+", line))), None)
            assert url is not None, log.read_text()
            yield url
        finally:
            process.terminate()
            process.communicate(timeout=60)


@contextmanager
def installed(wheel: Path, extras: str, folder: Path) -> Iterator[Environment]:
    """An empty environment with `wheel[extras]` from the package index, removed afterwards."""
    environment = Environment(folder=folder)
    environment.work.mkdir(parents=True)
    try:
        run([sys.executable, "-m", "venv", folder / "venv"], cwd=folder)
        environment.pip("install", "--quiet", f"{wheel}[{extras}]" if extras else wheel)
        yield environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)
