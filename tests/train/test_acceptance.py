"""Update acceptance: the engines judge every update on the step's own rows, and one that they refuse is undone bit for
bit."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.processor import BFLOAT16
from tests.train.rows import groups_for, small_model
from tests.train.test_loop import Engine
from tokentrue.app.training import identity
from tokentrue.errors import ConfigError, EngineError, EngineUnreachable, TrainingError
from tokentrue.mismatch import loss_named
from tokentrue.providers.exact import ExactProvider
from tokentrue.train import OptimConfig, Publisher, Ranks, Store, TrainConfig, Trainer, config_hash, train
from tokentrue.train.checkpoint import find_checkpoints
from tokentrue.train.config import AcceptanceConfig
from tokentrue.train.publishing import IN_FLIGHT, Probe, UpdateGate


class JudgingEngine(Engine):
    """Plays rounds, and scores given tokens with the exact engine. From `harmed_from` on, its weights move the wrong
    way.

    That is what a broken kernel or quantisation of the new weights would do: the trainer's policy improves, the
    engine's gets worse.
    """

    name, truthful_filters, harmed_from = "stand-in", frozenset[str](), 99

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        torch.set_num_threads(1)
        self.start = {name: value.detach().clone() for name, value in trainer.weights()}
        self.exact = ExactProvider(self.model)
        self.published: list[int] = []

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        given = dict(weights)
        if version >= self.harmed_from:
            given = {name: self.start[name] - 3 * (value - self.start[name]) for name, value in given.items()}
        await self.exact.publish(list(given.items()), version=version)
        await super().publish(given.items(), version=version)
        self.published.append(version)

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        return await self.exact.score(token_ids)


def played(
    *, harmed_from: int = 99, steps: int = 2, dtype: torch.dtype = torch.float32, **acceptance: Any
) -> tuple[Trainer, Any, Any]:
    config = TrainConfig(
        steps=steps, groups_per_step=2, exact=dtype == torch.float32, acceptance=AcceptanceConfig(**acceptance)
    )
    trainer = Trainer(small_model().to(dtype), config=config, optim=OptimConfig(lr=1e-4), loss=loss_named("dapo"))
    engine = JudgingEngine(trainer)
    engine.harmed_from = harmed_from
    judge = UpdateGate(config.acceptance, lambda: [engine])  # type: ignore[list-item]
    try:
        reports = asyncio.run(train(trainer, engine, Publisher(engine, gate=judge)))
    finally:
        engine.exact.engine.close()
    return trainer, engine, reports


def test_a_good_update_is_accepted_and_its_gain_is_that_of_the_engine() -> None:
    trainer, engine, reports = played()
    assert [report.metrics["update/refused"] for report in reports] == [0.0, 0.0]
    assert all(report.metrics["acceptance/gain"] > 0 for report in reports)
    assert engine.published == [1, 2]
    assert any(not torch.equal(engine.start[name], value) for name, value in trainer.weights())


def test_an_update_that_harms_the_engine_is_undone_and_the_weights_before_are_published_again() -> None:
    """Both sides have the first weights again; so do the moments: the next step starts as if there had been none."""
    trainer, engine, reports = played(harmed_from=1, steps=1)
    (report,) = reports
    assert report.metrics["update/refused"] == 1.0 and report.metrics["acceptance/gain"] < 0
    assert trainer.version == 1 and engine.published == [1, 1]
    assert all(torch.equal(engine.start[name], value) for name, value in trainer.weights())
    assert not any(trainer.optimizer.state.values())
    trained = Trainer(small_model(), config=trainer.config, optim=trainer.optim, loss=loss_named("dapo"))
    rows = groups_for(small_model(), groups=2, size=3, seed=5, version=0)
    trained.step(rows)
    trainer.version = 0
    trainer.step(rows)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(trainer.weights(), trained.weights(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_moments_and_master_weights_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    trainer = Trainer(
        small_model().to(dtype),
        config=TrainConfig(exact=False, epochs=2),
        optim=OptimConfig(lr=1e-4),
        loss=loss_named("dapo"),
    )
    trainer.step(groups_for(small_model(), groups=2, size=3, seed=1))
    before = trainer.snapshot()
    held = [*map(torch.clone, trainer.masters.parameters), *(value.clone() for value in moments(trainer))]
    trainer.step(groups_for(small_model(), groups=2, size=3, seed=2))
    now = [*trainer.masters.parameters, *moments(trainer)]
    assert not any(torch.equal(a, b) for a, b in zip(held, now, strict=True)), (
        "a tensor that no update moves proves nothing"
    )
    trainer.restore(before)
    assert all(torch.equal(a, b) for a, b in zip(held, [*trainer.masters.parameters, *moments(trainer)], strict=True))
    assert all(
        torch.equal(own.float(), master.to(dtype).float())
        for own, master in zip(trainer.model.parameters(), trainer.masters.parameters, strict=True)
    )


def moments(trainer: Trainer) -> list[torch.Tensor]:
    return [value for parameter in trainer.masters.parameters for value in trainer.optimizer.state[parameter].values()]


def test_too_large_a_step_is_refused_by_its_divergence() -> None:
    _, _, reports = played(max_divergence=1e-12, steps=1)
    assert reports[0].metrics["update/refused"] == 1.0 and reports[0].metrics["acceptance/gain"] > 0


def test_too_many_refusals_in_a_row_stop_the_run() -> None:
    with pytest.raises(TrainingError, match="step 1: 2 updates in a row were refused"):
        played(harmed_from=1, steps=3, max_refused=1)


def test_an_engine_that_cannot_judge_is_refused_before_anything_is_sampled() -> None:
    trainer = Trainer(small_model(), config=TrainConfig(steps=1), optim=OptimConfig(), loss=loss_named("dapo"))
    engine = SilentEngine(trainer)
    judge = UpdateGate(AcceptanceConfig(enabled=True), lambda: [engine])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'silent' does not score given tokens"):
        asyncio.run(train(trainer, engine, Publisher(engine, gate=judge)))
    assert engine.played == [] and trainer.version == 0


def test_a_run_that_too_many_refusals_stopped_resumes_where_more_are_allowed() -> None:
    settings = [AcceptanceConfig(), AcceptanceConfig(max_refused=9), AcceptanceConfig(max_divergence=0.1)]
    hashes = [config_hash(identity(TrainConfig(acceptance=each), OptimConfig())) for each in settings]
    assert hashes[0] == hashes[1] != hashes[2]


class DyingEngine(JudgingEngine):
    """Dies when it is to score with the weights of version `dies_at`."""

    dies_at = 99

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        if self.version == self.dies_at:
            raise EngineUnreachable("killed")
        return await super().score(token_ids)


class InterruptedTrainer(Trainer):
    """Ctrl-C comes while it makes version `stops_at`."""

    stops_at = 99

    def step(self, groups: Any) -> Any:
        if self.version + 1 == self.stops_at:
            signal.raise_signal(signal.SIGINT)
        return super().step(groups)


@pytest.fixture
def pythons_own_ctrl_c() -> Iterator[None]:
    """A shell starts processes in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own_ctrl_c")
