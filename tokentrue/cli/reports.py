"""The commands' reports as the viewer's page: a training run, a diagnosis, an engine check."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentrue.cli.common import STEP_PARTS
from tokentrue.json_types import JsonObject
from tokentrue.mismatch.diagnosis import SIGNS, TAILS
from tokentrue.mismatch.metrics import Mean
from tokentrue.plain_json import dumps, loads, read_numbered_lines
from tokentrue.samples.trainer_logprobs import TrainerLogprobs
from tokentrue.sessions.journal import open_journal
from tokentrue.viewer import (
    Chart,
    FileSource,
    Report,
    ReportTable,
    SampleList,
    StoreSource,
    write_report,
)

if TYPE_CHECKING:
    from tokentrue.app.training import TrainRun
    from tokentrue.conformance.run import ConformanceReport
    from tokentrue.doctor import DoctorReport
    from tokentrue.mismatch import Diagnosis
    from tokentrue.types import Sample
    from tokentrue.viewer.records import ViewRenderer

TRAINING_TOKENS, WORST_TOKENS = 100_000, 200_000  # of sessions to read, in the page
CHARTS: tuple[tuple[str, str, Mapping[str, str], bool], ...] = (  # title, axis, {name: metric}, logarithmic
    ("Reward by step", "mean reward", {"rollouts": "reward", "held-out tasks": "eval/reward"}, False),
    ("Mismatch by step", "K3 per token", {"K3": "mismatch/k3"}, True),
    ("Gradient norm", "norm", {"norm": "update/grad_norm"}, True),
    ("Loss", "loss", {"loss": "update/loss"}, False),
    ("Staleness", "policy versions behind", {"mean": "staleness_mean", "largest": "staleness_max"}, False),
    ("Time of a step", "seconds", {part: f"seconds/{part}" for part in STEP_PARTS if part != "measure"}, False),
)
COMPARED = (
    "reward", "mismatch/k3", "mismatch/delta_abs_mean", "update/grad_norm", "update/loss", "tokens_trained",
    "seconds/step",
)  # fmt: skip
NUMBERS = {
    "tokens": "tokens", "rows": "sequences", "delta/mean": "mean δ", "delta/abs_mean": "mean |δ|",
    "delta/min": "smallest δ", "delta/max": "largest δ", "delta/quantile/abs_p50": "median |δ|",
    "delta/quantile/abs_p99": "99% of |δ| below", "delta/quantile/abs_p99.9": "99.9% of |δ| below",
    "corr/k1": "K1", "corr/k2": "K2", "corr/k3": "K3", "ppo_train/k3": "K3 of current ÷ trainer",
    "ppo_rollout/k3": "K3 of current ÷ rollout", "ppl/trainer": "perplexity, trainer",
    "ppl/rollout": "perplexity, rollout", "ppl/ratio": "their ratio", "chi2/token": "χ² per token",
    "chi2/sequence": "χ² per sequence", "ratio/raw/ess": "effective sample share, tokens",
    "ratio/sequence/ess": "effective sample share, sequences", "tail/raw/above_2": "tokens with r > 2",
    "tail/applied/above_2": "the same after the correction", "flips": "argmax flips",
    "fraction/rejected": "tokens rejected by the correction",
    "contribution/rollout/positive/skew": "skew of contributions, positive advantages",
    "contribution/rollout/negative/skew": "skew of contributions, negative advantages",
}  # fmt: skip
PLACES = {
    "by_probability": "probability of the token under the rollout",
    "by_position": "sampled tokens before it",
    "by_kind": "turn",
}


def write_training_report(settings: TrainRun) -> Path | None:
    """Writes `report.html` to the run's directory; None if it has no metrics."""
    from tokentrue.app.wiring import renderer_for

    rows = read_metrics(settings.out / "metrics.jsonl")
    if not rows:
        return None
    source, store = None, settings.out / "sessions.sqlite"
    if settings.samples is not None:
        source = FileSource(settings.samples)
    elif store.is_file():
        source = StoreSource(open_journal(f"sqlite:{store}", read_only=True), name="newest rollouts first")
    renderer: Any = renderer_for(settings.model)(settings.model.history) if source is not None else None
    path = settings.out / "report.html"
    try:
        write_report(path, training_report(settings, rows), source, renderer=renderer, most_tokens=TRAINING_TOKENS)
    finally:
        if source is not None:
            source.close()
    return path


def read_metrics(path: Path) -> list[JsonObject]:
    """Non-finite numbers become None: null, or NaN and Infinity in files of older runs."""
    rows: list[JsonObject] = []
    for _, line in read_numbered_lines(path) if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:  # a crash or a full disk left half a row
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(loads(dumps(row)))
    return rows


