"""FSDP2 in two processes (gloo): the losses of one process, and rollout log-probabilities still equal in
every bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.train import fsdp_worker
from tests.train.rows import small_model
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.checkpoint import Store, load


def run_two(out: Path, *options: str) -> dict[str, Any]:
    """Two processes with torchrun's variables, forks of one that has imported torch (tests/train/test_ranks.py has
    torchrun itself)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.fsdp_worker"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [context.Process(target=run_rank, args=(rank, port, str(out), options)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(240)
    assert [each.exitcode for each in ranks] == [0, 0]
    return json.loads(out.read_text())


def run_rank(rank: int, port: str, out: str, options: tuple[str, ...]) -> None:
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    fsdp_worker.main(out, is_staged="staged" in options)


def test_two_ranks_train_as_one_and_stay_exact(tmp_path: Path) -> None:
    fsdp_worker.main(str(tmp_path / "one.json"))
    one, two = json.loads((tmp_path / "one.json").read_text()), run_two(tmp_path / "two.json")
    assert (one["world"], two["world"]) == (1, 2)
    for a, b in zip(one["steps"], two["steps"], strict=True):
        assert b["compared"] > 0 and b["differing"] == 0
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3, abs=1e-5)
        assert b["norm"] == pytest.approx(a["norm"], rel=1e-3)
    assert two["steps"][0]["loss"] == pytest.approx(one["steps"][0]["loss"], rel=1e-6)
    assert one["resumed"] and two["resumed"], "a run that was resumed on its shards has other bits"
    assert two["checksum"] == pytest.approx(one["checksum"], rel=1e-6)
    (shards,) = (tmp_path / "shards-2").glob("step-*")
    assert len(list((shards / "optimizer").glob("*.distcp"))) == 2, "each rank writes its own"
    alone = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    load(alone, shards, Store(directory=shards.parent, run_hash="h", model=None))
    moments = [alone.optimizer.state[parameter]["exp_avg"] for parameter in alone.masters.parameters]
    assert all(bool(moment.any()) for moment in moments), "one process reads what two have written"


@pytest.mark.slow
def test_collectives_on_copies_in_host_memory_give_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "staged").mkdir()
    plain, staged = run_two(tmp_path / "plain" / "two.json"), run_two(tmp_path / "staged" / "two.json", "staged")
    assert staged == plain, "steps, weights and resumed runs"
