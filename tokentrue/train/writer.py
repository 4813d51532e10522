"""Metrics to JSON lines, and to TensorBoard, Weights & Biases or Trackio, each imported when it is named.

A row is JSON: a number that is not finite is null. Every row names its run, its policy version and the machine. What is
on file is replaced only by a file that is whole. wandb and trackio take their own variables (WANDB_MODE, TRACKIO_DIR).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tokentrue.errors import ConfigError, TrainingError
from tokentrue.json_types import JsonMapping
from tokentrue.train.config import LoggerName

PROJECT = "tokentrue"  # where WANDB_PROJECT or TRACKIO_PROJECT names no other
EXTRAS: Mapping[str, str] = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """`directory` names the run: a resumed one has the same id."""

    directory: Path
    config: JsonMapping
    first_step: int = 0

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def id(self) -> str:
        return hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class MetricsLogger:
    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_tensorboard(run: LoggedRun) -> MetricsLogger:
    module = import_logger("tensorboard", "torch.utils.tensorboard.writer")
    board = module.SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.first_step or None)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            board.add_scalar(name, value, step)

    return MetricsLogger(log, board.close)


def open_wandb(run: LoggedRun) -> MetricsLogger:
    wandb = import_logger("wandb", "wandb")
    is_online = os.environ.get("WANDB_MODE", "online") == "online"
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        dir=str(run.directory),
        id=run.id,
        name=run.name,
        config=dict(run.config),
        resume="allow" if is_online else None,  # offline, wandb cannot look up what it has of a run
        settings=wandb.Settings(silent=True),
    )
    return MetricsLogger(lambda step, metrics: opened.log(dict(metrics), step=step), opened.finish)


def open_trackio(run: LoggedRun) -> MetricsLogger:
    trackio = import_logger("trackio", "trackio")
    name = f"{run.name}-{run.id}"  # trackio has no ids: the name is what a resumed run is found by
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    opened = trackio.init(project=project, name=name, config=dict(run.config), resume="allow", embed=False)
    return MetricsLogger(lambda step, metrics: opened.log(dict(metrics), step=step), opened.finish)


LOGGERS: Mapping[str, Callable[[LoggedRun], MetricsLogger]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}


def import_logger(name: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"log: {name} is not installed: pip install 'tokentrue[{EXTRAS[name]}]', or leave it out of log"
        ) from error


class MetricsWriter:
    """Appends. Rows of steps that a resumed run repeats move to `metrics.before-N.jsonl`."""

    def __init__(
        self,
        directory: Path,
        *,
        provenance: JsonMapping,
        device: str = "cpu",
        first_step: int = 0,
        log: Sequence[LoggerName] = ("tensorboard",),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        self._provenance = {**provenance, "hardware": hardware(device), "torch": torch.__version__}
        run = LoggedRun(directory=directory, config=self._provenance, first_step=first_step)
        self._loggers = [LOGGERS[name](run) for name in log]
        try:
            self._move_repeated_rows(first_step)
            self._file = self.path.open("a")
        except OSError as error:
            raise TrainingError(
                f"{self.path}: the rows before step {first_step} could not be written again ({error.strerror}); the "
                "file is as it was: "
                "make room and run again to resume"
            ) from error

    def _move_repeated_rows(self, first_step: int) -> None:
        """Leaves the rows of earlier steps in `metrics.jsonl`; all other lines go to another file first."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = text.removesuffix("\n").split("\n") if text else []
        is_kept = [is_before(line, first_step) for line in lines]
        if all(is_kept) and (not text or text.endswith("\n")):
            return
        others = [line + "\n" for line, kept in zip(lines, is_kept, strict=True) if not kept]
        if others:
            moved = (self.path.with_name(f"metrics.before-{n}.jsonl") for n in itertools.count(1))
            replace_text(next(path for path in moved if not path.exists()), "".join(others))
        replace_text(self.path, "".join(line + "\n" for line, kept in zip(lines, is_kept, strict=True) if kept))

    def write(self, step: int, version: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        timed = {f"seconds/{name}": round(value, 6) for name, value in seconds.items()}
        row = {"step": step, "policy_version": version, **metrics, **timed, **self._provenance}
        try:
            self._file.write(json_line(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self.path}: the row of step {step} could not be written ({error.strerror}); the rows before are "
                "whole: make room and "
                "run again to resume"
            ) from error
        for logger in self._loggers:
            logger.log(step, {**metrics, **timed})

    def close(self) -> None:
        with contextlib.suppress(OSError):  # every row was flushed, or its error raised, by `write`
            self._file.close()
        for logger in self._loggers:
            logger.close()


def json_line(row: JsonMapping) -> str:
    """JSON has no NaN and no infinity: both are null."""
    return json.dumps(finite_or_null(row), allow_nan=False)


def finite_or_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        items: JsonMapping = value
        return {key: finite_or_null(item) for key, item in items.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Writes beside `path` and moves the whole file into place: a full disk leaves the old one."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        with beside.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write names no file


def is_before(line: str, first_step: int) -> bool:
    """Whether a line is a whole row of an earlier step; a crash may have left half a line."""
    try:
        return json.loads(line)["step"] < first_step
    except (ValueError, KeyError, TypeError):
        return False


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"
