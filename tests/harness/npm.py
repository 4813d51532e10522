"""Command-line agents from npm, each in a folder of its own under .cache/npm, installed by package name when it is
first needed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 1800
PACKAGES = {  # npm package and executable
    "claude-code": ("@anthropic-ai/claude-code", "claude"),
    "cline": ("cline", "cline"),
    "codex": ("@openai/codex", "codex"),
    "gemini": ("@google/gemini-cli", "gemini"),
    "opencode": ("opencode-ai", "opencode"),
    "pi": ("@mariozechner/pi-coding-agent", "pi"),
    "qwen-code": ("@qwen-code/qwen-code", "qwen"),
}


def program(package: str, name: str) -> Path:
    """The agent's executable; skips where npm or the registry is not to be had."""
    folder = ROOT / ".cache" / "npm" / package.replace("@", "_").replace("/", "_")
    path = folder / "node_modules" / ".bin" / name
    if path.exists():
        return path
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private":true}')
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", package],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
    )
    if done.returncode or not path.exists():
        pytest.skip(f"npm cannot install {package}: {done.stderr[-300:]}")
    return path


def version_of(package: str) -> str:
    folder = ROOT / ".cache" / "npm" / package.replace("@", "_").replace("/", "_")
    return json.loads((folder / "node_modules" / package / "package.json").read_text())["version"]


def run(
    command: list[str], *, home: Path, cwd: Path, env: dict[str, str], timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    """With a home of its own and nothing of the user's settings; what it left running in the background is ended."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "TMPDIR", "NODE_PATH"}}
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env={**kept, "HOME": str(home), "CI": "1", **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    finally:
        end_processes_of(home)


def end_processes_of(home: Path) -> None:
    """Cline leaves a daemon."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGTERM)
