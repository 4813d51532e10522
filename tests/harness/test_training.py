"""Three real command-line agents, trained for two GRPO steps each on a toy repository; the whole run is killed in its
middle and resumed.

The policy is the model that ships with the package, with a longer context limit: it samples nonsense, and the reward is
how much an agent printed, so that the rollouts of a group differ. What is checked: two steps, exact log-probabilities,
no process and no directory left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.npm import ROOT, program
from tokentrue.environments import SMALL_MODEL

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]
SHORT = [
    "--system-prompt",
    "You edit files.",
    "--tools",
    "Bash",
    "--max-turns",
    "2",
]  # of Claude Code: 1,300 tokens instead of 50,000
AGENTS: dict[str, tuple[str, str, list[str]]] = {  # npm package, executable, further arguments
    "pi": ("@mariozechner/pi-coding-agent", "pi", []),
    "claude-code": ("@anthropic-ai/claude-code", "claude", SHORT),
    "mini-swe-agent": ("", "mini", ["-c", "agent.step_limit=2"]),
}


def write_run(folder: Path, agent: str) -> Path:
    """The configuration of a run, with its model, its task and the directory that rollouts work in."""
    package, executable, arguments = AGENTS[agent]
    found = program(package, executable) if package else Path(sys.executable).parent / executable
    shutil.copytree(SMALL_MODEL, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65536}))
    (folder / "repo").mkdir()
    (folder / "repo" / "sum.txt").write_text("x = 2 + 2\n")
    (folder / "tasks.jsonl").write_text(json.dumps({"id": "sum", "prompt": "Add 2 and 2.", "dir": "repo"}) + "\n")
    options = {
        "agent": agent,
        "tasks": str(folder / "tasks.jsonl"),
        "score": "wc -c < $AGENT_LOG",
        "arguments": arguments,
    }
    options |= {
        "program": str(found),
        "directory": str(folder / "rollouts"),
        "transcripts": str(folder / "transcripts"),
    }
    lines = [
        f'out = "{folder / "out"}"',
        "[model]",
        f'path = "{folder / "model"}"',
        "[train]",
        "steps = 2",
        "checkpoint_every = 1",
    ]
    lines += ["[rollout]", 'environment = "agent"', "tasks = 1", "group_size = 3", "max_tokens = 16", "concurrency = 2"]
    lines += [
        "timeout_s = 200.0",
        "[rollout.options]",
        *(f"{name} = {json.dumps(value)}" for name, value in options.items()),
    ]
    (folder / "train.toml").write_text("\n".join(lines) + "\n")
    return folder / "train.toml"


def start(config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tokentrue", "train", "--config", str(config)]
    log = (config.parent / "train.log").open("ab")
    with log:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def processes_of(directory: Path) -> list[str]:
    """Processes that work in this directory, or have it in their environment."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                known = (
                    (entry / "environ").read_bytes()
                    + (entry / "cmdline").read_bytes()
                    + os.readlink(entry / "cwd").encode()
                )
            except OSError:
                continue
            if str(directory).encode() in known:
                found.append((entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")[:200])
    return found


def check_no_process_left(directory: Path) -> None:
    """The kernel ends the sandboxes of a killed run."""
    until = time.monotonic() + 10
    while processes_of(directory) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_of(directory) == []


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "out" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("agent", AGENTS)
def test_two_grpo_steps_killed_and_resumed(tmp_path: Path, agent: str) -> None:
    config = write_run(tmp_path, agent)
    rollouts = tmp_path / "rollouts"
    first = start(config)
    try:
        while not (
            len(metrics(tmp_path)) == 1 and any(rollouts.glob("*/agent.log"))
        ):  # agents of the second step are running
            assert first.poll() is None, (tmp_path / "train.log").read_text()[-3000:]
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    check_no_process_left(rollouts)
    assert start(config).wait(500) == 0, (tmp_path / "train.log").read_text()[-3000:]
    check_no_process_left(rollouts)
    assert list(rollouts.iterdir()) == [], "of the killed run neither"
    steps = metrics(tmp_path)
    assert [row["step"] for row in steps] == [0, 1], steps
    assert all(row["rollouts/failed"] == 0 and row["rollouts/played"] == 3 for row in steps), steps
    assert "exactness: 0 of" in (tmp_path / "train.log").read_text()
    assert len(list((tmp_path / "transcripts").iterdir())) >= 6
