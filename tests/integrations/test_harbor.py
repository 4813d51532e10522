"""examples/harbor: a session written as ATIF, and compared with what a harness tells of the same run.

TOKENTRUE_HARBOR_PYTHON names a Python with harbor: its own models then read what is written, and its own converter
makes the trajectory of a run of mini-swe-agent.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.test_mini_swe_agent import TEN_TURNS
from tests.gateway.world import call, sampled_by, scripted_server
from tests.harness.pip import version_of

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "harbor"
PYTHON = shutil.which(os.environ.get("TOKENTRUE_HARBOR_PYTHON", ""))
TEXTS = [
    "<think>\nfirst look\n</think>\n\n" + call("bash", '{"command": "ls"}'),
    "Two files." + call("bash", '{"command": "cat a é"}'),
    "All done.",
    "Another ending.",
]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
QUESTION, LISTING, CONTENT = "What is in the folder?", "a\nb", "twelve 🙂"


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def harbor(*arguments: str) -> tuple[int, str, str]:
    """Its exit code, and what it printed."""
    main: Any = import_module("tokentrue_harbor.__main__").main
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    return code, out.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Three turns, and a second ending of the third."""
    folder = tmp_path_factory.mktemp("harbor")
    server = scripted_server(folder, TEXTS)
    try:
        session = server.session()
        history: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
        ]
        usage: list[dict[str, int]] = []

        def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = {"model": "some-model", "messages": messages, "tools": TOOLS}
            key = {"authorization": f"Bearer {session.api_key}"}
            answer = httpx.post(f"{session.base_url}/chat/completions", json=body, headers=key, timeout=60).json()
            usage.append(answer["usage"])
            return answer["choices"][0]["message"]

        for result in (LISTING, CONTENT):
            message = ask(history)
            history.append(message)
            history.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result})
        last = ask(history)
        ask([*history[:2], {"role": "user", "content": "And shorter?"}])
        (sample, *_) = sorted(server.samples(session.session_id)["samples"], key=lambda each: -sum(each["loss_mask"]))
        yield {
            "store": f"sqlite:{folder / 'journal.sqlite'}",
            "session": session.session_id,
            "usage": usage,
            "sample": sample,
            "last": last,
        }
    finally:
        assert server.stop() == 0


def told(run: dict[str, Any]) -> dict[str, Any]:
    """The harness's account, written by hand; the last result was never sent to the model."""

    def agent(at: int, text: str, number: int, **more: Any) -> dict[str, Any]:
        used = {name: run["usage"][number][name] for name in ("prompt_tokens", "completion_tokens")}
        return {"step_id": at, "source": "agent", "message": text, "metrics": used, **more}

    def ran(command: str, result: str, name: str) -> dict[str, Any]:
        made = {"tool_call_id": name, "function_name": "bash", "arguments": {"command": command}}
        return {"tool_calls": [made], "observation": {"results": [{"source_call_id": name, "content": result}]}}

    steps = [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": QUESTION},
        agent(3, "", 0, reasoning_content="first look", **ran("ls", LISTING, "c1")),
        agent(4, "Two files.\n", 1, **ran("cat a é", CONTENT, "c2")),
        agent(5, "All done.", 2, observation={"results": [{"content": "the harness's own farewell"}]}),
    ]
    return {"schema_version": "ATIF-v1.7", "agent": {"name": "hand", "version": "1"}, "steps": steps}


def check(run: dict[str, Any], trajectory: Any, folder: Path) -> tuple[int, list[str]]:
    (folder / "trajectory.json").write_text(json.dumps(trajectory))
    code, out, errors = harbor("check", run["store"], run["session"], str(folder / "trajectory.json"), "--json")
    assert code in (0, 1), errors
    return code, json.loads(out)["findings"]


def test_an_account_that_agrees(run: dict[str, Any], tmp_path: Path) -> None:
    assert check(run, told(run), tmp_path) == (0, [])
    without = told(run)
    del without["steps"][0]
    assert check(run, without, tmp_path) == (0, []), "some harnesses leave out the system prompt"


def drop(steps: list[Any]) -> None:
    del steps[3]


def change_text(steps: list[Any]) -> None:
    steps[4]["message"] = "All gone."


def change_arguments(steps: list[Any]) -> None:
    steps[2]["tool_calls"][0]["arguments"] = {"command": "ls -a"}


def change_result(steps: list[Any]) -> None:
    steps[3]["observation"]["results"][0]["content"] = "thirteen"


def change_question(steps: list[Any]) -> None:
    steps[1]["message"] += " Really?"


def change_count(steps: list[Any]) -> None:
    steps[3]["metrics"]["completion_tokens"] += 1


def change_prompt_count(steps: list[Any]) -> None:
    steps[4]["metrics"]["prompt_tokens"] -= 1


def swap(steps: list[Any]) -> None:
    steps[2:4] = [steps[3], steps[2]]


def invent(steps: list[Any]) -> None:
    steps.append({"step_id": 6, "source": "agent", "message": "One more thing."})


def change_ids(steps: list[Any]) -> None:
    steps[4]["metrics"]["completion_token_ids"] = [1, 2, 3]


