"""What the commands that run share: progress bars, the log of rollouts, and where the time of a step goes."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path


@contextlib.contextmanager
def progress_bar(title: str, total: int, *, quiet: bool = False) -> Generator[Callable[[str], None], None, None]:
    """Call what it yields once per finished piece, with a word about it."""
    if quiet:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    note = TextColumn("{task.fields[note]}")
    with Progress(
        TextColumn("  {task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn(), note
    ) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(note: str) -> None:
            progress.update(task, advance=1, note=note)

        yield advance


@contextlib.contextmanager
def loading(what: str, *, quiet: bool = False) -> Generator[None, None, None]:
    """Says on stderr that something is being loaded: a spinner with the elapsed time on a terminal, one line
    elsewhere."""
    if quiet:
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"  loading {what}", file=sys.stderr, flush=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("loading {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextlib.contextmanager
def rollout_log(out: Path) -> Generator[Path, None, None]:
    """Tracebacks of agents and environments go to `out/rollouts.log`; the file is there when something was written."""
    path = out / "rollouts.log"
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("tokentrue.rollouts")
    logger.addHandler(handler)
    try:
        yield path
    finally:
        logger.removeHandler(handler)
        handler.close()


class Costs:
    """Where the time of a run's steps goes, added up over its steps."""

    PARTS = ("wait", "recompute", "measure", "update", "publish")

    def __init__(self) -> None:
        self.steps = 0
        self._spent: dict[str, float] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        self.steps += 1
        for name in (*self.PARTS, "step"):
            self._spent[name] = self._spent.get(name, 0.0) + seconds.get(name, 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """By part; `wait` is the time in which rollouts run and nothing is trained."""
        whole = self._spent.get("step", 0.0)
        return {name: self._spent[name] / whole for name in self.PARTS} if whole else {}

    @property
    def publish_ms(self) -> float:
        return 1000 * self._spent.get("publish", 0.0) / max(1, self.steps)

    def line(self) -> str:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items())
        return f"{shares}; publishing the weights took {self.publish_ms:.1f} ms"
