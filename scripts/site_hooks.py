"""Hooks of mkdocs: fences marked `console no-run` (see tests/test_docs.py) are console blocks to a reader."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("```console no-run", "```console")
