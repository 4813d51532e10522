"""The fenced blocks of README.md and docs/, by the words after the three backticks.

| fence | what happens to it |
|---|---|
| `python` | run, page by page in one namespace |
| `console` | run, command by command (commands.py) |
| `console slow` | run by `make test-slow`; `make test` parses its command lines |
| `console gpu`, `vllm`, `harness`, `cluster` | parsed: every option is one that the program, or a test that runs it,
knows |
| `toml`, `json` | parsed; with `title="NAME"` it is the file NAME of its page's commands |
| `python harness` | run by `make test-harness`, in the environment of its framework |
| `text` | no code: output, a drawing |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONSOLE = ("console", "console slow", "console gpu", "console vllm", "console harness", "console cluster")
KNOWN = ("python", "python harness", "toml", "json", "text", *CONSOLE)
FENCE = re.compile(
    r"^```(?P<kind>[^\n`]*?)(?: title=\"(?P<title>[^\"\n]+)\")?\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    kind: str
    title: str | None
    body: str

    @property
    def commands(self) -> list[str]:
        joined = self.body.replace("\\\n", " ")
        return (
            [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")] if self.kind in CONSOLE else []
        )


def blocks_of(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(kind=match["kind"].strip(), title=match["title"], body=match["body"]) for match in found]


def pages_with(*kinds: str) -> list[Path]:
    return [page for page in PAGES if any(block.kind in kinds for block in blocks_of(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
