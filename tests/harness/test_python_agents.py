"""Agent frameworks in Python, unchanged, against a real gateway process with a real tokenizer. Each runs the script of
its page; one sample must hold every sampled token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.fences import ROOT, blocks_of
from tests.gateway.world import call, check_recorded, scripted_server
from tests.harness.npm import run
from tests.harness.pip import python_with, version_of

pytestmark = [pytest.mark.harness, pytest.mark.timeout(1200)]
PAGE = ROOT / "docs" / "harnesses" / "python-agents.md"
SCRIPTS = {
    block.body.split("\n")[0].removeprefix("# "): block.body
    for block in blocks_of(PAGE)
    if block.kind == "python harness"
}
REQUIREMENTS = {  # of each script; the first is the one whose version is shown
    "langchain.py": ("langgraph", "langchain", "langchain-openai"),
    "pydantic_ai.py": ("pydantic-ai-slim[openai]",),
    "autogen.py": ("autogen-agentchat", "autogen-ext[openai]"),
    "claude_agent_sdk.py": ("claude-agent-sdk",),
    "smolagents.py": ("smolagents[openai]",),
}
TOOLS = {"claude_agent_sdk.py": "mcp__sums__add"}


def turns_for(script: str) -> list[str]:
    tool = TOOLS.get(script, "add")
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
    python = python_with(Path(script).stem, requirements)
    turns, home = turns_for(script), tmp_path / "home"
    home.mkdir()
    (home / f"run_{script}").write_text(SCRIPTS[script])  # another name: no module may import its own script
    server = scripted_server(tmp_path, turns)
    try:
        session = server.session()
        env = {"SESSION_URL": session.base_url, "SESSION_KEY": session.api_key, "CREWAI_TRACING_ENABLED": "false"}
        done = run([str(python), f"run_{script}"], home=home, cwd=home, env=env)
        assert "The sum is 10." in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
        answer = check_recorded(server, session.session_id, turns)
    finally:
        server.stop()
    package = requirements[0].partition("[")[0]
    record_property("harness", f"{package} {version_of(python, package)}")
    record_property("samples", len(answer["samples"]))
    record_property("coverage", answer["coverage"]["ratio"])
