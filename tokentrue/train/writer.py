"""Metrics to JSON lines, and to the loggers that were asked for. Every row names its run, its policy version and the machine."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tokentrue.train.loggers import LOGGERS, LoggedRun, LoggerName


class MetricsWriter:
    """Appends. A resumed run continues the file; rows of steps that it repeats move to `metrics.before-N.jsonl`: nothing is erased."""

    def __init__(
        self, directory: Path, *, provenance: Mapping[str, Any], first_step: int = 0, log: Sequence[LoggerName] = ("tensorboard",)
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        self._provenance = {**provenance, "hardware": hardware(), "torch": torch.__version__}
        run = LoggedRun(directory=directory, config=self._provenance, first_step=first_step)
        self._loggers = [LOGGERS[name](run) for name in log]
        lines = self._lines()
        kept = [line for line in lines if is_before(line, first_step)]
        if len(kept) < len(lines):
            number = next(n for n in itertools.count(1) if not (directory / f"metrics.before-{n}.jsonl").exists())
            (directory / f"metrics.before-{number}.jsonl").write_text("".join(line + "\n" for line in lines if line not in set(kept)))
        self._file = self.path.open("w")
        self._file.writelines(line + "\n" for line in kept)
        self._file.flush()

    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def write(self, step: int, version: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        timed = {f"seconds/{name}": round(value, 6) for name, value in seconds.items()}
        row = {"step": step, "policy_version": version, **metrics, **timed, **self._provenance}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.log(step, {**metrics, **timed})

    def close(self) -> None:
        self._file.close()
        for logger in self._loggers:
            logger.close()


def is_before(line: str, first_step: int) -> bool:
    """Whether a line on file is a whole row of an earlier step; a crash may have left half a line."""
    try:
        return json.loads(line)["step"] < first_step
    except (ValueError, KeyError):
        return False


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"
