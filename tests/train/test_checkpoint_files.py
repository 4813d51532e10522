"""Checkpoints above a size: several files with an index, the optimiser's state in shards, digests of all; and what a
resumed run knows."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.processor import BFLOAT16
from tests.train.rows import groups_for, small_model
from tests.train.test_long_runs import store_of
from tests.train.test_loop import Engine
from tokentrue.app.wiring import ModelConfig
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import EngineError, FileFormatError
from tokentrue.mismatch import loss_named
from tokentrue.train import OptimConfig, Publisher, TrainConfig, Trainer, checkpoint, train
from tokentrue.train.checkpoint import Progress, Store, find_checkpoints, load, save
from tokentrue.train.config import EvaluationConfig
from tokentrue.train.loop import Evaluator

MIB = 1 / 1024  # of a GiB


def trainer_of(dtype: torch.dtype = torch.float32, **config: object) -> Trainer:
    torch.set_num_threads(1)
    model = small_model().to(dtype)
    settings = TrainConfig(**{"exact": False, "shard_checkpoint_gib": MIB, **config})  # type: ignore[arg-type]
    return Trainer(model, config=settings, optim=OptimConfig(lr=1e-3), loss=loss_named("dapo"))


def store_in(directory: Path, *, model: str | None = None) -> Store:
    return Store(directory=directory, run_hash="h", model=model)


def bits(trainer: Trainer) -> list[torch.Tensor]:
    own = [value.view(torch.int16 if value.dtype == torch.bfloat16 else torch.int32) for _, value in trainer.weights()]
    return [*own, *(master.detach().view(torch.int32) for _, master in trainer.masters.named.items())]


def same(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_a_large_checkpoint_is_sharded_and_resumes_with_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    groups = groups_for(small_model(), groups=2, size=3)
    whole, resumed = trainer_of(dtype), trainer_of(dtype)
    whole.step(groups)
    path = save(whole, store_in(tmp_path, model=str(SMALL_MODEL)), Progress())
    assert path is not None
    names = {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}
    assert "model.safetensors.index.json" in names and any(name.startswith("model-00001-of-0000") for name in names)
    assert "optimizer/.metadata" in names and "optimizer.safetensors" not in names
    assert set(json.loads((path / "state.json").read_text())["digests"]) == names - {"state.json"}
    load(resumed, path, store_in(tmp_path))
    assert same(whole, resumed)
    for each in (whole, resumed):
        each.step(groups)
    assert same(whole, resumed), "moments or counts were not restored"
    again = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    fresh = trainer_of(dtype)
    load(fresh, path, store_in(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), fresh.model.parameters(), strict=True))


def test_the_link_to_the_newest_leads_somewhere_whenever_a_save_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the checkpoint that it led to is removed."""

    class Killed(BaseException):
        pass

    def remove(path: Path, *, ignore_errors: bool = False) -> None:
        rmtree(path, ignore_errors=ignore_errors)
        if path.name == "step-000000":
            raise Killed

    trainer, store, rmtree = trainer_of(keep_checkpoints=1), store_in(tmp_path), shutil.rmtree
    save(trainer, store, Progress())
    trainer.step(groups_for(small_model(), groups=2, size=3))
    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(Killed):
        save(trainer, store, Progress())
    assert (tmp_path / "latest" / "state.json").is_file()


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".step-000009.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    save(trainer_of(), store_in(tmp_path), Progress())
    assert not left.exists()
    assert [each.name for each in find_checkpoints(tmp_path)] == ["step-000000"]


def test_a_changed_shard_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.step(groups_for(small_model(), groups=2, size=3))
    path = save(trainer, store_in(tmp_path), Progress())
    assert path is not None
    (shard,) = (path / "optimizer").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FileFormatError, match=r"optimizer/.*distcp is missing or changed"):
        load(trainer_of(), path, store_in(tmp_path))


