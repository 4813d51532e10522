"""Run under torchrun by test_fsdp: a few exact steps on sharded weights; rank 0 writes what it saw."""

from __future__ import annotations

import json
import sys

import torch

from tests.train.rows import groups_for, small_model
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, TrainConfig, Trainer, join, leave, shard


def main(out: str) -> None:
    torch.set_num_threads(1)
    ranks = join()
    model = small_model()
    engine = small_model()  # plays the engine: whole weights, one process
    shard(model, ranks)
    config = TrainConfig(micro_tokens=128, steps=3)
    trainer = Trainer(model, config=config, optim=OptimConfig(), loss=loss_named("dapo"), ranks=ranks)
    seen: list[dict[str, float]] = []
    for step in range(3):
        groups = ranks.from_first(groups_for(engine, groups=3, size=3, seed=step, version=step) if ranks.first else None)
        report = trainer.step(groups)
        weights = dict(trainer.weights())
        engine.load_state_dict(weights, strict=False)
        seen.append({"loss": report.metrics["update/loss"], "norm": report.metrics["update/grad_norm"], **vars_of(report)})
    if ranks.first:
        checksum = sum(float(value.double().abs().sum()) for value in weights.values())
        with open(out, "w") as file:
            json.dump({"world": ranks.world, "steps": seen, "checksum": checksum}, file)
    leave()


def vars_of(report: object) -> dict[str, float]:
    found = report.agreement  # type: ignore[attr-defined]
    return {"compared": found.compared, "differing": found.differing}


if __name__ == "__main__":
    main(sys.argv[1])
