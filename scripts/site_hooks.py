"""Hooks of mkdocs: fences such as `console slow` (tests/docs/fences.py has all of them) are console blocks to a
reader."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^```console \w+$", "```console", markdown, flags=re.MULTILINE)
