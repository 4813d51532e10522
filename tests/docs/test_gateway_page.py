"""docs/gateway-reference.md has every error code that the gateway answers with, and every metric that /metrics shows."""

from __future__ import annotations

import re

from tests.docs.fences import ROOT
from tokentrue.errors import FileFormatError, TokenTrueError
from tokentrue.gateway.metrics import Metrics, build_page

PAGE = (ROOT / "docs" / "gateway-reference.md").read_text(encoding="utf-8")
RAISED = re.compile(r"HttpError\(\s*(\d{3}), \"(\w+)\"")
UNLISTED = {FileFormatError}  # of commands: no request names a file


def listed_codes() -> set[tuple[int, str]]:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| \d{3} \| `", line)]
    return {(int(row[2:5]), code) for row in rows for code in re.findall(r"`(\w+)`", row.split(" | ")[1])}


def kinds_below(kind: type[TokenTrueError]) -> list[type[TokenTrueError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in kinds_below(child))]


def test_every_error_code_is_listed_with_its_status() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tokentrue" / "gateway").rglob("*.py")]
    known = {(int(status), code) for source in sources for status, code in RAISED.findall(source)}
    known |= {
        (kind.status, kind.code) for kind in kinds_below(TokenTrueError) if kind not in UNLISTED and kind.status != 500
    }
    known |= {(403, "not_admin"), (429, "limit_exceeded"), (500, "internal")}
    assert listed_codes() == known, (
        f"not listed: {sorted(known - listed_codes())}; unknown: {sorted(listed_codes() - known)}"
    )


def test_every_metric_is_listed_with_its_type() -> None:
    shown = re.findall(r"^# TYPE (\w+) (\w+)$", build_page(Metrics().registry.collect()).decode(), re.MULTILINE)
    listed = re.findall(r"^\| `(tokentrue_\w+)(?:\{[^}]*\})?` \| (\w+) \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(shown)
