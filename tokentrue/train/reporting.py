"""What one step did, in numbers, and where they are written. A number that is not finite is null. What is on file is
replaced only by a file that is whole.
"""

import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tokentrue.errors import ConfigError, TrainingError
from tokentrue.json_types import JsonMapping
from tokentrue.mismatch.metrics import Mean, Metrics
from tokentrue.plain_json import dumps
from tokentrue.records import record
from tokentrue.samples.shape import spread_spans
from tokentrue.train.config import LoggerName
from tokentrue.train.exactness import Agreement
from tokentrue.train.rows import Row, is_truncated

PROJECT = "tokentrue"  # where WANDB_PROJECT or TRACKIO_PROJECT names no other
LOGGERS: Mapping[LoggerName, tuple[str, str]] = {  # module, and the extra that installs it
    "tensorboard": ("torch.utils.tensorboard.writer", "train"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}
MEASURED: Mapping[str, str] = {  # what a step reports of `diagnose`
    "delta_abs_mean": "delta/abs_mean",
    "delta_min": "delta/min",
    "delta_max": "delta/max",
    "k1": "corr/k1",
    "k3": "corr/k3",
    "chi2": "chi2/token",
    "ratio_mean": "ratio/raw/mean",
    "ess": "ratio/sequence/ess",
    "log_ppl_trainer": "log_ppl/trainer",
    "skew_positive": "contribution/rollout/positive/skew",
    "skew_negative": "contribution/rollout/negative/skew",
    "pull_positive": "contribution/rollout/positive/mean",
    "pull_negative": "contribution/rollout/negative/mean",
}


TURNS = (*map(str, range(8)), "8+")
FALL_STEPS = 20
WATCHED = {"update/grad_norm": "gradient norm", "mismatch/ess": "effective sample share"}


def turn_numbers(row: Row) -> torch.Tensor:
    return torch.tensor(spread_spans(row.sample, lambda span: min(span.turn, len(TURNS) - 1), 0))


def step_mismatch(found: Metrics) -> dict[str, float]:
    tails = found["tail/raw/above_1.1"] + found["tail/raw/below_1/1.1"]
    turns = ((turn, found.statistics[f"by_kind/{turn}"]) for turn in TURNS)
    by_turn = {f"mismatch/turn/{turn}": stat.value for turn, stat in turns if isinstance(stat, Mean) and stat.count}
    return {**{f"mismatch/{name}": found[key] for name, key in MEASURED.items()}, "mismatch_rate": tails, **by_turn}


def find_falling(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """A line for each watched metric of which four fifths of the pairs of the last steps fall, and the last five are
    below half of the first five."""
    if len(rows) < FALL_STEPS or len(rows) % (FALL_STEPS // 2):  # no line for every step of a fall
        return []
    lines: list[str] = []
    for key, name in WATCHED.items():
        values = [row.get(key, math.nan) for row in rows[-FALL_STEPS:]]
        pairs = list(itertools.combinations(values, 2))
        first, last = statistics.median(values[:5]), statistics.median(values[-5:])
        if sum(a > b for a, b in pairs) > 0.8 * len(pairs) and last < first / 2:
            lines.append(
                f"{name} fell from {first:.3g} to {last:.3g} in {FALL_STEPS} steps; compare mismatch/k3 and the reward"
            )
    return lines


@record
class StepReport:
    """`metrics` are the same whenever the step is repeated; `seconds` and `speeds` are not."""

    step: int
    version: int  # of the weights that the step produced
    metrics: Mapping[str, float]
    agreement: Agreement
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    speeds: Mapping[str, float] = field(default_factory=dict[str, float])


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def step_speeds(report: StepReport, seconds: Mapping[str, float]) -> dict[str, float]:
    whole = max(seconds["step"], 1e-9)
    shares = {f"share/{name}": value / whole for name, value in seconds.items() if name != "step"}
    tokens, trained = report.metrics["tokens"], report.metrics["tokens_trained"]
    return {"speed/tokens_per_s": tokens / whole, "speed/trained_tokens_per_s": trained / whole, **shares}


def batch_metrics(rows: Sequence[Row], advantages: Sequence[float], *, version: int) -> dict[str, float]:
    rewards = torch.tensor(list({row.session: row.reward for row in rows}.values()), dtype=torch.float64)
    lengths = torch.tensor([int(row.mask.sum()) for row in rows], dtype=torch.float64)
    ages = torch.cat([version - row.versions[row.sampled] for row in rows]).double().clamp(min=0)
    groups: dict[str, bool] = {}
    for row, advantage in zip(rows, advantages, strict=True):
        groups[row.group] = groups.get(row.group, False) or advantage != 0.0
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()) if rewards.numel() > 1 else 0.0,
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "rows": len(rows),
        "sessions": rewards.numel(),
        "groups": len(groups),
        "groups_without_signal": sum(not taught for taught in groups.values()),
        "tokens": sum(row.length for row in rows),
        "tokens_trained": int(lengths.sum()),
        "completion_length_mean": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "truncated": sum(map(is_truncated, rows)) / len(rows),
        "staleness_mean": float(ages.mean()) if ages.numel() else 0.0,
        "staleness_max": float(ages.max()) if ages.numel() else 0.0,
    }


def open_logger(
    name: LoggerName, directory: Path, config: JsonMapping, first_step: int
) -> tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]:
    """Functions that log a step's metrics, and close. `directory` names the run: a resumed one has the same id."""
    module_name, extra = LOGGERS[name]
    try:
        module: Any = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"log: {name} is not installed: pip install 'tokentrue[{extra}]', or leave it out of log"
        ) from error
    if name == "tensorboard":
        board = module.SummaryWriter(str(directory / "tensorboard"), purge_step=first_step or None)

        def log(step: int, metrics: Mapping[str, float]) -> None:
            for key, value in metrics.items():
                board.add_scalar(key, value, step)

        return log, board.close
    place = directory.resolve()
    run_id = hashlib.sha256(str(place).encode()).hexdigest()[:12]
    project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    # trackio has no ids: the name is what a resumed run is found by
    own: JsonMapping = {"name": f"{place.name}-{run_id}", "embed": False}
    if name == "wandb":
        own = {"name": place.name, "id": run_id, "dir": str(directory), "settings": module.Settings(silent=True)}
    # offline, wandb cannot look up what it has of a run
    is_known = name == "trackio" or os.environ.get("WANDB_MODE", "online") == "online"
    opened = module.init(project=project, config=dict(config), resume="allow" if is_known else None, **own)
    return lambda step, metrics: opened.log(dict(metrics), step=step), opened.finish


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
        self._loggers = [open_logger(name, directory, self._provenance, first_step) for name in log]
        try:
            self._move_repeated_rows(first_step)
            self._file = self.path.open("ab")
        except OSError as error:
            raise TrainingError(
                f"{self.path}: the rows before step {first_step} could not be written again ({error.strerror}); the "
                "file is as it was: make room and run again to resume"
            ) from error

    def _move_repeated_rows(self, first_step: int) -> None:
        """All lines but earlier steps' go to another file first."""
        text = self.path.read_text() if self.path.exists() else ""
        kept: list[str] = []
        others: list[str] = []
        for line in text.removesuffix("\n").split("\n") if text else ():
            (kept if is_before(line, first_step) else others).append(line + "\n")
        if not others and (not text or text.endswith("\n")):
            return
        if others:
            moved = (self.path.with_name(f"metrics.before-{n}.jsonl") for n in itertools.count(1))
            replace_text(next(path for path in moved if not path.exists()), "".join(others))
        replace_text(self.path, "".join(kept))

    def write(self, step: int, version: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        timed = {f"seconds/{name}": round(value, 6) for name, value in seconds.items()}
        try:
            row = {"step": step, "policy_version": version, **metrics, **timed, **self._provenance}
            self._file.write(dumps(row) + b"\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self.path}: the row of step {step} could not be written ({error.strerror}); the rows before are "
                "whole: make room and run again to resume"
            ) from error
        for log, _ in self._loggers:
            log(step, {**metrics, **timed})

    def close(self) -> None:
        with suppress(OSError):  # every row was flushed, or its error raised, by `write`
            self._file.close()
        for _, close in self._loggers:
            close()


def replace_text(path: Path, text: str) -> None:
    """The whole file is moved into place: a full disk leaves the old one."""
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
    try:
        return json.loads(line)["step"] < first_step
    except (ValueError, KeyError, TypeError):
        return False


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"