@pytest.mark.parametrize(
    ("mutate", "place", "words"),
    [
        (drop, "step 4", ["tells of no such agent", "Two files."]),
        (change_text, "step 5", ["All done.", "All gone."]),
        (change_arguments, "step 3", ["'ls'", "'ls -a'"]),
        (change_result, "step 4", ["twelve", "thirteen"]),
        (change_question, "step 2", ["Really?"]),
        (change_count, "step 4", ["completion_tokens"]),
        (change_prompt_count, "step 5", ["prompt_tokens"]),
        (swap, "step", ["tells of no such", "recorded no such"]),
        (invent, "told step 6", ["recorded no such agent", "One more thing."]),
        (change_ids, "step 5", ["completion_token_ids"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_account_that_does_not(
    run: dict[str, Any], tmp_path: Path, mutate: Callable[[list[Any]], None], place: str, words: list[str]
) -> None:
    other = copy.deepcopy(told(run))
    mutate(other["steps"])
    code, found = check(run, other, tmp_path)
    assert code == 1 and all(word in " ".join(found) for word in (place, *words)), found


def test_what_is_written_has_the_tokens_of_the_sample(run: dict[str, Any], tmp_path: Path) -> None:
    code, _, errors = harbor("export", run["store"], run["session"], "-o", str(tmp_path / "out.json"))
    assert code == 0, errors
    written = json.loads((tmp_path / "out.json").read_text())
    turns = [step for step in written["steps"] if step["source"] == "agent"]
    assert [step["message"] for step in turns] == ["", "Two files.", "All done."]
    assert turns[0]["reasoning_content"] == "first look"
    ids, logprobs = sampled_by(TEXTS[:3])
    assert [token for step in turns for token in step["metrics"]["completion_token_ids"]] == ids
    assert [value for step in turns for value in step["metrics"]["logprobs"]] == logprobs
    last = turns[-1]["metrics"]
    assert [*last["prompt_token_ids"], *last["completion_token_ids"]] == run["sample"]["token_ids"]
    (other,) = written["subagent_trajectories"]
    assert [step.get("is_copied_context") for step in other["steps"] if step["source"] == "agent"] == [None]
    if PYTHON:
        program = "import sys; from harbor.models.trajectories import Trajectory as T; T.model_validate_json(open(sys.argv[1]).read())"
        subprocess.run([PYTHON, "-c", program, str(tmp_path / "out.json")], check=True)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"steps": [{}]}', '{"steps": 3}', '{"steps": [{"step_id": 1, "source": "agent", "message": 7}]}'],
)
def test_a_file_that_is_no_trajectory_is_one_line(run: dict[str, Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    code, _, errors = harbor("check", run["store"], run["session"], str(tmp_path / "bad.json"))
    assert code == 2 and len(errors.splitlines()) == 1 and "not an ATIF trajectory" in errors


CONVERT = """
import json, sys
from harbor.agents.installed.mini_swe_agent import convert_mini_swe_agent_to_atif
made = convert_mini_swe_agent_to_atif(json.load(open(sys.argv[1])), "run")
open(sys.argv[2], "w").write(json.dumps(made.to_json_dict()))
"""


@pytest.mark.harness
@pytest.mark.skipif(find_spec("minisweagent") is None, reason="mini-swe-agent is not installed")
def test_a_run_of_mini_swe_agent_as_harbor_converts_it(tmp_path: Path, add_row: Callable[..., None]) -> None:
    if not PYTHON:
        pytest.skip("NOT RUN: TOKENTRUE_HARBOR_PYTHON names no Python with harbor (make test-frameworks)")
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
        mini = [str(Path(sys.executable).parent / "mini"), "-m", "openai/m", "-t", "compute 2 + 2", "-y"]
        mini += ["--exit-immediately", "-l", "0", "-c", "mini.yaml", "-o", str(tmp_path / "mini.json")]
        mini += ["-c", f"model.model_kwargs.api_base={session.base_url}", "-c", "agent.step_limit=12"]
        done = subprocess.run(mini, cwd=work, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        converted = tmp_path / "trajectory.json"
        subprocess.run([PYTHON, "-c", CONVERT, str(tmp_path / "mini.json"), str(converted)], check=True)
        run = {"store": f"sqlite:{tmp_path / 'journal.sqlite'}", "session": session.session_id}
        trajectory = json.loads(converted.read_text())
        agents = [at for at, step in enumerate(trajectory["steps"]) if step["source"] == "agent"]
        assert len(agents) == 10
        code, differing = check(run, trajectory, tmp_path)
        assert (code, differing) == (0, [])
        for at in agents:
            other = copy.deepcopy(trajectory)
            del other["steps"][at]
            code, found = check(run, other, tmp_path)
            assert code == 1 and found, f"turn {at} was dropped"
        add_row(
            f"harbor {version_of(Path(PYTHON), 'harbor')}",
            len(agents),
            len(agents) - len(differing),
            "turns of mini-swe-agent as ATIF",
        )
    finally:
        assert server.stop() == 0
