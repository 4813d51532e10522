"""Drills: what breaks in a long run, what is said, what is lost, and how it resumes. docs/training-evidence.md has the table.

A full disk is a real one: a small tmpfs where this process may mount one, and everywhere a limit on the size of files.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.app.test_resampling import StandInSessions
from tests.train.rows import small_model
from tests.train.test_long_runs import store_of
from tests.train.test_loop import Engine
from tokentrue.app.rollouts import RolloutRounds
from tokentrue.environments import RolloutConfig, Task
from tokentrue.errors import EngineError, EngineUnreachable, TrainingError
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, Publisher, TrainConfig, Trainer, train
from tokentrue.train.checkpoint import find_checkpoints

ROOT = Path(__file__).parent.parent.parent
STEPS = 4


def trainer_of(**config: object) -> Trainer:
    torch.set_num_threads(1)
    settings = TrainConfig(**{"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 1, **config})  # type: ignore[arg-type]
    return Trainer(small_model(), config=settings, optim=OptimConfig(lr=1e-3), loss=loss_named("dapo"))


def run(directory: Path, engine_of: Any = Engine, **config: object) -> Trainer:
    trainer = trainer_of(**config)
    engine = engine_of(trainer)
    asyncio.run(train(trainer, engine, Publisher(engine), store=store_of(directory)))
    return trainer


def versions(directory: Path) -> list[int]:
    return [json.loads((path / "state.json").read_text())["version"] for path in find_checkpoints(directory)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return run(tmp_path_factory.mktemp("unbroken"))


def same(a: Trainer, b: Trainer) -> bool:
    pairs = zip(a.weights(), b.weights(), strict=True)
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for (_, x), (_, y) in pairs)


# ---- a full disk -------------------------------------------------------------------------------------------------------------------------
@contextmanager
def small_disk(directory: Path, mib: int) -> Iterator[None]:
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(directory)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_keeps_the_checkpoint_before_and_the_run_resumes(tmp_path: Path, unbroken: Trainer) -> None:
    """A checkpoint of the shipped model takes 8 MiB; the second one no longer fits beside the first."""
    with small_disk(tmp_path, 12):
        with pytest.raises(TrainingError, match=r"step 2: the checkpoint could not be written to .*No space left"):
            run(tmp_path)
        assert versions(tmp_path) == [1] and not list(tmp_path.glob(".*partial"))
        assert (tmp_path / "latest").resolve().name == "step-000001"
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path)], check=True)
        resumed = run(tmp_path)
        assert resumed.version == STEPS and versions(tmp_path) == [STEPS]
        assert same(resumed, unbroken)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails instead of killing the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_half(tmp_path: Path, unbroken: Trainer) -> None:
    run(tmp_path, steps=2)
    with file_limit(1 << 20), pytest.raises(TrainingError, match="step 3: the checkpoint could not be written"):
        run(tmp_path)
    assert versions(tmp_path) == [2] and not list(tmp_path.glob(".*partial"))
    assert same(run(tmp_path), unbroken)


# ---- engines and environments
# ------------------------------------------------------------------------------------------------------------
class DyingEngine(Engine):
    async def play(self, number: int) -> Any:
        if number == 3:
            raise EngineUnreachable("no engine is reachable (tried 1: connection refused)")
        return await super().play(number)


def test_an_engine_that_dies_costs_no_finished_step(tmp_path: Path, unbroken: Trainer) -> None:
    """No checkpoint was due: the steps are kept because the engine failed."""
    with pytest.raises(EngineUnreachable, match="no engine is reachable"):
        run(tmp_path, DyingEngine, checkpoint_every=0, checkpoint_minutes=0.0)
    assert versions(tmp_path) == [3]
    assert same(run(tmp_path, checkpoint_every=0, checkpoint_minutes=0.0), unbroken)


class Unreliable:
    """Raises in a fixed share of its rollouts."""

    name = "unreliable"

    def __init__(self, broken: int) -> None:
        self.broken = broken  # of four

    def tasks(self, count: int, *, seed: int = 0, split: str = "train") -> list[Task]:
        return [Task(task_id=f"{seed}-{i}", prompt="") for i in range(count)]

    async def run(self, client: Any, task: Task) -> float:
        if client.index % 4 < self.broken:
            raise ValueError("the environment broke")
        return float(client.index > 5)


def environment_rounds(broken: int) -> RolloutRounds:
    name = "tests.train.test_drills:Unreliable"
    return RolloutRounds(
        RolloutConfig(environment=name, options={"broken": broken}, tasks=2, group_size=8), StandInSessions()
    )


def test_an_environment_that_raises_half_of_the_time_costs_those_rollouts_alone(tmp_path: Path) -> None:
    trainer = trainer_of(exact=False)
    reports = asyncio.run(train(trainer, environment_rounds(2), Publisher(), store=store_of(tmp_path)))
    assert [(report.metrics["rollouts/played"], report.metrics["rollouts/failed"]) for report in reports] == [
        (16, 8)
    ] * STEPS
    assert all(report.metrics["rows_trained"] == 8 for report in reports) and versions(tmp_path) == [STEPS]


def test_an_environment_that_raises_more_often_stops_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(exact=False)
    said = r"round 0: 12 of 16 rollouts failed \(rollout.max_failed = 0.5\); the first said: ValueError: the environment broke"
    with pytest.raises(EngineError, match=said):
        asyncio.run(train(trainer, environment_rounds(3), Publisher(), store=store_of(tmp_path)))


# ---- an interrupted command
# -------------------------------------------------------------------------------------------------------------
def metrics_of(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_ctrl_c_of_the_command_ends_the_step_and_the_run_resumes(tmp_path: Path) -> None:
    sets = ("rollout.tasks=2", "rollout.group_size=4", "log=[]", "threads=1")
    options = [part for text in sets for part in ("--set", text)]
    command = [sys.executable, "-m", "tokentrue", "train", "--out", str(tmp_path), "--steps", "6", "--json", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while len(metrics_of(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.endswith("the same command resumes\n"), said
    (kept,) = versions(tmp_path / "checkpoints")
    assert 2 <= kept < 6 and len(metrics_of(tmp_path)) >= kept - 1
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics_of(tmp_path)] == list(range(6)) and versions(tmp_path / "checkpoints")[
        -1
    ] == 6
