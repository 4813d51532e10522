"""One arm of an experiment: a source of mismatch, a loss, a correction; run for some steps from the same start,
measured every step."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from experiments.adapters import NAME, AdapterSink, MergingSink, add_adapter
from experiments.local_sessions import LocalSessions
from experiments.rewriting import Rewriting, RewrittenRounds, TranscribedSessions
from experiments.routing import is_mixture, routing_flips
from experiments.sources import SourceSink, rollout_weights
from tokentrue.app.rollouts import RolloutRounds, evaluate
from tokentrue.environments import SMALL_MODEL, RolloutConfig, Sessions
from tokentrue.errors import ConfigError
from tokentrue.hub import load_causal_model
from tokentrue.mismatch import Correction, LossConfig, loss_named
from tokentrue.protocols import WeightSink
from tokentrue.providers.exact import ExactProvider
from tokentrue.renderers import load_renderer
from tokentrue.train import Groups, OptimConfig, Publisher, Rounds, StepReport, TrainConfig, Trainer, train
from tokentrue.train.config import Baseline, RoutingReplay
from tokentrue.types import Sample

CONVERSATION_TOKENS = 640  # cache room for one conversation
TURN_TOKENS = 56
ANSWER_TOKENS = 32  # to a question


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How big, and on what. `model` is a model directory; `lr` belongs to the size."""

    model: str = str(SMALL_MODEL)
    tasks: str | None = None  # a file for `experiments.questions`; otherwise the calculator
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
    """`source` changes the rollout's weights, `scorer="plain"` takes the trainer off the engine's kernels (the everyday
    mismatch), `rewriting` trains on something else than what was sampled. `variant` names a relative of the scale's
    model, in the directory beside it with that ending; `horizon` is the number of steps of every problem (otherwise one
    or two). `routing_replay` has the engine record the experts of every position, for the trainer to take. With an
    `adapter` nothing but that is trained."""

    name: str
    source: str = "none"
    scorer: Literal["exact", "plain"] = "exact"
    loss: str = "dapo"
    baseline: Baseline = "grpo"
    correction: Correction | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rewriting: Rewriting = "none"
    minibatches: int = 1
    epochs: int = 1
    lag: int = 0
    lr_factor: float = 1.0
    variant: str = ""
    horizon: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of engine and trainer
    top_p: float = 1.0
    forget_masks: bool = False  # the trainer scores over the whole vocabulary, whatever the sampler kept
    routing_replay: RoutingReplay = "off"
    adapter: Literal["none", "unmerged", "merged"] = "none"  # how the engine holds it

    @property
    def exact(self) -> bool:
        return (
            self.source == "none" and self.scorer == "exact" and self.rewriting == "none" and self.adapter != "merged"
        )

    @property
    def extra(self) -> dict[str, Any]:
        """What the arm asks of the engine beside tokens."""
        extra: dict[str, Any] = {} if self.adapter != "unmerged" else {"adapter": NAME}
        return extra if self.routing_replay == "off" else {**extra, "routed_experts": True}


KEPT = (
    "reward", "staleness_mean", "mismatch/ratio_mean",
    "update/grad_norm", "update/loss", "mismatch/delta_abs_mean", "mismatch/delta_min", "mismatch/delta_max", "mismatch/k1",
    "mismatch/k3", "mismatch/chi2", "mismatch/ess", "mismatch/log_ppl_trainer", "mismatch/skew_positive", "mismatch/skew_negative",
    "mismatch/pull_positive", "mismatch/pull_negative", "update/kept", "exact_compared", "exact_differing", "tokens_trained",
)  # fmt: skip


