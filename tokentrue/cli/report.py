"""What the demo found, and its report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = """<!doctype html><meta charset="utf-8"><title>tokentrue demo</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#222}}
table{{border-collapse:collapse;margin:1rem 0}}td,th{{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:right}}
td:first-child,th:first-child{{text-align:left}}svg{{width:100%;height:auto}}</style>
<h1>tokentrue demo</h1><p>A tool-calling agent over HTTP, the exact engine, {steps} GRPO steps, seed {seed}.</p>
<table>{facts}</table><h2>Reward by step</h2>{curve}<h2>Steps</h2>
<table><tr><th>step</th><th>reward</th><th>rows trained</th><th>tokens compared</th><th>bits differ</th><th>gradient norm</th>
<th>play s</th><th>train s</th><th>publish ms</th></tr>{steps_table}</table>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo found. `ok` is what it promises: reward up, every token covered, no bit different."""

    model: str
    parameters: int
    steps: int
    seed: int
    tasks: int
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
        return self.trained / self.sampled if self.sampled else 0.0

    @property
    def ok(self) -> bool:
        return self.reward_after > self.reward_before and self.trained == self.sampled > 0 and self.differing == 0 and self.compared > 0


def write_report(path: Path, result: DemoResult, rows: Sequence[Mapping[str, float]]) -> None:
    facts = {
        "held-out reward before": f"{result.reward_before:.3f}",
        "held-out reward after": f"{result.reward_after:.3f}",
        "coverage": f"{result.coverage:.2%} ({result.trained:,} of {result.sampled:,} sampled tokens)",
        "mismatch": f"{result.differing} of {result.compared:,} log-probabilities differ",
        "rollouts": f"{result.rollouts} ({result.failed} failed)",
        "model": f"{html.escape(result.model)}, {result.parameters:,} parameters",
        "a step": result.cost_line,
        "time": f"{result.seconds:.0f} s",
    }
    body = "".join(f"<tr><td>{html.escape(name)}</td><td>{value}</td></tr>" for name, value in facts.items())
    lines = "".join(step_line(number, row) for number, row in enumerate(rows))
    curve = line_chart([row["reward"] for row in rows], low=0.0, high=1.0)
    path.write_text(PAGE.format(steps=result.steps, seed=result.seed, facts=body, curve=curve, steps_table=lines))


def step_line(number: int, row: Mapping[str, float]) -> str:
    train = row["seconds/recompute"] + row["seconds/correct"] + row["seconds/update"]
    cells = (
        f"{number}", f"{row['reward']:.3f}", f"{row['rows_trained']:.0f}", f"{row['exact_compared']:.0f}", f"{row['exact_differing']:.0f}",
        f"{row['update/grad_norm']:.3f}", f"{row['seconds/wait']:.2f}", f"{train:.2f}", f"{1000 * row['seconds/publish']:.1f}",
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def line_chart(values: Sequence[float], *, low: float, high: float, width: int = 800, height: int = 260) -> str:
    """A plain polyline in SVG."""
    pad = 36
    span = max(1, len(values) - 1)

    def place(index: int, value: float) -> tuple[float, float]:
        return pad + (width - 2 * pad) * index / span, height - pad - (height - 2 * pad) * (value - low) / (high - low)

    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(i, v) for i, v in enumerate(values)))
    grid = ""
    for mark in (low, (low + high) / 2, high):
        _, y = place(0, mark)
        grid += f'<line x1="{pad}" x2="{width - pad}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        grid += f'<text x="4" y="{y + 4:.1f}" font-size="12">{mark:g}</text>'
    return f'<svg viewBox="0 0 {width} {height}">{grid}<polyline points="{points}" fill="none" stroke="#0a7" stroke-width="2.5"/></svg>'
