"""What the commands that train share: quiet libraries, a progress bar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator


def quiet_libraries(threads: int | None = None) -> None:
    """Progress bars and warnings of libraries stay out of our output."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))


@contextlib.contextmanager
def progress_bar(title: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Call what it yields once per finished piece, with a word about it."""
    if quiet:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}")
    with Progress(TextColumn("  {task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn(), note) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(note: str) -> None:
            progress.update(task, advance=1, note=note)

        yield advance
