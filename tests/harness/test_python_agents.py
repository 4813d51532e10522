"""Agent frameworks in Python, unchanged, against a real gateway process with a real tokenizer. Each runs the script of
its page; one sample must hold every sampled token."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.fences import ROOT, blocks_of
from tests.gateway.world import call, check_recorded, sampled_by, scripted_server
from tests.harness.npm import run
from tests.harness.pip import python_with, version_of
from tests.harness.test_agents import note
from tests.integrations.environments import newer_python

pytestmark = [pytest.mark.harness, pytest.mark.timeout(2400)]
PAGE = ROOT / "docs" / "harnesses" / "python-agents.md"
OTHERS = PAGE.with_name("other-agents.md")
SCRIPTS = {
    block.body.split("\n")[0].removeprefix("# "): block.body
    for block in blocks_of(PAGE)
    if block.kind == "python harness"
}
REQUIREMENTS = {  # of each script; the first is the one whose version is shown
    "crewai.py": ("crewai",),
    "google_adk.py": ("google-adk", "litellm", "mcp"),
    "langchain.py": ("langgraph", "langchain", "langchain-openai"),
    "openai_agents.py": ("openai-agents",),
    "openhands.py": ("openhands-sdk", "openhands-tools"),
    "pydantic_ai.py": ("pydantic-ai-slim[openai]",),
    "autogen.py": ("autogen-agentchat", "autogen-ext[openai]"),
    "claude_agent_sdk.py": ("claude-agent-sdk",),
    "smolagents.py": ("smolagents[openai]",),
}
QUIET = {"CREWAI_TRACING_ENABLED": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TOOLS = {"claude_agent_sdk.py": "mcp__sums__add"}


def turns_for(script: str) -> list[str]:
    tool = TOOLS.get(script, "add")
    if script == "openhands.py":
        return [
            "<think>\nOne by one.\n</think>\n\n" + call("terminal", '{"command": "expr 2 + 3"}'),
            "Then the other.\n" + call("terminal", '{"command": "expr 5 + 5"}'),
            call("finish", '{"message": "The sum is 10."}'),
        ]
    last = "<think>\nFive and five.\n</think>\n\nThe sum is 10."
    if script == "smolagents.py":  # its answer is a call
        last = call("final_answer", '{"answer": "The sum is 10."}')
    return [
        "<think>\nOne by one.\n</think>\n\n" + call(tool, json.dumps({"a": 2, "b": 3})),
        call(tool, json.dumps({"a": 5, "b": 5})),
        last,
    ]


def test_every_script_of_the_page_is_run() -> None:
    assert set(SCRIPTS) == set(REQUIREMENTS)


@pytest.mark.parametrize("script", REQUIREMENTS)
def test_the_script_of_the_page_is_one_sample(
    script: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    requirements = REQUIREMENTS[script]
    base = newer_python() if script == "openhands.py" else sys.executable
    python = python_with(Path(script).stem, requirements, base)
    turns, home = turns_for(script), tmp_path / "home"
    home.mkdir()
    (home / f"run_{script}").write_text(SCRIPTS[script])  # another name: no module may import its own script
    server = scripted_server(tmp_path, turns)
    try:
        session = server.session()
        env = {"SESSION_URL": session.base_url, "SESSION_KEY": session.api_key, **QUIET}
        done = run([str(python), f"run_{script}"], home=home, cwd=home, env=env)
        assert "The sum is 10." in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
        answer = check_recorded(server, session.session_id, turns)
    finally:
        server.stop()
    package = requirements[0].partition("[")[0]
    note(record_property, f"{package} {version_of(python, package)}", answer)


FAILS = "I add a line.\n\nsum.py\n```python\n<<<<<<< SEARCH\nx = 3\n=======\nx = 2 + 2\nprint(x)\n>>>>>>> REPLACE\n```"


def test_aider_changes_the_users_message_from_turn_to_turn(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """As its page says: a sample per turn, all of them trained."""
    python = python_with("aider", ("aider-chat",))
    turns = ["<think>\nLook.\n</think>\n\n" + FAILS, FAILS.replace("x = 3\n", "x = 2 + 2\n")]
    (tmp_path / "sum.py").write_text("x = 2 + 2\n")
    (line,) = [line for line in OTHERS.read_text().splitlines() if line.startswith("$ aider ")]
    server = scripted_server(tmp_path, turns)
    try:
        session = server.session()
        known = {"SESSION_URL": session.base_url, "SESSION_KEY": session.api_key, "FILE": "sum.py"}
        _, *words = (known.get(word.removeprefix("$"), word) for word in shlex.split(line.removeprefix("$ ")))
        done = run([str(python.parent / "aider"), *words], home=tmp_path, cwd=tmp_path, env=QUIET)
        assert (tmp_path / "sum.py").read_text() == "x = 2 + 2\nprint(x)\n", done.stdout[-2000:] + done.stderr[-2000:]
        nodes = server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]
        assert [node["why"] for node in nodes] == ["first", "edited"]
        answer = server.samples(session.session_id)
    finally:
        server.stop()
    trained = [
        [token for token, mask in zip(sample["token_ids"], sample["loss_mask"], strict=True) if mask]
        for sample in answer["samples"]
    ]
    assert sorted(trained) == sorted(sampled_by([turn])[0] for turn in turns)
    note(record_property, f"aider-chat {version_of(python, 'aider-chat')}", answer)
