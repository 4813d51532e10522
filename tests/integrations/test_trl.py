"""TRL's real GRPOTrainer learns on rows that are the gateway's record, bit for bit."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gateway.world import scripted_server
from tests.integrations.seeing import make_model
from tokentrue.app.background import BackgroundGateway
from tokentrue.client import Client
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import ConfigError, GatewayError
from tokentrue.integrations.trl import WeightTransfer, reward_from_rollout, rollout_func, rollout_worker
from tokentrue.samples import sample_from_json

ROOT = Path(__file__).parent.parent.parent


def run(script: str, steps: int, out: Path, rows: int) -> dict[str, Any]:
    env = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).parent / script), str(steps), str(out), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=out, timeout=1100)
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert result is not None, done.stderr[-2000:]
    return json.loads(result.removeprefix("RESULT "))


def train(steps: int, out: Path, rows: int = 64) -> dict[str, Any]:
    """TRL's log of `steps` steps, whose rows were all equal to the record, and their count."""
    told = run("trl_run.py", steps, out, rows)
    assert told["rows"] == told["equal"] == steps * rows
    worst = max(entry["sampling/sampling_logp_difference/max"] for entry in told["log"])
    assert 0 < worst < 1e-3, (
        "TRL's forward in float32 is close to the engine's; weights that were not published are not"
    )
    return told


def test_processes_have_seeds_of_their_own_and_repeat() -> None:
    """TRL deals the rollouts of one prompt to all processes: with one seed, no two of them may be equal."""

    async def agent(client: Any, prompt: str) -> float:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": prompt}], max_tokens=12
        )
        return 1.0

    def play(process: int, url: str, key: str) -> list[list[int]]:
        args, state = SimpleNamespace(temperature=1.0), SimpleNamespace(global_step=3)
        trainer = SimpleNamespace(args=args, state=state, accelerator=SimpleNamespace(process_index=process))
        return rollout_func(agent, url=url, admin_key=key, seed=7)(["What is 2 + 2?"] * 2, trainer)["completion_ids"]

    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        found = [play(process, gateway.url, gateway.admin_key) for process in (0, 1, 0)]
    assert found[0] == found[2], "the same process has the same rollouts again"
    assert len({tuple(ids) for ids in (*found[0], *found[1])}) == 4, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_images_of_rollouts_reach_the_forward_pass(tmp_path: Path) -> None:
    make_model(model := tmp_path / "model")
    with BackgroundGateway(str(model)) as gateway:
        told = {"TOKENTRUE_URL": gateway.url, "TOKENTRUE_ADMIN_KEY": gateway.admin_key, "TRL_EXPERIMENTAL_SILENCE": "1"}
        env = {**os.environ, **told, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.integrations.trl_images_run", str(model), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=1100)
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert result is not None, done.stderr[-3000:]
    found = json.loads(result.removeprefix("RESULT "))
    assert found["true"]["images"] == [2, 2, 2, 2] and found["true"]["apart"] < 1e-4, found
    assert found["swapped"]["apart"] > 1e-2, "other pictures give other log-probabilities"
    assert "has 2 images, which rows for this trainer do not carry" in found["refused"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_real_ranks_get_rollouts_of_their_own(tmp_path: Path) -> None:
    """TRL deals the generations of one prompt to both ranks: no two of them may be equal."""
    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        told = {"TOKENTRUE_URL": gateway.url, "TOKENTRUE_ADMIN_KEY": gateway.admin_key, "TRL_EXPERIMENTAL_SILENCE": "1"}
        env = {**os.environ, **told, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launch, "-m", "tests.integrations.trl_ranks", str(tmp_path / "ranks")]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"ranks.{rank}").read_text()) for rank in range(2)]
    assert [len(rows) for rows in ranks] == [8, 8]
    assert not {tuple(row["ids"]) for row in ranks[0]} & {tuple(row["ids"]) for row in ranks[1]}
    groups: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for row in (*ranks[0], *ranks[1]):
        groups.setdefault((row["step"], row["prompt"]), []).append(tuple(row["ids"]))
    assert [len(set(rollouts)) for rollouts in groups.values()] == [8, 8], groups


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rows_are_equal_to_the_record_and_weights_are_published(tmp_path: Path) -> None:
    assert len(train(2, tmp_path, rows=16)["log"]) >= 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reward_rises(tmp_path: Path, add_row: Callable[..., None]) -> None:
    told = train(5, tmp_path)
    rewards = [entry["reward"] for entry in told["log"]]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1, rewards
    add_row(f"trl {version('trl')}", told["rows"], told["equal"], f"GRPOTrainer, reward {shown(rewards)}")


def shown(rewards: list[float]) -> str:
    return " ".join(f"{reward:.2f}" for reward in rewards)


def test_a_rollout_without_a_reward_is_refused() -> None:
    assert reward_from_rollout(["a", "b"], reward=[0.0, 1.0]) == [0.0, 1.0]
    with pytest.raises(ConfigError, match=r"rollouts \[1\] have no reward"):
        reward_from_rollout(["a", "b"], reward=[0.0, None])


