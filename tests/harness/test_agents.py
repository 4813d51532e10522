"""Command-line agents, unchanged, against a real gateway process with a real tokenizer: ten turns, nine of them with
tools, streamed.

Each test is the how-to for its harness: the same settings work for a user. What is checked: the agent did its work,
every sampled token is trained exactly once, and the conversation is one chain. Side requests are roots of their own,
labelled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import Made, Server, call, check_recorded, model_dir, renderer, sampled_by, scripted_server
from tests.harness.npm import program, run
from tests.harness.player import Player

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]
TASK = "Compute two plus two with the shell, carefully."
COMMANDS = [
    "echo 'x = 2 + 2' > sum.txt",
    "cat sum.txt",
    "expr 2 + 2",
    "printf 'é 🙂 <|%s|>' im_end",
    "ls",
    "echo \"quoted 'text'\"",
    "pwd",
    "wc -c sum.txt",
    "echo done",
]
LAST = "<think>\nEverything fits.\n</think>\n\nIt is 4."


def played(tool: str, argument: str, **more: Any) -> list[str]:
    """Nine tool calls, every other one with reasoning before it, and the last word."""
    turns = [call(tool, json.dumps({argument: command, **more}, ensure_ascii=False)) for command in COMMANDS]
    thought = [f"<think>\nStep {n}.\n</think>\n\n{turn}" if n % 2 == 0 else turn for n, turn in enumerate(turns)]
    return [*thought, LAST]


def at_once(*calls: tuple[str, dict[str, Any]]) -> str:
    """Several calls in one turn."""
    return "\n".join(call(tool, json.dumps(arguments, ensure_ascii=False)) for tool, arguments in calls)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    yield tmp_path, home, work


def check_chain(server: Server, session: Made, turns: Sequence[str], work: Path) -> None:
    assert (work / "sum.txt").read_text() == "x = 2 + 2\n"
    check_recorded(server, session.session_id, turns)
    _, shown = server.ask("GET", f"/sessions/{session.session_id}")
    assert [node["why"] for node in shown["nodes"]] == ["first", *[None] * 9]


def claude_environment(session: Made) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": session.anthropic_base_url,
        "ANTHROPIC_AUTH_TOKEN": session.api_key,
        "ANTHROPIC_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def write_codex_config(home: Path, session: Made) -> None:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f"""
