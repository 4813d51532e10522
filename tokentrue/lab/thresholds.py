"""Calibrating τ_tok and τ_seq: for each threshold, how well does the corrected gradient of mismatched rollouts point where exact ones do?

No training: one set of weights and a batch of exact rollouts for the reference gradient. The mismatched rollouts have the same tasks
and the same random numbers, so that they differ from the reference by the mismatch alone; every threshold corrects them in its own way.
A batch of exact rollouts of other tasks shows how little two finite batches agree anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import torch

from tokentrue.engine import ExactEngine
from tokentrue.lab.arms import Arm, Scale, publish, trainer_for
from tokentrue.lab.play import Player
from tokentrue.lab.study import spread
from tokentrue.mismatch import Correction, Reject, Weights
from tokentrue.renderers import load_renderer

CLAIM = (
    "τ_tok and τ_seq can be read off the exact reference: the right threshold is the one whose corrected gradient has the largest cosine "
    "with the gradient of exact rollouts, not one taken from another model's paper."
)
COMMAND = "tokentrue lab run thresholds"
SOURCES = ("int8", "int4", "int3")
TAUS_TOKEN = (1.0, 1.5, 2.0, 5.0, 100.0)
TAUS_SEQUENCE = (0.001, 0.01, 0.05, 0.2, 1.0)
CURVES: dict[str, str] = {}
BATCH = 4  # tasks here for one of a training step: a gradient is compared, so it may be a good one


def arms(*, quick: bool) -> list[Arm]:
    sources = SOURCES[1:2] if quick else SOURCES
    made = [Arm(name="exact, other tasks: the noise of one batch", loss="reinforce", correction=Correction(surrogate="reinforce"))]
    for source in sources:
        made.append(corrected_arm(source, "no correction", Correction(surrogate="reinforce")))
        for tau in (2.0,) if quick else TAUS_TOKEN:
            made.append(corrected_arm(source, f"τ_tok {tau:g}", Correction(surrogate="reinforce", weights=Weights(upper=tau))))
        for tau in (0.05,) if quick else TAUS_SEQUENCE:
            rule = Reject(estimator="k3", aggregate="seq_mean", upper=tau)
            made.append(corrected_arm(source, f"τ_seq {tau:g}", Correction(surrogate="reinforce", reject=(rule,))))
            both = Correction(surrogate="reinforce", reject=(rule,), weights=Weights(upper=2.0))
            made.append(corrected_arm(source, f"τ_tok 2 + τ_seq {tau:g}", both))
    return made


def corrected_arm(source: str, name: str, correction: Correction) -> Arm:
    return Arm(name=f"{source}: {name}", source=source, loss="reinforce", correction=correction)


def cell(name: str, form: str) -> Any:
    return lambda results: spread([result[name] for result in results], form)


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
    renderer = load_renderer(scale.model)
    engine = ExactEngine(scale.model, device=scale.device, dtype="float32")
    results: list[dict[str, Any]] = []
    try:
        player = Player(engine, renderer, groups=scale.groups * BATCH, size=scale.size, seed=seed)
        base = trainer_for(made[0], scale)
        await publish(engine, base, "none")
        exact = await player.play(0)
        reference, _ = base.gradient(exact)
        played = {"none": await player.play(1)}
        for source in dict.fromkeys(arm.source for arm in made):
            if source != "none":
                await publish(engine, base, source)
                played[source] = await player.play(0)  # the same tasks and seeds as the reference: only the mismatch differs
        for arm in made:
            trainer = trainer_for(arm, scale)
            found, metrics = trainer.gradient(played[arm.source])
            results.append(
                {
                    "arm": arm.name,
                    "seed": seed,
                    "cosine": float(torch.nn.functional.cosine_similarity(reference, found, dim=0)),
                    "norm": float(found.norm() / reference.norm()),
                    "kept": metrics.get("kept", 1.0),
                    "delta": metrics["mismatch/delta_abs_mean"],
                    "seconds": time.perf_counter() - began,
                    "rows": [],
                }
            )
    finally:
        engine.close()
    return results
