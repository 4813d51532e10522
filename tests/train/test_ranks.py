"""Several ranks: an engine on each, rollouts spread over them, rounds longer than a collective waits, weights handed on
one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tokentrue.app.rollouts import Share

ROOT = Path(__file__).parent.parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def launch(world: int, *command: str) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    return [sys.executable, *torchrun, "-m", *command]


def work(world: int, out: Path) -> dict[str, Any]:
    command = launch(world, "tests.train.ranks_worker", str(out), *(["--world"] if world > 1 else []))
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def train(world: int, out: Path, *, steps: int = 2, **sets: object) -> list[str]:
    settings = {
        "rollout.tasks": 3,
        "rollout.group_size": 4,
        "rollout.seed": 3,
        "optim.lr": 4e-4,
        "log": "[]",
        "threads": 1,
        **sets,
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return launch(world, "tokentrue", "train", "--out", str(out), "--steps", str(steps), "--json", *options)


def rows_of(command: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("count", "world"), [(8, 2), (7, 3), (1, 4), (0, 2)])
def test_shares_in_rank_order_are_the_list(count: int, world: int) -> None:
    tasks = list(range(count))
    parts = [list(Share(rank=rank, world=world).of(tasks)) for rank in range(world)]  # type: ignore[arg-type]
    assert [task for part in parts for task in part] == tasks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.slow
def test_ranks_wait_for_each_other_publish_one_by_one_and_stop_together(tmp_path: Path) -> None:
    one, two = work(1, tmp_path / "one.json"), work(2, tmp_path / "two.json")
    assert one["differing"] == two["differing"] == 0
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5), "a sharded reference model gives another penalty"
    for seen in (one, two):
        assert seen["same_bits"] and seen["checkpointed"] == seen["loss"], "activation checkpointing changed a bit"
    assert two["slow"][0] == [2, 2, 2] and two["slow"][1] > 20.0, "the round took longer than a collective waits"
    assert all("no engine is reachable" in said for said in two["failed"])
    tensors = two["published"]["tensors"]
    for count, peak, said in two["published"]["ranks"]:
        assert count == tensors and peak <= 2, f"{peak} of {tensors} gathered tensors were alive at once"
        assert "the engine is full" in said


@pytest.mark.slow
def test_an_engine_on_every_rank_samples_what_one_process_samples(tmp_path: Path) -> None:
    one, two = rows_of(train(1, tmp_path / "one")), rows_of(train(2, tmp_path / "two"))
    assert [row["step"] for row in two] == [0, 1]
    for row in two:
        assert row["exact_compared"] > 0 and row["exact_differing"] == 0
        assert row["rollouts/played"] == 12 and row["rollouts/failed"] == 0
    alike = ("reward", "tokens", "tokens_trained", "completion_length_max", "exact_compared")
    assert [two[0][key] for key in alike] == [one[0][key] for key in alike], (
        "the first round is the same whoever plays it"
    )
    assert two[0]["update/grad_norm"] == pytest.approx(one[0]["update/grad_norm"], rel=1e-4)
    played = [tmp_path / "two" / name for name in ("sessions.sqlite", "sessions-1.sqlite")]
    assert all(path.exists() for path in played), "a rank played nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_ends_the_run_and_a_resumed_one_has_the_same_bits(tmp_path: Path) -> None:
    rows_of(train(2, tmp_path / "whole", steps=4, **{"train.checkpoint_every": 1}))
    command = train(2, tmp_path / "broken", steps=4, **{"train.checkpoint_every": 1})
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 200
    while not (tmp_path / "broken" / "checkpoints" / "step-000001" / "state.json").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    os.kill(max(children_of(process.pid)), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0 and "SIGKILL" in said
    assert not (tmp_path / "broken" / "checkpoints" / "step-000004").exists(), (
        "the run had ended before the rank was killed"
    )
    rows_of(command)
    whole, broken = (
        load_file(tmp_path / name / "checkpoints" / "step-000004" / "model.safetensors") for name in ("whole", "broken")
    )
    assert all((whole[name].numpy().tobytes() == broken[name].numpy().tobytes()) for name in whole)


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]