class Engines:
    """Engines that outlive a run: the next run of the same model and dtype publishes its weights to one that is
    there."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, str], ExactProvider] = {}

    def take(self, arm: Arm, scale: Scale, *, at_once: int) -> ExactProvider:
        key = (model_of(arm, scale), arm.dtype, scale.device)
        return self._open.pop(key, None) or provider_for(arm, scale, at_once=at_once)

    def give_back(self, arm: Arm, scale: Scale, provider: ExactProvider) -> None:
        """After a run that ended well; an engine whose run failed is closed instead."""
        self._open[model_of(arm, scale), arm.dtype, scale.device] = provider

    async def close(self) -> None:
        while self._open:
            await self._open.popitem()[1].close()


def run_arm(arm: Arm, scale: Scale, seed: int, engines: Engines | None = None) -> dict[str, Any]:
    """One run; returns its curves and its held-out reward before and after. Its engine is closed, unless `engines`
    keeps it."""
    torch.set_num_threads(scale.threads)
    return asyncio.run(_run(arm, scale, seed, engines))


async def _run(arm: Arm, scale: Scale, seed: int, engines: Engines | None) -> dict[str, Any]:
    lent = engines or Engines()
    provider = lent.take(arm, scale, at_once=max(scale.groups * scale.size, scale.heldout))
    try:
        result = await run_on(provider, arm, scale, seed)
    except BaseException:
        await provider.close()
        raise
    lent.give_back(arm, scale, provider)
    if engines is None:
        await lent.close()
    return result


async def run_on(provider: ExactProvider, arm: Arm, scale: Scale, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    trainer = trainer_for(arm, scale)
    renderer = load_renderer(model_of(arm, scale))
    config = rollout_config(scale, seed, horizon=arm.horizon, tasks=scale.groups)
    if scale.tasks is not None:
        config = replace(
            config,
            environment="experiments.questions:Questions",
            options={"path": scale.tasks},
            max_tokens=ANSWER_TOKENS,
        )
    rows: list[dict[str, float]] = []
    sessions = LocalSessions(renderer, provider, sampling={**config.sampling, "top_p": arm.top_p, "extra": arm.extra})
    rounds = KeptRounds(rounds_for(arm, config, sessions, renderer, provider))

    def add_row(report: StepReport, seconds: Mapping[str, float]) -> None:
        row = {name: float(report.metrics[name]) for name in KEPT if name in report.metrics}
        rows.append(row | flips(arm, trainer, rounds.kept.pop(report.step)))
        done = len(rows)
        left = timedelta(seconds=round((time.perf_counter() - began) / done * (scale.steps - done)))
        shown = f"reward {report.metrics['reward']:.2f}  |δ| {report.metrics.get('mismatch/delta_abs_mean', 0.0):.2g}"
        speed = f"{report.speeds['speed/tokens_per_s']:,.0f} tokens/s"
        line = f"  {arm.name}, seed {seed}: step {done}/{scale.steps}  {shown}  {speed}  {left} left"
        print(line, file=sys.stderr, flush=True)

    if (
        arm.adapter != "none"
    ):  # the engine may hold the weights of another run; an adapter that is still 0 merges to the base weights
        await MergingSink(provider).publish(trainer.weights(), version=0)
    before = await held_out_reward(arm, trainer, provider, config, renderer, scale.heldout)
    publish = Publisher(SourceSink(sink_for(arm, provider), arm.source))
    await publish(trainer)
    await train(trainer, rounds, publish, on_step=add_row)
    after = await held_out_reward(arm, trainer, provider, config, renderer, scale.heldout)
    size = sum(p.numel() for p in trainer.model.parameters())
    seconds = time.perf_counter() - began
    return {
        "arm": arm.name,
        "seed": seed,
        "before": before,
        "after": after,
        "parameters": size,
        "seconds": seconds,
        "rows": rows,
    }


class KeptRounds:
    """Rounds that keep what was sampled, by number, until somebody takes it."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.kept: dict[int, Groups] = {}

    async def play(self, number: int) -> Groups:
        self.kept[number] = await self._rounds.play(number)
        return self.kept[number]


