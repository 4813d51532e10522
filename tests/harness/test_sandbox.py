"""Every preset's agent, unchanged, in bubblewrap: it starts, reaches the gateway through the bridge and answers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gateway.world import scripted_server
from tests.harness.npm import PACKAGES, program
from tokentrue.environments.agents import CommandLineAgent
from tokentrue.environments.agents.presets import PRESETS
from tokentrue.environments.agents.sandbox import try_bwrap

pytestmark = [
    pytest.mark.harness,
    pytest.mark.timeout(600),
    pytest.mark.skipif(try_bwrap() is not None, reason=f"bubblewrap does not work here: {try_bwrap()}"),
]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_in_bubblewrap(tmp_path: Path, preset: str) -> None:
    found = program(*PACKAGES[preset]) if preset in PACKAGES else Path(sys.executable).parent / "mini"
    (tmp_path / "repo").mkdir()
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "sum", "prompt": "Add 2 and 2.", "dir": "repo"}) + "\n")
    server = scripted_server(tmp_path, ["It is 4."] * 40)
    try:
        session = server.session(sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0})
        agent = CommandLineAgent(
            agent=preset,
            tasks=str(tmp_path / "tasks.jsonl"),
            score="true",
            sandbox="bwrap",
            program=str(found),
            arguments=["-c", "agent.step_limit=2"] if preset == "mini-swe-agent" else [],
            agent_timeout_s=200,
            directory=str(tmp_path / "rollouts"),
            transcripts=str(tmp_path / "transcripts"),
        )
        client = SimpleNamespace(base_url=session.base_url, api_key=session.api_key)
        outcome = asyncio.run(agent.run(client, agent.tasks(1)[0]))
        said = next((tmp_path / "transcripts").iterdir()).read_bytes().decode(errors="replace")
        assert outcome.reward == 1.0 and outcome.note is None, (outcome, said[-3000:])
        answer = server.samples(session.session_id)
        assert answer["samples"], said[-3000:]
        assert {item["why"] for item in answer["coverage"]["untrained"]} <= {"side_request"}, answer["coverage"]
    finally:
        server.stop()
