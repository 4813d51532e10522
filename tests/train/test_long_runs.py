"""What long runs need: checkpoints that are models, Ctrl-C, evaluation, probes of the engines, and nothing that fails
in silence."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.rows import groups_for, small_model
from tests.train.test_loop import Engine
from tokentrue.app.rollouts import RolloutRounds
from tokentrue.environments import SMALL_MODEL, RolloutConfig
from tokentrue.errors import (
    EngineContractError,
    EngineError,
    EngineUnreachable,
    FileFormatError,
    TokenContractError,
    TrainingError,
)
from tokentrue.mismatch import loss_named
from tokentrue.train import MetricsWriter, OptimConfig, Publisher, Store, TrainConfig, Trainer, train
from tokentrue.train.checkpoint import Progress, find_checkpoints, load, save
from tokentrue.train.config import EvaluationConfig
from tokentrue.train.loop import Evaluator, pass_at_k
from tokentrue.train.publishing import Probe
from tokentrue.types import Completion, Finish


def trainer_of(model: torch.nn.Module | None = None, **config: object) -> Trainer:
    torch.set_num_threads(1)
    settings = TrainConfig(**{"steps": 4, **config})  # type: ignore[arg-type]
    return Trainer(model or small_model(), config=settings, optim=OptimConfig(lr=1e-3), loss=loss_named("dapo"))


def store_of(directory: Path) -> Store:
    return Store(directory=directory, run_hash="h", model=str(SMALL_MODEL))


# ---- checkpoints -------------------------------------------------------------------------------------------------------------------------
def test_a_checkpoint_of_a_hub_id_is_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id has no directory to copy from: configuration, generation settings and tokenizer are saved anew."""
    shutil.copytree(SMALL_MODEL, tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of()
    monkeypatch.setattr(Path, "is_dir", lambda self, real=Path.is_dir: self.name != "hub" and real(self))
    path = save(trainer, replace(store_of(tmp_path / "c"), model="hub"), Progress())
    monkeypatch.undo()
    assert path is not None
    names = {each.name for each in path.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    } <= names
    again = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trainer.model.parameters(), strict=True))
    assert (tmp_path / "c" / "latest").resolve() == path.resolve()


def test_persistent_buffers_are_saved_restored_and_published(tmp_path: Path) -> None:
    model = small_model()
    model.register_buffer("router_bias", torch.arange(4.0))
    trainer = trainer_of(model)
    assert torch.equal(dict(trainer.weights())["router_bias"], torch.arange(4.0))
    path = save(trainer, replace(store_of(tmp_path), model=None), Progress())
    other = small_model()
    other.register_buffer("router_bias", torch.zeros(4))
    resumed = trainer_of(other)
    assert path is not None
    load(resumed, path, store_of(tmp_path))
    assert torch.equal(dict(resumed.weights())["router_bias"], torch.arange(4.0))


def test_a_checkpoint_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = save(trainer_of(), replace(store_of(tmp_path), model=None), Progress())
    assert path is not None
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(FileFormatError, match=r"model\.safetensors is missing or changed"):
        load(trainer_of(), path, store_of(tmp_path))


def test_ctrl_c_leaves_a_checkpoint_of_the_last_whole_step(tmp_path: Path) -> None:
    trainer = trainer_of(checkpoint_minutes=0.0)
    engine = Engine(trainer)

    async def interrupted() -> None:
        running = asyncio.create_task(train(trainer, engine, Publisher(engine), store=store_of(tmp_path)))
        while trainer.version < 2:
            await asyncio.sleep(0.02)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    (kept,) = find_checkpoints(tmp_path)
    assert json.loads((kept / "state.json").read_text())["version"] == trainer.version >= 2


class FailingEngine(Engine):
    """Fails when version 2 is published, once."""

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        if version == 2 and self.trainer.config.lag == 0:
            raise EngineUnreachable("killed")
        await super().publish(weights, version=version)


@pytest.mark.parametrize(("lag", "error"), [(0, EngineUnreachable), (1, asyncio.CancelledError)])
def test_every_finished_step_has_its_row_of_metrics(tmp_path: Path, lag: int, error: type[BaseException]) -> None:
    """The run ends between step 1 and its publication: by an engine, or by Ctrl-C while another round is sampled."""
    rows: list[int] = []

    async def run(engine_class: type[Engine], *, stops: bool) -> None:
        trainer = trainer_of(lag=lag, checkpoint_minutes=0.0, checkpoint_every=9)
        engine = engine_class(trainer)
        running = asyncio.create_task(
            train(
                trainer,
                engine,
                Publisher(engine),
                store=store_of(tmp_path),
                on_step=lambda report, _: rows.append(report.step),
            )
        )
        while stops and lag and trainer.version < 2:
            await asyncio.sleep(0.001)
        if stops and lag:
            running.cancel()
        await running

    with pytest.raises(error):
        asyncio.run(run(FailingEngine, stops=True))
    (kept,) = find_checkpoints(tmp_path)
    assert kept.name == "step-000002" and rows == [0, 1]
    asyncio.run(run(Engine, stops=False))
    assert rows == [0, 1, 2, 3]


