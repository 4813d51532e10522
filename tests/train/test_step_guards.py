"""A forward pass keeps within its budget, the policy is recomputed without dropout, each turn at its own temperature,
and numbers that are not finite change no weight."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.train.rows import groups_for, sample_of, small_model
from tokentrue.errors import TokenContractError, TrainingError
from tokentrue.mismatch import loss_named
from tokentrue.numerics import score
from tokentrue.train import OptimConfig, PlainScorer, TrainConfig, Trainer
from tokentrue.train.rows import pack


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    torch.set_num_threads(1)
    return small_model()


def trainer(base: torch.nn.Module, **config: object) -> Trainer:
    return Trainer(
        copy.deepcopy(base),
        config=TrainConfig(**{"micro_tokens": 128, **config}),
        optim=OptimConfig(lr=1e-3),
        loss=loss_named("dapo"),
    )  # type: ignore[arg-type]


class Watching(PlainScorer):
    """Notes what each forward pass costs, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[int] = []

    def __call__(self, model: Any, rows: Any, **settings: Any) -> Any:
        self.costs.append(len(rows) * max(row.length for row in rows))
        return super().__call__(model, rows, **settings)


def test_padding_counts_in_the_budget(base: torch.nn.Module) -> None:
    """One long row among many short ones: padded together they would cost many times the budget."""
    rows = [sample_of([7] * n, [t < 2 for t in range(n)], [-1.0] * n, name=f"s{i}", group="g", reward=float(i % 2)) for i, n in
            enumerate([100, *[4] * 20])]  # fmt: skip
    t = trainer(base, exact=False)
    t.scorer = watch = Watching()
    t.step([rows])
    assert watch.costs and max(watch.costs) <= 128


@pytest.mark.parametrize("padded", [True, False])
def test_bins_keep_within_the_budget(padded: bool) -> None:
    lengths = [100, 90, 3, 3, 3, 50, 2, 2, 60, 1]
    for found in pack(lengths, 128, padded=padded):
        chosen = [lengths[i] for i in found]
        assert (max(chosen) * len(chosen) if padded else sum(chosen)) <= 128
    assert sorted(i for found in pack(lengths, 128, padded=padded) for i in found) == list(range(10))


def test_the_policy_is_recomputed_without_dropout(base: torch.nn.Module) -> None:
    class Dropping(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.dropout = inner, torch.nn.Dropout(0.5)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.inner(hidden))

    model: Any = copy.deepcopy(base)
    model.model.layers[0].mlp.down_proj = Dropping(model.model.layers[0].mlp.down_proj)
    t = Trainer(model, config=TrainConfig(exact=False), optim=OptimConfig(), loss=loss_named("dapo"))
    report = t.step(groups_for(base))
    assert report.metrics["mismatch/delta_abs_mean"] < 1e-5, "the rollout's policy has no dropout"
    assert model.training


def with_nodes(sample: Any, temperatures: list[float]) -> Any:
    """The sample as the gateway records it: one node per turn, each with its temperature."""
    spans = [span for span in sample.spans if span.kind == "sampled"]
    nodes, at = [], 0
    for span, temperature in zip(spans, temperatures, strict=True):
        nodes.append({"given": span.start - at, "sampled": span.end - span.start, "temperature": temperature})
        at = span.end
    return replace(sample, metadata={"tokentrue": {"nodes": nodes}})


def test_each_turn_is_scored_at_the_temperature_it_was_sampled_at(base: torch.nn.Module) -> None:
    groups = []
    for group in groups_for(base, groups=2, size=3):
        changed = []
        for sample in group:
            heats = (0.7, 1.3)
            with torch.no_grad():
                values = [
                    [0.0, *score(base, torch.tensor([sample.token_ids]), temperature=heat)[0].tolist()]
                    for heat in heats
                ]
            logprobs = list(sample.rollout_logprobs)
            sampled = [span for span in sample.spans if span.kind == "sampled"]
            for span, found in zip(sampled, values, strict=True):
                logprobs[span.start : span.end] = found[span.start : span.end]
            changed.append(with_nodes(replace(sample, rollout_logprobs=logprobs), list(heats)))
        groups.append(changed)
    report = trainer(base).step(groups)
    assert report.agreement.compared > 0 and report.agreement.differing == 0
    plain = trainer(base, exact=False).step(groups)
    assert plain.metrics["mismatch/delta_abs_mean"] < 1e-5
    greedy = [[with_nodes(groups[0][0], [0.7, 0.0])]]
    with pytest.raises(TokenContractError, match="temperature 0"):
        trainer(base).step(greedy)


def test_a_gradient_that_is_not_finite_changes_no_weight_and_stops_the_run_after_a_few(
    base: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(base, exact=False, max_skipped_updates=1)
    groups = groups_for(base)

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = plain(*args, **kwargs)
        return loss * float("nan"), metrics

    plain = t.pass_loss
    monkeypatch.setattr(t, "pass_loss", poisoned)
    report = t.step(groups)
    assert report.metrics["update/skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(t.model.parameters(), base.parameters(), strict=True))
    with pytest.raises(TrainingError, match="not finite in 2 updates in a row"):
        t.step(groups)


def test_a_maximum_over_several_updates_is_a_maximum(base: torch.nn.Module) -> None:
    once = trainer(base, exact=False, epochs=1).step(groups_for(base)).metrics["update/ppo_ratio/max"]
    t = trainer(base, exact=False, epochs=4)
    seen: list[float] = []
    plain = t.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        done = plain(*args, **kwargs)
        seen.append(done.statistics["ppo_ratio/max"])
        return done

    t.update = watched  # type: ignore[method-assign]
    found = t.step(groups_for(base)).metrics["update/ppo_ratio/max"]
    assert found == max(seen) > once


def test_the_loss_does_not_depend_on_the_number_of_passes(base: torch.nn.Module) -> None:
    whole, cut = (trainer(base, exact=False, micro_tokens=budget).step(groups_for(base)) for budget in (100_000, 1))
    assert whole.metrics["update/loss"] == pytest.approx(cut.metrics["update/loss"], rel=1e-4)
    assert not [key for key in cut.metrics if key.endswith("loss/policy")]
