"""The loop: who plays what with which weights, and a resume that nobody could tell from an unbroken run."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.train.rows import groups_for, small_model
from tokentrue.app.training import TrainRun, store_for
from tokentrue.errors import FileFormatError
from tokentrue.mismatch import loss_named
from tokentrue.train import MetricsWriter, OptimConfig, Publisher, SourceRounds, Store, TrainConfig, Trainer, train
from tokentrue.train.checkpoint import find_checkpoints
from tokentrue.train.config import plain_settings
from tokentrue.train.loop import Evaluator, Run
from tokentrue.train.rows import Groups


class Crash(Exception):
    """The process dies."""


class Engine:
    """A stand-in engine: holds published weights, plays rounds with them, remembers which version played which
    round."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.model = small_model()
        self.version = 0
        self.played: list[tuple[int, int]] = []

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        self.model.load_state_dict(dict(weights), strict=False)
        self.version = version

    async def play(self, number: int) -> Groups:
        began = self.version
        ahead = number > self.trainer.version
        while (
            ahead and self.trainer.version == began
        ):  # a slow round: the step beside it has ended, its weights want to be published
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        groups = groups_for(self.model, groups=2, size=3, seed=number, version=self.version)
        assert self.version == began, "weights changed under a round"
        self.played.append((number, began))
        return groups

    def counts(self, number: int) -> Mapping[str, float]:
        return {"rollouts/played": 10 + number} if number in dict(self.played) else {}


def run(directory: Path | None, *, steps: int, lag: int, dies_after: int = 0) -> tuple[Trainer, Engine, list[Any]]:
    """With `dies_after` the process dies in the step after it."""
    torch.set_num_threads(1)
    config = TrainConfig(steps=steps, lag=lag, checkpoint_every=2, groups_per_step=2)
    trainer = Trainer(
        small_model(), config=config, optim=OptimConfig(schedule="cosine", warmup=2), loss=loss_named("dapo")
    )
    engine = Engine(trainer)
    store = None if directory is None else Store(directory=directory, run_hash="h", model=None)

    def stop(report: Any, seconds: Any) -> None:
        if dies_after and report.version == dies_after + 1:
            raise Crash

    try:
        reports = asyncio.run(train(trainer, engine, Publisher(engine), store=store, on_step=stop))
    except Crash:
        reports = []
    return trainer, engine, reports


class Runs(NamedTuple):
    """A run of six steps, and one that died in step 5, after the checkpoint of step 4."""

    whole: Path
    broken: Path
    trainer: Trainer  # of the whole run
    reports: list[Any]


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_round_j_is_played_by_version_j_minus_lag(lag: int) -> None:
    _, engine, reports = run(None, steps=4, lag=lag)
    assert sorted(engine.played) == [(j, max(0, j - lag)) for j in range(4)]
    assert [r.metrics["staleness_max"] for r in reports] == [min(j, lag) for j in range(4)]
    assert [r.agreement.compared > 0 for r in reports] == [j == 0 or lag == 0 for j in range(4)]


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, runs: Callable[[int], Runs], lag: int) -> None:
    _, broken, trainer, reports = runs(lag)
    assert [path.name for path in find_checkpoints(broken)] == ["step-000002", "step-000004"]
    resumed, engine, rest = run(shutil.copytree(broken, tmp_path / "broken", symlinks=True), steps=6, lag=lag)
    assert [r.step for r in rest] == [4, 5]
    assert [r.metrics["rollouts/played"] for r in rest] == [14, 15], "of rounds that wait in the checkpoint, too"
    assert [r.metrics for r in rest] == [r.metrics for r in reports[4:]]
    for a, b in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert np.array_equal(a.detach().numpy().view(np.uint32), b.detach().numpy().view(np.uint32))
    assert engine.version == 6


def test_a_checkpoint_is_a_model_directory_and_refuses_another_configuration(
    tmp_path: Path, runs: Callable[[int], Runs]
) -> None:
    path = find_checkpoints(shutil.copytree(runs(2).whole, tmp_path, symlinks=True, dirs_exist_ok=True))[-1]
    assert json.loads((path / "state.json").read_text())["version"] == 6
    trainer = Trainer(small_model(), config=TrainConfig(steps=6), optim=OptimConfig(), loss=loss_named("dapo"))
    from tokentrue.train import checkpoint

    with pytest.raises(FileFormatError, match="another configuration"):
        checkpoint.load(trainer, path, Store(directory=tmp_path, run_hash="other", model=None))
    (path / "optimizer.safetensors").write_bytes(b"half")
    with pytest.raises(FileFormatError, match="not a whole checkpoint"):
        checkpoint.load(trainer, path, Store(directory=tmp_path, run_hash="h", model=None))


