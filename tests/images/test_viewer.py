"""The viewer shows an image where its tokens are, from a store, a gateway, an exported file and the one-file page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.images.double import Eyes, Seer, ask_about, image_part, picture
from tests.viewer.browser import open_browser, serve, violations, watched
from tests.viewer.world import run_apart
from tokentrue.cli.main import run as run_command
from tokentrue.errors import AuditError, SessionNotFound
from tokentrue.images import hash_image
from tokentrue.sessions.journal import Journal
from tokentrue.turn import Session
from tokentrue.viewer import StoreSource, ViewerData, write_export
from tokentrue.viewer.sources import FileSource

RED, BLUE = picture(140, 56, color=(255, 0, 0)), picture(28, 84, color=(0, 0, 255))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seen") / "runs.sqlite"

    async def play() -> None:
        journal = Journal(path)
        session = Session(renderer=Seer(), provider=Eyes(), journal=journal, session_id="s")  # type: ignore[arg-type]
        messages: list[Any] = [ask_about(image_part(RED), image_part(BLUE))]
        messages.append((await session.chat(messages)).message)
        await session.chat([*messages, ask_about(image_part(RED), text="again?")])
        journal.close()

    run_apart(play())
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


def colour_in(page: Any, locator: Any) -> tuple[int, int, int]:
    """The colour of a pixel of the slice, as the browser painted it."""
    import io

    from PIL import Image

    shot = Image.open(io.BytesIO(locator.screenshot())).convert("RGB")
    return shot.getpixel((4, shot.height // 2))  # type: ignore[return-value]


def look(browser: Browser, url: str) -> None:
    with watched(browser, url) as seen:
        page = seen.page
        page.goto(f"{url}#/session/s")
        labels = page.locator(".t.image")
        expect(labels).to_have_count(3)
        expect(labels.nth(0)).to_contain_text(f"image {hash_image(RED)[:12]} · 10 tokens · grid 1×56×140")
        expect(labels.nth(1)).to_contain_text(f"image {hash_image(BLUE)[:12]} · 3 tokens")
        slices = page.locator(".picture[style*='data:image/png']")
        expect(slices).to_have_count(18)
        assert colour_in(page, slices.nth(0)) == (255, 0, 0) and colour_in(page, slices.nth(6)) == (0, 0, 255)
        labels.nth(1).click()
        expect(page.locator(".t.image.active")).to_have_count(1)
        assert not violations(page)
        seen.check()


def test_from_a_store(browser: Browser, store: Path) -> None:
    journal = Journal(store, read_only=True)
    with serve(ViewerData(StoreSource(journal, name="store"))) as url:
        look(browser, f"{url}/")
    with pytest.raises(SessionNotFound):
        StoreSource(journal, name="store").load_image("s", "0" * 64)
    journal.close()


def test_from_an_export(browser: Browser, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run_command("samples", [f"sqlite:{store}", "-o", str(out)]) == 0
    data = ViewerData(FileSource(out))
    with serve(data) as url:
        look(browser, f"{url}/")
    write_export(data, tmp_path / "page.html")
    look(browser, f"file://{tmp_path}/page.html")
    for file in (tmp_path / "out.jsonl.images").iterdir():
        file.unlink()
    with serve(data) as url, watched(browser, url) as seen:
        seen.page.goto(f"{url}/#/session/s")
        expect(seen.page.locator(".t.image").nth(0)).to_contain_text("its file is not here")
    with pytest.raises(AuditError):
        FileSource(out).load_image("s", "../../etc/passwd")