model = "m"
model_provider = "gateway"
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
base_url = "{session.base_url}"
wire_api = "responses"
env_key = "GATEWAY_KEY"
"""
    )


def test_claude_code(folders: tuple[Path, Path, Path]) -> None:
    folder, home, work = folders
    claude = program("@anthropic-ai/claude-code", "claude")
    turns = played("Bash", "command", description="a step")
    server = scripted_server(folder, turns)
    try:
        session = server.session()
        command = [str(claude), "-p", TASK, "--max-turns", "20", "--allowedTools", "Bash"]
        done = run(command, home=home, cwd=work, env=claude_environment(session))
        assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
        check_chain(server, session, turns, work)
    finally:
        server.stop()


def test_codex(folders: tuple[Path, Path, Path]) -> None:
    folder, home, work = folders
    codex = program("@openai/codex", "codex")
    turns = played("exec_command", "cmd")
    server = scripted_server(folder, turns)
    try:
        session = server.session()
        write_codex_config(home, session)
        command = [str(codex), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
        done = run(command, home=home, cwd=work, env={"GATEWAY_KEY": session.api_key})
        assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
        check_chain(server, session, turns, work)
    finally:
        server.stop()


def check_several(server: Server, session: Made, turns: Sequence[str], work: Path) -> None:
    """Each of the different tools of one turn did its own work, and the turns are one chain, trained to the last
    token."""
    assert (work / "sum.txt").read_text() == "x = 2 + 2\n" and (work / "second.txt").read_text().strip() == "two"
    answer = server.samples(session.session_id)
    assert answer["coverage"]["ratio"] == 1.0, answer["coverage"]
    main = max(answer["samples"], key=lambda sample: sum(sample["loss_mask"]))
    trained = [token for token, mask in zip(main["token_ids"], main["loss_mask"], strict=True) if mask]
    assert trained == sampled_by(turns)[0]
    assert "unsupported call" not in renderer().decode(main["token_ids"])


def test_codex_calls_several_different_tools_in_one_turn(folders: tuple[Path, Path, Path]) -> None:
    """Functions that take other arguments: each must be run under its own name."""
    folder, home, work = folders
    codex = program("@openai/codex", "codex")
    turns = [
        "<think>\nAll at once.\n</think>\n\n"
        + at_once(
            ("exec_command", {"cmd": COMMANDS[0]}), ("get_goal", {}), ("exec_command", {"cmd": "echo two > second.txt"})
        ),
        at_once(("get_goal", {}), ("exec_command", {"cmd": "cat sum.txt"})),
        LAST,
    ]
    server = scripted_server(folder, turns)
    try:
        session = server.session()
        write_codex_config(home, session)
        command = [str(codex), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
        done = run(command, home=home, cwd=work, env={"GATEWAY_KEY": session.api_key})
        assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
        check_several(server, session, turns, work)
    finally:
        server.stop()


def test_claude_code_calls_several_different_tools_in_one_turn(folders: tuple[Path, Path, Path]) -> None:
    folder, home, work = folders
    claude = program("@anthropic-ai/claude-code", "claude")
    turns = [
        at_once(
            ("Bash", {"command": COMMANDS[0], "description": "a step"}),
            ("Write", {"file_path": str(work / "second.txt"), "content": "two\n"}),
            ("Bash", {"command": "pwd", "description": "where"}),
        ),
        "<think>\nLook.\n</think>\n\n"
        + at_once(
            ("Read", {"file_path": str(work / "second.txt")}),
            ("Bash", {"command": "cat sum.txt", "description": "look"}),
        ),
        LAST,
    ]
    server = scripted_server(folder, turns)
    try:
        session = server.session()
        command = [str(claude), "-p", TASK, "--max-turns", "20", "--allowedTools", "Bash", "Write", "Read"]
        done = run(command, home=home, cwd=work, env=claude_environment(session))
        assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
        check_several(server, session, turns, work)
    finally:
        server.stop()


SEVERAL_QWEN = [
    at_once(
        ("run_shell_command", {"command": COMMANDS[0], "is_background": False}),
        ("list_directory", {"path": "WORK"}),
        ("run_shell_command", {"command": "echo two > second.txt", "is_background": False}),
    ),
    at_once(
        ("list_directory", {"path": "WORK"}), ("run_shell_command", {"command": "cat sum.txt", "is_background": False})
    ),
    LAST,
]


@pytest.mark.parametrize("played_server", [SEVERAL_QWEN], indirect=True, ids=["several"])
def test_qwen_code_calls_several_different_tools_in_one_turn(
    folders: tuple[Path, Path, Path], played_server: tuple[Server, Player]
) -> None:
    (server, player), (_, home, work) = played_server, folders
    player.turns = [turn.replace("WORK", str(work)) for turn in player.turns]
    qwen = program("@qwen-code/qwen-code", "qwen")
    session = server.session()
    environment = {"OPENAI_API_KEY": session.api_key, "OPENAI_BASE_URL": session.base_url, "OPENAI_MODEL": "m"}
    done = run([str(qwen), "--auth-type", "openai", "--yolo", "-p", TASK], home=home, cwd=work, env=environment)
    assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    check_several(server, session, player.turns, work)


def test_pi(folders: tuple[Path, Path, Path]) -> None:
    folder, home, work = folders
    pi = program("@mariozechner/pi-coding-agent", "pi")
    turns = played("bash", "command")
    server = scripted_server(folder, turns)
    try:
        session = server.session()
        (home / ".pi" / "agent").mkdir(parents=True)
        model = {"id": "m", "reasoning": True, "contextWindow": 200000, "maxTokens": 8192}
        provider = {
            "baseUrl": session.base_url,
            "api": "openai-completions",
            "apiKey": session.api_key,
            "models": [model],
        }
        (home / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"gateway": provider}}))
        command = [str(pi), "--provider", "gateway", "--model", "m", "-p", TASK]
        done = run(command, home=home, cwd=work, env={"PI_OFFLINE": "1"})
        assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
        check_chain(server, session, turns, work)
    finally:
        server.stop()


def test_gemini_cli(folders: tuple[Path, Path, Path]) -> None:
    """It drops thoughts and keeps their signatures: no turn loses its reasoning. Its own top_p and top_k are overridden
    by the session."""
    folder, home, work = folders
    gemini = program("@google/gemini-cli", "gemini")
    turns = played("run_shell_command", "command", description="a step")
    server = scripted_server(folder, turns)
    try:
        session = server.session(sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0})
        (home / ".gemini").mkdir()
        (home / ".gemini" / "settings.json").write_text(
            json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}})
        )
        environment = {"GEMINI_API_KEY": session.api_key, "GOOGLE_GEMINI_BASE_URL": session.google_base_url}
        environment["GEMINI_CLI_TRUST_WORKSPACE"] = "true"
        done = run([str(gemini), "-m", "m", "--yolo", "-p", TASK], home=home, cwd=work, env=environment)
        assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
        check_chain(server, session, turns, work)
        nodes = server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]
        assert not any("reasoning" in node["projection"] for node in nodes)
    finally:
        server.stop()


@pytest.fixture
def played_server(folders: tuple[Path, Path, Path], request: pytest.FixtureRequest) -> Iterator[tuple[Server, Player]]:
    """An engine that reads its prompt, for harnesses that ask beside the conversation."""
    player = Player(renderer(), request.param, task=TASK, aside='{"title": "aside"}')
    store = f"sqlite:{folders[0] / 'journal.sqlite'}"
    server = Server(
        "--engine", "sglang", "--url", player.url, "--model", str(model_dir()), "--store", store, folder=folders[0]
    )
    yield server, player
    server.stop()
    player.stop()


def check_main_chain(server: Server, session: Made, turns: Sequence[str], work: Path) -> list[dict[str, Any]]:
    """The longest sample is the conversation, whole; everything else is a small root with a label. All of it is
    trained."""
    assert (work / "sum.txt").read_text() == "x = 2 + 2\n"
    answer = server.samples(session.session_id)
    assert answer["coverage"]["ratio"] == 1.0, answer["coverage"]
    main = max(answer["samples"], key=lambda sample: sum(sample["loss_mask"]))
    trained = [token for token, mask in zip(main["token_ids"], main["loss_mask"], strict=True) if mask]
    assert trained == sampled_by(turns)[0]
    nodes = server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]
    sides = [node for node in nodes if node["parent"] is None and node["why"] != "first"]
    assert len(nodes) - 10 == len(answer["samples"]) - 1 and all(node["why"] == "new_conversation" for node in sides)
    return sides


@pytest.mark.parametrize(
    "played_server", [played("run_shell_command", "command", is_background=False)], indirect=True, ids=["ten-turns"]
)
def test_qwen_code(folders: tuple[Path, Path, Path], played_server: tuple[Server, Player]) -> None:
    (server, player), (_, home, work) = played_server, folders
    qwen = program("@qwen-code/qwen-code", "qwen")
    session = server.session()
    environment = {"OPENAI_API_KEY": session.api_key, "OPENAI_BASE_URL": session.base_url, "OPENAI_MODEL": "m"}
    done = run([str(qwen), "--auth-type", "openai", "--yolo", "-p", TASK], home=home, cwd=work, env=environment)
    assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    check_main_chain(server, session, player.turns, work)


@pytest.mark.parametrize(
    "played_server", [played("bash", "command", description="a step")], indirect=True, ids=["ten-turns"]
)
def test_opencode(folders: tuple[Path, Path, Path], played_server: tuple[Server, Player]) -> None:
    (server, player), (_, home, work) = played_server, folders
    opencode = program("opencode-ai", "opencode")
    session = server.session()
    options = {"baseURL": session.base_url, "apiKey": session.api_key}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": options,
        "models": {"m": {"name": "m", "tool_call": True}},
    }
    (work / "opencode.json").write_text(json.dumps({"provider": {"gateway": provider}, "model": "gateway/m"}))
    environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    done = run([str(opencode), "run", TASK], home=home, cwd=work, env=environment)
    assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    nodes = server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]
    assert (
        len([node for node in nodes if node["parent"] is None]) == 2
    )  # the title is asked for beside the conversation
    check_main_chain(server, session, player.turns, work)
