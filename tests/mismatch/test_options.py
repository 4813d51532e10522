"""The whole option matrix: every single choice, every pair of choices, either refused with a reason or harmless on
hostile batches.

Hostile: NaN wherever the mask is off, an empty row, a one-token row, ratios of e^±15 that whole rows are rejected for,
a batch that is masked altogether, and valid tokens that could not be scored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tokentrue.errors import ConfigError, InputError
from tokentrue.mismatch import (
    Correction,
    LossConfig,
    Normalise,
    OffPolicyMask,
    Outlier,
    Penalty,
    Reject,
    ScoreCentering,
    SecondMoment,
    Staleness,
    Veto,
    Weights,
    policy_loss,
)
from tokentrue.mismatch.loss import Aggregation
from tokentrue.mismatch.rules import Aggregate, Estimator, Level, Mode, Signal, Surrogate

pytestmark = pytest.mark.filterwarnings("ignore:weights normalised over a single row")
BOUNDS: tuple[dict[str, float], ...] = ({}, {"upper": 1.5}, {"lower": 0.5}, {"lower": 0.5, "upper": 1.5})
SIGNALS = get_args(Signal)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hostile:
    given: dict[str, Tensor]
    mask: Tensor

    @staticmethod
    def make(*, off: bool = False, unscored: bool = False) -> Hostile:
        generator = torch.Generator().manual_seed(3)
        mask = torch.tensor(
            [[1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 0, 0]], dtype=torch.bool
        )
        trainer = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) * 4
        gap = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * 0.2
        gap[1, 0], gap[3, 2] = 15.0, -15.0
        noise = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        given = {
            "trainer": trainer,
            "rollout": trainer - gap,
            "current": trainer + noise * 0.1,
            "advantages": noise.flip(0),
            "reference": trainer * 0.9,
            "entropy": trainer.abs(),
            "support": -trainer.abs() * 0.01,
        }
        mask = mask & (not off)
        given = {name: torch.where(mask, values, torch.nan) for name, values in given.items()}
        if unscored:
            given["rollout"][0, 1] = torch.nan
            given["trainer"][4, 0] = -torch.inf
        return Hostile(given=given, mask=mask)


PLAIN, OFF, UNSCORED = Hostile.make(), Hostile.make(off=True), Hostile.make(unscored=True)
VERSIONS = torch.tensor([[3, 7, 7, 7, 0], [7, 7, 7, 7, 7], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [7, 7, 6, 0, 0]])


def survive(config: LossConfig) -> None:
    for batch in (PLAIN, OFF, UNSCORED):
        if batch is UNSCORED and config.correction.non_finite == "raise":
            with pytest.raises(InputError, match="finite"):
                run(config, batch)
            continue
        loss, grad, metrics = run(config, batch)
        assert torch.isfinite(loss), (loss, config)
        assert torch.isfinite(grad).all(), config
        assert not grad[~batch.mask].any(), config
        assert all(value == value for value in metrics.values()), config
        if metrics["all_rejected"] and config.penalty is None:
            assert loss == 0 and not grad.any(), config


def run(config: LossConfig, batch: Hostile) -> tuple[Tensor, Tensor, Any]:
    given = batch.given
    current = given["current"].clone().requires_grad_()
    rest = {
        "reference_logprobs": given["reference"],
        "entropy": given["entropy"] if config.entropy_coefficient else None,
        "versions": VERSIONS,
        "version": 7,
    }
    if config.correction.centering is not None:
        rest["head_logprobs"] = torch.stack((current, given["reference"] - 1, given["trainer"] - 2), -1)
        rest["rollout_head_logprobs"] = torch.stack((given["rollout"], given["trainer"] - 1.5, given["trainer"]), -1)
        rest["rollout_head_logprobs"][0, 0, 1:] = -torch.inf
    loss, metrics = policy_loss(
        current,
        given["trainer"],
        given["rollout"],
        given["advantages"],
        batch.mask,
        config,
        **rest,  # type: ignore[arg-type]
    )
    (grad,) = torch.autograd.grad(loss, current, allow_unused=True)
    return loss.detach(), torch.zeros_like(current) if grad is None else grad, metrics


def settle(make: Any) -> bool:
    """True where the choice works, False where it is refused; a refusal must say why."""
    try:
        config = make()
    except ConfigError as error:
        text = str(error)
        assert len(text) > 30 and text.split(":")[0].split(".")[0] in OWNERS, text
        return False
    survive(config)
    return True


OWNERS = {
    "Weights",
    "Reject",
    "Normalise",
    "Veto",
    "Outlier",
    "OffPolicyMask",
    "Staleness",
    "Correction",
    "LossConfig",
    "Penalty",
}


@pytest.mark.slow
def test_every_kind_of_weight() -> None:
    """144 shapes with their normalisations, under REINFORCE, which may be weighed by any ratio."""
    means: list[dict[str, Any] | None] = [None]
    means += [{"level": n, "over": o} for n, o in itertools.product(("token", "sequence"), ("kept", "valid", "raw"))]
    done = [
        settle(
            lambda level=level, mode=mode, bounds=bounds, signal=signal, mean=mean: LossConfig(  # type: ignore[misc]
                correction=Correction(
                    weights=Weights(
                        level=level,
                        mode=mode,
                        signal=signal,
                        normalise=None if mean is None else Normalise(**mean),
                        **bounds,
                    ),
                    surrogate="reinforce",
                )
            )
        )
        for level, mode, bounds, signal, mean in itertools.product(
            get_args(Level), get_args(Mode), BOUNDS, SIGNALS, means
        )
    ]
    assert len(done) == 1008 and 300 < sum(done) < 900


@pytest.mark.slow
def test_every_kind_of_rejection() -> None:
    bounds = (*BOUNDS, {"upper": 0.3}, {"lower": -0.3, "upper": 0.3})
    kinds = itertools.product(get_args(Estimator), get_args(Aggregate), bounds, SIGNALS, (False, True))
    done = [
        settle(
            lambda e=e, a=a, b=b, s=s, i=i: LossConfig(  # type: ignore[misc]
                correction=Correction(reject=(Reject(estimator=e, aggregate=a, signal=s, inverse=i, **b),))
            )
        )
        for e, a, b, s, i in kinds
    ]
    assert len(done) == 720 and 200 < sum(done) < 500


AXES: dict[str, tuple[Any, ...]] = {
    "denominator": ("trainer", "rollout", "interpolated"),
    "surrogate": get_args(Surrogate),
    "weights": (
        None,
        *(lambda level=level: Weights(level=level, upper=1.5) for level in get_args(Level)),
        lambda: Weights(mode="clip", **BOUNDS[3]),
        lambda: Weights(mode="mask", upper=1.5),
        lambda: Weights(upper=2.0, signal="ppo_rollout"),
        lambda: Weights(upper=2.0, signal="ppo_train"),
        lambda: Weights(mode="raw"),
        lambda: Weights(upper=2.0, normalise=Normalise()),
    ),
    "reject": (
        (),
        (lambda: Reject(estimator="k3", aggregate="seq_mean", upper=1e-9)),
        (lambda: Reject(estimator="ratio", aggregate="token", upper=1.1)),
        (lambda: Reject(estimator="k2", aggregate="seq_max", upper=0.1)),
        (lambda: Reject(estimator="k1", aggregate="seq_sum", upper=0.1, signal="ppo_rollout")),
        (lambda: Reject(estimator="ratio", aggregate="geometric", lower=0.9, upper=1.1, signal="ppo_train")),
    ),
    "veto": (None, lambda: Veto(below=1e-2)),
    "outlier": (None, lambda: Outlier(), lambda: Outlier(upper=1.05, signal="ppo_rollout")),
    "off_policy_mask": (
        None,
        lambda: OffPolicyMask(threshold=0.0),
        lambda: OffPolicyMask(threshold=0.0, signal="corr"),
    ),
    "second_moment": (None, lambda: SecondMoment(), lambda: SecondMoment(threshold=0.0, signal="corr", tokens="all")),
    "staleness": (None, lambda: Staleness(limit=1)),
    "centering": (None, lambda: ScoreCentering()),
    "loss_counts": ("original", "kept"),
    "staged": (False, True),
    "non_finite": ("raise", "unit"),
    "log_clamp": (20.0, 80.0, 0.5),
    "clamp_tokens": (False, True),
    "clip_low": (0.2, None, 1.0),
    "clip_high": (0.2, None, 4.0),
    "dual_clip": (None, 3.0, 1.1),
    "ratio_cap": (None, 3.0),
    "gspo_gradient": ("token", "sequence"),
    "aggregate": get_args(Aggregation),
    "fixed_length": (None, 7),
    "penalty": (
        None,
        *(lambda e=e: Penalty(coefficient=0.1, estimator=e) for e in ("k1", "k2", "k3", "unbiased")),
        lambda: Penalty(coefficient=0.1, against="rollout", tokens="valid"),
        lambda: Penalty(coefficient=0.1, against="trainer"),
        lambda: Penalty(coefficient=0.1, clamp=None),
        lambda: Penalty(coefficient=0.1, ceiling=10.0),
    ),
    "entropy_coefficient": (0.0, 0.1),
}
OF_THE_LOSS = set(LossConfig.__dataclass_fields__) & set(AXES) - {"surrogate"}


def pairs() -> Iterator[dict[str, Any]]:
    yield {}
    for first, second in itertools.combinations(AXES, 2):
        for a, b in itertools.product(AXES[first], AXES[second]):
            yield {first: a, second: b}


def build(choice: dict[str, Any]) -> LossConfig:
    made = {name: value() if callable(value) else value for name, value in choice.items()}
    if isinstance(made.get("reject"), Reject):
        made["reject"] = (made["reject"],)
    if made.get("centering") is not None and "surrogate" not in made:
        made["surrogate"] = "reinforce"
    correction = Correction(**{name: value for name, value in made.items() if name not in OF_THE_LOSS})
    return LossConfig(correction=correction, **{name: value for name, value in made.items() if name in OF_THE_LOSS})


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_pair_of_options(every: int) -> None:
    """`make test` takes every eighth."""
    choices = list(pairs())[::every]
    done = [settle(lambda choice=choice: build(choice)) for choice in choices]  # type: ignore[misc]
    assert len(done) > 2000 / every and 0.6 < sum(done) / len(done) < 0.95


def test_every_penalty() -> None:
    kinds = itertools.product(("k1", "k2", "k3", "unbiased"), ("reference", "rollout", "trainer"), ("kept", "valid"))
    for (estimator, against, tokens), how in itertools.product(kinds, ("raise", "unit")):
        penalty = Penalty(coefficient=0.1, estimator=estimator, against=against, tokens=tokens)  # type: ignore[arg-type]
        survive(LossConfig(correction=Correction(non_finite=how), penalty=penalty))  # type: ignore[arg-type]


def test_every_option_is_in_the_matrix() -> None:
    """A new field of the two records must be given its values here."""
    fields = set(Correction.__dataclass_fields__) | set(LossConfig.__dataclass_fields__)
    assert fields - set(AXES) == {"notes", "correction"}
