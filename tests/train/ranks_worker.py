"""Run under torchrun by test_ranks: what several ranks do beside the training step. Rank 0 writes what it saw."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from tests.train.rows import groups_for, small_model
from tokentrue.errors import EngineError
from tokentrue.mismatch import Penalty, loss_named
from tokentrue.train import OptimConfig, Publisher, Ranks, TrainConfig, Trainer, join, leave, shard
from tokentrue.train.loop import Evaluator, Run
from tokentrue.train.rows import Groups

TIMEOUT_S = 20.0


class CountingSink:
    """Counts how many gathered tensors are alive at once, and may fail after a few."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.names: list[str] = []
        self.peak = 0
        self._alive = 0
        self._lock = threading.Lock()
        self._fail_after = fail_after

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        await asyncio.to_thread(self.take, weights)

    def take(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            with self._lock:
                self._alive += 1
                self.peak = max(self.peak, self._alive)
            weakref.finalize(tensor, self.forget)
            self.names.append(name)
            if len(self.names) == self._fail_after:
                raise EngineError("the engine is full")

    def forget(self) -> None:
        with self._lock:
            self._alive -= 1


class UnevenRounds:
    """Rank 1 needs longer for its part of a round than a collective waits; or it fails."""

    def __init__(self, ranks: Ranks, *, fails: bool = False) -> None:
        self._ranks = ranks
        self._fails = fails

    async def play(self, number: int) -> Groups:
        if self._ranks.first:
            return groups_for(small_model(), groups=2, size=2, seed=number)
        if self._fails:
            raise EngineError("no engine is reachable")
        await asyncio.sleep(TIMEOUT_S + 2)
        return groups_for(small_model(), groups=1, size=2, seed=100 + number)


def trainer_of(ranks: Ranks, *, checkpointing: bool = False) -> Trainer:
    model: Any = small_model()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = loss_named("grpo", penalty=Penalty(coefficient=0.1))
    reference: Any = small_model()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.01)
    reference = shard(reference.requires_grad_(False), ranks)
    return Trainer(
        shard(model, ranks),
        config=TrainConfig(micro_tokens=128),
        optim=OptimConfig(),
        loss=loss,
        ranks=ranks,
        reference=reference,
    )


def first_loss(ranks: Ranks, *, checkpointing: bool = False) -> tuple[float, int, list[torch.Tensor]]:
    trainer = trainer_of(ranks, checkpointing=checkpointing)
    groups = ranks.from_first(groups_for(small_model(), groups=3, size=3, seed=1) if ranks.first else None)
    report = trainer.step(groups)
    return report.metrics["update/loss"], report.agreement.differing, [value.clone() for _, value in trainer.weights()]


def published(ranks: Ranks) -> dict[str, Any]:
    trainer = trainer_of(ranks)
    sink = CountingSink()
    asyncio.run(Publisher(sink)(trainer))
    failing = CountingSink(fail_after=None if ranks.first else 3)
    said = ""
    try:
        asyncio.run(Publisher(failing)(trainer))
    except EngineError as error:
        said = str(error)
    found = ranks.all_gather_object((len(sink.names), sink.peak, said))
    return {"tensors": len(dict(trainer.model.named_parameters())), "ranks": found}


async def gather(ranks: Ranks, *, fails: bool) -> tuple[list[int], float, str]:
    run = Run(
        trainer=trainer_of(ranks),
        rounds=UnevenRounds(ranks, fails=fails),
        publish=Publisher(),
        store=None,
        evaluator=Evaluator(),
        on_step=None,
    )
    began = time.monotonic()
    run.start_rounds(first=0)
    try:
        await run.gather_round(0)
    except EngineError as error:
        return [], time.monotonic() - began, str(error)
    return [len(group) for group in run.finished[0]], time.monotonic() - began, ""


def main(out: str) -> None:
    torch.set_num_threads(1)
    if "--world" in sys.argv:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    ranks = join()
    loss, differing, weights = first_loss(ranks)
    again, _, recomputed = first_loss(ranks, checkpointing=True)
    same = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(weights, recomputed, strict=True))
    seen: dict[str, Any] = {"loss": loss, "differing": differing, "checkpointed": again, "same_bits": same}
    if ranks.world > 1:
        seen |= {"published": published(ranks), "slow": asyncio.run(gather(ranks, fails=False))}
        seen["failed"] = ranks.all_gather_object(asyncio.run(gather(ranks, fails=True))[2])
    if ranks.first:
        with open(out, "w") as file:
            json.dump(seen, file)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