class RoundsWithoutMasks:
    """Rounds whose samples say nothing of filters: what a trainer sees that was not told of them."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    async def play(self, number: int) -> Groups:
        return [[forget_mask(sample) for sample in group] for group in await self._rounds.play(number)]


def forget_mask(sample: Sample) -> Sample:
    own = sample.metadata["tokentrue"]
    nodes = [{key: value for key, value in node.items() if key != "sampling"} for node in own["nodes"]]
    return replace(sample, sampling_mask=None, metadata={**sample.metadata, "tokentrue": {**own, "nodes": nodes}})


def rollout_config(scale: Scale, seed: int, *, horizon: int | None, tasks: int) -> RolloutConfig:
    return RolloutConfig(
        options={"steps": horizon, "max_turns": (horizon or 2) + 2, "stream": False},
        tasks=tasks,
        group_size=scale.size,
        max_tokens=TURN_TOKENS,
        concurrency=tasks * scale.size,
        timeout_s=600.0,
        seed=seed,
    )


def rounds_for(arm: Arm, config: RolloutConfig, sessions: Sessions, renderer: Any, provider: ExactProvider) -> Rounds:
    if arm.rewriting == "none":
        rounds = RolloutRounds(config, sessions)
        return RoundsWithoutMasks(rounds) if arm.forget_masks else rounds
    rounds = RolloutRounds(config, TranscribedSessions(sessions))
    return RewrittenRounds(rounds, arm.rewriting, renderer=renderer, provider=provider)


async def held_out_reward(
    arm: Arm, trainer: Trainer, provider: ExactProvider, config: RolloutConfig, renderer: Any, tasks: int
) -> float:
    """Mean reward over fixed held-out tasks, greedy, with the trainer's own weights (an adapter held as the arm's
    engine holds it)."""
    await Publisher(sink_for(arm, provider))(trainer)
    extra = {key: value for key, value in arm.extra.items() if key == "adapter"}
    greedy = LocalSessions(renderer, provider, sampling={**replace(config, temperature=0.0).sampling, "extra": extra})
    groups = await evaluate(config, greedy, tasks=tasks)
    return fmean(reward for group in groups for reward in group)


def flips(arm: Arm, trainer: Trainer, groups: Groups) -> dict[str, float]:
    """Of a mixture of experts: the share of its choices that the source of mismatch changes."""
    if arm.source == "none" or not is_mixture(trainer.model):
        return {}
    longest = max((sample for group in groups for sample in group), key=lambda sample: len(sample.token_ids))
    return {
        "routing_flips": routing_flips(trainer.model, rollout_weights(trainer.weights(), arm.source), longest.token_ids)
    }


def model_of(arm: Arm, scale: Scale) -> str:
    """The directory of the arm's model."""
    path = f"{scale.model}-{arm.variant}" if arm.variant else scale.model
    if not Path(path).is_dir():
        raise ConfigError(f"{arm.name}: no model in {path}; scripts/make_small_model.py --help says how to make it")
    return path


def provider_for(arm: Arm, scale: Scale, *, at_once: int) -> ExactProvider:
    """The exact engine. Its cache holds `at_once` conversations and no more: many runs share a device."""
    return ExactProvider(
        model_of(arm, scale), device=scale.device, dtype=arm.dtype, kv_tokens=at_once * CONVERSATION_TOKENS
    )


def sink_for(arm: Arm, provider: ExactProvider) -> WeightSink:
    """What the engine takes of the trainer's weights."""
    return {"none": provider, "unmerged": AdapterSink(provider), "merged": MergingSink(provider)}[arm.adapter]


def trainer_for(arm: Arm, scale: Scale) -> Trainer:
    model = load_causal_model(model_of(arm, scale), dtype=arm.dtype)
    config = TrainConfig(
        steps=scale.steps,
        baseline=arm.baseline,
        minibatches=arm.minibatches,
        epochs=arm.epochs,
        lag=arm.lag,
        exact=arm.exact,
        max_idle_steps=scale.steps,  # a rare reward is no reason to stop a study
        routing_replay=arm.routing_replay,
        micro_tokens=4096 if scale.device == "cpu" else 8192,
    )
    from tokentrue.train.scoring import ExactScorer, PlainScorer

    scorer = ExactScorer() if arm.scorer == "exact" else PlainScorer()
    optim = OptimConfig(lr=scale.lr * arm.lr_factor)
    model = model.to(scale.device)
    if arm.adapter != "none":
        torch.manual_seed(0)  # of A
        model = add_adapter(model)
    return Trainer(model, config=config, optim=optim, loss=loss_of(arm), scorer=scorer)


def loss_of(arm: Arm) -> LossConfig:
    correction = {} if arm.correction is None else {"correction": arm.correction}
    return loss_named(arm.loss, **arm.options, **correction)
