"""Command-line agents, unchanged, against a real gateway process with a real tokenizer: ten turns, nine of them with
tools, streamed.

Each agent starts from its preset, as its page says it. What is checked: the agent did its work, every sampled token of
the conversation is trained exactly once, and the conversation is one chain. Side requests are left out, with their
reason.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_mini_swe_agent import TEN_TURNS
from tests.gateway.world import Made, Server, call, check_recorded, model_dir, renderer, sampled_by, scripted_server
from tests.harness.npm import PACKAGES, program, run, version_of
from tests.harness.player import Player
from tokentrue.environments.agents.presets import PRESETS

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


def check_chain(server: Server, session: Made, turns: Sequence[str], work: Path) -> dict[str, Any]:
    assert (work / "sum.txt").read_text() == "x = 2 + 2\n"
    answer = check_recorded(server, session.session_id, turns)
    _, shown = server.ask("GET", f"/sessions/{session.session_id}")
    assert [node["why"] for node in shown["nodes"]] == ["first", *[None] * 9]
    return answer


def add_npm_row(record: Callable[[str, Any], None], name: str, answer: dict[str, Any]) -> None:
    note(record, f"{name} {version_of(PACKAGES[name][0])}", answer)


def note(record: Callable[[str, Any], None], name: str, answer: dict[str, Any]) -> None:
    """To the table at the end (conftest.py). Coverage is that of the conversation: side requests are left out."""
    untrained, coverage = answer["coverage"]["untrained"], answer["coverage"]
    aside = sum(item["tokens"] for item in untrained if item["why"] == "side_request")
    record("harness", name)
    record("samples", len(answer["samples"]))
    record("coverage", f"{coverage['trained'] / (coverage['sampled'] - aside):.2%}")
    record("note", f"{aside} tokens of side requests left out" if aside else "")


def start(
    name: str,
    session: Made,
    folders: tuple[Path, Path, Path],
    *more: str,
    env: dict[str, str] | None = None,
    task: str = TASK,
) -> subprocess.CompletedProcess[str]:
    """Starts a preset's agent with a home of its own."""
    _, home, work = folders
    arguments, own, files = PRESETS[name].launch(session.anthropic_base_url, session.api_key, task)
    for path, text in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    command = [str(program(*PACKAGES[name])), *arguments, *more]
    return run(command, home=home, cwd=work, env={**own, **(env or {})})


