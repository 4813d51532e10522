"""check_prose.py: exits 1 if a page, a docstring, a comment or a command's help has a phrase of banned_phrases.txt; prints file, line, phrase
and the advice."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("banned_phrases.txt")
PAGES = (
    "*.md",
    "docs/**/*.md",
    "tokentrue/**/*.md",
    "examples/*",
    "tokentrue/**/*.py",
    "benchmarks/**/*.py",
    "experiments/**/*.py",
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


WORDS = r"(?<!\w)(?:{})(?!\w)"


def banned() -> list[tuple[str, str]]:
    """(pattern in lower case, advice)"""
    rules = [line.split(" => ") for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return [(pattern, advice) for pattern, advice in rules]


def findings(text: str, rules: list[tuple[str, str]]) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, advice). Code and output in fences are not prose; a phrase may run over a line break."""
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    flat = prose.replace("\n", " ")
    # One search for all, with regard to case, takes a tenth of the time of one for each.
    if not re.search(WORDS.format("|".join(pattern for pattern, _ in rules)), flat.lower()):
        return
    for pattern, advice in rules:
        for match in re.finditer(WORDS.format(pattern), flat, re.IGNORECASE):
            yield prose.count("\n", 0, match.start()) + 1, match[0], advice


def main() -> int:
    rules = banned()
    found = 0
    for page in sorted({path for glob in PAGES for path in ROOT.glob(glob) if path.is_file()}):
        for line, phrase, advice in findings(page.read_text(encoding="utf-8"), rules):
            found += 1
            print(f"{page.relative_to(ROOT)}:{line}: {phrase!r}: {advice}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
