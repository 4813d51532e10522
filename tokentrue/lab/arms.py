"""One arm of an experiment: a source of mismatch, a loss, a correction; run for some steps from the same start, measured every step."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tokentrue.engine import ExactEngine
from tokentrue.environments import SMALL_MODEL
from tokentrue.lab.play import Player, reencoded, rerendered, stringified, unchanged
from tokentrue.lab.sources import rollout_weights
from tokentrue.mismatch import Correction, loss_named
from tokentrue.renderers import load_renderer
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.config import Baseline
from tokentrue.types import Sample

Retelling = Literal["none", "reencode", "rerender", "stringify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How big. `model` is a model directory; `lr` belongs to the size."""

    model: str = str(SMALL_MODEL)
    device: str = "cpu"
    groups: int = 8
    size: int = 8
    steps: int = 40
    heldout: int = 64
    lr: float = 2.5e-4
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int = 2
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`source` changes the rollout's weights, `scorer="plain"` takes the trainer off the engine's kernels (the everyday mismatch),
    `retelling` trains on something else than what was sampled."""

    name: str
    source: str = "none"
    scorer: Literal["exact", "plain"] = "exact"
    loss: str = "dapo"
    baseline: Baseline = "grpo"
    correction: Correction | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    retelling: Retelling = "none"
    minibatches: int = 1
    epochs: int = 1
    lag: int = 0
    lr_factor: float = 1.0

    @property
    def exact(self) -> bool:
        return self.source == "none" and self.scorer == "exact" and self.retelling == "none"


KEPT = (
    "reward", "update/grad_norm", "update/loss", "mismatch/delta_abs_mean", "mismatch/delta_min", "mismatch/delta_max", "mismatch/k1",
    "mismatch/k3", "mismatch/chi2", "mismatch/ess", "mismatch/log_ppl_trainer", "mismatch/skew_positive", "mismatch/skew_negative",
    "mismatch/pull_positive", "mismatch/pull_negative", "update/kept", "exact_compared", "exact_differing", "tokens_trained",
)  # fmt: skip


def run_arm(arm: Arm, scale: Scale, seed: int) -> dict[str, Any]:
    """One run; returns its curves and its held-out reward before and after."""
    torch.set_num_threads(scale.threads)
    return asyncio.run(_run(arm, scale, seed))


async def _run(arm: Arm, scale: Scale, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    trainer = trainer_for(arm, scale)
    renderer = load_renderer(scale.model)
    engine = ExactEngine(scale.model, device=scale.device, dtype="float32")
    rows: list[dict[str, float]] = []
    waiting: dict[int, list[list[Sample]]] = {}
    try:
        player = Player(engine, renderer, groups=scale.groups, size=scale.size, seed=seed)
        await publish(engine, trainer, "none")
        before = await player.judged(scale.heldout)
        for step in range(scale.steps):
            if step == 0 or arm.lag == 0 or step % (arm.lag + 1) == 0:
                await publish(engine, trainer, arm.source)
                for ahead in range(step, min(step + arm.lag + 1, scale.steps)):  # all of them by these weights: up to `lag` steps old
                    waiting[ahead] = await player.play(ahead)
            groups = retell(arm.retelling, waiting.pop(step), renderer)
            report = await asyncio.to_thread(trainer.step, groups)
            rows.append({name: float(report.metrics[name]) for name in KEPT if name in report.metrics} | lowest(arm, groups, trainer))
        await publish(engine, trainer, "none")
        after = await player.judged(scale.heldout)
    finally:
        engine.close()
    return {"arm": arm.name, "seed": seed, "before": before, "after": after, "seconds": time.perf_counter() - began, "rows": rows}


def lowest(arm: Arm, groups: list[list[Sample]], trainer: Trainer) -> dict[str, float]:
    """Of a retold batch: how many tokens are trained that nobody sampled."""
    if arm.retelling == "none":
        return {}
    return {"retold_tokens": float(sum(sum(sample.loss_mask) for group in groups for sample in group))}


def trainer_for(arm: Arm, scale: Scale) -> Trainer:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(scale.model, dtype=torch.float32)
    options = dict(arm.options)
    if arm.correction is not None:
        options["correction"] = arm.correction
    config = TrainConfig(
        steps=scale.steps,
        baseline=arm.baseline,
        minibatches=arm.minibatches,
        epochs=arm.epochs,
        exact=arm.exact,
        micro_tokens=4096 if scale.device == "cpu" else 16384,
    )
    from tokentrue.train.scoring import ExactScorer, PlainScorer

    scorer = ExactScorer() if arm.scorer == "exact" else PlainScorer()
    optim = OptimConfig(lr=scale.lr * arm.lr_factor)
    return Trainer(model.to(scale.device), config=config, optim=optim, loss=loss_named(arm.loss, **options), scorer=scorer)


async def publish(engine: ExactEngine, trainer: Trainer, source: str) -> None:
    with torch.no_grad():
        await engine.publish(rollout_weights(trainer.weights(), source), version=trainer.version)


def retell(kind: Retelling, groups: list[list[Sample]], renderer: Any) -> list[list[Sample]]:
    if kind == "none":
        return groups
    change = {
        "reencode": lambda sample: reencoded(sample, renderer),
        "rerender": lambda sample: rerendered(sample, renderer, unchanged),
        "stringify": lambda sample: rerendered(sample, renderer, stringified),
    }[kind]
    return [[change(sample) for sample in group] for group in groups]


def save(path: Path, results: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results))
