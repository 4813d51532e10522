"""Command-line agents: what a rollout leaves behind (nothing), what its score is, which tasks are read, what an agent
can reach."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokentrue.environments import load_environment
from tokentrue.environments.agents import CommandLineAgent, presets
from tokentrue.environments.agents.presets import PRESETS, load_preset
from tokentrue.environments.agents.process import CommandResult, reward_from_command, run_command
from tokentrue.environments.agents.sandbox import (
    SandboxLimits,  # noqa: F401
    folders_named_in,
    parts_beside,
    try_bwrap,
)
from tokentrue.environments.agents.tasks import read_tasks
from tokentrue.environments.agents.workspace import PREFIX, find_abandoned, open_workspace
from tokentrue.environments.base import digest
from tokentrue.errors import AgentError, ConfigError

CLIENT = SimpleNamespace(base_url="http://127.0.0.1:1/sessions/s1/v1/", api_key="tt-s1-secret")
BUBBLEWRAP = pytest.mark.skipif(try_bwrap() is not None, reason=f"bubblewrap does not work here: {try_bwrap()}")
SANDBOXES = [pytest.param("bwrap", marks=BUBBLEWRAP), "none"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "sum.txt").write_text("x = 2 + 2\n")
    line = {"id": "sum", "prompt": 'it\'s a "task" $HOME', "dir": "repo"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


def make_agent(folder: Path, command: str, score: str = "true", **more: Any) -> CommandLineAgent:
    settings = {
        "tasks": str(folder / "tasks.jsonl"),
        "directory": str(folder / "rollouts"),
        "transcripts": str(folder / "transcripts"),
    }
    return CommandLineAgent(agent=command, score=score, **{"sandbox": "none", **settings, **more})


async def play(agent: CommandLineAgent) -> float:
    (task,) = agent.tasks(9)
    return (await agent.run(CLIENT, task)).reward


def left_over(mark: str) -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found


async def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_a_rollout_works_on_its_own_copy_and_leaves_nothing(folder: Path, sandbox: Any) -> None:
    """The task is one argument; home and session address are the rollout's own; background processes are ended."""
    script = 'printf "%s\\n" "$1" > told.txt; echo more >> sum.txt; echo $HOME $OPENAI_BASE_URL; sleep 4711 & exit 3'
    agent = make_agent(
        folder, f"sh -c '{script}' agent {{task}}", "grep -q more sum.txt && cat told.txt && echo 0.25", sandbox=sandbox
    )
    assert await play(agent) == 0.25
    assert (folder / "repo" / "sum.txt").read_text() == "x = 2 + 2\n"
    assert list((folder / "rollouts").iterdir()) == [] and left_over("4711") == []
    transcript = (folder / "transcripts" / "s1.log").read_text()
    address = "http://127.0.0.1:1/" if sandbox == "none" else "http://127.0.0.1:47321/"
    home = "rollouts/" if sandbox == "none" else "/rollout/home "
    assert 'it\'s a "task" $HOME' in transcript and f"{address}sessions/s1/v1" in transcript and home in transcript


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_files_named_by_absolute_path_are_seen_with_what_lies_beside_them(folder: Path, sandbox: Any) -> None:
    tools = folder / "tools"
    tools.mkdir()
    (tools / "agent.py").write_text("import answer\nopen('out.txt', 'w').write(answer.TEXT)\n")
    (tools / "answer.py").write_text("TEXT = '4'\n")
    (tools / "grade.py").write_text("print(float(open('out.txt').read() == '4'))\n")
    python = sys.executable
    agent = make_agent(
        folder, f"{python} {tools / 'agent.py'} {{task}}", f"{python} {tools / 'grade.py'}", sandbox=sandbox
    )
    assert await play(agent) == 1.0


@BUBBLEWRAP
async def test_the_agent_does_not_see_the_folder_of_what_scores_it(folder: Path) -> None:
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "answer.txt").write_text("4")
    (hidden / "grade.sh").write_text(f"test -s {hidden / 'answer.txt'} && test ! -s seen.txt")
    agent = make_agent(
        folder, f"sh -c 'cat {hidden}/* > seen.txt; true' {{task}}", f"sh {hidden / 'grade.sh'}", sandbox="bwrap"
    )
    assert await play(agent) == 1.0


def test_no_spelling_of_a_path_shows_a_whole_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, link = tmp_path / "home", tmp_path / "link"
    (home / "project").mkdir(parents=True)
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    (home / "agent.py").touch()
    (home / "project" / "agent.py").touch()
    for spelled in (home, f"/{home}", home / "project" / "..", link):
        assert folders_named_in(f"python {spelled}/agent.py") == [str(home / "agent.py")]
        assert folders_named_in(f"python {spelled}/project/agent.py") == [str(home / "project")]