def test_a_file_of_samples_with_other_content_is_refused(tmp_path: Path) -> None:
    """Same name, same size."""
    settings = TrainRun(samples=tmp_path / "samples.jsonl", out=tmp_path / "out")
    trainer = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))

    def open_store(text: str) -> Store:
        (tmp_path / "samples.jsonl").write_text(text)
        return store_for(settings, {})[0]

    store = open_store("reward 0, reward 1")
    Run(
        trainer=trainer, rounds=Engine(trainer), publish=Publisher(), store=store, evaluator=Evaluator(), on_step=None
    ).keep()
    open_store("reward 0, reward 1")
    with pytest.raises(
        FileFormatError, match=r"step-000000: another file of samples made it \(SHA-256 \w{12}…, now \w{12}…\)"
    ):
        open_store("reward 1, reward 0")
    state = tmp_path / "out" / "checkpoints" / "step-000000" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "samples_digest": ""}))
    open_store("reward 1, reward 0")  # checkpoints of older versions name no digest


def test_a_run_with_other_settings_says_which(tmp_path: Path) -> None:
    settings = TrainRun(out=tmp_path)
    trainer = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    store, _ = store_for(settings, plain_settings(train=TrainConfig(), dtype="float32", loss=loss_named("dapo")))
    Run(
        trainer=trainer, rounds=Engine(trainer), publish=Publisher(), store=store, evaluator=Evaluator(), on_step=None
    ).keep()
    other = plain_settings(train=TrainConfig(lag=1), dtype="bfloat16", loss=loss_named("dapo", clip_high=0.2))
    said = "train.lag: 0, now 1; dtype: 'float32', now 'bfloat16'; loss.clip_high: 0.28, now 0.2"
    with pytest.raises(FileFormatError, match=re.escape(f"step-000000: another configuration made it ({said})")):
        store_for(settings, other)
    state = tmp_path / "checkpoints" / "step-000000" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "made_from": {}}))
    with pytest.raises(FileFormatError, match=r"made it \(\w{12}, now \w{12}\)"):  # a checkpoint of an older version
        store_for(settings, other)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, runs: Callable[[int], Runs]) -> None:
    from tokentrue.train import checkpoint

    shutil.copytree(runs(2).whole, tmp_path, symlinks=True, dirs_exist_ok=True)
    model = small_model()
    model.lm_head = torch.nn.Linear(128, 7, bias=False)  # type: ignore[assignment]
    other = Trainer(model, config=TrainConfig(steps=6), optim=OptimConfig(), loss=loss_named("dapo"))
    store = Store(directory=tmp_path, run_hash="h", model=None)
    with pytest.raises(FileFormatError, match="another model"):
        checkpoint.load(other, find_checkpoints(tmp_path)[-1], store)
    (find_checkpoints(tmp_path)[-1] / "rounds.jsonl").write_text("{")
    with pytest.raises(FileFormatError, match="not a whole checkpoint"):
        checkpoint.load(other, find_checkpoints(tmp_path)[-1], store)


async def test_a_source_is_read_in_one_pass_and_found_again_from_any_place() -> None:
    class Source:
        passes = 0

        def groups(self) -> Iterable[list[Any]]:
            self.passes += 1
            yield from ([n] for n in range(5))

    source = Source()
    rounds = SourceRounds(source, 2)  # type: ignore[arg-type]
    assert [await rounds.play(n) for n in range(4)] == [[[0], [1]], [[2], [3]], [[4]], [[0], [1]]], (
        "no step holds a group twice"
    )
    assert source.passes == 2
    assert await rounds.play(1) == [[2], [3]], "a resumed run asks for a round in the middle"


def test_metrics_rows_carry_their_provenance_and_survive_a_resume(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, provenance={"run": "abc"})
    for step in range(4):
        writer.write(step, step + 1, {"reward": 0.5}, {"step": 0.1})
    writer.close()
    with writer.path.open("a") as file:
        file.write('{"step": 1, "rew')  # a crash in the middle of a line
    again = MetricsWriter(tmp_path, provenance={"run": "abc"}, first_step=2)
    again.write(2, 3, {"reward": 0.75}, {"step": 0.1})
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward"]) for row in rows] == [(0, 0.5), (1, 0.5), (2, 0.75)]
    assert all(row["run"] == "abc" and row["hardware"] and row["policy_version"] == row["step"] + 1 for row in rows)
    assert list((tmp_path / "tensorboard").iterdir())
