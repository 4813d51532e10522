"""Every code block of README.md and docs/ is run: `python` blocks page by page in one namespace, `console` blocks command by command.

A fence marked `text` is prose. A console command that only belongs on a user's machine (a server that stays up, a GPU) is marked
by `console no-run`; that it at least exists is checked by its `--help`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
KNOWN = {"python", "console", "console no-run", "text", "toml", "json", "jinja"}


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(match["info"].strip(), match["body"]) for match in FENCE.finditer(page.read_text())]


def having(kind: str) -> list[Path]:
    return [page for page in PAGES if any(info.startswith(kind) for info, _ in blocks(page))]


def commands(body: str) -> list[str]:
    joined = body.replace("\\\n", " ")
    return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_fences_are_of_a_known_kind(page: Path) -> None:
    for info, body in blocks(page):
        assert info in KNOWN, f"{page.name}: fence {info!r}; one of {sorted(KNOWN)}"
        if info.startswith("console"):
            assert commands(body), f"{page.name}: a console block without a `$ ` command"


@pytest.mark.parametrize("page", having("python"), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    code = "\n".join(body for info, body in blocks(page) if info == "python")
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("page", having("console"), ids=lambda p: str(p.relative_to(ROOT)))
def test_console_blocks_run(page: Path, tmp_path: Path) -> None:
    for info, body in blocks(page):
        for command in commands(body) if info.startswith("console") else ():
            words = shlex.split(command, comments=True)
            if info == "console no-run":
                if words[0] != "tokentrue":
                    continue
                command = f"tokentrue {words[1]} --help"
            run = subprocess.run(command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
            assert run.returncode == 0, f"$ {command}\n{run.stdout[-500:]}\n{run.stderr[-1500:]}"
