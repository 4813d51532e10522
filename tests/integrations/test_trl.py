"""TRL's real GRPOTrainer learns on rows that are the gateway's record, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrue.app.background import BackgroundGateway
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError
from tokentrue.integrations.trl import reward_from_rollout, rollout_func

ROOT = Path(__file__).parent.parent.parent


def train(steps: int, out: Path, rows: int = 64) -> list[dict[str, float]]:
    """TRL's log of `steps` steps, whose rows were all equal to the record."""
    env = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).parent / "trl_run.py"), str(steps), str(out), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=out, timeout=580)
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert result is not None, done.stderr[-2000:]
    told = json.loads(result.removeprefix("RESULT "))
    assert told["rows"] == told["equal"] == steps * rows
    worst = max(entry["sampling/sampling_logp_difference/max"] for entry in told["log"])
    assert 0 < worst < 1e-3, (
        "TRL's forward in float32 is close to the engine's; weights that were not published are not"
    )
    return told["log"]


def test_processes_have_seeds_of_their_own_and_repeat() -> None:
    """TRL deals the rollouts of one prompt to all processes: with one seed, no two of them may be equal."""

    async def agent(client: Any, prompt: str) -> float:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": prompt}], max_tokens=12
        )
        return 1.0

    def run(process: int, url: str, key: str) -> list[list[int]]:
        args, state = SimpleNamespace(temperature=1.0), SimpleNamespace(global_step=3)
        trainer = SimpleNamespace(args=args, state=state, accelerator=SimpleNamespace(process_index=process))
        return rollout_func(agent, url=url, admin_key=key, seed=7)(["What is 2 + 2?"] * 2, trainer)["completion_ids"]

    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        found = [run(process, gateway.url, gateway.admin_key) for process in (0, 1, 0)]
    assert found[0] == found[2], "the same process has the same rollouts again"
    assert len({tuple(ids) for ids in (*found[0], *found[1])}) == 4, found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_real_ranks_get_rollouts_of_their_own(tmp_path: Path) -> None:
    """TRL deals the generations of one prompt to both ranks: no two of them may be equal."""
    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        told = {"TOKENTRUE_URL": gateway.url, "TOKENTRUE_ADMIN_KEY": gateway.admin_key, "TRL_EXPERIMENTAL_SILENCE": "1"}
        env = {**os.environ, **told, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launch, "-m", "tests.integrations.trl_ranks", str(tmp_path / "ranks")]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"ranks.{rank}").read_text()) for rank in range(2)]
    assert [len(rows) for rows in ranks] == [8, 8]
    assert not {tuple(row["ids"]) for row in ranks[0]} & {tuple(row["ids"]) for row in ranks[1]}
    groups: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for row in (*ranks[0], *ranks[1]):
        groups.setdefault((row["step"], row["prompt"]), []).append(tuple(row["ids"]))
    assert [len(set(rollouts)) for rollouts in groups.values()] == [8, 8], groups


@pytest.mark.timeout(600)
def test_rows_are_equal_to_the_record_and_weights_are_published(tmp_path: Path) -> None:
    assert len(train(2, tmp_path, rows=16)) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reward_rises(tmp_path: Path) -> None:
    rewards = [entry["reward"] for entry in train(5, tmp_path)]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1, rewards


def test_a_rollout_without_a_reward_is_refused() -> None:
    assert reward_from_rollout(["a", "b"], reward=[0.0, 1.0]) == [0.0, 1.0]
    with pytest.raises(ConfigError, match=r"rollouts \[1\] have no reward"):
        reward_from_rollout(["a", "b"], reward=[0.0, None])
