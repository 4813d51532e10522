"""Every adapter inside its framework's own code. One gateway here; each framework in the Python that FRAMEWORKS_PYTHON
names.

Rows are compared with the gateway's record: ids, masks, log-probabilities, and versions where the framework has a
place for them. What of a framework is not run is said by its script; a framework whose modules are missing is skipped
by name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.pip import version_of
from tests.integrations.seeing import make_model
from tokentrue.app.background import BackgroundGateway
from tokentrue.environments import SMALL_MODEL
from tokentrue.mismatch import Correction, correct

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "frameworks"
PYTHON = os.environ.get("TOKENTRUE_FRAMEWORKS_PYTHON")
VERIFIERS_PYTHON = os.environ.get("TOKENTRUE_VERIFIERS_PYTHON")
SOURCES = os.environ.get("TOKENTRUE_FRAMEWORKS_SOURCES", "")
AddRow: TypeAlias = Callable[..., None]
OFF_THE_INDEX = ("slime", "miles", "prime_rl")  # their sources are in SOURCES
VERSION = 7  # as frameworks/common.py has it

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


@pytest.fixture
def gateway() -> Iterator[BackgroundGateway]:
    with BackgroundGateway(str(SMALL_MODEL)) as running:
        running.publish(load_file(SMALL_MODEL / "model.safetensors"), version=VERSION)
        yield running


def run(
    name: str,
    gateway: BackgroundGateway,
    folder: Path,
    *arguments: str,
    python: str | None = PYTHON,
    model: Path = SMALL_MODEL,
) -> dict[str, Any]:
    assert python, "set TOKENTRUE_FRAMEWORKS_PYTHON and TOKENTRUE_VERIFIERS_PYTHON, see docs/trainers.md"
    path = os.pathsep.join([str(ROOT), str(SCRIPTS), SOURCES])
    told = {"TOKENTRUE_URL": gateway.url, "TOKENTRUE_ADMIN_KEY": gateway.admin_key, "TOKENTRUE_MODEL": str(model)}
    env = {**os.environ, **told, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [python, str(SCRIPTS / f"{name}_run.py"), str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=580)
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    missing = re.search(r"^ModuleNotFoundError: No module named '(\w+)", done.stderr, re.M)
    if result is None and missing is not None and missing[1] not in ("tokentrue", "common", "agent"):
        pytest.skip(f"NOT RUN: {missing[1]} is not installed in {python}")
    assert result is not None, done.stderr[-3000:]
    return json.loads(result.removeprefix("RESULT "))


def named(name: str, python: str | None = PYTHON) -> str:
    """With its version."""
    assert python
    package = name.replace("_", "-")
    return f"{package} {'sources' if name in OFF_THE_INDEX else version_of(Path(python), package)}"


def test_verl_from_agent_loop_to_gradient(gateway: BackgroundGateway, tmp_path: Path, add_row: AddRow) -> None:
    told = run("verl", gateway, tmp_path)
    add_row(named("verl"), told["rows"], told["equal"], "agent loop")
    assert told["rows"] == told["equal"] == 8
    assert told["left_out"] == told["besides"] and all(told["left_out"]), "the other conversation is counted"
    assert told["routing"], "the experts of a rollout are in the rows of both of verl's trainers"
    assert told["norm"] > 0
    assert told["worst"] < 1e-4, "verl's forward in float32 is close to what the engine reported"
    values = {name: torch.tensor(value) for name, value in json.loads((tmp_path / "verl.json").read_text()).items()}
    ours = correct(
        values["old"],
        values["rollout"],
        values["mask"],
        Correction.from_verl({"rollout_is": "token", "rollout_is_threshold": 2.0}),
    )
    torch.testing.assert_close(ours.weights * values["mask"], values["weights"] * values["mask"], rtol=1e-6, atol=1e-6)


def test_verl_with_its_manager_class(gateway: BackgroundGateway, tmp_path: Path, add_row: AddRow) -> None:
    """Two prompts, two rollouts each; in the v1 trainer each with two conversations, which are two rows."""
    told = run("verl_manager", gateway, tmp_path)
    rows, equal = told["rows"] + told["rows_v1"], told["equal"] + told["equal_v1"]
    add_row(named("verl"), rows, equal, "manager class, both trainers")
    assert told["rows"] == told["equal"] == 4
    assert told["rows_v1"] == told["equal_v1"] == 8


def test_verl_gets_the_images_of_rollouts(tmp_path: Path) -> None:
    make_model(model := tmp_path / "model")
    with BackgroundGateway(str(model)) as gateway:
        told = run("verl_images", gateway, tmp_path, model=model)
    assert told["apart"] < 1e-4 and told["swapped"] > 1e-2, told
    assert told["positions"][1] == 4 and told["rows"] == 1 and told["equal"], told
    assert "has images of the processor 'Qwen2VLImageProcessor pil" in told["refused"]


@pytest.mark.parametrize(
    "name, rows",
    [("areal", 8), ("openrlhf", 4), ("tinker", 16), ("skyrl", 24), ("slime", 16), ("miles", 16), ("prime_rl", 16)],
)
def test_rows_are_the_record(name: str, rows: int, gateway: BackgroundGateway, tmp_path: Path, add_row: AddRow) -> None:
    told = run(name, gateway, tmp_path)
    add_row(named(name), told["rows"], told["equal"], "")
    assert told["rows"] == told["equal"] == rows
    if name in ("slime", "miles", "tinker"):
        assert told["rollouts"] == 8
    if name == "slime":
        assert told["routing"], "the experts of a rollout are in slime's training data"
        assert told["one_reward"] and told["mask_sums_are_of_rollouts"]
        assert told["group_sums"] == pytest.approx([0, 0], abs=1e-6)
    if name == "miles":
        assert told["rewards"] == pytest.approx(told["own_rewards"], abs=1e-5), (
            "Miles' own normalisation of the same rollouts"
        )
    if name == "skyrl":
        assert told["left_out"] == 8 * 16 and told["last"] == 8


@pytest.mark.parametrize("name", ["verl", "slime", "skyrl", "areal", "openrlhf", "tinker", "prime_rl"])
def test_examples_run_in_their_frameworks(name: str, gateway: BackgroundGateway, tmp_path: Path) -> None:
    assert run("examples", gateway, tmp_path, name)["made"] > 0


def test_verifiers_as_environment_and_as_evaluator(gateway: BackgroundGateway, tmp_path: Path, add_row: AddRow) -> None:
    """`vf-eval` sampled through the gateway: a session for each trace, with its tokens, its reward and its task as
    group."""
    told = run("verifiers", gateway, tmp_path, python=VERIFIERS_PYTHON)
    rows, equal = told["traces"] + told["rows"], told["equal"] + told["same"]
    add_row(named("verifiers", VERIFIERS_PYTHON), rows, equal, "vf-eval, environment")
    assert told["traces"] == told["equal"] == 4 and told["groups"] == 2
    assert told["rows"] == told["same"] == 4, "the environment's rows are the record"
    assert len(set(told["rewards"])) > 1, told["rewards"]
