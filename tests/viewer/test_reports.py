"""Reports of commands that are not run here: what `train` and `lab` make of the numbers that they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.report import curves, mean_over_runs, write_experiment_report
from tokentrue.app.training import TrainRun
from tokentrue.cli.reports import write_training_report


def answers_of(page: Path) -> Any:
    held = page.read_text(encoding="utf-8").partition('id="answers">')[2].partition("</script>")[0]
    return json.loads(held)


def test_a_training_run_without_steps_has_no_report(tmp_path: Path) -> None:
    assert write_training_report(TrainRun(out=tmp_path)) is None


def test_a_training_run_is_drawn_from_its_metrics(tmp_path: Path) -> None:
    rows = [
        {
            "step": n,
            "policy_version": n + 1,
            "reward": 0.1 * n,
            "mismatch/k3": 0.0,
            "update/grad_norm": 1.0 + n,
            "exact_compared": 50,
        }
        | {"exact_differing": 0, "seconds/wait": 1.0}
        for n in range(4)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_training_report(TrainRun(out=tmp_path))
    assert page is not None
    report = answers_of(page)['["report"]']
    assert [chart["title"] for chart in report["charts"]] == [
        "Reward by step",
        "Gradient norm",
        "Time of a step",
    ]  # K3 is 0 throughout
    assert report["charts"][0]["series"]["rollouts"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert ["of 200 log-probabilities differ", "0"] in report["highlights"]
    assert report["tables"][0]["rows"][0] == ["reward", 0.0, pytest.approx(0.3)]


def test_arms_are_averaged_over_seeds_and_gaps_stay_gaps() -> None:
    assert mean_over_runs([[1.0, 2.0, None], [3.0, float("nan")]]) == [2.0, 2.0, None]
    results = [
        {"arm": "a", "seed": 0, "rows": [{"reward": 0.0}, {"reward": 1.0}]},
        {"arm": "a", "seed": 1, "rows": [{"reward": 1.0}]},
        {"arm": "b", "seed": 0, "rows": [{"reward": 0.5}]},
        {"arm": "c", "seed": 0, "error": "diverged", "rows": []},
    ]
    (chart,) = curves(results, {"reward": "reward", "mismatch/k3": "K3"})
    assert chart.series == {"a": [0.5, 1.0], "b": [0.5, None]}


def test_an_experiment_has_its_claim_table_and_curves(tmp_path: Path) -> None:
    from experiments.registry import EXPERIMENTS, module_of

    name = next(each for each in EXPERIMENTS if getattr(module_of(each), "CURVES", None))
    key = next(iter(module_of(name).CURVES))
    results = [
        {"arm": "exact", "seed": 0, "rows": [{key: 1.0}, {key: 2.0}]},
        {"arm": "off", "seed": 0, "error": "diverged", "rows": []},
    ]
    (tmp_path / f"{name}.json").write_text(
        json.dumps({"experiment": name, "machine": "here", "arms": [], "results": results})
    )
    table = SimpleNamespace(title="a table", columns=("arm", "reward"), rows=[("exact", "1.0")])
    report = answers_of(write_experiment_report(tmp_path, name, table))['["report"]']
    assert report["verdict"] == EXPERIMENTS[name].claim and not report["ok"]
    assert report["charts"][0]["series"] == {"exact": [1.0, 2.0]} and report["tables"][0]["rows"] == [["exact", "1.0"]]
    assert ["stopped: off, seed 0", "diverged"] in report["facts"]
