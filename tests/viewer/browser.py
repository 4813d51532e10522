"""A real browser and a served viewer for tests. No browser is a failure, not a skip: `make test` installs one."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tokentrue.viewer import ViewerData, create_app

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SIZE = {"width": 1440, "height": 860}
expect.set_options(timeout=30_000)  # for machines that other jobs keep busy


def find_browser() -> str | None:
    """A system browser; None lets Playwright use the one that it installed itself."""
    named = os.environ.get("TOKENTRUE_BROWSER")
    return named or next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path = find_browser()
        if path is None and not Path(playwright.chromium.executable_path).exists():
            pytest.fail(
                "no browser: run `sh scripts/install_programs.sh .venv/bin/python`, or set TOKENTRUE_BROWSER to a Chromium"
            )
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def serve(app_or_data: Any) -> Iterator[str]:
    """The base URL of an application (or of the viewer over some data) for as long as the block runs."""
    app = create_app(app_or_data) if isinstance(app_or_data, ViewerData) else app_or_data
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", ws="none", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


class Watched:
    """A page whose console errors, page errors and outside requests are collected."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self.base = page, base
        self.errors: list[str] = []
        self.outside: list[str] = []
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in {"error", "warning"} else None,
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((base, "data:", "blob:")) else self.outside.append(request.url)
            ),
        )

    def open(self, path: str = "") -> Page:
        self.page.goto("about:blank")
        self.page.goto(f"{self.base}/{path}" if self.base.startswith("http") else f"{self.base}{path}")
        self.page.wait_for_selector("main, .session")
        return self.page

    def check(self) -> None:
        assert self.errors == [], self.errors
        assert self.outside == []


@contextmanager
def watched(browser: Browser, base: str, *, theme: Any = "light", size: Any = None) -> Iterator[Watched]:
    context = browser.new_context(viewport=size or SIZE, color_scheme=theme)
    try:
        yield Watched(context.new_page(), base)
    finally:
        context.close()


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    nodes = [(one["id"], node) for one in found["violations"] for node in one["nodes"][:3]]
    return [f"{rule}: {node['html'][:120]} ({node['failureSummary'][:200]})" for rule, node in nodes]
