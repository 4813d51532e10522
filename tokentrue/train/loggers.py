"""Where metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio. Each is optional and imported when
it is named.

wandb and trackio take their own variables: WANDB_MODE=offline writes to the run's directory and sends nothing;
TRACKIO_DIR is where trackio's files are, which leave the machine only where you configure that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonMapping

LoggerName: TypeAlias = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "tokentrue"  # where WANDB_PROJECT or TRACKIO_PROJECT names no other
EXTRAS: Mapping[str, str] = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """`directory` names the run: a resumed run continues under the same id. `first_step` is the step that it resumes
    at."""

    directory: Path
    config: JsonMapping
    first_step: int = 0

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def id(self) -> str:
        return hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:12]


class MetricsLogger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    def __init__(self, run: LoggedRun) -> None:
        module = import_logger("tensorboard", "torch.utils.tensorboard.writer")
        self._board = module.SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.first_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


class WandbLogger:
    def __init__(self, run: LoggedRun) -> None:
        wandb = import_logger("wandb", "wandb")
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(run.directory),
            id=run.id,
            name=run.name,
            config=dict(run.config),
            resume="allow" if is_online else None,  # offline, wandb cannot look up what it has of a run
            settings=wandb.Settings(silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioLogger:
    def __init__(self, run: LoggedRun) -> None:
        trackio = import_logger("trackio", "trackio")
        name = f"{run.name}-{run.id}"  # trackio has no ids: the name is what a resumed run is found by
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(project=project, name=name, config=dict(run.config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: Mapping[str, Callable[[LoggedRun], MetricsLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}


def import_logger(name: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"log: {name} is not installed: pip install 'tokentrue[{EXTRAS[name]}]', or leave it out of log"
        ) from error
