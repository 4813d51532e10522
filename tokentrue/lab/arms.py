"""One arm of an experiment: a source of mismatch, a loss, a correction; run for some steps from the same start, measured every step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tokentrue.engine import ExactEngine
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError
from tokentrue.lab.play import Player, reencoded, rerendered, stringified, unchanged
from tokentrue.lab.routing import is_mixture, routing_flips
from tokentrue.lab.sources import rollout_weights
from tokentrue.mismatch import Correction, LossConfig, loss_named
from tokentrue.renderers import load_renderer
from tokentrue.train import OptimConfig, TrainConfig, Trainer
from tokentrue.train.config import Baseline
from tokentrue.types import Sample

TALK_TOKENS = 640  # room for one conversation
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

    def __post_init__(self) -> None:
        for name in ("groups", "size", "steps", "heldout", "jobs", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be at least 1")
        if not self.seeds:
            raise ConfigError("seeds: at least one run of each arm, three for a result")
        if not self.lr > 0:
            raise ConfigError(f"lr: {self.lr!r} must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """`source` changes the rollout's weights, `scorer="plain"` takes the trainer off the engine's kernels (the everyday mismatch),
    `retelling` trains on something else than what was sampled. `variant` names a relative of the scale's model, in the directory beside
    it with that ending; `horizon` is the number of steps of every problem (otherwise one or two)."""

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
    variant: str = ""
    horizon: int | None = None

    @property
    def exact(self) -> bool:
        return self.source == "none" and self.scorer == "exact" and self.retelling == "none"


KEPT = (
    "reward", "staleness_mean",
    "update/grad_norm", "update/loss", "mismatch/delta_abs_mean", "mismatch/delta_min", "mismatch/delta_max", "mismatch/k1",
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
    renderer = load_renderer(model_of(arm, scale))
    engine = engine_for(arm, scale, at_once=max(scale.groups * scale.size, scale.heldout))
    rows: list[dict[str, float]] = []
    waiting: dict[int, list[list[Sample]]] = {}
    try:
        player = Player(engine, renderer, groups=scale.groups, size=scale.size, seed=seed, horizon=arm.horizon)
        await publish(engine, trainer, "none")
        before = await player.judged(scale.heldout)
        for step in range(scale.steps):
            if step == 0 or arm.lag == 0 or step % (arm.lag + 1) == 0:
                await publish(engine, trainer, arm.source)
                for ahead in range(step, min(step + arm.lag + 1, scale.steps)):  # all of them by these weights: up to `lag` steps old
                    waiting[ahead] = await player.play(ahead)
            groups = retell(arm.retelling, waiting.pop(step), renderer)
            report = await asyncio.to_thread(trainer.step, groups)
            row = {name: float(report.metrics[name]) for name in KEPT if name in report.metrics}
            rows.append(row | retold_tokens(arm, groups) | await asyncio.to_thread(flips, arm, trainer, groups))
        await publish(engine, trainer, "none")
        after = await player.judged(scale.heldout)
    finally:
        engine.close()
    size = sum(p.numel() for p in trainer.model.parameters())
    seconds = time.perf_counter() - began
    return {"arm": arm.name, "seed": seed, "before": before, "after": after, "parameters": size, "seconds": seconds, "rows": rows}


def retold_tokens(arm: Arm, groups: list[list[Sample]]) -> dict[str, float]:
    """Of a retold batch: how many tokens are trained that nobody sampled."""
    if arm.retelling == "none":
        return {}
    return {"retold_tokens": float(sum(sum(sample.loss_mask) for group in groups for sample in group))}


def flips(arm: Arm, trainer: Trainer, groups: list[list[Sample]]) -> dict[str, float]:
    """Of a mixture of experts: the share of its choices that the source of mismatch changes."""
    if arm.source == "none" or not is_mixture(trainer.model):
        return {}
    longest = max((sample for group in groups for sample in group), key=lambda sample: len(sample.token_ids))
    return {"routing_flips": routing_flips(trainer.model, rollout_weights(trainer.weights(), arm.source), longest.token_ids)}


def model_of(arm: Arm, scale: Scale) -> str:
    """The directory of the arm's model."""
    path = f"{scale.model}-{arm.variant}" if arm.variant else scale.model
    if not Path(path).is_dir():
        raise ConfigError(f"{arm.name}: no model in {path}; scripts/make_small_model.py --help says how to make it")
    return path


def engine_for(arm: Arm, scale: Scale, *, at_once: int) -> ExactEngine:
    """Its cache holds `at_once` conversations and no more: many runs share a device."""
    return ExactEngine(model_of(arm, scale), device=scale.device, dtype="float32", kv_tokens=at_once * TALK_TOKENS)


def trainer_for(arm: Arm, scale: Scale) -> Trainer:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_of(arm, scale), dtype=torch.float32)
    config = TrainConfig(
        steps=scale.steps,
        baseline=arm.baseline,
        minibatches=arm.minibatches,
        epochs=arm.epochs,
        exact=arm.exact,
        micro_tokens=4096 if scale.device == "cpu" else 8192,
    )
    from tokentrue.train.scoring import ExactScorer, PlainScorer

    scorer = ExactScorer() if arm.scorer == "exact" else PlainScorer()
    optim = OptimConfig(lr=scale.lr * arm.lr_factor)
    return Trainer(model.to(scale.device), config=config, optim=optim, loss=loss_of(arm), scorer=scorer)


def loss_of(arm: Arm) -> LossConfig:
    correction = {} if arm.correction is None else {"correction": arm.correction}
    return loss_named(arm.loss, **arm.options, **correction)


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