def training_report(settings: TrainRun, rows: Sequence[JsonObject]) -> Report:
    last = rows[-1]
    ends = [row for row in (rows[0], last) if row["reward"] is not None]
    highlights = [(f"reward at step {row['step']}", f"{row['reward']:.3f}") for row in ends]
    if compared := sum(row.get("exact_compared", 0) for row in rows):
        differing = sum(row.get("exact_differing", 0) for row in rows)
        highlights.append((f"of {compared:,.0f} log-probabilities differ", f"{differing:,.0f}"))
    return Report(
        title=f"Training run {settings.out.name}",
        highlights=highlights,
        facts=[
            ("model", settings.model.shown),
            ("engine", settings.engine.name),
            ("loss", settings.loss.name),
            ("steps", f"{len(rows):,}"),
            ("policy version", str(last["policy_version"])),
            ("configuration", str(last.get("run", ""))),
            ("hardware", str(last.get("hardware", ""))),
        ],
        charts=list(training_charts(rows)),
        tables=[compare_ends(rows)],
    )


def training_charts(rows: Sequence[JsonObject]) -> Iterator[Chart]:
    steps = [float(row["step"]) for row in rows]
    for title, label, names, log in CHARTS:
        columns = {name: [row.get(key) for row in rows] for name, key in names.items()}
        series = {name: values for name, values in columns.items() if any(values)}
        if series:  # a metric that is 0 throughout has no curve to show
            yield Chart(title=title, x_label="step", y_label=label, x=steps, series=series, log_y=log)


def compare_ends(rows: Sequence[JsonObject]) -> ReportTable:
    known = [key for key in COMPARED if key in rows[0] and key in rows[-1]]
    cells = [(key, *("not finite" if row[key] is None else row[key] for row in (rows[0], rows[-1]))) for key in known]
    return ReportTable(title="First and last step", columns=("metric", "first", "last"), rows=cells)


def write_doctor_report(report: DoctorReport, path: Path) -> None:
    probes = [(one.probe, one.verdict.value.replace("_", " "), one.figure, one.confidence) for one in report.findings]
    tables = [
        ("Probes", ("probe", "verdict", "figure", "confidence"), probes),
        ("Causes and cures", ("probe", "cause", "cure"), [(one.probe, one.cause, one.cure) for one in report.faults]),
        ("Details", ("probe", "detail"), [(one.probe, one.detail) for one in report.findings if one.detail]),
    ]
    page = Report(
        title=f"Engine check: {report.engine}",
        verdict=report.summary,
        ok=not report.faults,
        facts=[("model", report.model), *report.facts.items()],
        tables=[ReportTable(title=title, columns=columns, rows=rows) for title, columns, rows in tables if rows],
    )
    write_report(path, page)


def write_conformance_report(report: ConformanceReport, target: str, path: Path) -> None:
    shown = report.to_json()
    levels = [(f"{one['level']} {one['name']}", one["verdict"], one["cases"], one["why"]) for one in shown["levels"]]
    found = [
        (one["rule"], one["severity"], one["detail"], f"tokentrue conformance {target} {one['replay']}")
        for one in shown["findings"]
    ]
    talks = [(one["case"], "\n".join(one["conversation"])) for one in shown["findings"] if one["conversation"]]
    habits = [
        (one.habit, one.dialect, f"{one.coverage:.1%}", one.rows, one.tokens, one.fewest_rows or "")
        for one in report.habits
    ]
    tables = [
        ("Levels", ("level", "verdict", "cases", "why"), levels),
        ("Findings", ("rule", "severity", "what", "replay"), found),
        ("Histories", ("habit", "dialect", "trained", "rows", "tokens to forward", "rows enough"), habits),
        ("Smallest conversations", ("case", "requests and answers"), talks),
    ]
    page = Report(
        title=f"Conformance: {report.target} {report.version}",
        verdict=report.summary,
        ok=report.exit_code == 0,
        facts=[("command", report.command), ("seed", str(report.settings.seed)), ("engine route", report.engine)],
        tables=[ReportTable(title=title, columns=columns, rows=rows) for title, columns, rows in tables if rows],
    )
    write_report(path, page)


def write_diagnosis(
    path: Path,
    report: Report,
    whole: Diagnosis,
    samples: Sequence[Sample],
    trainer: Mapping[str, TrainerLogprobs],
    renderer: ViewRenderer | None,
) -> None:
    """`samples`: all of the file, for the groups' baselines; `trainer`: log-probabilities of those compared."""
    worst = {row.row: number for number, row in enumerate(whole.worst)}
    rank: dict[str, int] = {}
    for sample in samples:  # sessions are sorted, their samples stay in order: a session's reward is its first sample's
        place = worst.get(sample.sample_id, len(worst) + (sample.sample_id not in trainer))
        rank[sample.session_id] = min(place, rank.get(sample.session_id, place))
    source = SampleList(sorted(samples, key=lambda sample: rank[sample.session_id]), name="worst sequences first")
    write_report(path, report, source, renderer=renderer, trainer=trainer, most_tokens=WORST_TOKENS)


