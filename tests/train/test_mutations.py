"""The trainer broken on purpose, one fault at a time: the test that is there for it must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import slow_except
from tests.train import test_batch, test_loop, test_trainer
from tests.train.rows import small_model
from tests.train.test_loop import Runs
from tokentrue.errors import ExactnessError
from tokentrue.train import checkpoint, exactness, loop, rows, trainer
from tokentrue.train.checkpoint import Store
from tokentrue.train.exactness import Agreement, ulps
from tokentrue.train.rows import Row, row_from_sample, session_advantages
from tokentrue.train.trainer import Trainer

CAUGHT = (AssertionError, ExactnessError, pytest.fail.Exception)


@pytest.fixture(scope="module")
def base() -> torch.nn.Module:
    torch.set_num_threads(1)
    return small_model()


def caught(test: Callable[[], object]) -> None:
    with pytest.raises(CAUGHT):
        test()


def test_a_comparison_that_lets_one_ulp_pass(base: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(rows: Sequence[Row], values: Sequence[Tensor], *, version: int) -> Agreement:
        near: list[Tensor] = []
        for row, found in zip(rows, values, strict=True):
            close = [ulps(float(a), float(b)) <= 1 for a, b in zip(found, row.rollout, strict=True)]
            near.append(torch.where(torch.tensor(close), row.rollout, found.detach()))
        return strict(rows, near, version=version)

    strict = exactness.agreement
    monkeypatch.setattr(trainer, "agreement", lenient)
    caught(lambda: test_trainer.test_one_bit_stops_the_run_and_is_located(base))


def test_a_comparison_by_allclose(base: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(rows: Sequence[Row], values: Sequence[Tensor], *, version: int) -> Agreement:
        unlike = [
            not torch.allclose(v.detach()[r.sampled], r.rollout[r.sampled], atol=1e-6)
            for r, v in zip(rows, values, strict=True)
        ]
        return Agreement(compared=1, differing=sum(unlike), largest=0.0)

    monkeypatch.setattr(trainer, "agreement", close)
    caught(lambda: test_trainer.test_one_bit_stops_the_run_and_is_located(base))


def test_a_mean_over_the_rows_that_give_a_gradient_only(base: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def active_only(batch: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
        counted = replace(part, rows=tuple(i for bin_ in part.active for i in bin_))
        return plain(batch, counted, *args, **kwargs)

    plain = trainer.correct_minibatch
    monkeypatch.setattr(trainer, "correct_minibatch", active_only)
    caught(lambda: test_trainer.test_packing_and_dropping_idle_rows_change_nothing_but_rounding(base))


def test_a_mean_over_each_micro_batch(base: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: Trainer, batch: Any, numbers: Sequence[int], correction: Any) -> Any:
        tokens = float(sum(int(batch.rows[i].mask.sum()) for i in numbers))
        return plain(self, batch, numbers, replace(correction, num_tokens=tokens, num_sessions=float(len(numbers))))

    plain = Trainer.pass_loss
    monkeypatch.setattr(Trainer, "pass_loss", own)
    caught(lambda: test_trainer.test_packing_and_dropping_idle_rows_change_nothing_but_rounding(base))


@pytest.mark.parametrize("part", slow_except({"exp_avg"}, ["exp_avg", "exp_avg_sq", "step"]))
def test_moments_that_are_not_resumed(
    part: str, tmp_path: Path, runs: Callable[[int], Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(2)  # before anything is broken

    def forgetful(target: Trainer, moments: dict[str, Tensor]) -> None:
        plain(
            target,
            {key: torch.zeros_like(value) if key.endswith(f"|{part}") else value for key, value in moments.items()},
        )

    plain = checkpoint.restore_optimizer
    monkeypatch.setattr(checkpoint, "restore_optimizer", forgetful)
    caught(lambda: test_loop.test_a_resumed_run_has_the_same_bits(tmp_path, runs, 2))


def test_rounds_in_waiting_that_are_not_resumed(
    tmp_path: Path, runs: Callable[[int], Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(2)  # before anything is broken

    def forget(run: loop.Run) -> None:
        plain(run)
        run.finished.clear()

    plain = loop.Run.resume
    monkeypatch.setattr(loop.Run, "resume", forget)
    caught(lambda: test_loop.test_a_resumed_run_has_the_same_bits(tmp_path, runs, 2))


def test_updates_that_are_counted_anew(
    tmp_path: Path, runs: Callable[[int], Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule hangs on them."""

    runs(2)  # before anything is broken

    def anew(target: Trainer, path: Path, store: Store) -> Any:
        loaded = plain(target, path, store)
        target.updates = 0
        return loaded

    plain = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", anew)
    caught(lambda: test_loop.test_a_resumed_run_has_the_same_bits(tmp_path, runs, 2))


def test_samples_counted_where_sessions_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_sample(rows: Sequence[Row], *settings: Any) -> list[float]:
        alone = [replace(row, sample=replace(row.sample, session_id=row.sample.sample_id)) for row in rows]
        return session_advantages(alone, *settings)

    monkeypatch.setattr(test_batch, "session_advantages", by_sample)
    caught(test_batch.test_a_session_with_two_samples_counts_once)


def test_a_version_that_does_not_move_on(base: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that takes every token for its own policy's, whatever version sampled it."""

    def all_current(rows: Sequence[Row], values: Sequence[Tensor], *, version: int) -> Agreement:
        renamed = [replace(row, versions=torch.where(row.sampled, version, row.versions)) for row in rows]
        return plain(renamed, values, version=version)

    plain = exactness.agreement
    monkeypatch.setattr(trainer, "agreement", all_current)
    caught(lambda: test_trainer.test_other_weights_are_not_mistaken_for_the_same(base))


def test_samples_that_carry_a_stale_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stamped with the version before: nothing would be compared any more."""

    def stale(sample: Any, group: str, temperature: float = 1.0, images: Any = None) -> Row:
        row = row_from_sample(sample, group, temperature)
        return replace(row, versions=torch.where(row.sampled, row.versions - 1, row.versions))

    monkeypatch.setattr(rows, "row_from_sample", stale)
    caught(lambda: test_loop.test_round_j_is_played_by_version_j_minus_lag(0))


def test_weights_published_before_older_rounds_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hasty(tasks: Sequence[Any]) -> None:
        return None

    monkeypatch.setattr(loop.asyncio, "wait", hasty)
    caught(lambda: test_loop.test_round_j_is_played_by_version_j_minus_lag(1))
