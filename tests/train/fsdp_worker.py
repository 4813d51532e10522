"""One rank of test_fsdp: a few exact steps on sharded weights; rank 0 writes what it saw."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tests.gpu.host_collectives import HostStagedGroup
from tests.marks import IS_THOROUGH
from tests.train.rows import groups_for, small_model
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, Ranks, TrainConfig, Trainer, join, leave, shard
from tokentrue.train.checkpoint import Progress, Store, load, save

STEPS, SIZE = (3, 4) if IS_THOROUGH else (2, 2)


def main(out: str, *, is_staged: bool = False) -> None:
    torch.set_num_threads(1)
    if is_staged:  # as on ranks that share a GPU, but with this machine's tensors
        torch.distributed.Backend.register_backend(
            "staged", partial(HostStagedGroup, devices=("cpu",)), devices=["cpu"]
        )
        torch.distributed.init_process_group("staged")
    ranks = join()
    model = small_model()
    engine = small_model()  # plays the engine: whole weights, one process
    shard(model, ranks)
    config = TrainConfig(micro_tokens=128, steps=STEPS)
    trainer = Trainer(model, config=config, optim=OptimConfig(), loss=loss_named("dapo"), ranks=ranks)
    seen: list[dict[str, float]] = []
    for step in range(STEPS):
        groups = ranks.from_first(
            groups_for(engine, groups=2, size=SIZE, seed=step, version=step) if ranks.first else None
        )
        report = trainer.step(groups)
        weights = dict(trainer.weights())
        engine.load_state_dict(weights, strict=False)
        seen.append(
            {"loss": report.metrics["update/loss"], "norm": report.metrics["update/grad_norm"], **vars_of(report)}
        )
    checksum = sum(float(value.double().abs().sum()) for value in weights.values())
    went_on = not IS_THOROUGH or resumed(trainer, ranks, Path(out).parent / f"checkpoints-{ranks.world}")
    trainer.config = replace(trainer.config, shard_checkpoint_gib=1 / 1024)
    went_on = went_on and resumed(trainer, ranks, Path(out).parent / f"shards-{ranks.world}")
    if ranks.first:
        with open(out, "w") as file:
            json.dump({"world": ranks.world, "steps": seen, "checksum": checksum, "resumed": went_on}, file)
    leave()


def resumed(trainer: Trainer, ranks: Ranks, directory: Path) -> bool:
    """Whether a trainer that loads a checkpoint of this one takes the next step to the same bits, on its own shards."""
    store = Store(directory=directory, run_hash="h", model=None)
    save(trainer, store, Progress())
    torch.distributed.barrier() if ranks.world > 1 else None
    other = Trainer(
        shard(small_model(), ranks), config=trainer.config, optim=OptimConfig(), loss=loss_named("dapo"), ranks=ranks
    )
    load(other, directory / f"step-{trainer.version:06d}", store)
    plain = small_model()
    plain.load_state_dict(dict(trainer.weights()), strict=False)
    groups = ranks.from_first(
        groups_for(plain, groups=2, size=SIZE, seed=9, version=trainer.version) if ranks.first else None
    )
    for each in (trainer, other):
        each.step(groups)
    pairs = list(zip(trainer.weights(), other.weights(), strict=True))
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for (_, a), (_, b) in pairs)


def vars_of(report: object) -> dict[str, float]:
    found = report.agreement  # type: ignore[attr-defined]
    return {"compared": found.compared, "differing": found.differing}