@pytest.mark.parametrize(("dies_at", "stops_at", "error"), [(2, 99, EngineUnreachable), (99, 2, KeyboardInterrupt)])
def test_an_update_that_nobody_judged_is_in_no_checkpoint(
    tmp_path: Path, dies_at: int, stops_at: int, error: type[BaseException]
) -> None:
    """The engine dies before its verdict, or Ctrl-C. The run resumes with that step, and ends with the bits of an
    unbroken one."""

    def run(directory: Path, *, dies_at: int = 99, stops_at: int = 99) -> Trainer:
        config = TrainConfig(steps=2, groups_per_step=2, checkpoint_every=9, acceptance=AcceptanceConfig(enabled=True))
        trainer = InterruptedTrainer(small_model(), config=config, optim=OptimConfig(lr=1e-4), loss=loss_named("dapo"))
        engine = DyingEngine(trainer)
        engine.dies_at, trainer.stops_at = dies_at, stops_at
        judge = UpdateGate(config.acceptance, lambda: [engine])  # type: ignore[list-item]
        store = Store(directory=directory, run_hash="h", model=None)
        try:
            asyncio.run(train(trainer, engine, Publisher(engine, gate=judge), store=store))
        finally:
            engine.exact.engine.close()
        return trainer

    unbroken = run(tmp_path / "unbroken")
    with pytest.raises(error):
        run(tmp_path / "broken", dies_at=dies_at, stops_at=stops_at)
    (kept,) = find_checkpoints(tmp_path / "broken")
    assert kept.name == "step-000001"
    assert [json.loads(line)["round"] for line in (kept / "rounds.jsonl").read_text().splitlines()] == [1]
    resumed = run(tmp_path / "broken")
    assert resumed.counters() == unbroken.counters()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(resumed.weights(), unbroken.weights(), strict=True))


