"""`make docs` builds the site without a warning; its pages load nothing from other servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.viewer.browser import open_browser, watched
from tokentrue.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(https?:[^"'>\s]+)|<link[^>]*\shref=["']?(https?:[^"'>\s]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [Path(sys.executable).with_name("mkdocs"), "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


def test_every_page_is_there_and_asks_no_other_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    sources = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) == len(sources) + 1, "one page per source, and 404.html"
    for page in pages:
        asked = [url for found in LOADED.findall(page.read_text()) for url in found if url]
        assert not asked, f"{page.relative_to(site)}: {asked}"
        assert "```" not in page.read_text(), f"{page.relative_to(site)}: a fence was not recognised"


def test_search_works_from_disk_and_code_wraps(site: Path) -> None:
    with open_browser() as browser, watched(browser, f"file://{site}/index.html") as seen:
        page = seen.page
        page.goto(f"file://{site}/is-it-for-me.html")
        page.get_by_label("Search").first.click()
        page.keyboard.type("row explosion")
        expect(page.locator(".md-search-result__link[href*=is-it-for-me]").first).to_be_attached()
        page.goto(f"file://{site}/start.html")
        widths = page.evaluate(
            "[...document.querySelectorAll('pre > code')].map((one) => one.scrollWidth - one.clientWidth)"
        )
        assert widths and max(widths) <= 1, "no line of code runs out of sight"


def test_the_reference_has_the_public_names(site: Path) -> None:
    text = (site / "reference.html").read_text()
    for name in (
        "load_renderer",
        "Client",
        "ExactEngine",
        "diagnose",
        "policy_loss",
        "Session",
        "Sampling",
        "ConfigError",
        "read_samples",
    ):
        assert re.search(rf'id="tokentrue[.\w]*\.{name}"', text), f"{name} is not in the reference"


def test_llms_txt_names_every_page_and_the_commands(site: Path) -> None:
    text = (ROOT / "llms.txt").read_text()
    links = set(re.findall(r"\]\((\S+?)\)", text))
    assert not [link for link in links if not (ROOT / link).is_file()]
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} - {"docs/index.md"}
    assert pages <= links, pages - links
    commands = re.search(r"Commands: `tokentrue ([\w |]+)`", text)
    assert commands is not None and set(commands[1].split(" | ")) == set(COMMANDS)
    published = (site / "llms.txt").read_text()
    assert all((site / link).is_file() for link in re.findall(r"\]\((\S+?)\)", published))
    assert "](start.html)" in published and "AGENTS.md (AGENTS.md)" in published
