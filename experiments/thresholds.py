"""Calibrating τ_tok and τ_seq: for each threshold, how well does the corrected gradient of mismatched rollouts point
where exact ones do?

No training: one set of weights. The reference is the gradient of many exact rollouts; every arm corrects one batch of
mismatched rollouts of other tasks in its own way, and is judged by the cosine of its gradient with the reference. A
batch of exact rollouts of those same tasks and random numbers shows the cosine that a batch of this size can have at
all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.arms import Arm, Scale, loss_of, provider_for, rollout_config, trainer_for
from experiments.gradients import flat_gradient
from experiments.local_sessions import LocalSessions
from experiments.sources import SourceSink
from experiments.study import format_mean_range, save
from tokentrue.app.rollouts import RolloutRounds
from tokentrue.mismatch import Correction, Reject, Weights
from tokentrue.renderers import load_renderer
from tokentrue.train import Publisher, Trainer

SOURCES = ("int8", "int4", "int3")
TAUS_TOKEN = (1.0, 1.5, 2.0, 5.0, 100.0)
TAUS_SEQUENCE = (0.001, 0.01, 0.05, 0.2, 1.0)
CURVES: dict[str, str] = {}
BATCH = 4  # tasks here for one of a training step: a gradient is compared, so it may be a good one
REFERENCE = 4  # batches behind the reference
EXACT = "exact: the most a batch can have"


def arms(*, quick: bool) -> list[Arm]:
    sources = SOURCES[1:2] if quick else SOURCES
    made = [Arm(name=EXACT, loss="reinforce", correction=Correction(surrogate="reinforce"))]
    for source in sources:
        made.append(corrected_arm(source, "no correction", Correction(surrogate="reinforce")))
        for tau in (2.0,) if quick else TAUS_TOKEN:
            made.append(
                corrected_arm(source, f"τ_tok {tau:g}", Correction(surrogate="reinforce", weights=Weights(upper=tau)))
            )
        for tau in (0.05,) if quick else TAUS_SEQUENCE:
            rule = Reject(estimator="k3", aggregate="seq_mean", upper=tau)
            made.append(corrected_arm(source, f"τ_seq {tau:g}", Correction(surrogate="reinforce", reject=(rule,))))
            both = Correction(surrogate="reinforce", reject=(rule,), weights=Weights(upper=2.0))
            made.append(corrected_arm(source, f"τ_tok 2 + τ_seq {tau:g}", both))
    return made


def corrected_arm(source: str, name: str, correction: Correction) -> Arm:
    return Arm(name=f"{source}: {name}", source=source, loss="reinforce", correction=correction)


def cell(name: str, form: str) -> Any:
    return lambda results: format_mean_range([result[name] for result in results], form)


COLUMNS = (
    ("cosine with the exact gradient", cell("cosine", ".3f")),
    ("norm over exact", cell("norm", ".2f")),
    ("tokens kept", cell("kept", ".3f")),
    ("mean abs δ", cell("delta", ".1e")),
)


def run_arms(made: Sequence[Arm], scale: Scale, seed: int) -> list[dict[str, Any]]:
    """All arms of one seed: they share their rollouts."""
    torch.set_num_threads(scale.threads)
    return asyncio.run(_run(made, scale, seed))


async def _run(made: Sequence[Arm], scale: Scale, seed: int) -> list[dict[str, Any]]:
    began = time.perf_counter()
    trainer = trainer_for(made[0], scale)
    provider = provider_for(made[0], scale, at_once=scale.groups * BATCH * scale.size)
    config = rollout_config(scale, seed, horizon=None, tasks=scale.groups * BATCH)
    results: list[dict[str, Any]] = []
    try:
        rounds = RolloutRounds(config, LocalSessions(load_renderer(scale.model), provider, sampling=config.sampling))
        await Publisher(provider)(trainer)
        reference = torch.zeros(1)
        behind = min(REFERENCE, scale.steps)  # a quick run has two steps, and two batches behind its reference
        for number in range(1, behind + 1):
            reference = reference.to(scale.device) + flat_gradient(trainer, await rounds.play(number))[0] / behind
        for source in dict.fromkeys(arm.source for arm in made):
            await Publisher(SourceSink(provider, source))(trainer)
            sampled = await rounds.play(0)  # the same tasks and seeds whatever the source: only the mismatch differs
            for arm in made:
                if arm.source == source:
                    results.append(
                        {
                            "arm": arm.name,
                            "seed": seed,
                            **compare_gradient(trainer, arm, sampled, reference),
                            "rows": [],
                        }
                    )
                    results[-1]["seconds"] = time.perf_counter() - began
    finally:
        await provider.close()
    return results


def compare_gradient(trainer: Trainer, arm: Arm, sampled: Any, reference: torch.Tensor) -> dict[str, float]:
    """The arm's gradient of the batch against the reference."""
    trainer.loss = loss_of(arm)
    found, metrics = flat_gradient(trainer, sampled)
    return {
        "cosine": float(torch.nn.functional.cosine_similarity(reference, found, dim=0)),
        "norm": float(found.norm() / reference.norm()),
        "kept": metrics.get("kept", 1.0),
        "delta": metrics["mismatch/delta_abs_mean"],
    }


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Cosine over τ, a line per source with the range over seeds, and the exact batch's as a band."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(10.4, 3.8), sharey=True)
    ceiling = [r["cosine"] for r in results if r["arm"] == EXACT]
    for axis, kind, taus in zip(axes, ("τ_tok", "τ_seq"), (TAUS_TOKEN, TAUS_SEQUENCE), strict=True):
        axis.axhspan(min(ceiling), max(ceiling), color="0.85", label="exact rollouts, same tasks")
        for color, source in zip(("C0", "C1", "C3"), SOURCES, strict=True):
            values = {tau: [r["cosine"] for r in results if r["arm"] == f"{source}: {kind} {tau:g}"] for tau in taus}
            shown = {tau: found for tau, found in values.items() if found}
            if shown:
                means = [sum(found) / len(found) for found in shown.values()]
                axis.plot(list(shown), means, "o-", color=color, label=source, linewidth=1.4)
                axis.fill_between(
                    list(shown),
                    [min(f) for f in shown.values()],
                    [max(f) for f in shown.values()],
                    color=color,
                    alpha=0.15,
                )
            plain = [r["cosine"] for r in results if r["arm"] == f"{source}: no correction"]
            if plain:
                axis.axhline(sum(plain) / len(plain), color=color, linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel(kind)
    axes[0].set_ylabel("cosine with the exact gradient")
    axes[0].legend(fontsize=7, title="dotted: no correction", title_fontsize=7)
    save(drawn, path)