def test_only_files_with_a_digest_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be a link to another disk; nobody's other file keeps a run from its checkpoint."""

    def digest(path: Path) -> str:
        if path.name == "notes":
            raise PermissionError(path)
        return own(path)

    own, path = checkpoint.file_digest, save(trainer_of(), store_in(tmp_path), Progress())
    assert path is not None
    (path / "notes").write_text("")
    (path / "optimizer").rename(tmp_path / "elsewhere")
    (path / "optimizer").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(checkpoint, "file_digest", digest)
    load(trainer_of(), path, store_in(tmp_path))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    path = save(trainer_of(), store_in(tmp_path), Progress())
    assert path is not None
    other = trainer_of()
    other.model.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(FileFormatError, match="another model"):
        load(other, path, store_in(tmp_path))


def test_a_resumed_run_knows_its_best_version_and_its_patience(tmp_path: Path) -> None:
    """Without this the first evaluation after a resume is the best one, and the checkpoint that was is removed."""
    rewards = iter([0.1, 0.9, 0.3, 0.2, 0.1])

    async def play() -> Any:
        return [[next(rewards)]]

    def run(steps: int) -> Evaluator:
        trainer = trainer_of(steps=steps, keep_checkpoints=1, checkpoint_every=1)
        engine = Engine(trainer)
        evaluator = Evaluator(EvaluationConfig(every=1, patience=3), play)
        asyncio.run(train(trainer, engine, Publisher(engine), store=store_of(tmp_path), evaluator=evaluator))
        return evaluator

    run(2)
    after = run(6)
    assert (after.best, after.best_version) == (0.9, 1) and after.is_over
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-000001", "step-000004"]

    again = run(6)
    assert again.is_over, "a run that patience has ended evaluates again"
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-000001", "step-000004"], "it has trained on"


def test_an_interrupted_evaluation_is_run_when_the_run_resumes(tmp_path: Path) -> None:
    class Down(EngineError):
        pass

    def run(*rewards: float | None) -> tuple[Evaluator, list[Any]]:
        left, reports = list(rewards), list[Any]()

        async def play() -> Any:
            if (reward := left.pop(0)) is None:
                raise Down("the engine is away")
            return [[reward]]

        trainer = trainer_of(steps=4, checkpoint_every=1)
        engine = Engine(trainer)
        evaluator = Evaluator(EvaluationConfig(every=2), play)
        with suppress(Down):
            reports = asyncio.run(
                train(trainer, engine, Publisher(engine), store=store_of(tmp_path), evaluator=evaluator)
            )
        assert not left
        return evaluator, reports

    run(0.1, None)  # of version 0, and of version 2
    assert find_checkpoints(tmp_path)[-1].name == "step-000002"
    evaluator, reports = run(0.9, 0.3)
    assert len(reports) == 2 and (evaluator.best, evaluator.best_version) == (0.9, 2)


def test_the_directory_of_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run-7"
    save(trainer_of(), store_in(out / "checkpoints", model=str(SMALL_MODEL)), Progress())
    (out / "config.json").write_text("{}")  # the run's own configuration, not a model's
    config = ModelConfig(path=str(out))
    assert config.shown == "run-7"
    assert config.path is not None and AutoModelForCausalLM.from_pretrained(config.path).config.model_type == "qwen3"
    assert ModelConfig(path=str(SMALL_MODEL)).path == str(SMALL_MODEL)


# ---- speed -----------------------------------------------------------------------------------------------------------
def test_speeds_and_shares_of_a_step() -> None:
    trainer = trainer_of(steps=1)
    engine = Engine(trainer)
    (report,) = asyncio.run(train(trainer, engine, Publisher(engine)))
    metrics, speeds = report.metrics, report.speeds
    shares = {name: value for name, value in speeds.items() if name.startswith("share/")}
    assert {"share/wait", "share/recompute", "share/update", "share/publish"} <= set(shares) and 0.5 < sum(
        shares.values()
    ) <= 1.0
    assert speeds["speed/trained_tokens_per_s"] / speeds["speed/tokens_per_s"] == pytest.approx(
        metrics["tokens_trained"] / metrics["tokens"]
    )
