"""Every program in examples/ runs as it stands, those that need a gateway against one that this test starts."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gateway.test_mini_swe_agent import bash
from tests.gateway.world import scripted_server
from tokentrue.app.background import BackgroundGateway
from tokentrue.environments import word_problems

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
AGAINST_A_GATEWAY = {
    "openai_sdk": "1 sample, ",
    "anthropic_sdk": "messages, ",
    "responses": "2 turns in one sample, ",
    "diagnose_samples": "exact: K3 0.000000, largest δ 0.0000",
}
ALONE = {
    "verify_model": "nothing rendered again",
    "custom_family": "{'name': 'calculator', 'arguments': '{\"expression\": \"2+2\"}'} {'user': 'proven', 'tool': 'proven'}",
    "own_trainer": "step 1: reward 0.",
    "nano_provider": "; coverage 100% of ",
    "rescore_edited_turns": "scored, 29 sampled after it: 0 of 35 differ from the trainer's",
}
ELSEWHERE = {"trl_grpo": "tests/integrations", "trl_async_grpo": "tests/integrations"}
KEY = "a-key-of-this-test"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a program in this process (torch is loaded once) and returns what it printed."""

    def run(name: str, *, url: str = "") -> str:
        monkeypatch.setenv("TOKENTRUE_URL", url)
        monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", KEY)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(sys, "argv", [name])
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENTRUE_ADMIN_KEY", KEY)
        with BackgroundGateway() as running:
            yield running.url


@pytest.mark.parametrize("name", AGAINST_A_GATEWAY)
def test_against_a_gateway(name: str, gateway: str, play: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[str] = []

    def calculate(arguments: str) -> str:
        results.append(plain(arguments))
        return results[-1]

    plain = word_problems.calculate
    monkeypatch.setattr(word_problems, "calculate", calculate)
    said = play(name, url=gateway)
    assert "error: give an expression" not in results, "the tool gets the arguments' text"
    assert results or not name.endswith("_sdk")
    assert AGAINST_A_GATEWAY[name] in said, said
    assert ("coverage 100%" in said and "The answer is 17." in said) or name == "diagnose_samples", said


@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str, play: Callable[..., str]) -> None:
    assert ALONE[name] in play(name)


@pytest.mark.slow  # tests/gateway/test_mini_swe_agent.py has the agent itself
def test_mini_swe_agent(tmp_path: Path, play: Callable[..., str]) -> None:
    turns = [bash("echo 4 > sum.txt", "Two and two."), bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    server = scripted_server(tmp_path, turns, admin_key=KEY)
    try:
        said = play("mini_swe_agent", url=server.url)
        assert "reward 1.0, " in said and "coverage 100%" in said
    finally:
        server.stop()


@pytest.mark.timeout(900)
@pytest.mark.slow  # tests/engine/test_images.py has the bits
def test_images(play: Callable[..., str]) -> None:
    said = play("images")
    steps = re.findall(r"^step \d+: reward (\S+), (\d+) of (\d+) log-probabilities differ$", said, re.M)
    assert len(steps) == 12, said
    assert all(int(differing) == 0 and int(compared) > 500 for _, differing, compared in steps), said
    rewards = [float(reward) for reward, *_ in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05, said


def test_without_zoom_the_picture_has_no_answer() -> None:
    made = runpy.run_path(str(EXAMPLES / "images.py"))
    see, png = made["see"], made["png"]
    assert len({png(see(f"{colour}/7")) for colour in made["COLOURS"]}) == 1
    assert len({png(see(f"{colour}/7", 2)) for colour in made["COLOURS"]}) == 4


def test_custom_environment(
    gateway: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokentrue.cli.main import run

    monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", KEY)
    monkeypatch.chdir(EXAMPLES)
    sets = [f"--set=rollout.{each}" for each in ("environment=custom_environment:Pens", "tasks=2", "group_size=4")]
    assert run("rollout", ["--url", gateway, "--out", str(tmp_path), *sets]) == 0
    assert "8 rollouts in 2 groups, 0 failed" in capsys.readouterr().out
    groups: dict[str, set[float]] = {}
    for line in (tmp_path / "rollouts.jsonl").read_text().splitlines():
        groups.setdefault(json.loads(line)["group"], set()).add(json.loads(line)["reward"])
    assert len(groups) == 2 and any(len(rewards) > 1 for rewards in groups.values()), f"nothing to learn: {groups}"


def test_every_example_is_run_and_short() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*AGAINST_A_GATEWAY, *ALONE, *ELSEWHERE, "mini_swe_agent", "custom_environment", "images"}
    for path in EXAMPLES.glob("*.py"):
        longest = 240 if path.stem == "images" else 56  # it makes its model, pictures included
        assert len(path.read_text().splitlines()) <= longest, path.name
        assert "\nNeeds: " in path.read_text().split('"""')[1], f"{path.name}: which extra?"


def test_an_edited_turn_is_not_scored_by_other_weights() -> None:
    found = runpy.run_path(str(EXAMPLES / "rescore_edited_turns.py"))
    sample = SimpleNamespace(token_ids=[1, 2, 3, 4], rollout_logprobs=[None, None, -1.5, None], loss_mask=[0, 0, 1, 0])

    def rescored(*logprobs: float) -> Any:
        async def answer(ids: list[int]) -> tuple[float, ...]:
            return logprobs

        return asyncio.run(found["rescore"](SimpleNamespace(score=answer), sample, range(1, 2)))

    assert rescored(-1.0, -1.5, -3.0) == ([0, 1, 1, 0], [None, -1.0, -1.5, None])
    with pytest.raises(ValueError, match="token 2 was sampled with"):
        rescored(-1.0, -1.4, -3.0)
