"""verifiers: `vf-eval` with a gateway as its client, and a taskset as an environment of ours. Both run the package's
own `null` harness.

The harness is a program that verifiers starts with uv, in a process; containers and remote sandboxes were not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import GATEWAY, record, tell

sys.path.insert(0, str(Path(__file__).parent.parent.parent.parent / "examples" / "trainers"))
TASKSET = "sums_v1"


def evaluate(folder: Path) -> dict[str, Any]:
    """Two tasks, two attempts each, by the command itself."""
    from tokentrue.integrations.verifiers import record_rewards

    options = {
        "-n": 2, "-r": 2, "--model": "policy", "--client.base-url": f"{GATEWAY['url']}/v1", "--client.api-key-var": "TOKENTRUE_ADMIN_KEY",
        "--env.agent.runtime.type": "subprocess", "--env.agent.harness.id": "null", "--env.agent.max-turns": 2,
        "--sampling.max-tokens": 32, "--output-dir": folder, "--run.name": "sums",
    }  # fmt: skip
    command = [
        Path(sys.executable).parent / "vf-eval",
        TASKSET,
        *(str(part) for option in options.items() for part in option),
    ]
    done = subprocess.run([*command, "--no-push", "--no-rich"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-3000:])
    rewards = record_rewards(folder / "sums", **GATEWAY)
    traces = [trace for line in (folder / "sums" / "traces.jsonl").open() for trace in json.loads(line)["traces"]]
    return {"traces": traces, "rewards": rewards}


def texts_of(trace: dict[str, Any]) -> list[str]:
    messages = [node["message"] for node in trace["nodes"]]
    return [message.get("content") or "" for message in messages if message["role"] == "assistant"]


def main(folder: Path) -> None:
    from verifiers_rollouts import make_samples

    found = evaluate(folder)
    known = record()
    by_session = {sample.session_id: sample for sample in known.values()}
    equal = 0
    for trace in found["traces"]:
        sample = by_session[trace["id"]]
        counted = sum(call["usage"]["completion_tokens"] for call in trace["calls"])
        equal += (
            sum(sample.loss_mask) == counted
            and sample.reward == found["rewards"][trace["id"]]
            and bool(texts_of(trace))
        )
    groups = {by_session[trace["id"]].group for trace in found["traces"]}
    rollouts = make_samples(TASKSET, groups=2, size=2)
    again = record()
    rows = [sample for samples in rollouts for sample in samples]
    same = sum(again[row.sample_id] == row for row in rows)
    tell(
        traces=len(found["traces"]),
        equal=equal,
        groups=len(groups),
        rows=len(rows),
        same=same,
        rewards=[row.reward for row in rows],
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]))