def test_metrics_are_never_erased(tmp_path: Path) -> None:
    for value in (0.25, 0.75):
        writer = MetricsWriter(tmp_path, provenance={}, log=())
        writer.write(0, 1, {"reward": value}, {})
        writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward"] == 0.75
    assert json.loads((tmp_path / "metrics.before-1.jsonl").read_text())["reward"] == 0.25


# ---- evaluation --------------------------------------------------------------------------------------------------------------------------
def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 0, 2) == 0.0 and pass_at_k(4, 4, 1) == 1.0
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # half of the pairs hold the solved one


def test_the_best_version_is_kept_and_patience_ends_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(steps=6, keep_checkpoints=1)
    engine = Engine(trainer)
    rewards = iter([[[0.2, 0.2]], [[1.0, 0.5]], [[0.5, 0.5]], [[0.4, 1.0]], [[0.9, 0.9]]])

    async def play() -> Any:
        return next(rewards)

    evaluator = Evaluator(EvaluationConfig(every=1, attempts=2, temperature=1.0, patience=2), play)
    reports = asyncio.run(train(trainer, engine, Publisher(engine), store=store_of(tmp_path), evaluator=evaluator))
    assert [report.metrics["eval/reward"] for report in reports] == [0.75, 0.5, 0.7]
    assert reports[0].metrics["eval/pass@1"] == 0.5 and reports[0].metrics["eval/pass@2"] == 1.0
    assert evaluator.best_version == 1
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-000001", "step-000003"], "the best one is gone"


# ---- engines -----------------------------------------------------------------------------------------------------------------------------
class ScoringEngine(Engine):
    """Samples with its own weights, like a remote engine; from version `deaf_from` on it keeps the old ones."""

    name, truthful_filters = "stand-in", frozenset[str]()
    deaf_from = 99

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        if version >= self.deaf_from:
            weights = []
        await super().publish(weights, version=version)

    async def generate(self, prompt_ids: Any, sampling: Any, *, session: str | None = None) -> Completion:
        from tokentrue.numerics import score

        sampled = [(7 * i) % 300 for i in range(sampling.max_tokens)]
        with torch.no_grad():
            values = score(self.model, torch.tensor([[*prompt_ids, *sampled]]))[0, -len(sampled) :]
        return Completion(
            token_ids=tuple(sampled), logprobs=tuple(min(0.0, v) for v in values.tolist()), finish=Finish.LENGTH
        )


def probed(*, deaf_from: int) -> list[Any]:
    trainer = trainer_of(steps=3)
    engine = ScoringEngine(trainer)
    engine.deaf_from = deaf_from
    publisher = Publisher(engine, probe=Probe(lambda: [engine], vocabulary=300))  # type: ignore[list-item]
    return asyncio.run(train(trainer, engine, publisher))


def test_a_probe_follows_every_publication() -> None:
    reports = probed(deaf_from=99)
    assert [report.metrics["probe/delta"] for report in reports] == [0.0, 0.0, 0.0]
    assert all(report.metrics["probe/engines"] == 1 for report in reports)