# The asynchronous trainer.
ARGS: dict[str, Any] = {
    "temperature": 1.0, "num_generations": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
    "world_size": 1, "max_staleness": 1, "queue_maxsize": 1024, "top_p": 1.0, "top_k": 0, "min_p": None,
    "repetition_penalty": 1.0,
}  # fmt: skip


async def two_conversations(client: Any, task: str) -> float:
    """An agent and its sub-agent: two rows of one rollout. The reward tells rollouts apart."""
    texts = []
    for said in (f"plan {task}", f"do {task}"):
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": said}], max_tokens=8
        )
        texts.append(answer.choices[0].message.content or "")
    return float(len(set("".join(texts))))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_sample_of_a_rollout_is_a_row_with_its_version_and_its_rollouts_advantage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        worker = rollout_worker(
            two_conversations, ["a", "b"], SimpleNamespace(**ARGS), url=gateway.url, admin_key=gateway.admin_key,
            concurrency=3,
        )  # fmt: skip
        worker.start()
        rows = [worker.rollout_buffer.get(timeout=120) for _ in range(12)]
        worker.check_health(60)
        worker.stop()
        with Client(gateway.url, gateway.admin_key) as client:
            ids = [session["session_id"] for session in client.sessions()]
            record = [
                sample_from_json(one)
                for name in ids
                for one in client.call("GET", f"/sessions/{name}/samples")["samples"]
            ]
    recorded = {tuple(sample.token_ids): sample for sample in record}
    groups: dict[int, list[Any]] = {}
    for row in rows:
        sample = recorded[tuple(row.input_ids.tolist())]
        assert row.completion_mask.tolist() == list(sample.loss_mask)
        kept = [x for x, y in zip(row.old_log_probs.tolist(), sample.rollout_logprobs, strict=True) if y is not None]
        assert kept == pytest.approx([x for x in sample.rollout_logprobs if x is not None], rel=1e-6)
        assert row.model_version == 0 and row.metrics["reward"] == sample.reward
        groups.setdefault(row.group_id, []).append((sample.session_id, sample.reward, row.advantage))
    assert {len(members) for members in groups.values()} == {6}, "three rollouts of two rows each"
    for members in groups.values():
        rewards = {session: reward for session, reward, _ in members}
        assert len(rewards) == 3
        mean, std = statistics.fmean(rewards.values()), statistics.pstdev(rewards.values())
        for _, reward, advantage in members:
            assert advantage == pytest.approx((reward - mean) / (std + 1e-8))


def test_a_worker_whose_agents_fail_says_so() -> None:
    async def broken(client: Any, task: str) -> float:
        raise RuntimeError("no such tool")

    with BackgroundGateway(str(SMALL_MODEL)) as gateway:
        settings = SimpleNamespace(**ARGS)
        worker = rollout_worker(broken, ["a"], settings, url=gateway.url, admin_key=gateway.admin_key)
        worker.start()
        worker.check_health(60)
        until = time.monotonic() + 60
        while worker._failure is None and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(GatewayError, match=r"\d groups in a row failed, the last with: no such tool"):
            worker.check_health(60)
        worker.stop()


def test_what_trl_does_not_score_with_is_refused() -> None:
    for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.1)):
        with pytest.raises(ConfigError, match=f"AsyncGRPOConfig.{name}: TRL scores without it"):
            rollout_worker(two_conversations, ["a"], SimpleNamespace(**{**ARGS, name: value}), url="http://x")
    with pytest.raises(ConfigError, match="at least one task"):
        rollout_worker(two_conversations, [], SimpleNamespace(**ARGS), url="http://x")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_versions_of_an_engine_that_reports_none_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    server = scripted_server(tmp_path, [f"answer {place}" for place in range(200)])
    try:
        settings = SimpleNamespace(**ARGS)
        more = {"url": server.url, "admin_key": server.admin_key, "announce_versions": True}
        worker = rollout_worker(two_conversations, ["a"], settings, **more)
        worker.update_model_version(5)
        worker.start()
        found = {worker.rollout_buffer.get(timeout=120).model_version for _ in range(6)}
        worker.stop()
        assert found == {5}
    finally:
        server.stop()


def test_transfers_are_counted_as_trl_counts_versions() -> None:
    import torch

    published: list[tuple[dict[str, Any], int]] = []
    transfer = WeightTransfer(lambda weights, version: published.append((dict(weights), version)))
    weight = torch.ones(2)
    for _ in range(2):
        transfer.send_weights(iter([("w", weight)]))
        weight += 1
    assert [(weights["w"].tolist(), version) for weights, version in published] == [([1, 1], 1), ([2, 2], 2)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reward_rises_with_the_asynchronous_trainer(tmp_path: Path, add_row: Callable[..., None]) -> None:
    told = run("trl_async_run.py", 5, tmp_path, 64)
    assert told["rows"] == told["equal"] >= 5 * 64
    assert all(row == recorded for row, recorded in told["versions"])
    assert len(set(row for row, _ in told["versions"])) >= 4, "the weights of every step but the last sampled rows"
    assert told["log"][0]["kl"] < 1e-6, "of the first step, whose rows the same weights sampled"
    rewards = [entry["reward"] for entry in told["log"]]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1, rewards
    add_row(f"trl {version('trl')}", told["rows"], told["equal"], f"AsyncGRPOTrainer, reward {shown(rewards)}")
