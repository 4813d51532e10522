"""A diagnosis as one HTML page that needs nothing beside it: tables and plots in plain SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokentrue.mismatch.bag import Histogram
from tokentrue.mismatch.diagnose import Diagnosis, WorstRow
from tokentrue.mismatch.sums import SIGNS, TAILS

WIDTH, HEIGHT, PAD = 760, 240, 46
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1f2328}}
table{{border-collapse:collapse;margin:.6rem 0}}td,th{{padding:.2rem .8rem;border-bottom:1px solid #d8dee4;text-align:right}}
td:first-child,th:first-child{{text-align:left}}svg{{width:100%;height:auto}}
.verdict{{padding:.6rem 1rem;background:#f6f8fa;border-left:4px solid {colour}}}
.tokens{{line-height:2;overflow-wrap:anywhere}}
.tokens span{{padding:.1rem .15rem;border-radius:3px;margin-right:1px;font:13px ui-monospace,monospace}}
summary{{cursor:pointer}}</style>
<h1>{title}</h1><p class="verdict">{verdict}</p>{body}</html>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of an excerpt: what to print for it, and its two log-probabilities."""

    text: str
    trainer: float
    rollout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A worst row with its tokens; `first` is the number of the first one shown."""

    row: WorstRow
    first: int
    tokens: Sequence[Token]


def report_html(
    diagnosis: Diagnosis,
    *,
    title: str = "Training-inference mismatch",
    verdict: str = "",
    alarm: bool = False,
    facts: Mapping[str, str] | None = None,
    steps: Sequence[tuple[str, Diagnosis]] = (),
    excerpts: Sequence[Excerpt] = (),
) -> str:
    """The page. `steps` are the parts over time, each with a label, in order."""
    parts = [
        section("What was compared", table(("", ""), [(name, value) for name, value in (facts or {}).items()])) if facts else "",
        section("In numbers", _numbers(diagnosis)),
        section("|δ| per token", _delta_histogram(diagnosis)),
        section("Ratio tails, raw and as applied", _tails(diagnosis)),
        section("K1 and K3 over steps", _over_steps(steps)),
        section("Contribution C(r) = -(r - 1)·A by the sign of the advantage", _contribution(diagnosis)),
        section("Where |δ| is", _where(diagnosis)),
        section("Worst sequences", _worst(diagnosis, excerpts)),
    ]
    colour = "#d1242f" if alarm else "#1a7f37"
    return PAGE.format(title=html.escape(title), verdict=html.escape(verdict), colour=colour, body="".join(parts))


def section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>{body}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _numbers(d: Diagnosis) -> str:
    names = {
        "tokens": "tokens", "rows": "sequences", "delta/mean": "mean δ", "delta/abs_mean": "mean |δ|", "delta/min": "smallest δ",
        "delta/max": "largest δ", "delta/quantile/abs_p50": "median |δ|", "delta/quantile/abs_p99": "99% of |δ| below",
        "delta/quantile/abs_p99.9": "99.9% of |δ| below", "corr/k1": "K1", "corr/k2": "K2", "corr/k3": "K3",
        "ppo_train/k3": "K3 of current ÷ trainer",
        "ppo_rollout/k3": "K3 of current ÷ rollout", "ppl/trainer": "perplexity, trainer", "ppl/rollout": "perplexity, rollout",
        "ppl/ratio": "their ratio", "chi2/token": "χ² per token", "chi2/sequence": "χ² per sequence",
        "ratio/raw/ess": "effective sample share, tokens",
        "ratio/sequence/ess": "effective sample share, sequences", "flips": "argmax flips",
        "fraction/rejected": "tokens rejected by the correction",
    }  # fmt: skip
    return table(("", ""), [(label, d[key]) for key, label in names.items() if key in d.metrics])


def _delta_histogram(d: Diagnosis) -> str:
    """Octaves of |δ| against counts, both on log scales; exact agreement is the first bar."""
    found = d.metrics.statistics.get("delta/quantile")
    if not isinstance(found, Histogram) or not found.total:
        return "<p>No token was compared.</p>"
    octaves: dict[int, int] = {}
    equal = 0
    for low, high, count in found.bins(magnitude=True):
        if high <= 1e-30:
            equal += count
        else:
            octaves[math.floor(math.log2((low + high) / 2))] = octaves.get(math.floor(math.log2((low + high) / 2)), 0) + count
    bars = [("0", equal)] if equal else []
    if octaves:
        bars += [(f"{2.0**power:.1e}", octaves.get(power, 0)) for power in range(min(octaves), max(octaves) + 1)]
    return bar_chart(bars, label="tokens (log scale) by |δ|, one bar an octave", log=True)


def _tails(d: Diagnosis) -> str:
    rows: list[tuple[object, ...]] = []
    applied = d["ratio/applied/count"] > 0
    for bound in TAILS:
        for way, label in ((f"above_{bound:g}", f"r > {bound:g}"), (f"below_1/{bound:g}", f"r < 1/{bound:g}")):
            rows.append((label, d[f"tail/raw/{way}"], d[f"tail/applied/{way}"] if applied else "–"))
    rows.append(("mean", d["ratio/raw/mean"], d["ratio/applied/mean"] if applied else "–"))
    rows.append(("smallest", math.exp(min(d["delta/min"], 700)), d["ratio/applied_range/min"] if applied else "–"))
    rows.append(("largest", math.exp(min(d["delta/max"], 700)), d["ratio/applied_range/max"] if applied else "–"))
    rows.append(("effective sample share", d["ratio/raw/ess"], d["ratio/applied/ess"] if applied else "–"))
    found = d.metrics.statistics.get("delta/quantile")
    plot = ""
    if isinstance(found, Histogram) and found.total:
        shares = (0.5, 0.9, 0.99, 0.999, 0.9999)
        lines = {
            "upper tail: quantile of r - 1": [max(math.expm1(min(found.quantile(s), 80)), 1e-12) for s in shares],
            "lower tail: 1 - quantile of r": [max(-math.expm1(found.quantile(1 - s)), 1e-12) for s in shares],
        }
        plot = line_chart([f"{s:g}" for s in shares], lines, label="how far r is from 1, by share of tokens (log scale)", log=True)
    return table(("share of tokens", "raw", "as applied"), rows) + plot


def _over_steps(steps: Sequence[tuple[str, Diagnosis]]) -> str:
    if len(steps) < 2:
        return "<p>One step only: nothing to plot.</p>"
    lines = {"|K1|": [abs(d["corr/k1"]) for _, d in steps], "K3": [d["corr/k3"] for _, d in steps]}
    return line_chart([label for label, _ in steps], lines, label="per token (log scale)", log=True)


def _contribution(d: Diagnosis) -> str:
    if not any(d[f"contribution/rollout/{sign}/count"] for sign in SIGNS):
        return "<p>No advantages were given.</p>"
    head = ("denominator", "advantage", "tokens", "mean", "deviation", "skew")
    rows = [
        (name, sign, int(d[at := f"contribution/{name}/{sign}/count"]), *(d[at.replace("count", key)] for key in ("mean", "std", "skew")))
        for name in ("trainer", "rollout")
        for sign in SIGNS
    ]
    bars = [(f"{name}, A {'>' if sign == 'positive' else '<'} 0", d[f"contribution/{name}/{sign}/mean"]) for name, sign, *_ in rows]
    return table(head, rows) + bar_chart(bars, label="mean of C(r); 0 when on policy")


def _where(d: Diagnosis) -> str:
    out = ""
    titles = {"by_probability": "probability of the token under the rollout", "by_position": "sampled tokens before it", "by_kind": "kind"}
    for prefix, title in titles.items():
        bars = [(key.partition("/")[2], value) for key, value in d.metrics.items() if key.startswith(f"{prefix}/")]
        if any(value for _, value in bars):
            out += bar_chart(bars, label=f"mean |δ| by {title}")
    return out or "<p>No difference anywhere.</p>"


def _worst(d: Diagnosis, excerpts: Sequence[Excerpt]) -> str:
    if not d.worst:
        return "<p>No sequence differs.</p>"
    head = ("sequence", "tokens", "mean K3", "ΣK3", "mean δ", "max |δ|", "at token", "log of the ratios' product")
    rows = [
        (w.row, w.tokens, w.score, w.sum_k3, w.mean_delta, w.max_abs_delta, w.position, w.log_product) for w in d.worst
    ]
    return table(head, rows) + "".join(_excerpt(excerpt) for excerpt in excerpts)


def _excerpt(excerpt: Excerpt) -> str:
    spans = "".join(_token(excerpt.first + index, token) for index, token in enumerate(excerpt.tokens))
    name = html.escape(excerpt.row.row)
    return f"<details open><summary>{name}, tokens from {excerpt.first}</summary><p class='tokens'>{spans}</p></details>"


def _token(number: int, token: Token) -> str:
    delta = token.trainer - token.rollout
    strength = min(1.0, max(0.0, (math.log10(abs(delta)) + 4) / 4)) if delta else 0.0  # 1e-4 pale … 1 full
    colour = f"rgba(209,36,47,{strength:.2f})" if delta < 0 else f"rgba(31,111,235,{strength:.2f})"
    tip = f"token {number}: δ {delta:+.4g}, trainer {token.trainer:.4f}, rollout {token.rollout:.4f}"
    return f"<span style='background:{colour}' title='{tip}'>{html.escape(token.text)}</span>"


def bar_chart(bars: Sequence[tuple[str, float]], *, label: str, log: bool = False) -> str:
    """Bars from zero; with `log`, of counts."""
    values = [math.log10(value + 1) if log else value for _, value in bars]
    high, low = max([0.0, *values]) or (0.0 if min([0.0, *values]) else 1.0), min([0.0, *values])
    span = high - low
    step = (WIDTH - 2 * PAD) / max(1, len(bars))
    zero = PAD + (HEIGHT - 2 * PAD) * high / span
    marks = ""
    for index, ((name, value), shown) in enumerate(zip(bars, values, strict=True)):
        x, size = PAD + step * index, (HEIGHT - 2 * PAD) * abs(shown) / span
        top = zero - size if shown >= 0 else zero
        tip = f"<title>{html.escape(name)}: {value:.6g}</title>"
        colour = COLOURS[0] if shown >= 0 else COLOURS[1]
        marks += f"<rect x='{x + 1:.1f}' y='{top:.1f}' width='{max(step - 2, 1):.1f}' height='{size:.1f}' fill='{colour}'>{tip}</rect>"
        if len(bars) <= 14 or index % (len(bars) // 10) == 0:
            marks += f"<text x='{x + step / 2:.1f}' y='{HEIGHT - PAD + 14}' text-anchor='middle' font-size='10'>{html.escape(name)}</text>"
    ends = [f"{10**high - 1:,.0f}" if log else f"{high:.3g}", "0" if log else f"{low:.3g}"]
    return _frame(marks + f"<line x1='{PAD}' x2='{WIDTH - PAD}' y1='{zero:.1f}' y2='{zero:.1f}' stroke='#57606a'/>", label, ends)


def line_chart(labels: Sequence[str], lines: Mapping[str, Sequence[float]], *, label: str, log: bool = False) -> str:
    every = [value for line in lines.values() for value in line]
    floor = min((value for value in every if value > 0), default=1e-12)
    scale = [[math.log10(max(value, floor)) if log else value for value in line] for line in lines.values()]
    high, low = max(max(line) for line in scale), min(min(line) for line in scale)
    span = (high - low) or 1.0
    marks = ""
    for number, (name, line) in enumerate(zip(lines, scale, strict=True)):
        places = [
            (PAD + (WIDTH - 2 * PAD) * index / max(1, len(line) - 1), HEIGHT - PAD - (HEIGHT - 2 * PAD) * (value - low) / span)
            for index, value in enumerate(line)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour = COLOURS[number % len(COLOURS)]
        marks += f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>"
        place = f"x='{WIDTH - PAD}' y='{18 + 14 * number}' text-anchor='end'"
        marks += f"<text {place} font-size='12' fill='{colour}'>{html.escape(name)}</text>"
    for index in {0, len(labels) // 2, len(labels) - 1}:
        x = PAD + (WIDTH - 2 * PAD) * index / max(1, len(labels) - 1)
        marks += f"<text x='{x:.1f}' y='{HEIGHT - PAD + 14}' text-anchor='middle' font-size='10'>{html.escape(labels[index])}</text>"
    ends = [f"{10**high:.1e}" if log else f"{high:.3g}", f"{10**low:.1e}" if log else f"{low:.3g}"]
    return _frame(marks, label, ends)


def _frame(marks: str, label: str, ends: Sequence[str]) -> str:
    """The plot area with the largest and smallest value on its left and a caption below."""
    axis = f"<line x1='{PAD}' x2='{PAD}' y1='{PAD}' y2='{HEIGHT - PAD}' stroke='#57606a'/>"
    axis += f"<text x='{PAD - 4}' y='{PAD + 4}' text-anchor='end' font-size='10'>{ends[0]}</text>"
    axis += f"<text x='{PAD - 4}' y='{HEIGHT - PAD}' text-anchor='end' font-size='10'>{ends[1]}</text>"
    caption = f"<text x='{WIDTH / 2}' y='{HEIGHT - 8}' text-anchor='middle' font-size='12'>{html.escape(label)}</text>"
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{html.escape(label)}'>{axis}{marks}{caption}</svg>"
