"""Agent frameworks in Python, each in a virtual environment of its own under .cache/venvs, installed when it is first
needed. `TOKENTRUE_VENVS` names another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.npm import INSTALL_S, ROOT


def python_with(name: str, requirements: tuple[str, ...], base: str = sys.executable) -> Path:
    """The environment's Python; skips where the packages are not to be had."""
    if not base:
        pytest.skip(f"{requirements[0]} needs Python 3.12 or newer, and none is here")
    folder = Path(os.environ.get("TOKENTRUE_VENVS") or ROOT / ".cache" / "venvs") / name
    python, mark = folder / "bin" / "python", folder / "installed"
    if mark.exists():
        return python
    subprocess.run([base, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
    command = [str(python), "-m", "pip", "install", "-q", *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(requirements)}: {done.stderr[-300:]}")
    mark.touch()
    return python


def version_of(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True, timeout=60).strip()
