"""Run under torchrun by test_drills: a short training run on sharded weights; rank 1 may be killed after some steps."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.train.rows import small_model
from tests.train.test_long_runs import store_of
from tests.train.test_loop import Engine
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, Publisher, TrainConfig, Trainer, join, leave, shard, train
from tokentrue.train.data.rounds import NoRounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill-after", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = join()
    config = TrainConfig(steps=4, checkpoint_every=2, keep_checkpoints=1, shard_checkpoint_gib=1 / 1024)
    trainer = Trainer(shard(small_model(), ranks), config=config, optim=OptimConfig(lr=1e-3), loss=loss_named("dapo"), ranks=ranks)
    engine: Any = Engine(trainer) if ranks.first else NoRounds()

    def on_step(report: Any, seconds: Any) -> None:
        if options.kill_after and report.version == options.kill_after + 1 and not ranks.first:
            os.kill(os.getpid(), signal.SIGKILL)

    publish = Publisher(engine) if ranks.first else Publisher()
    asyncio.run(train(trainer, engine, publish, store=store_of(options.out), on_step=on_step))
    leave()


if __name__ == "__main__":
    main()
