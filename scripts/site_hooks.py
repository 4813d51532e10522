"""Hooks of mkdocs: fences such as `console slow` (tests/docs/fences.py has all of them) are plain blocks to a
reader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"^```(console|python) \w+$", r"```\1", markdown, flags=re.MULTILINE)


def on_post_build(config: Any, **_: Any) -> None:
    """llms.txt at the site's root, with links to the site's pages; what is outside docs/ is named without a link."""
    source = Path(config["config_file_path"]).with_name("llms.txt").read_text(encoding="utf-8")
    pages = re.sub(r"\]\(docs/([\w/-]+)\.md\)", r"](\1.html)", source)
    plain = re.sub(r"\[([^\]]+)\]\((?!\S+\.html\))(\S+)\)", r"\1 (\2)", pages)
    (Path(config["site_dir"]) / "llms.txt").write_text(plain, encoding="utf-8")
