"""The pictures of docs/viewer.md, taken of the tests' own store: `python -m tests.viewer.figures`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from tests.viewer.browser import open_browser, serve, watched
from tests.viewer.world import build_store, renderer, store_samples, write_trainer_file
from tokentrue.samples.trainer_logprobs import read_trainer_logprobs
from tokentrue.sessions import Journal
from tokentrue.viewer import StoreSource, ViewerData

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
SIZE = {"width": 1280, "height": 760}
COLOURS = 224
PAGES = (  # file, theme, path, keys to press in the token view
    ("viewer-sessions", "light", "", ""),
    ("viewer-tokens", "light", "#/session/task0-rollout2", "1nnn"),
    ("viewer-tokens-dark", "dark", "#/session/task0-rollout1", "1nn"),
    ("viewer-breaks", "light", "#/session/task0-rollout2/x/breaks", ""),
    ("viewer-breaks-dark", "dark", "#/session/task0-rollout2/x/breaks", ""),
    ("viewer-group", "light", "#/group/task-0", ""),
    ("viewer-mismatch-dark", "dark", "#/mismatch", ""),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = build_store(Path(folder) / "runs.sqlite")
        trainer = write_trainer_file(Path(folder) / "trainer.jsonl", store_samples(store))
        source = StoreSource(Journal(f"sqlite:{store}"), name=store.name)
        data = ViewerData(source, renderer=renderer(), trainer=read_trainer_logprobs(trainer))
        with serve(data) as base, open_browser() as browser:
            for name, theme, path, keys in PAGES:
                with watched(browser, base, theme=theme, size=SIZE) as seen:
                    page = seen.open(path)
                    page.wait_for_timeout(1000)
                    if keys:
                        page.get_by_role("grid").focus()
                        for key in keys:
                            page.keyboard.press(key)
                        page.wait_for_timeout(200)
                    target = FIGURES / f"{name}.png"
                    page.screenshot(path=target)
                    Image.open(target).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
                        target, optimize=True
                    )
                    seen.check()
                    print(f"{target.name}: {target.stat().st_size / 1000:.0f} kB")
        source.close()


if __name__ == "__main__":
    main()