@pytest.mark.parametrize(
    ("deaf_from", "said"), [(0, "does not take published weights"), (2, "version 2: .* samples from other weights")]
)
def test_an_engine_that_keeps_old_weights_stops_the_run(deaf_from: int, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        probed(deaf_from=deaf_from)


class RestartedEngine(ScoringEngine):
    """Restarted at a moment of version 2 with the weights of its start. It says so where it is asked for its version;
    behind a router (`hides`) it still says 2. What it samples is stamped with version 2."""

    url, moment, hides, is_back = "http://engine", "", False, False

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.start = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def restart(self, moment: str) -> None:
        if moment == self.moment and self.version == 2 and not self.is_back:
            self.is_back = True
            self.model.load_state_dict(self.start)

    async def weight_version(self) -> int:
        return 0 if self.is_back and not self.hides else self.version

    async def play(self, number: int) -> Any:
        self.restart("round")
        groups = await super().play(number)
        self.restart("mid-round")
        if self.is_back and self.moment == "mid-round":  # the second group came after the restart
            groups[1:] = groups_for(self.model, groups=2, size=3, seed=number, version=self.version)[1:]
        return groups


@pytest.mark.parametrize(
    ("moment", "hides", "error"),
    [
        pytest.param(
            "round", False, "weight version 0 after round 2, and version 2 was published", marks=pytest.mark.slow
        ),
        pytest.param(
            "round", True, "an engine sampled it as version 2, and its log-probabilities are", marks=pytest.mark.slow
        ),
        pytest.param(
            "mid-round", False, "weight version 0 after round 2, and version 2 was published", marks=pytest.mark.slow
        ),
        ("mid-round", True, "an engine sampled it as version 2, and its log-probabilities are"),
    ],
)
def test_nothing_is_trained_on_an_engine_that_came_back_with_old_weights(
    tmp_path: Path, moment: str, hides: bool, error: str
) -> None:
    trainer = trainer_of(steps=4, exact=False)
    engine = RestartedEngine(trainer)
    engine.moment, engine.hides = moment, hides
    engines: Any = lambda: [engine]  # noqa: E731
    publisher = Publisher(engine, probe=Probe(engines, vocabulary=300))
    rows: list[int] = []
    with pytest.raises(EngineContractError, match=error):
        asyncio.run(
            train(
                trainer, engine, publisher, store=store_of(tmp_path), on_step=lambda report, _: rows.append(report.step)
            )
        )
    assert engine.is_back and trainer.version == 2 and rows == [0, 1]
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-000002"], "finished steps are kept"
    resumed = trainer_of(steps=4, exact=False)
    engine = RestartedEngine(resumed)
    publisher = Publisher(engine, probe=Probe(lambda: [engine], vocabulary=300))  # type: ignore[list-item]
    asyncio.run(train(resumed, engine, publisher, store=store_of(tmp_path)))
    unbroken = trainer_of(steps=4, exact=False)
    engine = RestartedEngine(unbroken)
    asyncio.run(train(unbroken, engine, Publisher(engine)))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(resumed.weights(), unbroken.weights(), strict=True))
    assert resumed.counters() == unbroken.counters()


class ForgettingEngine(Engine):
    """Started anew after the second version: it has the weights, and the version, of the first."""

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        if version < 2:
            await super().publish(weights, version=version)


def test_a_round_of_older_weights_than_the_lag_allows_stops_the_run() -> None:
    """Old versions are not compared for exactness: nothing else would notice."""
    trainer = trainer_of(steps=4)
    engine = ForgettingEngine(trainer)
    with pytest.raises(TrainingError, match=r"round 2: .* of policy version 1, and version 2 was published"):
        asyncio.run(train(trainer, engine, Publisher(engine)))
    assert trainer.version == 2
    late = trainer_of(steps=3, lag=1)
    engine = ForgettingEngine(late)
    asyncio.run(train(late, engine, Publisher(engine)))
    assert engine.played == [(0, 0), (1, 0), (2, 1)], "a lag of 1 allows it"


def test_proving_the_path_leaves_the_weights_as_they_were() -> None:
    trainer = trainer_of()
    engine = ScoringEngine(trainer)
    asyncio.run(Publisher(engine, probe=Probe(lambda: [engine], vocabulary=300)).begin(trainer))  # type: ignore[list-item]
    for model in (trainer.model, engine.model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), small_model().parameters(), strict=True))


def test_versions_of_another_run_are_refused_live_and_train_from_a_file() -> None:
    groups = groups_for(small_model(), groups=1, size=3, version=7)
    with pytest.raises(TokenContractError, match="policy version 7, and this run is at 0"):
        trainer_of().step(groups)
    offline = trainer_of(offline=True)
    assert offline.step(groups).agreement.compared == 0
    offline.version = 7  # these weights sampled nothing of the file, whatever the numbers say
    assert offline.step(groups).agreement.compared == 0


class HangingClient:
    """An OpenAI client whose requests are never answered."""

    @property
    def chat(self) -> HangingClient:
        return self

    completions = chat

    async def create(self, **_: Any) -> None:
        await asyncio.sleep(60)


class Half:
    """Sessions of which every second one fails, and the agents of the others hang."""

    def __init__(self) -> None:
        self.opened = 0

    @asynccontextmanager
    async def open(self, plan: Any) -> AsyncIterator[Any]:
        self.opened += 1
        if self.opened % 2:
            raise RuntimeError("the environment broke")
        yield SimpleNamespace(session_id=f"s{self.opened}", client=HangingClient())


async def test_too_many_failed_rollouts_stop_the_run_and_are_counted() -> None:
    config = RolloutConfig(tasks=1, group_size=4, options={"stream": False}, timeout_s=0.2)
    rounds = RolloutRounds(config, Half())
    with pytest.raises(
        EngineError, match=r"4 of 4 rollouts failed .* the first said: RuntimeError: the environment broke"
    ):
        await rounds.play(0)
    counts = rounds.counts(0)
    assert (counts["rollouts/failed"], counts["rollouts/timed_out"], counts["rollouts/groups_lost"]) == (4, 2, 1)
    assert rounds.counts(0) == {}
