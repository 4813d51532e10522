"""What the demo found, and its report: one HTML file with the viewer's parts, and rollouts of the first and the last
step to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentrue.types import Coverage

if TYPE_CHECKING:
    from tokentrue.viewer import Chart, Report, ReportTable

GROUPS_SHOWN = 2  # of the first step, and of the last
Row = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo found. `ok` is what it promises: reward up (where judged), every token covered, no bit
    different."""

    model: str
    parameters: int
    steps: int
    seed: int
    tasks: int
    is_judged: bool  # enough steps for the reward to count
    reward_before: float
    reward_after: float
    rollouts: int
    failed: int
    sampled: int
    trained: int
    compared: int
    differing: int
    seconds: float
    publish_ms: float
    shares: dict[str, float]
    cost_line: str
    report: str

    @property
    def coverage(self) -> float:
        return Coverage(sampled=self.sampled, trained=self.trained).ratio

    @property
    def ok(self) -> bool:
        rose = self.reward_after > self.reward_before or not self.is_judged
        return rose and self.trained == self.sampled > 0 and self.differing == 0 and self.compared > 0


def write_demo_report(
    path: Path, result: DemoResult, rows: Sequence[Row], *, store: str, samples: Path, renderer: Any
) -> None:
    """`store` and `samples` are what the demo wrote: its sessions, and the samples that it trained on in their
    order."""
    from tokentrue.sessions.journal import open_journal
    from tokentrue.viewer import ChosenSessions, StoreSource, write_report

    source = StoreSource(open_journal(store, read_only=True), name="rollouts of the first and the last step")
    try:
        write_report(
            path, demo_report(result, rows), source=ChosenSessions(source, pick_sessions(samples)), renderer=renderer
        )
    finally:
        source.close()


def pick_sessions(samples: Path) -> list[str]:
    """The sessions of the first and of the last groups in the file."""
    from tokentrue.samples import read_samples

    groups: dict[str, list[str]] = {}
    for sample in read_samples(samples):
        found = groups.setdefault(sample.group or sample.session_id, [])
        if sample.session_id not in found:
            found.append(sample.session_id)
    names = list(groups)
    chosen = dict.fromkeys([*names[:GROUPS_SHOWN], *names[-GROUPS_SHOWN:]])
    return [session for name in chosen for session in groups[name]]


def demo_report(result: DemoResult, rows: Sequence[Row]) -> Report:
    from tokentrue.viewer import Report

    verdict = "The reward rose, every sampled token was trained, and no log-probability differs in any bit between rollout and trainer."
    return Report(
        title="tokentrue demo",
        verdict=verdict
        if result.ok
        else "Not as promised: the reward must rise, coverage must be 100% and no bit may differ.",
        ok=result.ok,
        highlights=[
            (f"held-out reward before, {result.tasks} tasks", f"{result.reward_before:.3f}"),
            (f"held-out reward after {result.steps} GRPO steps", f"{result.reward_after:.3f}"),
            (f"coverage: {result.trained:,} of {result.sampled:,} sampled tokens", f"{result.coverage:.2%}"),
            (f"of {result.compared:,} log-probabilities differ", f"{result.differing:,}"),
        ],
        note="A tool-calling agent over HTTP, the exact engine, GRPO. Groups and sessions of the first and the last step are in this file.",
        charts=_charts(result, rows),
        facts=[
            ("model", f"{result.model}, {result.parameters:,} parameters"),
            ("rollouts", f"{result.rollouts:,}, {result.failed} failed"),
            ("seed", str(result.seed)),
            ("a step", result.cost_line),
            ("time", f"{result.seconds:.0f} s"),
        ],
        tables=[_steps_table(rows)],
    )


def _train_s(row: Row) -> float:
    return row["seconds/recompute"] + row["seconds/measure"] + row["seconds/update"]


def _charts(result: DemoResult, rows: Sequence[Row]) -> list[Chart]:
    from tokentrue.viewer import Chart

    steps = [float(number) for number in range(1, len(rows) + 1)]
    held_out = {"held-out reward": [result.reward_before, result.reward_after]}
    seconds = {
        "play": [row["seconds/wait"] for row in rows],
        "train": [_train_s(row) for row in rows],
        "publish": [row["seconds/publish"] for row in rows],
    }
    return [
        Chart(
            title="Reward by step", x_label="step", y_label="mean reward of the rollouts", x=steps, y_range=(0.0, 1.0),
            series={"reward": [row["reward"] for row in rows]},
        ),
        Chart(
            title="Before and after", x_label="held-out tasks, greedy", y_label="mean reward", labels=("before", "after"), kind="bars",
            y_range=(0.0, 1.0), series=held_out,
        ),
        Chart(title="Gradient norm", x_label="step", y_label="norm", x=steps, series={"norm": [row["update/grad_norm"] for row in rows]}),
        Chart(title="Time of a step", x_label="step", y_label="seconds", x=steps, series=seconds),
    ]  # fmt: skip


def _steps_table(rows: Sequence[Row]) -> ReportTable:
    from tokentrue.viewer import ReportTable

    columns = (
        "step",
        "reward",
        "rows trained",
        "tokens compared",
        "bits differ",
        "gradient norm",
        "play s",
        "train s",
        "publish ms",
    )
    cells = [
        (
            str(number), f"{row['reward']:.3f}", f"{row['rows_trained']:.0f}", f"{row['exact_compared']:.0f}",
            f"{row['exact_differing']:.0f}", f"{row['update/grad_norm']:.3f}", f"{row['seconds/wait']:.2f}", f"{_train_s(row):.2f}",
            f"{1000 * row['seconds/publish']:.1f}",
        )
        for number, row in enumerate(rows, start=1)
    ]  # fmt: skip
    return ReportTable(title="Steps", columns=columns, rows=cells)