def test_without_a_sandbox_nothing_starts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """`none` is never chosen for the user, and says what it means."""
    monkeypatch.setattr("tokentrue.environments.agents.sandbox.try_bwrap", lambda: "not installed")
    with pytest.raises(ConfigError, match=r"not installed\); install bubblewrap .* --sandbox none"):
        CommandLineAgent(agent="true {task}", score="true", tasks=str(folder / "tasks.jsonl"))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"agent\.sandbox: 'docker' is not one of 'bwrap', 'none'"):
        make_agent(folder, "true {task}", sandbox="docker")
    assert "WITHOUT A SANDBOX: it can read and write all that you can" in make_agent(folder, "true {task}").notes()[0]


def test_limits_are_options(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^agent.file_mib: 0 must be finite and >= 1"):
        make_agent(folder, "true {task}", file_mib=0)
    with pytest.raises(ConfigError, match="no option 'memory'; one of memory_mib"):
        make_agent(folder, "true {task}", memory=5)


def test_of_a_prefix_in_the_home_only_programs_and_libraries_are_shown(tmp_path: Path) -> None:
    for name in (".cargo/bin", ".cargo/lib", ".cargo/registry", "app/node_modules/.bin", "app/secret"):
        (tmp_path / name).mkdir(parents=True)
    assert parts_beside(tmp_path / ".cargo" / "bin") == [tmp_path / ".cargo" / "bin", tmp_path / ".cargo" / "lib"]
    assert parts_beside(tmp_path / "app" / "node_modules" / ".bin") == [tmp_path / "app" / "node_modules"]


async def test_time_out_and_cancellation_end_everything(folder: Path) -> None:
    agent = make_agent(
        folder, "sh -c 'touch begun; sleep 4712 & sleep 4712' {task}", "test -e begun", agent_timeout_s=1.0
    )
    assert await play(agent) == 1.0  # what it did in its time is scored
    agent = make_agent(folder, "sh -c 'sleep 4712 & sleep 4712' {task}")
    task = asyncio.create_task(play(agent))
    await wait_for(lambda: len(left_over("sleep\x004712")) >= 2)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and left_over("4712") == [] and list((folder / "rollouts").iterdir()) == []


async def test_cancelled_while_the_agent_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent runs already, and the loop does not know it yet: as on a busy machine."""
    plain = asyncio.create_subprocess_exec

    async def slow(*command: Any, **options: Any) -> Any:
        process = await plain(*command, **options)
        await asyncio.sleep(1.0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    task = asyncio.create_task(play(make_agent(folder, "sh -c 'sleep 4714 & sleep 4714' {task}")))
    await wait_for(lambda: len(left_over("sleep\x004714")) >= 2)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and left_over("4714") == [] and list((folder / "rollouts").iterdir()) == []


@BUBBLEWRAP
def test_a_killed_run_leaves_no_process_and_the_next_one_removes_its_directory(folder: Path) -> None:
    program = f"""
import asyncio
from tests.environments.test_agents import make_agent, play
from dataclasses import replace
from pathlib import Path
asyncio.run(play(make_agent(Path({str(folder)!r}), "sh -c 'setsid sleep 4713 & sleep 4713' {{task}}", sandbox="bwrap")))
"""
    run = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL)
    asyncio.run(wait_for(lambda: len(left_over("sleep\x004713")) >= 2, 30))
    run.send_signal(signal.SIGKILL)
    run.wait()
    asyncio.run(wait_for(lambda: left_over("4713\0") == []))
    make_agent(folder, "true {task}")
    assert list((folder / "rollouts").iterdir()) == []


async def test_directories_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """Those whose lock nobody holds; one without a lock is being made."""
    abandoned, fresh = tmp_path / f"{PREFIX}a", tmp_path / f"{PREFIX}b"
    for directory in (abandoned, fresh):
        (directory / "home").mkdir(parents=True)
    (abandoned / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(abandoned)
    async with open_workspace(None, ref=None, under=tmp_path):
        assert find_abandoned(tmp_path) == [abandoned]


async def test_a_checkout_of_a_commit(tmp_path: Path) -> None:
    """With what is committed alone, from a folder inside the repository too; its own repository borrows the objects."""
    repository = tmp_path / "repo"
    (repository / "inner").mkdir(parents=True)
    (repository / "inner" / "a.txt").write_text("one")
    commands = ["init -q", "config user.email a@b", "config user.name n", "add .", "commit -q -m one", "tag first"]
    for command in commands:
        subprocess.run(["git", "-C", str(repository), *command.split()], check=True)
    (repository / "untracked").touch()
    async with open_workspace(repository / "inner", ref="first", under=tmp_path / "rollouts") as place:
        assert (place.agent / "work" / "inner" / "a.txt").read_text() == "one"
        assert not (place.agent / "work" / "untracked").exists() and place.objects == repository / ".git" / "objects"
    assert list((tmp_path / "rollouts").iterdir()) == [] and not (repository / ".git" / "worktrees").exists()
    with pytest.raises(ConfigError, match="git rev-parse failed"):
        async with open_workspace(tmp_path, ref="HEAD", under=tmp_path / "r"):
            pass


SCORES = [
    (0, "", 1.0),
    (0, "passed\n", 1.0),
    (0, "3 passed\n0.75\n", 0.75),
    (1, "0.75", 0.0),
    (4, "", 0.0),
]


@pytest.mark.parametrize(("code", "printed", "reward"), SCORES)
def test_scores(code: int, printed: str, reward: float) -> None:
    assert reward_from_command(CommandResult(code=code, tail=printed), "c") == reward


@pytest.mark.parametrize("printed", ["nan", "3 passed\n-inf\n"])
def test_a_score_that_is_no_finite_number_is_refused(printed: str) -> None:
    with pytest.raises(AgentError, match="which is no score"):
        reward_from_command(CommandResult(code=0, tail=printed), "c")


@pytest.mark.parametrize("code", [None, 126, 127, 137])
def test_a_score_command_that_did_not_run_is_no_score(code: int | None) -> None:
    with pytest.raises(AgentError, match="score: 'c'"):
        reward_from_command(CommandResult(code=code), "c")


async def test_what_cannot_run_is_an_error_with_its_cure(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no preset 'clode-code'"):
        make_agent(folder, "clode-code")
    with pytest.raises(ConfigError, match="--tasks FILE_OR_DIRECTORY"):
        CommandLineAgent(agent="pi")
    with pytest.raises(ConfigError, match=r"^agent: no preset 'nope'"):
        load_environment("agent", {"agent": "nope", "tasks": str(folder / "tasks.jsonl")})
    with pytest.raises(ConfigError, match="'nothing-of-this-name' is not installed"):
        make_agent(folder, "nothing-of-this-name {task}")  # at the start of a run, not in each rollout
    (folder / "program").write_text("#!/no/such/interpreter\n")
    (folder / "program").chmod(0o700)
    with pytest.raises(AgentError, match=r"could not be run \(exit code 127\)"):
        await play(make_agent(folder, f"{folder / 'program'} {{task}}"))
    agent = make_agent(folder, "true {task}")
    with pytest.raises(ConfigError, match="gateway over HTTP"):
        await agent.run(SimpleNamespace(), agent.tasks(1)[0])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_a_line_feed_ends_a_line_of_tasks(tmp_path: Path, end: str) -> None:
    """JSON strings may hold U+2028, U+2029 and U+0085 as they are; `str.splitlines` cuts there."""
    prompts = ["one\u2028two", "one\u2029two", "one\x85two"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "tasks.jsonl").write_bytes("".join(line + end for line in [*lines, ""]).encode())
    tasks = read_tasks(tmp_path / "tasks.jsonl")
    assert [task.prompt for task in tasks] == prompts
    assert [task.task_id for task in tasks] == [digest(line)[:12] for line in lines], "whatever the file's line ends"


def test_limits_of_harbor_tasks_are_numbers(tmp_path: Path) -> None:
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "tests" / "test.sh").touch()
    (task / "instruction.md").write_text("do it")
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 'long'\n")
    with pytest.raises(ConfigError, match=r"got `str` - at `\$.verifier.timeout_sec`"):
        read_tasks(task)


def test_tasks_are_read_or_refused_by_line(folder: Path) -> None:
    path = folder / "bad.jsonl"
    for text, named in {
        "{": "bad.jsonl:1: Input data was truncated",
        "{}": "missing required field `prompt`",
        '{"prompt": "a", "promt": 1}': "unknown field `promt`",
        '{"prompt": "a", "dir": "none"}': "no directory",
        '{"prompt": "a", "split": "x"}': r"Invalid enum value 'x' - at `\$.split`",
        '{"prompt": "a", "network": "all"}': r"Invalid enum value 'all' - at `\$.network`",
        '{"prompt": "a", "timeout_s": "abc"}': r"bad.jsonl:1: Expected `float .*`, got `str` - at `\$.timeout_s`",
        '{"prompt": "a", "timeout_s": -1}': r"Expected `float` >= 0.0 - at `\$.timeout_s`",
        '{"prompt": "a", "timeout_s": NaN}': "malformed",
        '{"prompt": "a", "dir": 5}': r"got `int` - at `\$.dir`",
        '{"prompt": "a", "ref": {}}': r"\$.ref",
        '{"prompt": "a", "score": 5}': r"\$.score",
        '{"prompt": "a", "id": "\\ud800"}': "bad.jsonl:1: ",
        '{"prompt": "\\udc00"}': "surrogate",
        '{"prompt": "a\\u0000b"}': r"\$.prompt",
        '{"prompt": "a", "env": {"A": "\\u0000"}}': r"\$.env",
        '{"prompt": "a"}\n{"prompt": "\x85\u2028", "score": 5}': r"bad.jsonl:2: .*\$.score",
        '{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}': "'1' twice",
        "": "holds no task",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=named):
            read_tasks(path)
    path.write_text(
        '{"id": "a", "prompt": "1", "split": "heldout"}\n{"id": "b", "prompt": "2", "score": "false"}\n{"id": "c", "prompt": "3"}\n'  # noqa: E501, RUF100
    )
    agent = make_agent(folder, "true {task}", tasks=str(path))
    assert [task.task_id for task in agent.tasks(9)] == ["b", "c"] and [
        t.task_id for t in agent.tasks(9, split="heldout")
    ] == ["a"]
    assert [task.task_id for task in agent.tasks(1, seed=1)] == [task.task_id for task in agent.tasks(1, seed=1)]


@pytest.fixture
def harbor(tmp_path: Path) -> Path:
    """A task directory in Harbor's layout."""
    task = tmp_path / "tasks" / "hello"
    for name in ("environment", "tests", "solution"):
        (task / name).mkdir(parents=True)
    settings = 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 20.0\n[environment]\ncpus = 1\n'
    (task / "task.toml").write_text(settings)
    (task / "instruction.md").write_text("Write hello to /app/hello.txt.")
    (task / "environment" / "Dockerfile").write_text("FROM python:3.13-slim\nWORKDIR /app\n")
    verdict = 'test "$(cat /app/hello.txt)" = hello && reward=1 || reward=0'
    (task / "tests" / "test.sh").write_text(f"#!/bin/sh\n{verdict}\necho $reward > /logs/verifier/reward.txt\n")
    return task


@BUBBLEWRAP
@pytest.mark.parametrize(
    ("command", "reward"),
    [("echo hello > /app/hello.txt", 1.0), ("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt", 0.0)],
)
async def test_harbor_tasks_as_they_are(harbor: Path, tmp_path: Path, command: str, reward: float) -> None:
    """/app, /tests and /logs are where the task expects them; the agent does not see the tests, and its own reward does
    not count."""
    agent = make_agent(
        tmp_path,
        f"sh -c '{command}; test ! -e /tests || rm -rf /app/hello.txt' {{task}}",
        tasks=str(harbor.parent),
        sandbox="bwrap",
    )
    assert await play(agent) == reward
    assert any("Dockerfile" in note for note in agent.notes())
    with pytest.raises(ConfigError, match="use sandbox='bwrap'"):
        make_agent(tmp_path, "true {task}", tasks=str(harbor)).notes()


def test_every_key_of_the_presets_is_a_field() -> None:
    """A misspelt key would be left out in silence."""
    tables = tomllib.loads(Path(presets.__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    assert tables.keys() == PRESETS.keys()
    for name, table in tables.items():
        assert table.keys() <= {each.name for each in fields(PRESETS[name])}, name


def test_presets_say_how_to_start() -> None:
    for name in PRESETS:
        preset = load_preset(name)
        launch = preset.launch("http://g/sessions/s", "the-key", "do it")
        said = json.dumps(launch)
        assert preset.name == name and preset.install
        assert "do it" in launch[0] and "the-key" in said and "http://g/sessions/s" in said


async def test_exit_codes_are_a_shells(tmp_path: Path) -> None:
    for command, code in ((["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -TERM $$"], 143)):
        with (tmp_path / "log").open("wb") as output:
            got = await run_command(
                lambda _, command=command: command,
                env={"PATH": os.environ["PATH"]},
                output=output,
                most_output=1000,
            )
        assert got.code == code


async def test_an_agent_that_broke_off_with_exit_code_0_is_a_failed_rollout(folder: Path) -> None:
    """opencode's words, as the last line; before it they are the agent's own output."""
    said = PRESETS["opencode"].broken_off
    for printed, fails in ((f"work\\n\\033[91m{said}\\n\\n", True), (f"{said}\\nwork\\n", False)):
        agent = make_agent(folder, f"sh -c 'printf \"{printed}\"' {{task}}")
        agent.preset = replace(agent.preset, broken_off=said)
        if fails:
            with pytest.raises(AgentError, match="broke off: The user rejected permission"):
                await play(agent)
        else:
            assert await play(agent) == 1.0
