"""A diagnosis as the viewer's page: numbers, tails, δ plots, and the worst sequences token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokentrue.mismatch.diagnosis import SIGNS, TAILS
from tokentrue.mismatch.metrics import Mean
from tokentrue.samples.trainer_logprobs import TrainerLogprobs
from tokentrue.viewer import Chart, Report, ReportTable, SampleList, write_report

if TYPE_CHECKING:
    from tokentrue.mismatch import Diagnosis
    from tokentrue.types import Sample
    from tokentrue.viewer.records import ViewRenderer

Steps = Sequence[tuple[str, "Diagnosis"]]
READABLE_TOKENS = 200_000  # of the worst sequences, in the page
NUMBERS = {
    "tokens": "tokens", "rows": "sequences", "delta/mean": "mean δ", "delta/abs_mean": "mean |δ|", "delta/min": "smallest δ",
    "delta/max": "largest δ", "delta/quantile/abs_p50": "median |δ|", "delta/quantile/abs_p99": "99% of |δ| below",
    "delta/quantile/abs_p99.9": "99.9% of |δ| below", "corr/k1": "K1", "corr/k2": "K2", "corr/k3": "K3",
    "ppo_train/k3": "K3 of current ÷ trainer", "ppo_rollout/k3": "K3 of current ÷ rollout", "ppl/trainer": "perplexity, trainer",
    "ppl/rollout": "perplexity, rollout", "ppl/ratio": "their ratio", "chi2/token": "χ² per token", "chi2/sequence": "χ² per sequence",
    "ratio/raw/ess": "effective sample share, tokens", "ratio/sequence/ess": "effective sample share, sequences", "flips": "argmax flips",
    "fraction/rejected": "tokens rejected by the correction",
}  # fmt: skip
PLACES = {
    "by_probability": "probability of the token under the rollout",
    "by_position": "sampled tokens before it",
    "by_kind": "turn",
}


def write_diagnosis(
    path: Path,
    report: Report,
    whole: Diagnosis,
    *,
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
    write_report(path, report, source=source, renderer=renderer, trainer=trainer, most_tokens=READABLE_TOKENS)


def diagnosis_report(whole: Diagnosis, steps: Steps, *, verdict: str, ok: bool, facts: Mapping[str, str]) -> Report:
    most = max(whole["delta/max"], -whole["delta/min"])
    return Report(
        title="Training-inference mismatch",
        verdict=verdict,
        ok=ok,
        highlights=[
            ("tokens compared", f"{int(whole['tokens']):,}"),
            ("K3 per token", f"{whole['corr/k3']:.3g}"),
            ("mean |δ|", f"{whole['delta/abs_mean']:.3g}"),
            ("largest |δ|", f"{most:.3g}"),
        ],
        note="δ = trainer − rollout log-probability, r = exp(δ). Sessions are in this file with the worst sequences first.",
        charts=[*_over_steps(steps), *_where(whole)],
        facts=[*facts.items(), *_numbers(whole)],
        tables=[_tails(whole), *_contribution(whole), *_worst(whole)],
    )


def _numbers(d: Diagnosis) -> list[tuple[str, str]]:
    return [(label, _format_number(d, key)) for key, label in NUMBERS.items() if key in d.metrics]


def _format_number(d: Diagnosis, key: str) -> str:
    measured = d.metrics.statistics.get(key)
    if isinstance(measured, Mean) and not measured.count:
        return "not measured"
    return f"{int(d[key]):,}" if key in {"tokens", "rows"} else f"{d[key]:.4g}"


def _over_steps(steps: Steps) -> list[Chart]:
    if len(steps) < 2:
        return []
    lines = {"|K1|": [abs(d["corr/k1"]) for _, d in steps], "K3": [d["corr/k3"] for _, d in steps]}
    labels = [label for label, _ in steps]
    return [
        Chart(
            title="K1 and K3 over steps", x_label="step", y_label="per token", labels=labels, series=lines, log_y=True
        )
    ]


def _where(d: Diagnosis) -> list[Chart]:
    charts: list[Chart] = []
    for prefix, title in PLACES.items():
        found = {
            name: stat
            for name, stat in d.metrics.statistics.items()
            if name.startswith(f"{prefix}/") and isinstance(stat, Mean)
        }
        bars = {name.partition("/")[2]: stat.value for name, stat in found.items() if stat.count}
        if any(bars.values()):
            series = {"mean |δ|": list(bars.values())}
            charts.append(
                Chart(
                    title=f"|δ| by {title}",
                    x_label=title,
                    y_label="mean |δ|",
                    labels=list(bars),
                    kind="bars",
                    series=series,
                )
            )
    return charts


def _tails(d: Diagnosis) -> ReportTable:
    applied = d["ratio/applied/count"] > 0
    rows: list[tuple[str, float, float | str]] = []

    def add(label: str, raw: float, key: str) -> None:
        rows.append((label, raw, d[key] if applied else "–"))

    for bound in TAILS:
        for way, label in ((f"above_{bound:g}", f"r > {bound:g}"), (f"below_1/{bound:g}", f"r < 1/{bound:g}")):
            add(label, d[f"tail/raw/{way}"], f"tail/applied/{way}")
    add("mean", d["ratio/raw/mean"], "ratio/applied/mean")
    add("smallest", math.exp(min(d["delta/min"], 700)), "ratio/applied_range/min")
    add("largest", math.exp(min(d["delta/max"], 700)), "ratio/applied_range/max")
    add("effective sample share", d["ratio/raw/ess"], "ratio/applied/ess")
    return ReportTable(
        title="Ratio tails, raw and as applied", columns=("share of tokens", "raw", "as applied"), rows=rows
    )


def _contribution(d: Diagnosis) -> list[ReportTable]:
    if not any(d[f"contribution/rollout/{sign}/count"] for sign in SIGNS):
        return []
    places = [(f"{name}, {sign}", f"contribution/{name}/{sign}") for name in ("trainer", "rollout") for sign in SIGNS]
    rows = [
        (label, int(d[f"{at}/count"]), *(d[f"{at}/{key}"] for key in ("mean", "std", "skew"))) for label, at in places
    ]
    columns = ("denominator, advantage", "tokens", "mean", "deviation", "skew")
    return [
        ReportTable(title="Contribution C(r) = −(r − 1)·A by the sign of the advantage", columns=columns, rows=rows)
    ]


def _worst(d: Diagnosis) -> list[ReportTable]:
    if not d.worst:
        return []
    columns = ("sequence", "tokens", "mean K3", "ΣK3", "mean δ", "max |δ|", "at token", "log of the ratios' product")
    rows = [
        (w.row, w.tokens, w.score, w.sum_k3, w.mean_delta, w.max_abs_delta, w.position, w.log_product) for w in d.worst
    ]
    return [ReportTable(title="Worst sequences", columns=columns, rows=rows)]