class GoneEngine(Engine):
    name = "gone"

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        raise EngineUnreachable("killed")

    async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Any:
        raise EngineUnreachable("killed")


class SilentEngine(Engine):
    name = "silent"


def test_rows_of_an_engine_that_is_gone_are_scored_by_another() -> None:
    """The probe does without it, too."""
    trainer = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    gone, alive = GoneEngine(trainer), ExactProvider(small_model())
    rows = trainer.rows(groups_for(small_model(), groups=1, size=3))
    engines: Any = [gone, alive]
    try:
        found = asyncio.run(UpdateGate(AcceptanceConfig(), lambda: engines)(rows, [1.0] * 3, trainer.ranks))
        probed = asyncio.run(Probe(lambda: engines, vocabulary=300)(trainer))
    finally:
        alive.engine.close()
    assert (found.gain, found.divergence) == (0.0, 0.0), "the weights that sampled the rows"
    assert probed == {"probe/delta": 0.0, "probe/engines": 1}
    with pytest.raises(EngineUnreachable):
        asyncio.run(UpdateGate(AcceptanceConfig(), lambda: [gone])(rows, [1.0] * 3, trainer.ranks))  # type: ignore[list-item]


def test_a_row_that_fills_the_context_is_scored_without_its_last_token() -> None:
    trainer = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    rows = trainer.rows(groups_for(small_model(), groups=1, size=3))
    longest = max(row.length for row in rows)
    full, roomy = ExactProvider(small_model(), max_len=longest), ExactProvider(small_model())
    try:
        counts = [
            asyncio.run(UpdateGate(AcceptanceConfig(), lambda e=e: [e])(rows, [1.0] * 3, trainer.ranks))
            for e in (full, roomy)
        ]
    finally:
        full.engine.close()
        roomy.engine.close()
    assert counts[0].tokens == counts[1].tokens - sum(row.length == longest for row in rows)
    assert (counts[0].gain, counts[0].divergence) == (0.0, 0.0)


class OneOfTwo(Ranks):
    """A rank of two; what the first one says goes through `board`."""

    board: ClassVar[list[Any]] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        return [self.from_first(value), "" if self.first else value]

    def from_first(self, value: Any) -> Any:
        if self.first:
            self.board.append(value)
        return self.board[-1]


def test_all_ranks_stop_where_the_first_ones_engines_are_gone() -> None:
    trainer = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    rows = trainer.rows(groups_for(small_model(), groups=1, size=2))
    judge = UpdateGate(AcceptanceConfig(), lambda: [GoneEngine(trainer)])  # type: ignore[list-item]
    with pytest.raises(EngineUnreachable):
        asyncio.run(judge(rows, [1.0, 1.0], OneOfTwo(rank=0, world=2)))
    with pytest.raises(EngineError, match="rank 0 could not judge the update: EngineUnreachable: killed"):
        asyncio.run(judge(rows, [1.0, 1.0], OneOfTwo(rank=1, world=2)))


class CountingEngine(SilentEngine):
    """Counts the rows that it is asked for."""

    rows = 0

    async def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        self.rows += 1
        await asyncio.sleep(0)
        return [-1.0] * (len(token_ids) - 1)


def test_every_engine_scores_its_share_of_many_rows() -> None:
    """More rows than the engines are asked for at once."""
    trainer = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    rows = trainer.rows(groups_for(small_model(), groups=1, size=3)) * IN_FLIGHT * 2
    engines: Any = [CountingEngine(trainer), CountingEngine(trainer)]
    asyncio.run(UpdateGate(AcceptanceConfig(), lambda: engines)(rows, [1.0] * len(rows), trainer.ranks))
    assert [engine.rows for engine in engines] == [len(rows) // 2] * 2


def test_what_an_engine_cannot_judge_is_refused() -> None:
    trainer = Trainer(small_model(), config=TrainConfig(), optim=OptimConfig(), loss=loss_named("dapo"))
    groups = groups_for(small_model(), groups=1, size=2)
    silent = UpdateGate(AcceptanceConfig(), lambda: [SilentEngine(trainer)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'silent' does not score given tokens"):
        asyncio.run(silent(trainer.rows(groups), [1.0, 1.0], trainer.ranks))
    warm = Trainer(small_model(), config=TrainConfig(temperature=0.7), optim=OptimConfig(), loss=loss_named("dapo"))
    judge = UpdateGate(AcceptanceConfig(), lambda: [GoneEngine(trainer)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="another temperature than 1"):
        asyncio.run(judge(warm.rows(groups), [1.0, 1.0], warm.ranks))
