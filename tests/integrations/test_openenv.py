"""OpenEnv both ways: our samples in its training contract, read back by its own code, and tokentrue as its `--llm-url`.

TOKENTRUE_OPENENV_PYTHON names a Python with openenv 0.10.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.gateway.world import model_dir, renderer
from tests.harness.pip import version_of
from tokentrue.samples import write_samples

pytestmark = pytest.mark.timeout(1200)  # OpenEnv takes seconds to import
ROOT = Path(__file__).parent.parent.parent
PROGRAM = ROOT / "examples" / "trainers" / "openenv_trace.py"
PYTHON = shutil.which(os.environ.get("TOKENTRUE_OPENENV_PYTHON", ""))
READ = """
import json, sys
from openenv.core.harness.training import TrainingTrace
trace = TrainingTrace.model_validate_json(open(sys.argv[1]).read())
fields = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
print(json.dumps([[entry[name] for name in fields] for entry in trace.to_trace_entries()]))
"""
ANSWERS = [[40, 41, 42], [50, 51], [60, 61, 62, 63]]
LOGPROBS = [[-0.25, -0.5, -0.125], [-1.5, -2.0], [-0.75, -0.0625, -3.0, -0.1]]


async def written(folder: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """The contract of a session of three turns, of which the third begins again, and the prompts of the turns."""
    stop = renderer().stop_token_ids[0]
    script = [
        {"token_ids": [*ids, stop], "logprobs": [*values, -0.5]} for ids, values in zip(ANSWERS, LOGPROBS, strict=True)
    ]
    prompts: list[list[int]] = []
    engine = tt.providers.load("scripted", script=script)
    stream = engine.stream

    def note(prompt: Any, *arguments: Any, **more: Any) -> Any:
        prompts.append(list(prompt))
        return stream(prompt, *arguments, **more)

    engine.stream = note  # type: ignore[method-assign]
    session = tt.Session(renderer=tt.load_renderer(str(model_dir())), provider=engine)
    history: list[Any] = [{"role": "user", "content": "one"}]
    history.append((await session.chat(history)).message)
    await session.chat([*history, {"role": "user", "content": "two"}])
    await session.chat([{"role": "user", "content": "something else"}])
    samples = session.samples()
    write_samples(samples, folder / "samples.jsonl", format="jsonl")
    command = [sys.executable, str(PROGRAM), str(folder / "samples.jsonl"), samples[0].session_id]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "-o", str(folder / "trace.json")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "3 turns" in done.stdout, done.stderr
    return json.loads((folder / "trace.json").read_text()), prompts


async def test_samples_in_openenvs_training_contract(tmp_path: Path, add_row: Callable[..., None]) -> None:
    trace, prompts = await written(tmp_path)
    stop = renderer().stop_token_ids[0]
    expected = [
        [prompt, [*ids, stop], [*values, -0.5], [*[0] * len(prompt), *[1] * (len(ids) + 1)]]
        for prompt, ids, values in zip(prompts, ANSWERS, LOGPROBS, strict=True)
    ]
    fields = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
    assert trace["schema_version"] == 1
    assert sorted([turn[name] for name in fields] for turn in trace["turns"]) == sorted(expected)
    assert len({turn["node_id"] for turn in trace["turns"]}) == 3
    if PYTHON:
        read = subprocess.run(
            [PYTHON, "-c", READ, str(tmp_path / "trace.json")], capture_output=True, text=True, check=True
        )
        turns = json.loads(read.stdout)
        assert sorted(turns) == sorted(expected), "OpenEnv's own code reads the same"
        equal = sum(turn in expected for turn in turns)
        trace["turns"][0]["per_token_logps"].pop()
        (tmp_path / "trace.json").write_text(json.dumps(trace))
        refused = subprocess.run([PYTHON, "-c", READ, str(tmp_path / "trace.json")], capture_output=True, text=True)
        assert refused.returncode and "invalid training turn" in refused.stderr
        add_row(f"openenv {version_of(Path(PYTHON), 'openenv')}", len(turns), equal, "turns in its training contract")


@pytest.mark.frameworks
def test_tokentrue_behind_openenv(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows and tokens to forward of the habits, with and without us."""
    if not PYTHON:
        pytest.skip("NOT RUN: TOKENTRUE_OPENENV_PYTHON names no Python with openenv (make test-frameworks)")
    found: dict[str, dict[str, tuple[float, int, int]]] = {}
    for name in ("openenv", "openenv_tokentrue"):
        target = ROOT / "examples" / "conformance" / f"{name}.py"
        command = [sys.executable, "-m", "tokentrue", "conformance", str(target), "--levels", "3", "--dialects", "chat"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, "--python", PYTHON, "--json"], env=environment, capture_output=True, text=True)
        report = json.loads(done.stdout)
        found[name] = {one["habit"]: (one["coverage"], one["rows"], one["tokens"]) for one in report["habits"]}
    with capsys.disabled():
        print()
        for habit, (coverage, rows, tokens) in found["openenv"].items():
            ours = found["openenv_tokentrue"][habit]
            print(
                f"{habit:24} {coverage:7.1%} {rows:3} {tokens:6,}   over tokentrue {ours[0]:7.1%} {ours[1]:3} {ours[2]:6,}"
            )
    alone, over = found["openenv"]["reasoning_dropped"], found["openenv_tokentrue"]["reasoning_dropped"]
    assert alone[1] == 8 and over[1] == 1 and over[2] < alone[2]