def diagnosis_report(
    whole: Diagnosis, steps: Mapping[str, Diagnosis], *, verdict: str, ok: bool, facts: Mapping[str, str]
) -> Report:
    numbers = [(label, format_metric(whole, key)) for key, label in NUMBERS.items() if key in whole.metrics]
    return Report(
        title="Training-inference mismatch",
        verdict=verdict,
        ok=ok,
        highlights=[
            ("tokens compared", f"{int(whole['tokens']):,}"),
            ("K3 per token", f"{whole['corr/k3']:.3g}"),
            ("mean |δ|", f"{whole['delta/abs_mean']:.3g}"),
            ("largest |δ|", f"{max(whole['delta/max'], -whole['delta/min']):.3g}"),
        ],
        note="δ = trainer − rollout log-probability, r = exp(δ). Sessions are in this file with the worst sequences "
        "first.",
        charts=list(mismatch_charts(whole, steps)),
        facts=[*facts.items(), *numbers],
        tables=list(mismatch_tables(whole)),
    )


def format_metric(whole: Diagnosis, key: str) -> str:
    measured = whole.metrics.statistics.get(key)
    if isinstance(measured, Mean) and not measured.count:
        return "not measured"
    return f"{int(whole[key]):,}" if key in {"tokens", "rows"} else f"{whole[key]:.4g}"


def mismatch_charts(whole: Diagnosis, steps: Mapping[str, Diagnosis]) -> Iterator[Chart]:
    if len(steps) > 1:
        series = {"|K1|": [abs(d["corr/k1"]) for d in steps.values()], "K3": [d["corr/k3"] for d in steps.values()]}
        title, labels = "K1 and K3 over steps", list(steps)
        yield Chart(title=title, x_label="step", y_label="per token", labels=labels, series=series, log_y=True)
    for prefix, place in PLACES.items():
        bars: dict[str, float] = {}
        for name, stat in whole.metrics.statistics.items():
            if name.startswith(f"{prefix}/") and isinstance(stat, Mean) and stat.count:
                bars[name.partition("/")[2]] = stat.value
        if any(bars.values()):
            series, labels = {"mean |δ|": list(bars.values())}, list(bars)
            title, y_label = f"|δ| by {place}", "mean |δ|"
            yield Chart(title=title, x_label=place, y_label=y_label, labels=labels, kind="bars", series=series)


def mismatch_tables(d: Diagnosis) -> Iterator[ReportTable]:
    tails = [
        (label, d[f"tail/raw/{way}"], f"tail/applied/{way}")
        for bound in TAILS
        for way, label in ((f"above_{bound:g}", f"r > {bound:g}"), (f"below_1/{bound:g}", f"r < 1/{bound:g}"))
    ]
    tails += [
        ("mean", d["ratio/raw/mean"], "ratio/applied/mean"),
        ("smallest", math.exp(min(d["delta/min"], 700)), "ratio/applied_range/min"),
        ("largest", math.exp(min(d["delta/max"], 700)), "ratio/applied_range/max"),
        ("effective sample share", d["ratio/raw/ess"], "ratio/applied/ess"),
    ]
    rows = [(label, raw, d[key] if d["ratio/applied/count"] > 0 else "–") for label, raw, key in tails]
    columns = ("share of tokens", "raw", "as applied")
    yield ReportTable(title="Ratio tails, raw and as applied", columns=columns, rows=rows)
    if any(d[f"contribution/rollout/{sign}/count"] for sign in SIGNS):
        places = [
            (f"{side}, {sign}", f"contribution/{side}/{sign}") for side in ("trainer", "rollout") for sign in SIGNS
        ]
        rows = [
            (label, int(d[f"{at}/count"]), d[f"{at}/mean"], d[f"{at}/std"], d[f"{at}/skew"]) for label, at in places
        ]
        title = "Contribution C(r) = −(r − 1)·A by the sign of the advantage"
        columns = ("denominator, advantage", "tokens", "mean", "deviation", "skew")
        yield ReportTable(title=title, columns=columns, rows=rows)
    if d.worst:
        columns = (
            "sequence",
            "tokens",
            "mean K3",
            "ΣK3",
            "mean δ",
            "max |δ|",
            "at token",
            "log of the ratios' product",
        )
        names = ("row", "tokens", "score", "sum_k3", "mean_delta", "max_abs_delta", "position", "log_product")
        rows = [tuple(getattr(row, name) for name in names) for row in d.worst]
        yield ReportTable(title="Worst sequences", columns=columns, rows=rows)