NO_FILTERS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
CHAINS = {
    "claude-code": played("Bash", "command", description="a step"),
    "codex": played("exec_command", "cmd"),
    "gemini": played("run_shell_command", "command", description="a step"),
    "pi": played("bash", "command"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_ten_turns_are_one_chain(
    folders: tuple[Path, Path, Path], name: str, record_property: Callable[[str, Any], None]
) -> None:
    """Gemini drops thoughts and keeps their signatures: no turn loses its reasoning. Its own top_p and top_k are
    overridden by the session."""
    folder, _, work = folders
    server = scripted_server(folder, CHAINS[name])
    try:
        session = server.session(sampling=NO_FILTERS)
        done = start(name, session, folders)
        assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
        add_npm_row(record_property, name, check_chain(server, session, CHAINS[name], work))
        nodes = server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]
        assert {node["model"] for node in nodes} == {"policy"}
        assert name != "gemini" or not any("reasoning" in node["projection"] for node in nodes)
    finally:
        server.stop()


def test_cline_as_its_page_starts_it(
    folders: tuple[Path, Path, Path],
    played_server: tuple[Server, Player],
    record_property: Callable[[str, Any], None],
) -> None:
    (server, player), (_, home, work) = played_server, folders
    turns = [call("run_commands", json.dumps({"commands": [command]}, ensure_ascii=False)) for command in COMMANDS]
    player.turns = ["<think>\nFirst.\n</think>\n\n" + turns[0], "Beside it." + turns[1], *turns[2:], LAST]
    session = server.session()
    known = {"SESSION_URL": session.base_url, "SESSION_KEY": session.api_key, "the task": TASK}
    page = Path(__file__).parents[2] / "docs" / "harnesses" / "other-agents.md"
    for line in [line for line in page.read_text().splitlines() if line.startswith("$ cline ")]:
        _, *words = (known.get(word.removeprefix("$"), word) for word in shlex.split(line.removeprefix("$ ")))
        done = run([str(program(*PACKAGES["cline"])), *words], home=home, cwd=work, env={})
    assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert check_beside(server, session, player.turns, work) == []
    add_npm_row(record_property, "cline", server.samples(session.session_id))


def test_mini_swe_agent(folders: tuple[Path, Path, Path], record_property: Callable[[str, Any], None]) -> None:
    """A program of this environment, not of npm."""
    folder, home, work = folders
    server = scripted_server(folder, TEN_TURNS)
    try:
        session = server.session()
        arguments, env, _ = PRESETS["mini-swe-agent"].launch(session.anthropic_base_url, session.api_key, TASK)
        done = run([str(Path(sys.executable).parent / "mini"), *arguments], home=home, cwd=work, env=env)
        assert (work / "sum.py").read_text() == "x = 2 + 2\n", done.stdout[-2000:] + done.stderr[-2000:]
        answer = check_recorded(server, session.session_id, TEN_TURNS)
    finally:
        server.stop()
    note(record_property, f"mini-swe-agent {metadata.version('mini-swe-agent')}", answer)


def check_several(server: Server, session: Made, turns: Sequence[str], work: Path) -> None:
    """Each of the different tools of one turn did its own work, and the turns are one chain, trained to the last
    token."""
    assert (work / "sum.txt").read_text() == "x = 2 + 2\n" and (work / "second.txt").read_text().strip() == "two"
    answer = server.samples(session.session_id)
    assert {item["why"] for item in answer["coverage"]["untrained"]} <= {"side_request"}, answer["coverage"]
    (main,) = answer["samples"]
    trained = [token for token, mask in zip(main["token_ids"], main["loss_mask"], strict=True) if mask]
    assert trained == sampled_by(turns)[0]
    assert "unsupported call" not in renderer().decode(main["token_ids"])


SEVERAL = {
    "codex": [
        "<think>\nAll at once.\n</think>\n\n"
        + at_once(
            ("exec_command", {"cmd": COMMANDS[0]}), ("get_goal", {}), ("exec_command", {"cmd": "echo two > second.txt"})
        ),
        at_once(("get_goal", {}), ("exec_command", {"cmd": "cat sum.txt"})),
        LAST,
    ],
    "claude-code": [
        at_once(
            ("Bash", {"command": COMMANDS[0], "description": "a step"}),
            ("Write", {"file_path": "WORK/second.txt", "content": "two\n"}),
            ("Bash", {"command": "pwd", "description": "where"}),
        ),
        "<think>\nLook.\n</think>\n\n"
        + at_once(
            ("Read", {"file_path": "WORK/second.txt"}), ("Bash", {"command": "cat sum.txt", "description": "look"})
        ),
        LAST,
    ],
    "qwen-code": [
        at_once(
            ("run_shell_command", {"command": COMMANDS[0], "is_background": False}),
            ("list_directory", {"path": "WORK"}),
            ("run_shell_command", {"command": "echo two > second.txt", "is_background": False}),
        ),
        at_once(
            ("list_directory", {"path": "WORK"}),
            ("run_shell_command", {"command": "cat sum.txt", "is_background": False}),
        ),
        LAST,
    ],
}


@pytest.fixture
def played_server(folders: tuple[Path, Path, Path]) -> Iterator[tuple[Server, Player]]:
    """An engine that reads its prompt, for harnesses that ask beside the conversation."""
    player = Player(renderer(), [], task=TASK, aside='{"title": "aside"}')
    store = f"sqlite:{folders[0] / 'journal.sqlite'}"
    server = Server(
        "--engine", "sglang", "--url", player.url, "--model", str(model_dir()), "--store", store, folder=folders[0]
    )
    yield server, player
    server.stop()
    player.stop()


@pytest.mark.parametrize("name", SEVERAL)
def test_several_different_tools_in_one_turn(
    folders: tuple[Path, Path, Path], played_server: tuple[Server, Player], name: str
) -> None:
    """Functions that take other arguments: each must be run under its own name."""
    (server, player), work = played_server, folders[2]
    player.turns = [turn.replace("WORK", str(work)) for turn in SEVERAL[name]]
    session = server.session()
    done = start(name, session, folders)
    assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    check_several(server, session, player.turns, work)


def check_beside(server: Server, session: Made, turns: Sequence[str], work: Path) -> list[dict[str, Any]]:
    """One sample, the conversation, whole; everything else was asked beside it and is left out. Returns the nodes that
    were."""
    assert (work / "sum.txt").read_text() == "x = 2 + 2\n"
    answer = server.samples(session.session_id)
    (main,) = answer["samples"]
    trained = [token for token, mask in zip(main["token_ids"], main["loss_mask"], strict=True) if mask]
    assert trained == sampled_by(turns)[0]
    nodes = server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]
    sides = [node for node in nodes if "side_request" in node]
    assert {item["node"]: item["why"] for item in answer["coverage"]["untrained"]} == {
        node["id"]: "side_request" for node in sides
    }
    assert len(nodes) == len(turns) + len(sides)
    return sides


BESIDE = {
    "claude-code": CHAINS["claude-code"],
    "opencode": played("bash", "command", description="a step"),
    "qwen-code": played("run_shell_command", "command", is_background=False),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_asked_beside_the_conversation_is_not_trained(
    folders: tuple[Path, Path, Path],
    played_server: tuple[Server, Player],
    name: str,
    record_property: Callable[[str, Any], None],
) -> None:
    (server, player), work = played_server, folders[2]
    player.turns = BESIDE[name]
    session = server.session()
    env = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ""} if name == "claude-code" else {}
    done = start(name, session, folders, env=env)
    assert "It is 4." in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    sides = check_beside(server, session, player.turns, work)
    add_npm_row(record_property, name, server.samples(session.session_id))
    assert [node["side_request"] for node in sides] == (["title"] if name != "qwen-code" else [])


def test_opencode_reads_outside_its_folder(
    folders: tuple[Path, Path, Path], played_server: tuple[Server, Player]
) -> None:
    (server, player), (folder, _, work) = played_server, folders
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "note.txt").write_text("a note\n")
    player.turns = [
        call("read", json.dumps({"filePath": str(folder / "elsewhere" / "note.txt")})),
        call("bash", json.dumps({"command": COMMANDS[0], "description": "a step"})),
        LAST,
    ]
    done = start("opencode", server.session(), folders)
    assert "It is 4." in done.stdout and (work / "sum.txt").exists(), done.stderr[-2000:]
    assert any("a note" in prompt for prompt in player.prompts)


def test_opencode_that_rejects_a_path_ends_as_its_preset_says(
    folders: tuple[Path, Path, Path], played_server: tuple[Server, Player]
) -> None:
    """The words by which a rollout that broke off is known are those of the installed release."""
    server, player = played_server
    player.turns = [call("read", json.dumps({"filePath": str(folders[0] / "serve.log")})), LAST]
    done = start("opencode", server.session(), folders, env={"OPENCODE_CONFIG_CONTENT": '{"permission": "ask"}'})
    assert done.returncode == 0 and "It is 4." not in done.stdout
    assert (done.stdout + done.stderr).rstrip().endswith(PRESETS["opencode"].broken_off), done.stderr[-2000:]
