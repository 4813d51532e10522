"""The suite against a gateway that is right, against broken ones, and against our own."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.reference import DEFECTS, ReferenceTarget, start_reference
from tokentrue.cli.main import run as run_command
from tokentrue.conformance.levels import CASES, LEVELS
from tokentrue.conformance.run import ConformanceReport, ConformanceSettings, run
from tokentrue.hub import SMALL_MODEL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


def play(target: ReferenceTarget, settings: ConformanceSettings) -> ConformanceReport:
    return asyncio.run(run(target, settings, model=SMALL_MODEL, process=start_reference))


def test_a_gateway_of_another_design_conforms() -> None:
    """Nothing in the specification needs our design: rows by call, every prompt rendered whole, no matching."""
    report = play(ReferenceTarget(), ConformanceSettings(turns=4, dialects=("chat",)))
    told = json.dumps(report.to_json()["findings"], indent=1)
    assert report.exit_code == 0, told
    assert {finding.rule for finding in report.findings} == {"3.1", "5.3"}, told
    verdicts = {level: report.verdict(level) for level in LEVELS}
    assert verdicts == {**dict.fromkeys(LEVELS, "pass"), 3: "warn"}
    assert {level for level, count in report.ran.items() if count} == set(LEVELS)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_broken_gateway_is_caught_at_its_level(defect: str) -> None:
    case, rule = DEFECTS[defect]
    report = play(ReferenceTarget(defect), ConformanceSettings(case=case, turns=4))
    found = {finding.rule: finding for finding in report.findings}
    assert rule in found, report.to_json()["findings"]
    assert report.verdict(int(rule[0])) in {"fail", "warn"}
    assert found[rule].conversation and found[rule].case == case


def test_a_finding_names_the_smallest_conversation(tmp_path: Path) -> None:
    report = play(ReferenceTarget("trained_twice"), ConformanceSettings(levels=(1,), turns=4, dialects=("chat",)))
    finding, *others = [finding for finding in report.findings if finding.rule == "2.1"]
    assert not any(other.conversation for other in others)  # only the first case that breaks a rule is made smaller
    assert finding.case == "1.sound.chat.1"  # four turns were asked for, one is enough
    again = play(ReferenceTarget("trained_twice"), ConformanceSettings(case=finding.case, turns=4))
    assert [one.rule for one in again.findings] == ["2.1"]
    (other,) = again.findings
    assert (other.detail, other.conversation) == (
        finding.detail,
        finding.conversation,
    )  # of the smallest, not the longest


def test_a_finding_that_needs_an_earlier_session_is_replayed_with_it() -> None:
    target = ReferenceTarget("trained_twice_later")
    report = play(target, ConformanceSettings(levels=(1, 2), turns=2, dialects=("chat",)))
    finding = next(finding for finding in report.findings if finding.rule == "2.1")
    cases = finding.replay.split()[1]
    assert finding.case in cases and "," in cases
    again = play(ReferenceTarget("trained_twice_later"), ConformanceSettings(case=cases, turns=2))
    assert {one.rule for one in again.findings} == {"2.1"}
    alone = play(ReferenceTarget("trained_twice_later"), ConformanceSettings(case=finding.case, turns=2))
    assert not alone.findings


def test_our_own_gateway_over_all_dialects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slice for `make test`; `make conformance` runs all cases."""
    page = tmp_path / "report.html"
    code = run_command("conformance", ["tokentrue", "--turns", "2", "--levels", "0-1,4", "--json", "-o", str(page)])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["findings"]
    assert not report["findings"]
    ran = {level["level"] for level in report["levels"] if level["verdict"] == "pass"}
    assert ran == {0, 1, 4}
    assert report["levels"][1]["cases"] == 4 * len(CASES[1])
    assert "tokentrue" in page.read_text()


def test_the_adapter_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader who copies the page's adapter for the gateway that it describes gets results."""
    (page,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "(Target)" in text]
    (tmp_path / "adapter.py").write_text(page)
    (tmp_path / "my_gateway.py").write_text(Path(__file__).with_name("my_gateway.py").read_text())
    monkeypatch.chdir(tmp_path)
    arguments = ["adapter.py", "--python", sys.executable, "--levels", "0-2,4", "--turns", "3", "--json"]
    code = run_command("conformance", arguments)
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["findings"]
    assert [level["verdict"] for level in report["levels"][:5]] == ["pass", "warn", "pass", "not run", "pass"]


@pytest.mark.slow
def test_our_own_gateway_at_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command("conformance", ["tokentrue", "--turns", "8", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and not [one for one in report["findings"] if one["severity"] != "note"], report["findings"]
    assert {level["verdict"] for level in report["levels"]} == {"pass"}


def test_the_scoreboard_is_what_the_results_say() -> None:
    root = PAGE.parents[1]
    done = subprocess.run(
        [sys.executable, "scripts/scoreboard.py", "--check"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_adapters_are_short() -> None:
    folder = PAGE.parents[1] / "examples" / "conformance"
    results = {json.loads(path.read_text())["target"] for path in (folder / "results").glob("*.json")}
    assert len(results) >= 6 and "tokentrue" in results
    for path in folder.glob("*.py"):
        code = [line for line in path.read_text().splitlines() if line.strip()]
        methods = code[next(at for at, line in enumerate(code) if "def command" in line) :]
        assert len(methods) <= 30, path.name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.py"], "no target 'nowhere.py'"),
        (["tokentrue", "--levels", "12"], "--levels '12'"),
        (["tokentrue", "--case", "3.nothing.chat.1"], "level 3 has the cases verbatim"),
        (["tokentrue", "--dialects", "soap"], "no dialect soap"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("conformance", arguments) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1
