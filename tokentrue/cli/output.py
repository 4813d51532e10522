"""Output shared by the commands: plurals, tables, progress, the rollout log, the costs of a step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def pluralise(number: int, noun: str) -> str:
    """`1 sample`, `2 samples`, `1,024 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | tuple[str, str]]]) -> None:
    """A cell is its text, or (text, style)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    Console().print(table)


@contextmanager
def progress_bar(title: str, total: int, *, quiet: bool = False) -> Generator[Callable[[str], None], None, None]:
    """Call the yielded function once per finished piece, with a word about it."""
    if quiet:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("  {task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}")) as progress:
        task = progress.add_task(title, total=total, note="")
        yield lambda note: progress.update(task, advance=1, note=note)


def count_items(items: Iterable[T], noun: str, *, quiet: bool = False) -> Iterator[T]:
    """Passes the items on and counts them with a spinner on a terminal's stderr."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task("reading")
        for number, item in enumerate(items, start=1):
            progress.update(task, description=pluralise(number, noun))
            yield item


@contextmanager
def loading(what: str, *, quiet: bool = False) -> Generator[None, None, None]:
    """A spinner on a terminal's stderr, one line elsewhere."""
    if quiet:
        yield
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"  loading {what}", file=sys.stderr, flush=True)
        yield
        return
    with console.status(f"loading {what}"):
        yield


@contextmanager
def rollout_log(out: Path) -> Generator[Path, None, None]:
    """Tracebacks of agents and environments go to `out/rollouts.log`."""
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
        """By part; `wait`: rollouts run and nothing is trained."""
        whole = self._spent.get("step", 0.0)
        return {name: self._spent[name] / whole for name in self.PARTS} if whole else {}

    @property
    def publish_ms(self) -> float:
        return 1000 * self._spent.get("publish", 0.0) / max(1, self.steps)

    def line(self) -> str:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.shares.items())
        return f"{shares}; publishing the weights took {self.publish_ms:.1f} ms"
