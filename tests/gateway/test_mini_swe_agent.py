"""mini-swe-agent, as its command line: it talks Chat Completions through litellm, without streaming, one bash tool call
per turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gateway.world import call, check_recorded, scripted_server


def bash(command: str, thought: str = "") -> str:
    reasoning = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return reasoning + call("bash", json.dumps({"command": command}))


TEN_TURNS = [
    bash("ls", "Look first."),
    bash("echo 'x = 2 + 2' > sum.py"),
    bash("cat sum.py", "Is it there?"),
    bash("python3 -c 'exec(open(\"sum.py\").read()); print(x)'"),
    bash("printf 'é 🙂 <|%s|>' im_end > odd.txt; cat odd.txt", "odd text"),
    bash("false"),
    bash("wc -c odd.txt"),
    bash("for i in 1 2 3; do echo $i; done"),
    bash("echo almost", "nearly"),
    bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done", "That was all."),
]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("minisweagent") is None, reason="mini-swe-agent is not installed")
def test_mini_swe_agent(tmp_path: Path) -> None:
    server = scripted_server(tmp_path, TEN_TURNS)
    try:
        session = server.session()
        work = tmp_path / "work"
        work.mkdir()
        environment = {
            **os.environ,
            "HOME": str(tmp_path),
            "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "mswea"),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": session.api_key,
        }
        command = [
            str(Path(sys.executable).parent / "mini"),
            "-m",
            "openai/m",
            "-t",
            "compute 2 + 2",
            "-y",
            "--exit-immediately",
        ]
        command += [
            "-l",
            "0",
            "-c",
            "mini.yaml",
            "-c",
            f"model.model_kwargs.api_base={session.base_url}",
            "-c",
            "agent.step_limit=12",
        ]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert (work / "sum.py").read_text() == "x = 2 + 2\n"
        check_recorded(server, session.session_id, TEN_TURNS)
        assert len(server.turns_logged()) == 10
    finally:
        assert server.stop() == 0
