"""Training against real vLLM on CPU: `make test-vllm`. Two replicas, one of them killed in mid-run; stale weights stop a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.providers.test_vllm_real import serve
from tokentrue.cli.main import run as command
from tokentrue.environments import SMALL_MODEL
from tokentrue.providers.vllm import VLLMProvider

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
OPTIONS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "64")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    python = os.environ.get("TOKENTRUE_VLLM_PYTHON")
    if not python:
        pytest.fail("TOKENTRUE_VLLM_PYTHON names no Python with vllm; see docs/engines.md")
    folder = tmp_path_factory.mktemp("vllm")
    started = [serve(python, SMALL_MODEL, folder / f"{i}.log", *OPTIONS, context=1024) for i in range(2)]
    try:
        yield started
    finally:
        for process, _ in started:
            process.kill()
            process.wait()


def settings(out: Path, urls: list[str], steps: int) -> list[str]:
    sets = {
        "engine.name": "vllm", "engine.urls": json.dumps(urls), "rollout.tasks": 4, "rollout.group_size": 6, "rollout.timeout_s": 600,
        "train.steps": steps, "train.exact": "false", "optim.lr": 4e-4, "log": "[]", "threads": 1,
    }  # fmt: skip
    return ["--out", str(out), "--json", *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))]


def test_grpo_goes_on_when_a_replica_is_killed(servers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [url for _, url in servers]
    assert command("train", settings(tmp_path, urls, 2)) == 0
    both = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["probe/engines"] for row in both] == [2, 2]
    servers[1][0].kill()
    servers[1][0].wait()
    assert command("train", settings(tmp_path, urls, 5)) == 0, "the run resumes with the replica that is left"
    rest = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["probe/engines"] for row in rest] == [1, 1, 1]
    rows = both + rest
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["staleness_max"] == 0 and row["rollouts/failed"] == 0 for row in rows)
    assert all(row["mismatch/delta_abs_mean"] < 1e-4 and row["probe/delta"] < 1e-3 for row in rows), "float32 on both sides"
    assert sum(row["reward"] for row in rows[3:]) / 2 > sum(row["reward"] for row in rows[:2]) / 2


def test_a_server_that_does_not_load_the_weights_stops_the_run(
    servers: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def only_the_version(self: VLLMProvider, written: Any) -> None:
        await self._post("/update_weight_version", {"new_version": str(written.version)})

    monkeypatch.setattr(VLLMProvider, "_reload", only_the_version)
    assert command("train", settings(tmp_path, [servers[0][1]], 3)) == 2
    assert "does not take published weights" in capsys.readouterr().err
